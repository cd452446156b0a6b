"""Golden cases of passes: text in, text out, and what must hold of every case whatever its text.

A case is an `.ir` file:

    # canonicalise: equal masks are one mask
    # passes: canonicalise
    # observed: n0=8, n1=37                 counts that exact runs have seen
    # envelope: headroom=1.5                or: train.py:31=4096
    # inputs: arg0=[0, 100)                 range of the random integers for an input, [0, 8) unless told here or by a span
    --- before
    fx_graph(length0: i64[], arg0: f32[8, 4], weight: f32[4, 2]):
    ...
    --- after       or: --- error, with the message; a case with neither must stay as it is

Inputs in order, by name: `key`, `length0`..., `arg0`..., `hyper0`..., then the lifted tensors. `length0` and `key` may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten

from zgcompile.backend.exact import ConditionFailed, ExactRun, run_exact
from zgcompile.errors import ZgError
from zgcompile.frontend.shape_env import EnvelopeShapeEnv
from zgcompile.ir.bounded import Bounded, Number, Size
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.lowered import LoweredStep, SizeOutput, TensorOutput
from zgcompile.ir.parser import parse_fx_graph
from zgcompile.ir.printer import input_names, print_fx_graph
from zgcompile.ir.program import ArgumentInput, Condition, GradientWrite, LiftedInput, StateWrite, StepProgram
from zgcompile.ir.sizes import evaluate
from zgcompile.ir.spans import UNKNOWN, Span, span_of
from zgcompile.kernels.keyed_draw import step_key
from zgcompile.passes.canonicalise import Canonicalise
from zgcompile.passes.infer_bounds import Bounds, Observed, infer_bounds, provable
from zgcompile.passes.lower import Lowering, lower
from zgcompile.passes.rules.spans import SizeBounds

CPU = torch.device("cpu")
_SECTION = re.compile(r"^--- (before|after|error)$", re.MULTILINE)
_RANGE = re.compile(r"(\w[\w.]*)=\[(-?\d+), (-?\d+)\)")
_ROLES = ("key", "length", "arg", "hyper", "lifted")
# Nothing that reaches a valid row may depend on which of these its pads hold.
POISONS: list[Callable[[torch.dtype], Any]] = [
    lambda dtype: float("nan") if dtype.is_floating_point else True if dtype == torch.bool else -7,
    lambda dtype: 1e30 if dtype.is_floating_point else False if dtype == torch.bool else torch.iinfo(dtype).max,
]


@dataclass
class Case:
    """One `.ir` file. `line` is where `before` starts."""

    path: Path
    title: str
    passes: list[str]
    before: str
    line: int
    after: str | None
    error: str | None
    observed: dict[str, int] = field(default_factory=dict)
    envelope: Envelope = field(default_factory=Envelope)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        return self.before if self.after is None else self.after


def read_case(path: Path) -> Case:
    text = path.read_text()
    head, *rest = _SECTION.split(text)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    title, *settings = [line.removeprefix("# ") for line in head.strip().splitlines()]
    given = dict(s.split(": ", 1) for s in settings)
    observed = {k: int(v) for k, v in (p.split("=") for p in given.get("observed", "").split(", ") if p)}
    before_line = text[: text.index("--- before\n")].count("\n") + 2
    return Case(
        path,
        title,
        given["passes"].split(", "),
        sections["before"].lstrip("\n"),
        before_line,
        sections["after"].lstrip("\n") if "after" in sections else None,
        sections["error"].strip() if "error" in sections else None,
        observed,
        _envelope(given.get("envelope", "")),
        {name: (int(low), int(high)) for name, low, high in _RANGE.findall(given.get("inputs", ""))},
    )


def accept(case: Case, after: str) -> None:
    """Rewrites the `after` part, and no other."""
    text = case.path.read_text()
    case.path.write_text(text[: text.index("--- after\n")] + "--- after\n" + after)


def _envelope(text: str) -> Envelope:
    pairs = dict(p.rsplit("=", 1) for p in text.split(", ") if p)
    headroom = {"headroom": float(pairs.pop("headroom"))} if "headroom" in pairs else {}
    return Envelope(**headroom, caps={line: int(cap) for line, cap in pairs.items()})


# -- programs


def parse_program(text: str, file: str = "<text>", first_line: int = 1) -> StepProgram:
    """A `StepProgram` from text; the roles of its inputs go by their names."""
    text = text if re.search(r"\bkey: ", text) else text.replace("fx_graph(", "fx_graph(key: i64[], ", 1)
    shape_env = EnvelopeShapeEnv()
    shape_env.recording = False
    module, _ = parse_fx_graph(text, shape_env, file=file, first_line=first_line)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    names = [n.meta["input_name"] for n in placeholders]
    roles = [_role(name) for name in names]
    if roles != sorted(roles):
        raise ZgError(f"{file}: inputs come in the order key, length0, arg0, hyper0, lifted, not {', '.join(names)}")
    of_role = [[n for n, r in zip(placeholders, roles, strict=True) if r == role] for role in range(len(_ROLES))]
    lengths, arguments, hypers, lifted = of_role[1:]
    groups = _length_groups(lengths, module.graph.nodes)
    lifted_names = [n.meta["input_name"] for n in lifted]
    writes = module.meta["writes"]
    equal = [(e.lhs, e.rhs) for e, value in module.meta["requires"] if value and _is_equality(e)]
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    returned = len(output.args[0]) - sum(at is not None for _, at in writes)
    return StepProgram(
        fx_graph=module,
        shape_env=shape_env,
        lengths=len(lengths),
        arguments=[_argument(n, i, groups.get(n)) for i, n in enumerate(arguments)],
        hyperparameters=[n.meta["input_name"] for n in hypers],
        lifted=[LiftedInput(name, _unresolved, "tensor") for name in lifted_names],
        user_outputs=returned,
        out_spec=tree_flatten((None,) * returned)[1],
        state_writes=[StateWrite(lifted_names.index(t), at) for t, at in writes if not t.startswith("grad(")],
        gradient_writes=[
            GradientWrite(lifted_names.index(t.removeprefix("grad(").removesuffix(")")), at) for t, at in writes if t.startswith("grad(")
        ],
        conditions=[Condition(e, value, None) for e, value in module.meta["requires"] if not (value and _is_equality(e))],
        equalities=equal,
        hyper_symbols=[n.meta["val"].node.expr for n in hypers],
    )


def _role(name: str) -> int:
    found = re.fullmatch(r"(key|length|arg|hyper)\d*", name)
    return _ROLES.index(found[1]) if found else 4


def _is_equality(expr: sympy.Basic) -> bool:
    return isinstance(expr, sympy.Eq) and expr.lhs.is_Symbol and expr.rhs.is_Symbol


def _length_groups(lengths: list[Node], nodes: Any) -> dict[Node, int]:
    """Argument -> the length that its rows have; also rows -> length, for the arguments that share it."""
    groups: dict[Node, int] = {}
    for node in nodes:
        if node.target is torch.ops.zgcompile.dynamic_rows.default:
            groups[node.args[0]] = groups[node] = lengths.index(node.args[1])
        elif node.target is torch.ops.zgcompile.dynamic_rows_like.default:
            groups[node.args[0]] = groups[node.args[1]]
    return groups


def _argument(node: Node, position: int, length: int | None) -> ArgumentInput:
    value = node.meta["val"]
    trailing = tuple(value.shape if length is None else value.shape[1:])
    return ArgumentInput(node.meta["input_name"], position, length, value.dtype, value.device, trailing)


def _unresolved() -> torch.Tensor:
    raise AssertionError("a lifted input of a golden case has no tensor of its own")


# -- running the passes


@dataclass
class Outcome:
    """What the passes of a case made: the program, its bounds and its lowered form where they got so far, and the text."""

    program: StepProgram
    changed: bool
    bounds: Bounds | None
    lowered: LoweredStep | None
    text: str


def transform(case: Case, times: int = 1) -> Outcome:
    """Runs the passes of the case, each `times` times in a row. Raises what a pass raises."""
    program = parse_program(case.before, case.path.name, case.line)
    bounds: Bounds | None = None
    lowered: LoweredStep | None = None
    changed = False
    for name in case.passes:
        for _ in range(times):
            if name == "canonicalise":
                changed = Canonicalise().apply(program)
            elif name == "infer-bounds":
                bounds = bounds_of(case, program)
            elif name == "lower":
                bounds = bounds or bounds_of(case, program)
                lowered = lower(program, bounds, CPU)
            else:
                raise ZgError(f"{case.path}: there is no pass {name}")
    return Outcome(program, changed, bounds, lowered, outcome_text(case, program, bounds, lowered))


def outcome_text(case: Case, program: StepProgram, bounds: Bounds | None, lowered: LoweredStep | None) -> str:
    if lowered is not None:
        return print_fx_graph(lowered.fx_graph, names=lowered_names(program))
    lines = re.search(r"# \S+:\d+$", case.before, re.MULTILINE) is not None
    if bounds is not None:
        return print_fx_graph(program, caps=bounds.caps, ids=bounds.ids, spans=True, lines=lines)
    return print_fx_graph(program, lines=lines)


def lowered_names(program: StepProgram) -> list[str]:
    names, first, hypers = input_names(program), program.first_lifted(), len(program.hyperparameters)
    grads = [f"{program.lifted[w.lifted].name}.grad" for w in program.gradient_writes if w.output is not None]
    return ["launch", *names[: first - hypers], "hypers", *names[first:], *grads]


def bounds_of(case: Case, program: StepProgram) -> Bounds:
    symbols = dict(zip(case_sizes(program), _born(program), strict=True))
    observed = Observed({symbols[name]: count for name, count in case.observed.items()})
    lifted = program.placeholders[program.first_lifted() :]
    tables = {i: span_of(node) for i, node in enumerate(lifted) if span_of(node) != UNKNOWN}
    return infer_bounds(program, observed, case.envelope, tables)


def _born(program: StepProgram) -> list[sympy.Symbol]:
    born = [s for n in program.fx_graph.graph.nodes for s in n.meta.get("unbacked_bindings") or {}]
    return [s for s in born if s.is_integer]


def case_sizes(program: StepProgram) -> list[str]:
    return [f"n{i}" for i in range(len(_born(program)))]


def round_trip(text: str) -> str:
    """Printed, parsed and printed again, with what the text has of lines and spans."""
    module, _ = parse_fx_graph(text, _shape_env())
    return print_fx_graph(module, spans=True, lines=re.search(r"# \S+:\d+$", text, re.MULTILINE) is not None)


def _shape_env() -> EnvelopeShapeEnv:
    shape_env = EnvelopeShapeEnv()
    shape_env.recording = False
    return shape_env


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
        return [self.key, *[torch.tensor(n) for n in self.lengths], *self.arguments, *self.hypers, *[t.clone() for t in self.lifted]]

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
    """Every value lies in its span; a count lies within what is provable while those before it lie within their caps."""
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


class _Values(torch.fx.Interpreter):
    def __init__(self, program: StepProgram) -> None:
        super().__init__(program.fx_graph, garbage_collect_values=False)
        self.values: dict[Node, Any] = {}
        self.counts: dict[sympy.Symbol, int] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n] = result = super().run_node(n)
        for symbol, path in (n.meta.get("unbacked_bindings") or {}).items():
            self.counts[symbol] = int(torch.utils._pytree.key_get(result, path) if path else result)
        return result


def check_lowered(case: Case, outcome: Outcome) -> int:
    """At cap with poisoned pads the valid rows, the counts and the state are those of the exact run; how many batches were good."""
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
        for one, two in [*zip(*by_rule, strict=True), *([] if failed else zip(*[_valid(lowered, s[0], s[1], exact) for s in static], strict=True))]:
            assert_same(one, two, exact=True)
        if failed:
            assert_untouched(inputs, static[0][2])
            continue
        good += 1
        values = lowered.layout.count_values(static[0][0].tolist())
        assert {s: n for s, n in values.items() if s in exact.counts} == {s: exact.counts[s] for s in values if s in exact.counts}
        for (output, wanted), found in zip(_tensor_outputs(lowered, exact), _valid(lowered, *static[0][:2], exact), strict=True):
            assert_same(wanted, found, exact=False), output
        for write in program.state_writes:
            assert_same(exact.outputs[write.output], static[0][2][write.lifted], exact=False)
    assert_gated(case, program, lowered)
    return good


def _by_rules(
    program: StepProgram, bounds: Bounds, lowered: LoweredStep, inputs: Inputs, exact: ExactRun, poison: Callable[[torch.dtype], Any]
) -> list[torch.Tensor]:
    """Valid rows of every output, each op's pads poisoned."""
    lowering = Lowering(program, bounds, CPU, poison)
    numbers = [Number(torch.tensor(h, dtype=torch.float64)) for h in inputs.hypers]
    arguments = inputs.bounded(lowered.argument_caps, poison)
    lengths = [torch.tensor(n) for n in inputs.lengths]
    results, checks = lowering.run_flat([inputs.key, *lengths, *arguments, *numbers, *[t.clone() for t in inputs.lifted]])
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
    program: StepProgram, lowered: LoweredStep, inputs: Inputs, poison: Callable[[torch.dtype], Any], lengths: list[int] | None = None
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


def _valid(lowered: LoweredStep, metadata: torch.Tensor, outputs: list[torch.Tensor], exact: ExactRun) -> list[torch.Tensor]:
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
