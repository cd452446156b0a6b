"""Nodes that add scattered values to a buffer, and what stands around them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten
# Ops that make zeros, and where the value stands that has to be 0.
ZEROS: dict[Any, int | None] = {
    aten.zeros.default: None, aten.new_zeros.default: None, aten.zeros_like.default: None,
    aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}  # fmt: skip
PUTS = {aten.index_put.default, aten._unsafe_index_put.default}
ADDS = {aten.index_add.default, aten.scatter_add.default}
RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.permute.default, aten.alias.default,
    aten.detach.default,
}  # fmt: skip


def one_form(*nodes: Node) -> bool:
    """One shape, strides, dtype and device, so that any of the values may stand in the buffer of another."""
    forms = {
        (v.shape, v.stride(), v.dtype, v.device) if isinstance(v, torch.Tensor) else None
        for v in (n.meta.get("val") for n in nodes)
    }
    return len(forms) == 1 and None not in forms


def accumulates(node: Node) -> bool:
    if node.target in PUTS:
        return bool(node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False))
    return node.target in ADDS


def is_zeros(node: Node) -> bool:
    node = without_reshapes(node)
    if node.target not in ZEROS:
        return False
    at = ZEROS[node.target]
    value = 0 if at is None else node.args[at] if len(node.args) > at else None
    return isinstance(value, (int, float)) and value == 0


def is_reshape(node: Node) -> bool:
    """A view of the same elements at the same places, as the rules leave them around an `index_put`."""
    source, *rest = node.args or (None,)
    if node.target not in RESHAPES or not isinstance(source, Node) or not one_form(node, source):
        return False
    dims: Any = rest[0] if node.target is aten.permute.default else []
    return all(d % len(dims) == i for i, d in enumerate(dims))


def without_reshapes(node: Node) -> Node:
    while is_reshape(node):
        source: Any = node.args[0]
        node = source
    return node
