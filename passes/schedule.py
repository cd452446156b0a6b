"""Puts everything that the status needs first, and the publishing of the status right behind it: the host waits for no
more than that."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node


def publish_early(fx_graph: GraphModule) -> bool:
    """Reorder the lowered FX graph stably: inputs, what `zgcompile::publish` depends on, publish itself, the rest.

    The last fallible op is among what the status depends on, so all that can fail precedes the publish node, and every
    gated state write follows it by its own dependence on the status. True when the order changed.
    """
    graph = fx_graph.graph
    publish = next((n for n in graph.nodes if n.target is torch.ops.zgcompile.publish.default), None)
    if publish is None:
        return False
    before = list(graph.nodes)
    needed = _ancestors(publish)
    anchor = next(n for n in before if n.op != "placeholder")
    for node in before:
        if node in needed and node.op != "placeholder":
            if node is anchor:
                anchor = anchor.next
            else:
                anchor.prepend(node)
    if anchor is not publish:
        anchor.prepend(publish)
    graph.lint()
    fx_graph.recompile()
    return list(graph.nodes) != before


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending += current.all_input_nodes
    return found
