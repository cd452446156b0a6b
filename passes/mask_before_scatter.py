"""Masks and scales of a buffer of scattered sums are applied to what is scattered:

    where(c, index_put(zeros, i, v, True) * m * 2, 0)  ->  index_put(zeros, i, where(c[i], v * m[i] * 2, 0), True)

so in the backward pass of `dropout(relu(z))[i]`. Left alone, a code generator that scatters by atomics has written the
buffer when the masks come, and needs a second one of its size for them.

Invariant: every step that moves takes each element to 0, or to c times itself with a finite c, by a choice of its own
row. Then 0 stays 0: a row that nothing is scattered to needs no step, and neither does a pad, whose value is 0 and
whose row may be anybody's. That is why a factor is a finite number or a mask, never a tensor of other floats: at an
infinity or NaN of its, 0 would not stay 0. A condition of `where` may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from zgcompile.ir.accumulation import PUTS, RESHAPES, accumulates, is_reshape, is_zeros, one_form
from zgcompile.ir.calls import call
from zgcompile.pass_base import finished

aten = torch.ops.aten
PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
MOST_ROWS = 4  # scattered, for each row of the buffer: beyond, the steps would be done too many times over


class _Chain(NamedTuple):
    """`nodes`, each the only reader of the one before: the accumulations `sums`, then the `steps`, each with the node
    that it is a step from; reshapes in between."""

    nodes: list[Node]
    sums: list[Node]
    steps: list[tuple[Node, Node]]


def mask_before_scatter(fx_graph: GraphModule) -> bool:
    """Rewrite what masks and scales accumulations of rows into fresh zeros, where one of the masks is of full size.

    The accumulations are `index_put(accumulate=True)`, `_unsafe_index_put` and `index_add` along dimension 0, into
    floats of two dimensions and more; the steps are products with a number or a mask, quotients by a number, `neg`,
    `native_dropout_backward`, and `where` and `masked_fill` with 0. What a mask is: bools, or bools made floats and
    scaled by numbers. The scattered rows are at most `MOST_ROWS` times those of the buffer.

    Results differ by rounding, in the sign of a zero, and where only one of the sum and its scaled parts is beyond the
    largest number of the type. `where` drops the same infinities and NaNs; 0 times one of them is NaN, before and
    after. True when something changed.
    """
    changed = False
    pending = [node for node in fx_graph.graph.nodes if _row_sum(node) and _is_fresh(node.args[0])]
    while pending:
        chain = _chain(pending.pop())
        if _pays(chain) and not any(_writes(n) for n in _between(chain.nodes[0], chain.nodes[-1])):
            pending.append(_rewrite(fx_graph, chain))  # more may be scattered into its result
            changed = True
    return finished(fx_graph, changed)


def _row_sum(node: Node) -> tuple[Node, int] | None:
    """(index, position of the values among the arguments) of a sum of whole rows into a float buffer."""
    if not accumulates(node):
        return None
    target: Any = node.args[0]
    if node.target in PUTS:
        indices: Any = node.args[1]
        index, at = indices[0] if len(indices) == 1 else None, 2
    else:
        along_rows = node.target is aten.index_add.default and node.args[1] == 0 and not node.kwargs
        index, at = node.args[2] if along_rows else None, 3
    values = node.args[at]
    if not isinstance(index, Node) or not isinstance(values, Node) or not one_form(node, target):
        return None
    buffer, rows, places = (n.meta["val"] for n in (target, values, index))
    whole_rows = places.dim() == 1 and rows.shape == (places.shape[0], *buffer.shape[1:]) and buffer.dim() >= 2
    indexed = places.dtype in (torch.int64, torch.int32) and values is not target
    return (index, at) if whole_rows and indexed and buffer.is_floating_point() else None


def _is_fresh(node: Any) -> bool:
    while len(node.users) == 1 and is_reshape(node):
        node = node.args[0]
    return len(node.users) == 1 and is_zeros(node)


def _chain(first: Node) -> _Chain:
    chain = _Chain([first], [first], [])
    node = first
    while len(node.users) == 1:
        user = next(iter(node.users))
        if not chain.steps and user.args[0] is node and _row_sum(user):
            chain.sums.append(user)
        elif _is_step(user, node):
            chain.steps.append((user, node))
        elif not is_reshape(user):
            break
        chain.nodes.append(user)
        node = user
    return chain


def _is_step(node: Node, x: Node) -> bool:
    """What the invariant asks for, of the form of `x`, which is one of the arguments."""
    if node.kwargs or not one_form(node, x):
        return False
    dtype = x.meta["val"].dtype
    left, *others = list[Any](node.args)
    if node.target in PRODUCTS:
        other = others[0] if left is x else left
        return _is_finite(other, dtype) or _level(other) is not None
    if node.target is aten.where.self:
        return _is_bool(left) and any(_is_zero(branch) for branch in others)
    if left is not x:
        return False
    if node.target in QUOTIENTS:
        return _divides(others[0], dtype)
    if node.target is aten.masked_fill.Scalar:
        return _is_bool(others[0]) and others[1] == 0
    if node.target is aten.native_dropout_backward.default:
        return _is_bool(others[0]) and _is_finite(others[1], dtype)
    return node.target is aten.neg.default


def _is_bool(value: Any) -> bool:
    return isinstance(value, Node) and value.meta["val"].dtype is torch.bool


def _is_zero(value: Any) -> bool:
    return isinstance(value, Node) and value.meta["val"].dim() == 0 and is_zeros(value)


def _is_finite(number: Any, dtype: torch.dtype) -> bool:
    return isinstance(number, (int, float)) and abs(number) <= torch.finfo(dtype).max


def _divides(number: Any, dtype: torch.dtype) -> bool:
    """The inverse too is finite, as a quotient may be computed by it."""
    return _is_finite(number, dtype) and number != 0 and _is_finite(1 / number, dtype)


def _level(mask: Any) -> float | None:
    """The number that a mask holds where it is not 0; None for what is no mask."""
    if not isinstance(mask, Node) or _is_bool(mask):
        return 1.0 if isinstance(mask, Node) else None
    dtype, of = mask.meta["val"].dtype, mask.all_input_nodes
    level = _level(of[0]) if dtype.is_floating_point and of else None
    if level is None:
        return None
    if mask.target in PRODUCTS:
        left, right = list[Any](mask.args)
        factor = right if left is of[0] else left
        level = level * factor if _is_finite(factor, dtype) else None
    elif mask.target in QUOTIENTS:
        divisor: Any = mask.args[1]
        level = level / divisor if _divides(divisor, dtype) else None
    elif mask.target is not aten._to_copy.default and mask.target not in RESHAPES:
        return None
    return level if _is_finite(level, dtype) else None


def _pays(chain: _Chain) -> bool:
    buffer = chain.nodes[0].meta["val"]
    rows = sum(index.meta["val"].shape[0] for index, _ in map(_row_sum, chain.sums))  # type: ignore[misc]
    masks = [a for step, x in chain.steps for a in step.args if isinstance(a, Node) and a is not x]
    return rows <= MOST_ROWS * buffer.shape[0] and any(m.meta["val"].shape == buffer.shape for m in masks)


def _between(first: Node, last: Node) -> Iterator[Node]:
    while first is not last:
        yield first
        first = first.next


def _writes(node: Node) -> bool:
    """Past a write in place an operand would be read too late."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _rewrite(fx_graph: GraphModule, chain: _Chain) -> Node:
    """The first of the new accumulations, all of which stand where the last step was: there every operand is known."""
    graph, last = fx_graph.graph, chain.nodes[-1]
    buffer = last.meta["val"]
    total: Any = chain.sums[0].args[0]
    new: list[Node] = []
    with graph.inserting_before(last):
        for node in chain.sums:
            index, at = _row_sum(node)  # type: ignore[misc]
            values = node.args[at]
            taken: dict[Node, Node] = {}
            for step, x in chain.steps:
                operands = []
                for operand in step.args:
                    if operand is x:
                        operand = values
                    elif isinstance(operand, Node) and _has_rows(operand, buffer):
                        if operand not in taken:
                            taken[operand] = call(graph, step, aten.index.Tensor, operand, [index])
                        operand = taken[operand]
                    operands.append(operand)
                values = call(graph, step, step.target, *operands)
            rest = node.args[1:at], node.args[at + 1 :]
            total = call(graph, node, node.target, total, *rest[0], values, *rest[1], **node.kwargs)
            new.append(total)
    last.replace_all_uses_with(total)
    for node in reversed(chain.nodes):
        graph.erase_node(node)
    return new[0]


def _has_rows(operand: Node, buffer: torch.Tensor) -> bool:
    """Has a row for each of the buffer, not one for all."""
    shape = operand.meta["val"].shape
    return len(shape) == buffer.dim() and shape[0] == buffer.shape[0] != 1
