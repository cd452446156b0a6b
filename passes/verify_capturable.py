"""The last check before capture: nothing in the lowered FX graph has a size of its own or makes the host wait."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from zgcompile.errors import InternalError
from zgcompile.ir.lowered import LoweredStep
from zgcompile.ir.sizes import SYMBOLIC
from zgcompile.ir.source import user_line_from_stack_trace

aten = torch.ops.aten
SYNCHRONISING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.repeat_interleave.Tensor, aten.masked_select.default, aten.bincount.default,
    aten.item.default, aten.is_nonzero.default, aten.equal.default,
}  # fmt: skip


def verify_capturable(lowered: LoweredStep, device: torch.device) -> None:
    """Raises InternalError naming the node: a symbolic size, an op that reads a value back, a boolean index, a random
    op that is not keyed, or a tensor on another device than the step's."""
    for node in lowered.fx_graph.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, SYMBOLIC) or (
                isinstance(value, torch.Tensor) and any(not isinstance(s, int) for s in value.shape)
            ):
                raise _broken(node, "has a size that is not static")
            if isinstance(value, torch.Tensor) and value.device.type != device.type and value.dim():
                raise _broken(node, f"is on {value.device}, the step on {device}")
        if node.op != "call_function":
            continue
        if node.target in SYNCHRONISING:
            raise _broken(node, "reads a value back to the host")
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise _broken(node, "draws random numbers that are not keyed")
        if "index" in str(node.target) and _has_mask(node):
            raise _broken(node, "has a boolean index")


def _has_mask(node: Node) -> bool:
    indices = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else ()
    return any(
        isinstance(i, Node) and getattr(i.meta.get("val"), "dtype", None) in (torch.bool, torch.uint8) for i in indices
    )


def _broken(node: Node, what: str) -> InternalError:
    where = user_line_from_stack_trace(node.meta.get("stack_trace") or "")
    return InternalError(f"the lowered FX graph cannot be captured: {node.format_node()} {what}", where=where)
