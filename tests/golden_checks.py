"""What must hold of every golden case: passes change no result, bounds hold, pads reach no valid row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from golden import CPU, Case, Outcome, parse_program
from torch.fx import Interpreter, Node
from torch.utils._pytree import key_get
from zgcompile.passes.infer_bounds import provable
from zgcompile.passes.rules.interpreter import Lowering
from zgcompile.passes.rules.spans import SizeBounds

from zgcompile.backend.exact import ConditionFailed, ExactRun, run_exact
from zgcompile.ir.bounded import Bounded, Number, Size
from zgcompile.ir.bounds import Bounds
from zgcompile.ir.lowered import LoweredStep, SizeOutput, TensorOutput
from zgcompile.ir.program import StepProgram
from zgcompile.ir.sizes import evaluate
from zgcompile.ir.spans import Span, span_of
from zgcompile.keyed_numbers import step_key

# Nothing that reaches a valid row may depend on which of these its pads hold.
POISONS: list[Callable[[torch.dtype], Any]] = [
    lambda dtype: float("nan") if dtype.is_floating_point else True if dtype == torch.bool else -7,
    lambda dtype: 1e30 if dtype.is_floating_point else False if dtype == torch.bool else torch.iinfo(dtype).max,
]


# -- random inputs


@dataclass
class Inputs:
    """One batch: values by role, arguments with exactly `lengths` rows."""

    key: torch.Tensor
    lengths: list[int]
    arguments: list[torch.Tensor]
    hypers: list[float]
    lifted: list[torch.Tensor]

    def exact(self) -> list[Any]:
        return [
            self.key,
            *[torch.tensor(n) for n in self.lengths],
            *self.arguments,
            *self.hypers,
            *[t.clone() for t in self.lifted],
        ]

    def bounded(self, lowered_caps: list[int | None], poison: Callable[[torch.dtype], Any]) -> list[torch.Tensor]:
        """The arguments in buffers at cap, their pads poisoned."""
        buffers = []
        for argument, cap in zip(self.arguments, lowered_caps, strict=True):
            if cap is None:
                buffers.append(argument)
                continue
            buffer = torch.full((cap, *argument.shape[1:]), poison(argument.dtype), dtype=argument.dtype)
            buffer[: len(argument)] = argument
            buffers.append(buffer)
        return buffers


def batches(case: Case, program: StepProgram) -> Iterator[Inputs]:
    """Random batches: full, shrinking, and of one row."""
    nodes = program.placeholders
    full = [_rows(program, case, group) for group in range(program.lengths)]
    for seed, short in enumerate((0, 1, 3, None)):
        generator = torch.Generator().manual_seed(seed)
        lengths = [1 if short is None else max(rows - short, 1) for rows in full]
        first = 1 + program.lengths
        arguments = [
            _random(case, node, generator, None if a.length is None else lengths[a.length])
            for node, a in zip(nodes[first:], program.arguments, strict=False)
        ]
        lifted = [_random(case, node, generator, None) for node in nodes[program.first_lifted() :]]
        hypers = [0.5 + 0.1 * i for i in range(len(program.hyperparameters))]
        yield Inputs(torch.tensor(step_key(seed, 0)), lengths, arguments, hypers, lifted)


def _rows(program: StepProgram, case: Case, group: int) -> int:
    nodes = program.placeholders[1 + program.lengths :]
    rows = min(n.meta["val"].shape[0] for n, a in zip(nodes, program.arguments, strict=False) if a.length == group)
    return min(rows, case.observed.get(f"n{group}", rows))


def _random(case: Case, node: Node, generator: torch.Generator, rows: int | None) -> torch.Tensor:
    value = node.meta["val"]
    shape = [rows, *value.shape[1:]] if rows is not None else list(value.shape)
    if value.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=value.dtype)
    if value.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    span = span_of(node)
    low, high = case.ranges.get(node.meta["input_name"], (span.low, span.high) if span.known else (0, 8))
    return torch.randint(low, high, shape, generator=generator, dtype=value.dtype)


def exact_run(program: StepProgram, inputs: Inputs) -> ExactRun | None:
    """None where a condition of the trace does not hold for this batch."""
    try:
        return run_exact(program, inputs.exact())
    except ConditionFailed:
        return None


# -- what must hold of every case


def check_same_results(case: Case, outcome: Outcome) -> None:
    """Before and after agree to the bit."""
    for inputs in batches(case, outcome.program):
        before = exact_run(parse_program(case.before), inputs)
        after = exact_run(outcome.program, inputs)
        if before is None or after is None:
            assert before is after
            continue
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert_same(old, new, exact=True)


def check_bounds(case: Case, outcome: Outcome) -> None:
    """Every value lies in its span; a count is at most what is provable while the others lie within their caps."""
    assert outcome.bounds is not None
    program, caps = outcome.program, dict(outcome.bounds.caps)
    for inputs in batches(case, program):
        run = _Values(program)
        with torch.no_grad():
            run.run(*inputs.exact(), enable_io_processing=False)
        for node, value in run.values.items():
            if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and value.numel():
                _assert_inside(node, value, span_of(node), run.counts)
            for symbol in node.meta.get("unbacked_bindings") or {}:
                limit = provable(node, SizeBounds(program.shape_env, caps)) if symbol in caps else None
                within = all(run.counts[s] <= cap for s, cap in caps.items() if s in run.counts and s != symbol)
                assert limit is None or not within or run.counts[symbol] <= limit, (node, run.counts[symbol], limit)


def _assert_inside(node: Node, value: torch.Tensor, span: Span, counts: dict[sympy.Symbol, int]) -> None:
    assert span.low <= int(value.min()), (node, span)
    assert int(value.max()) < span.high, (node, span)
    if span.below is not None:
        assert int(value.max()) < int(evaluate(span.below, counts.__getitem__, {})), (node, span)


class _Values(Interpreter):
    def __init__(self, program: StepProgram) -> None:
        super().__init__(program.fx_graph, garbage_collect_values=False)
        self.values: dict[Node, Any] = {}
        self.counts: dict[sympy.Symbol, int] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n] = result = super().run_node(n)
        for symbol, path in (n.meta.get("unbacked_bindings") or {}).items():
            self.counts[symbol] = int(key_get(result, path) if path else result)
        return result


def check_lowered(case: Case, outcome: Outcome) -> int:
    """At cap with poisoned pads, valid rows, counts and state are those of the exact run. Returns the good batches."""
    program, bounds, lowered = outcome.program, outcome.bounds, outcome.lowered
    assert bounds is not None
    assert lowered is not None
    good = 0
    for inputs in batches(case, program):
        exact = exact_run(program, inputs)
        if exact is None:
            continue
        by_rule = [_by_rules(program, bounds, lowered, inputs, exact, poison) for poison in POISONS]
        static = [_static(program, lowered, inputs, poison) for poison in POISONS]
        failed = lowered.layout.failed(static[0][0].tolist())
        for one, two in [
            *zip(*by_rule, strict=True),
            *([] if failed else zip(*[_valid(lowered, s[0], s[1], exact) for s in static], strict=True)),
        ]:
            assert_same(one, two, exact=True)
        if failed:
            assert_untouched(inputs, static[0][2])
            continue
        good += 1
        values = lowered.layout.count_values(static[0][0].tolist())
        assert {s: n for s, n in values.items() if s in exact.counts} == {
            s: exact.counts[s] for s in values if s in exact.counts
        }
        for (output, wanted), found in zip(
            _tensor_outputs(lowered, exact), _valid(lowered, *static[0][:2], exact), strict=True
        ):
            assert_same(wanted, found, exact=False), output
        for write in program.state_writes:
            assert_same(exact.outputs[write.output], static[0][2][write.lifted], exact=False)
    assert_gated(case, program, lowered)
    return good


def _by_rules(
    program: StepProgram,
    bounds: Bounds,
    lowered: LoweredStep,
    inputs: Inputs,
    exact: ExactRun,
    poison: Callable[[torch.dtype], Any],
) -> list[torch.Tensor]:
    """Valid rows of every output, each op's pads poisoned."""
    lowering = Lowering(program, bounds, CPU, poison)
    numbers = [Number(torch.tensor(h, dtype=torch.float64)) for h in inputs.hypers]
    arguments = inputs.bounded(lowered.argument_caps, poison)
    lengths = [torch.tensor(n) for n in inputs.lengths]
    results, checks = lowering.run_flat(
        [inputs.key, *lengths, *arguments, *numbers, *[t.clone() for t in inputs.lifted]]
    )
    if any(bool(flag) for _, flag in checks):
        return []
    cut = []
    for result, wanted in zip(results, exact.outputs, strict=True):
        if isinstance(result, (Bounded, torch.Tensor)):
            data = result.data[tuple(slice(0, n) for n in wanted.shape)] if isinstance(result, Bounded) else result
            assert_same(wanted, data, exact=False)
            cut.append(data)
        elif isinstance(result, Size):
            assert int(lowering.context.count_tensor(result)) == wanted
    return cut


def _static(
    program: StepProgram,
    lowered: LoweredStep,
    inputs: Inputs,
    poison: Callable[[torch.dtype], Any],
    lengths: list[int] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """The metadata buffer, the outputs, and the lifted tensors as they are afterwards."""
    state = [t.clone() for t in inputs.lifted]
    grads = [torch.zeros(tuple(like.shape), dtype=like.dtype) for like in lowered.gradient_inputs]
    hypers = torch.tensor(inputs.hypers, dtype=torch.float64)
    counts = [torch.tensor(n) for n in lengths or inputs.lengths]
    arguments = inputs.bounded(lowered.argument_caps, poison)
    launch = torch.tensor([1, 0])  # its id, and no record to publish to
    metadata, _, *outputs = lowered.fx_graph(launch, inputs.key, *counts, *arguments, hypers, *state, *grads)
    return metadata, outputs, state


def _tensor_outputs(lowered: LoweredStep, exact: ExactRun) -> Iterator[tuple[TensorOutput, torch.Tensor]]:
    for output, wanted in zip(lowered.outputs, exact.outputs, strict=False):
        if isinstance(output, TensorOutput):
            yield output, wanted
        elif isinstance(output, SizeOutput):
            assert int(evaluate(output.expr, exact.counts.__getitem__, {})) == wanted


def _valid(
    lowered: LoweredStep, metadata: torch.Tensor, outputs: list[torch.Tensor], exact: ExactRun
) -> list[torch.Tensor]:
    counts = lowered.layout.count_values(metadata.tolist())
    cut = []
    for output, _ in _tensor_outputs(lowered, exact):
        sizes = [s if isinstance(s, int) else int(evaluate(s, counts.__getitem__, {})) for s in output.sizes]
        cut.append(outputs[output.position][tuple(slice(0, n) for n in sizes)])
    return cut


def assert_gated(case: Case, program: StepProgram, lowered: LoweredStep) -> None:
    """A batch above its capacity reports so and writes nothing."""
    inputs = next(batches(case, program))
    caps = {a.length: cap for a, cap in zip(program.arguments, lowered.argument_caps, strict=True) if cap is not None}
    if not caps:
        return
    above = [caps[i] + 1 for i in range(program.lengths)]
    metadata, _, state = _static(program, lowered, inputs, POISONS[0], above)
    assert lowered.layout.failed(metadata.tolist())
    assert_untouched(inputs, state)


def assert_untouched(inputs: Inputs, state: list[torch.Tensor]) -> None:
    for before, after in zip(inputs.lifted, state, strict=True):
        assert_same(before, after, exact=True)


def assert_same(wanted: Any, found: Any, *, exact: bool) -> None:
    if not isinstance(wanted, torch.Tensor):
        assert wanted == found
        return
    tolerance = {"rtol": 0, "atol": 0} if exact or not wanted.dtype.is_floating_point else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, wanted, equal_nan=True, **tolerance)
