"""Makes the dynamic FX graph static: an interpreter over bounded tensors, one rule an op, re-traced into a new FX
graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.floats import float_expression
from zgcompile.passes.rules.table import find_rule

from zgcompile.errors import InternalError, UnsupportedOp
from zgcompile.ir.bounded import Bounded, Number, Pad, Size, as_size
from zgcompile.ir.bounds import Bounds
from zgcompile.ir.lowered import ConstantOutput, LoweredStep, NumberOutput, Output, SizeOutput, TensorOutput
from zgcompile.ir.program import StepProgram
from zgcompile.ir.sizes import evaluate, upper_bound
from zgcompile.ir.source import user_line_from_stack_trace
from zgcompile.ir.spans import span_of
from zgcompile.ir.status import Check, CountSlot, Failure, MetadataLayout

aten = torch.ops.aten
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
BOUNDED = (Bounded, Size, Number)
Poison = Callable[[torch.dtype], Any]


class Lowering(Interpreter):
    """Runs the dynamic FX graph on bounded tensors. On real tensors it is the test of the rules; traced, it is the
    lowering.

    With `poison` given, pads of unknown content are overwritten after every op, so that a rule that lets one through
    shows.
    """

    def __init__(
        self, program: StepProgram, bounds: Bounds, device: torch.device, poison: Poison | None = None
    ) -> None:
        super().__init__(program.fx_graph)
        self.program, self.bounds, self.device, self.poison = program, bounds, device, poison
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

    def _is_dynamic(self, node: Node, args: Any, kwargs: Any) -> bool:
        if node.meta.get("unbacked_bindings") or node.target is aten.repeat_interleave.Tensor or _has_mask_index(node):
            return True  # of static sizes too, since eager waits for the device
        if any(isinstance(a, BOUNDED) for a in tree_leaves((args, kwargs), is_leaf=lambda v: isinstance(v, BOUNDED))):
            return True
        outs = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
        return any(not isinstance(as_size(s), int) for v in outs for s in v.shape) or "dynamic_rows" in str(node.target)

    def _wrap(self, node: Node, result: Any, like: Any) -> Any:
        if isinstance(like, (tuple, list)):
            return tuple(self._wrap(node, r, v) for r, v in zip(result, like, strict=True))
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
        node.meta["pad"] = pad.value
        bounded = Bounded(data, sizes, pad)
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


def lower(program: StepProgram, bounds: Bounds, device: torch.device, poison: Poison | None = None) -> LoweredStep:
    """The static FX graph of a step at the given capacities.

    Raises:
        UnsupportedOp: an op has no rule on a dynamic dimension; the message names the user's line.
    """
    lowering = Lowering(program, bounds, device, poison)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    placeholders = program.placeholders
    first_lifted = program.first_lifted()
    hypers = slice(first_lifted - len(program.hyperparameters), first_lifted)
    arguments = placeholders[1 + program.lengths : hypers.start]
    argument_caps = _argument_caps(program, bounds)
    gradients = [w for w in program.gradient_writes if w.output is not None]
    outputs: list[Output] = []
    layout: list[MetadataLayout] = []

    with fake_mode:
        scalar = torch.empty((), dtype=torch.int64, device=device)
        inputs = [torch.empty(2, dtype=torch.int64, device=device)]
        inputs += [scalar, *[scalar.clone() for _ in range(program.lengths)]]
        inputs += [_argument_buffer(p, cap, device) for p, cap in zip(arguments, argument_caps, strict=True)]
        inputs.append(torch.empty(len(program.hyperparameters), dtype=torch.float64, device=device))
        inputs += [_like(p.meta["val"]) for p in placeholders[first_lifted:]]
        inputs += [_like(placeholders[first_lifted + w.lifted].meta["val"]) for w in gradients]

    def static_step(launch: torch.Tensor, *flat: torch.Tensor) -> list[torch.Tensor]:
        _keep_stack_traces()
        head, hyper, lifted, buffers = _split(flat, program, len(gradients))
        numbers = [Number(hyper[i]) for i in range(len(program.hyperparameters))]
        results, checks = lowering.run_flat([*head, *numbers, *lifted])
        metadata, found = _metadata(lowering.context, checks, bounds)
        published = torch.ops.zgcompile.publish(metadata, launch)
        layout.append(found)
        returned, described = _returned(program, results, lowering.context)
        outputs.extend(described)
        good = ~metadata[: len(checks)].any() if checks else torch.ones((), dtype=torch.bool, device=device)
        for write in program.state_writes:
            _write_gated(good, lifted[write.lifted], lowering.context.raw(results[write.output]))
        for buffer, gradient in zip(buffers, gradients, strict=True):
            _write_gated(good, buffer, lowering.context.raw(results[gradient.output]))  # type: ignore[index]
        return [metadata, published, *returned]

    with fake_mode, torch.no_grad(), preserve_node_meta():
        fx_graph = make_fx(static_step, tracing_mode="real")(*inputs)
    fx_graph.graph.eliminate_dead_code()
    fx_graph.recompile()
    return LoweredStep(
        fx_graph=fx_graph,
        layout=layout[0],
        caps=dict(bounds.caps),
        names=dict(bounds.names),
        outputs=outputs,
        lengths=program.lengths,
        argument_caps=argument_caps,
        hypers=len(program.hyperparameters),
        gradients=len(gradients),
        example_inputs=inputs,
    )


def _argument_caps(program: StepProgram, bounds: Bounds) -> list[int | None]:
    """Rows of each argument's buffer: the capacity of its length; 0 where the step never looks at it."""
    placeholders = program.placeholders
    lengths = placeholders[1 : 1 + program.lengths]
    caps: dict[int, int] = {}
    for node in program.fx_graph.graph.nodes:
        if node.target is torch.ops.zgcompile.dynamic_rows.default and node.args[1] in lengths:
            size = program.shape_env.replace(as_size(node.meta["val"].shape[0]))
            caps[lengths.index(node.args[1])] = upper_bound(size, bounds.caps)
    return [None if a.length is None else caps.get(a.length, 0) for a in program.arguments]


def _argument_buffer(placeholder: Node, cap: int | None, device: torch.device) -> torch.Tensor:
    like = placeholder.meta["val"]
    shape = tuple(like.shape) if cap is None else (cap, *like.shape[1:])
    return torch.empty(shape, dtype=like.dtype, device=like.device if like.device.type != "cpu" else device)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device)


def _split(
    flat: Sequence[torch.Tensor], program: StepProgram, gradients: int
) -> tuple[list[Any], torch.Tensor, list[Any], list[Any]]:
    first = 1 + program.lengths + len(program.arguments)
    head, hyper, rest = list(flat[:first]), flat[first], list(flat[first + 1 :])
    return head, hyper, rest[: len(program.lifted)], rest[len(program.lifted) :]


def _metadata(
    context: Context, checks: list[tuple[Check, torch.Tensor]], bounds: Bounds
) -> tuple[torch.Tensor, MetadataLayout]:
    """One int64 vector: the checks, then the true counts."""
    flags = [flag.to(torch.int64).reshape(()) for _, flag in checks]
    counts = [(s, c) for s, c in context.true_counts.items()]
    slots = tuple(CountSlot(s, bounds.caps.get(s), bounds.names.get(s, str(s))) for s, _ in counts)
    values = [*flags, *[c.to(torch.int64).reshape(()) for _, c in counts]]
    metadata = torch.stack(values) if values else torch.zeros(0, dtype=torch.int64, device=context.device)
    return metadata, MetadataLayout(tuple(check for check, _ in checks), slots)


def _returned(program: StepProgram, results: list[Any], context: Context) -> tuple[list[torch.Tensor], list[Output]]:
    tensors: list[torch.Tensor] = []
    described: list[Output] = []

    def position(tensor: torch.Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    for node, result in zip(program.outputs[: program.user_outputs], results, strict=False):
        if not isinstance(node, Node):
            described.append(ConstantOutput(node))
        elif isinstance(result, Bounded):
            described.append(TensorOutput(position(result.data), result.sizes))
        elif isinstance(result, torch.Tensor):
            described.append(
                TensorOutput(position(result.clone() if node.op == "placeholder" else result), tuple(result.shape))
            )
        elif isinstance(result, Number):
            described.append(NumberOutput(position(result.value), False))
        elif isinstance(result, Size):
            if node.target is aten._local_scalar_dense.default and result.expr not in context.caps:
                described.append(NumberOutput(position(context.count_tensor(result)), True))
            else:
                if not all(s.is_integer for s in result.expr.free_symbols):
                    raise _int_of_float(node)
                context.count(result)  # a size that cannot be evaluated is refused now, not at a replay
                described.append(SizeOutput(result.expr))
        else:
            described.append(ConstantOutput(result))
    return tensors, described


def _int_of_float(node: Node) -> UnsupportedOp:
    return UnsupportedOp(
        "a whole number made from a float of the device",
        where=user_line_from_stack_trace(node.meta.get("stack_trace") or ""),
        advice="keep it a tensor: (x * 10).long()",
    )


def _write_gated(good: torch.Tensor, target: torch.Tensor, new: torch.Tensor) -> None:
    """`target` becomes `new` only when the whole step is good: the one place where a step writes state."""
    target.copy_(torch.where(good, new.to(target.dtype), target))


def _keep_stack_traces() -> None:
    mode = get_proxy_mode()
    if mode is not None:
        mode.tracer.record_stack_traces = False


def symbols_of(program: StepProgram) -> list[sympy.Symbol]:
    """The size symbols in the order in which they are born."""
    nodes = program.fx_graph.graph.nodes
    return [s for n in nodes if n.op == "call_function" for s in (n.meta.get("unbacked_bindings") or {})]
