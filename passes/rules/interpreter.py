"""The rules at work: an interpreter that runs the dynamic FX graph of a step on bounded tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Interpreter, Node
from torch.utils._pytree import tree_leaves
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.floats import float_expression
from zgcompile.passes.rules.table import find_rule

from zgcompile.errors import InternalError, UnsupportedOp
from zgcompile.ir.bounded import Bounded, Number, Pad, Size, as_size
from zgcompile.ir.bounds import Bounds
from zgcompile.ir.demands import is_demand
from zgcompile.ir.program import StepProgram
from zgcompile.ir.sizes import SYMBOLIC, evaluate, upper_bound
from zgcompile.ir.source import user_line_from_stack_trace
from zgcompile.ir.spans import span_of
from zgcompile.ir.status import Check, Failure

aten = torch.ops.aten
BOUNDED = (Bounded, Size, Number)
DIVISIONS = {operator.floordiv, operator.mod, operator.truediv}
Poison = Callable[[torch.dtype], Any]
Place = tuple[str, int]  # a value of the FX graph: its node, and its position where the node has several


class Lowering(Interpreter):
    """Runs the dynamic FX graph on bounded tensors. On real tensors it is the test of the rules; traced, it is the
    lowering.

    With `poison` given, pads of unknown content are overwritten after every op, so that a rule that lets one through
    shows. Values at the places in `clean` get zero pads where they are made.
    """

    def __init__(
        self,
        program: StepProgram,
        bounds: Bounds,
        device: torch.device,
        poison: Poison | None = None,
        clean: Collection[Place] = (),
    ) -> None:
        super().__init__(program.fx_graph)
        self.program, self.bounds, self.device, self.poison, self.clean = program, bounds, device, poison, clean
        self.born: list[tuple[Bounded, Node, int]] = []
        self.context = Context(bounds.caps, program.shape_env, device, bounds.ids)

    def run_flat(self, inputs: Sequence[Any]) -> tuple[list[Any], list[tuple[Check, torch.Tensor]]]:
        """The outputs (Bounded, Tensor, Size, Number or constants) and the checks, those of the trace's own conditions
        included."""
        self.context = Context(self.bounds.caps, self.program.shape_env, self.device, self.bounds.ids)
        self.context.key = inputs[0]
        outputs = self.run(*inputs, enable_io_processing=False)
        self._check_conditions()
        return list(outputs), self.context.checks

    def _check_conditions(self) -> None:
        context = self.context
        for condition in self.program.conditions:
            holds = evaluate(condition.expr, context.true_count, {})
            if isinstance(holds, torch.Tensor):
                failed = ~holds if condition.value else holds
                context.checks.append(
                    (
                        Check(Failure.PRECONDITION, f"taken as {condition.value}: {condition.expr}", condition.where),
                        failed,
                    )
                )
            elif bool(holds) != condition.value:
                raise InternalError(f"the condition {condition.expr} is never {condition.value}")
        for a, b in self.program.equalities:
            left, right = context.true_counts.get(a), context.true_counts.get(b)
            if left is not None and right is not None and left is not right:
                context.checks.append((Check(Failure.PRECONDITION, f"{a} == {b}", None), left != right))

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        value = n.meta.get("val")
        if n.target is operator.getitem:
            return self.env[n.args[0]][n.args[1]]  # type: ignore[index]
        if isinstance(value, SYMBOLIC) and n.target is not aten._local_scalar_dense.default:
            if n.target in DIVISIONS:
                self._check_divisor(n)
            return self._symbolic(n, value)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not self._is_dynamic(n, args, kwargs):
            return n.target(*args, **kwargs)  # type: ignore[operator]
        rule = find_rule(n.target)
        where = user_line_from_stack_trace(n.meta.get("stack_trace") or "")
        if rule is None:
            raise UnsupportedOp(
                f"{n.target} has no rule for a dynamic dimension (inputs {[getattr(a, 'sizes', None) for a in args]})",
                where=where,
                advice="express it with ops that have one, or keep it outside the step",
            )
        return self._wrap(n, rule(self.context, n, *args, **kwargs), value)

    def _symbolic(self, node: Node, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            expr = self.context.size(value)
            return expr if isinstance(expr, int) else Size(expr)
        if isinstance(value, torch.SymFloat):
            args, _ = self.fetch_args_kwargs_from_env(node)
            return float_expression(self.context, node, args)
        return None  # comparisons of sizes became conditions

    def _check_divisor(self, node: Node) -> None:
        """Python raises for a count divided by a count of 0; the device does not."""
        divisor = self.fetch_args_kwargs_from_env(node)[0][1]
        if isinstance(divisor, Size):
            zero = evaluate(sympy.Eq(divisor.expr, 0), self.context.true_count, {})
            if isinstance(zero, torch.Tensor):
                self.context.check(zero, Failure.USER_ERROR, f"division by {divisor.expr} == 0", node)

    def _is_dynamic(self, node: Node, args: Any, kwargs: Any) -> bool:
        if node.meta.get("unbacked_bindings") or node.target is aten.repeat_interleave.Tensor or _has_mask_index(node):
            return True  # of static sizes too, since eager waits for the device
        if is_demand(node):
            return True
        if any(isinstance(a, BOUNDED) for a in tree_leaves((args, kwargs), is_leaf=lambda v: isinstance(v, BOUNDED))):
            return True
        outs = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
        return any(not isinstance(as_size(s), int) for v in outs for s in v.shape) or "dynamic_rows" in str(node.target)

    def _wrap(self, node: Node, result: Any, like: Any, position: int = 0) -> Any:
        if isinstance(like, (tuple, list)):
            return tuple(self._wrap(node, r, v, i) for i, (r, v) in enumerate(zip(result, like, strict=True)))
        if isinstance(result, (Size, Number)) or result is None:
            return result
        data, pad = result if isinstance(result, tuple) else (result, Pad.ANY)
        sizes = tuple(self.context.size(s) for s in like.shape)
        caps = tuple(upper_bound(s, self.context.caps) for s in sizes)
        if tuple(data.shape) != caps or data.dtype != like.dtype:
            raise InternalError(
                f"the rule of {node.target} ({node}) gave {data.dtype}{list(data.shape)}, "
                f"expected {like.dtype}{list(caps)}"
            )
        if all(isinstance(s, int) for s in sizes):
            return data
        bounded = Bounded(data, sizes, pad)
        if (node.name, position) in self.clean:
            bounded = Bounded(self.context.select(bounded, 0), sizes, Pad.ZERO)
        node.meta["pad"] = bounded.pad.value
        self.born.append((bounded, node, position))
        return bounded if self.poison is None else self._poisoned(node, bounded)

    def _poisoned(self, node: Node, value: Bounded) -> Bounded:
        assert self.poison is not None
        mask = self.context.all_valid(value)
        assert mask is not None
        if value.pad is Pad.ZERO:
            if bool((torch.where(mask, torch.zeros((), dtype=value.dtype), value.data) != 0).any()):
                raise InternalError(f"the rule of {node.target} claims zero pads and has others")
            return value
        if value.pad is Pad.IN_RANGE:
            span = span_of(node)
            if bool(((value.data < span.low) | (value.data > span.high - 1)).any()):
                raise InternalError(f"the rule of {node.target} claims pads in {span} and has others")
            return value
        fill = torch.full((), self.poison(value.dtype), dtype=value.dtype, device=value.data.device)
        return Bounded(torch.where(mask, value.data, fill), value.sizes, value.pad)


def _has_mask_index(node: Node) -> bool:
    indices = node.args[1] if node.target in (aten.index_put.default, aten._unsafe_index_put.default) else ()
    return any(i is not None and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)  # type: ignore[union-attr]
