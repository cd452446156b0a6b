"""Which nodes of an FX graph share the memory of another."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node


def viewed(node: Node) -> Node | None:
    """The node whose memory `node` shows, as the schemas say; None where it has memory of its own, or is an input."""
    if node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, Node) and viewed(source) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    # Its schema calls the result fresh, which holds only for who no longer uses the source.
    shows = node.target is torch.ops.aten._unsafe_view.default
    if not shows and all(r.alias_info is None for r in node.target._schema.returns):
        return None
    source = node.args[0]
    return source if isinstance(source, Node) else None


def storage_root(node: Node) -> Node:
    """The node that the memory of `node` belongs to."""
    while (source := viewed(node)) is not None:
        node = source
    return node
