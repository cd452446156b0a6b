"""Sums of scattered rows go into one buffer:

    index_put(zeros, i, v, True) + index_put(zeros, j, w, True)  ->  index_put(index_put(zeros, i, v, True), j, w, True)
    y + index_put(zeros, i, v, True)                             ->  index_put(y, i, v, True)

The gradient of a tensor that was gathered twice then needs no second buffer, and one fill less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from zgcompile.ir.accumulation import accumulates, is_reshape, is_zeros, one_form, without_reshapes
from zgcompile.ir.aliases import viewed
from zgcompile.pass_base import finished

aten = torch.ops.aten


def chain_scatter(fx_graph: GraphModule) -> bool:
    """Turn sums whose one summand accumulates into fresh zeros into an accumulation into the other summand.

    The accumulations are `index_put(accumulate=True)`, `_unsafe_index_put`, `index_add` and `scatter_add`, nested sums
    included. The other summand is computed, comes before the accumulation and is read by nothing else, so that the
    buffer may be its own; shape, dtype and strides are one. The same numbers are added in another order: floats
    differ by rounding (and in the sign of a zero), integers not at all. True when something changed.
    """
    graph = fx_graph.graph
    place = {node: i for i, node in enumerate(graph.nodes)}
    changed = False
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or not _is_plain_sum(node):
            continue
        left, right = node.args
        for base, scattered in ((left, right), (right, left)):
            first, target = _first_of_chain(scattered), without_reshapes(base)
            if first is None or not _is_own(base) or place[target] >= place[first] or not one_form(node, target, first):
                continue
            first.update_arg(0, target)
            node.replace_all_uses_with(scattered)
            graph.erase_node(node)
            changed = True
            break
    if changed:
        graph.eliminate_dead_code()
    return finished(fx_graph, changed)


def _is_plain_sum(node: Node) -> bool:
    """Two tensors, none scaled. (A sum of bools is no sum.)"""
    tensors = all(isinstance(s, Node) for s in node.args) and isinstance(node.meta.get("val"), torch.Tensor)
    return tensors and bool(node.kwargs.get("alpha", 1) == 1 and node.meta["val"].dtype != torch.bool)


def _first_of_chain(node: Node) -> Node | None:
    """The accumulation into zeros that a chain of accumulations ending in `node` starts with. All have one reader, as
    each gets another value; the zeros may have more, as they are only left."""
    while len(node.users) == 1 and (is_reshape(node) or accumulates(node)):
        source: Any = node.args[0]
        if accumulates(node) and is_zeros(source):
            return node
        node = source
    return None


def _is_own(node: Node) -> bool:
    """Computed here, and neither it nor what it is a view of is read by anything else."""
    while node.op == "call_function" and len(node.users) == 1:
        source = viewed(node)
        if source is None:
            return True
        node = source
    return False
