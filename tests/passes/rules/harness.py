"""Runs a small function of bounded tensors as its rules see it and compares it with the untouched function.

A case is a function of tensors and what its inputs are. It is traced once; then, for each batch of counts, the
lowering runs
on real buffers at cap whose pads hold poison, before and after every op. Valid rows must not depend on the poison
and must
equal the function at exact sizes. Capacities that are too small must set the status and read or write nothing out of
range.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten
from zgcompile.passes.clean_pads import clean_pads
from zgcompile.passes.infer_bounds import infer_bounds
from zgcompile.passes.lower import lower
from zgcompile.passes.rules.interpreter import Lowering, Place
from zgcompile.passes.verify_capturable import verify_capturable

from tests.passes.rules.tracing import CPU, Fixed, Hyper, Input, Rows, argument_symbols, trace
from zgcompile.backend.exact import ConditionFailed, run_exact
from zgcompile.frontend.shape_env import EnvelopeShapeEnv
from zgcompile.ir.bounded import Bounded, Number, Size
from zgcompile.ir.bounds import Bounds, Observed
from zgcompile.ir.draws import KeyedDraws
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.lowered import NumberOutput, SizeOutput, TensorOutput
from zgcompile.ir.program import StepProgram
from zgcompile.ir.sizes import evaluate
from zgcompile.ir.spans import Span
from zgcompile.ir.status import Check, Failure

CAPS = {"n": 9, "m": 6}
BATCHES = ({"n": 9, "m": 6}, {"n": 8, "m": 2}, {"n": 2, "m": 5}, {"n": 1, "m": 1}, {"n": 0, "m": 0})
KEY = 8_123_456_789_012_345
POISONS: tuple[Callable[[torch.dtype], Any], ...] = (
    lambda dtype: math.nan if dtype.is_floating_point else dtype == torch.bool or _fits(2**40 + 5, dtype),
    lambda dtype: (
        _fits(1e30, dtype)
        if dtype.is_floating_point
        else False
        if dtype == torch.bool
        else _fits(-7_000_000_000, dtype)
    ),
    lambda dtype: (
        math.inf if dtype.is_floating_point else dtype == torch.bool or 1
    ),  # 1: a pad that is an index like any other
)


def _fits(value: float, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return min(max(value, info.min), info.max)


def _types_are_right() -> bool:
    with FakeTensorMode(shape_env=EnvelopeShapeEnv()):
        return torch.unique(torch.zeros(3), return_inverse=True)[1].dtype == torch.int64


# Releases that give `unique` its true types also trace the other cases marked `new`.
TRACES_ALL = _types_are_right()


@dataclass(frozen=True)
class Case:
    """`fails`: the batch counts at which the status must be set whatever eager does, with the kind of failure."""

    name: str
    fn: Callable[..., Any]
    inputs: tuple[Input, ...]
    batches: tuple[Mapping[str, int], ...] = BATCHES
    tolerance: float = 2e-6
    fails: Callable[[Mapping[str, int]], Failure | None] = lambda counts: None
    status_clear: bool = True  # at every batch of two rows and more where eager is content
    new: bool = False  # torch 2.11 cannot trace it, or gives its results the wrong type

    def __str__(self) -> str:
        return self.name


class Tight(Envelope):
    """Capacities of exactly what was seen (times `share`), so that a pad is met everywhere and an overflow is easy."""

    share: float = 1.0

    def fitted(self, seen: int, provable: int | None) -> int:
        cap = max(int(seen * self.share), 1)
        return cap if provable is None else max(min(cap, provable), 1)


def backward(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, then the gradients of all its floating-point inputs for a cotangent that no symmetry hides."""

    def run(*tensors: Any) -> Any:
        leaves = [
            t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors
        ]
        with torch.enable_grad():
            outputs = [o for o in tree_flatten(fn(*leaves))[0] if isinstance(o, torch.Tensor)]
            loss = sum((o * (o.detach() * 0.7 + 0.3)).sum() for o in outputs if o.requires_grad)
            wanted = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)  # type: ignore[arg-type]
        return [o.detach() for o in outputs], [g for g in grads if g is not None]

    return run


@dataclass
class Batch:
    """The inputs of one call: the values at exact size, as `fn` takes them, and the flat inputs of the program."""

    counts: Mapping[str, int]
    values: list[Any]
    inputs: Sequence[Input]

    def exact(self) -> list[Any]:
        return self._flat([v.clone() if isinstance(v, torch.Tensor) else v for v in self.values])

    def padded(self, caps: Mapping[str, int], poison: Callable[[torch.dtype], Any]) -> list[Any]:
        values = []
        for kind, value in zip(self.inputs, self.values, strict=True):
            if isinstance(kind, Rows):
                buffer = torch.full((caps[kind.group], *kind.shape), poison(kind.dtype), dtype=kind.dtype)
                buffer[: value.shape[0]] = value
                value = buffer
            elif isinstance(kind, Hyper):
                value = Number(torch.tensor(value, dtype=torch.float64))
            values.append(value)
        return self._flat(values)

    def _flat(self, values: list[Any]) -> list[Any]:
        groups = dict.fromkeys(i.group for i in self.inputs if isinstance(i, Rows))
        lengths = [torch.tensor(self.counts[g]) for g in groups]
        of = [
            [v for i, v in zip(self.inputs, values, strict=True) if isinstance(i, kind)]
            for kind in (Rows, Hyper, Fixed)
        ]
        return [torch.tensor(KEY), *lengths, *of[0], *of[1], *of[2]]


def make_batch(case: Case, counts: Mapping[str, int], seed: int = 0) -> Batch | None:
    """None where an index has nothing to point at."""
    values = []
    for k, kind in enumerate(case.inputs):
        # Static inputs are the same in every batch, as tables are.
        rng = np.random.default_rng([k, 0] if isinstance(kind, Fixed) else [k, seed + 1, *counts.values()])
        if isinstance(kind, Hyper):
            values.append(kind.value)
            continue
        shape = (counts[kind.group], *kind.shape) if isinstance(kind, Rows) else kind.shape
        high = counts[kind.high] if isinstance(kind.high, str) else kind.high
        if kind.dtype.is_floating_point:
            data = rng.normal(size=shape)
        elif kind.dtype == torch.bool:
            data = rng.random(size=shape) < 0.5
        elif high <= kind.low:
            if math.prod(shape):
                return None
            data = np.zeros(shape)
        else:
            data = rng.integers(kind.low, high, size=shape)
        values.append(torch.from_numpy(np.asarray(data)).to(kind.dtype).reshape(shape))
    return Batch(counts, values, case.inputs)


@dataclass
class Subject:
    """A traced case with the capacities that its batches need."""

    case: Case
    program: StepProgram
    observed: Observed
    batches: list[Batch]
    bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = self.capped(1.0)

    def capped(self, share: float) -> Bounds:
        envelope = Tight()
        object.__setattr__(envelope, "share", share)
        return infer_bounds(self.program, self.observed, envelope, self._tables())

    def _tables(self) -> dict[int, Span]:
        fixed = [i for i in self.case.inputs if isinstance(i, Fixed)]
        return {k: Span(i.low, i.high) for k, i in enumerate(fixed) if i.proven}


def prepare(case: Case) -> Subject:
    program = trace(case.fn, case.inputs)
    batches = [b for b in (make_batch(case, counts) for counts in case.batches) if b is not None]
    observed = Observed()
    for batch in batches:
        with contextlib.suppress(ConditionFailed, IndexError, RuntimeError, ValueError, ZeroDivisionError):
            run = run_exact(program, batch.exact())
            observed.note(run.counts, run.ids)
    # What an argument holds is its buffer's length, whatever batch was the largest.
    for group, symbol in argument_symbols(program, case.inputs).items():
        observed.counts[symbol] = CAPS[group]
    return Subject(case, program, observed, batches)


def group_caps(subject: Subject) -> dict[str, int]:
    symbols = argument_symbols(subject.program, subject.case.inputs)
    return CAPS | {group: subject.bounds.caps[s] for group, s in symbols.items() if s in subject.bounds.caps}


def eager(case: Case, batch: Batch) -> list[Any] | Exception:
    values = [v.clone() if isinstance(v, torch.Tensor) else v for v in batch.values]
    try:
        with KeyedDraws(torch.tensor(KEY)):
            return tree_flatten(case.fn(*values))[0]
    except (RuntimeError, IndexError, ValueError) as error:
        return error


@dataclass
class Ran:
    outputs: list[Any]
    failed: list[Check]


def run_bounded(
    subject: Subject,
    batch: Batch,
    poison: Callable[[torch.dtype], Any] | None,
    bounds: Bounds | None = None,
    clean: Collection[Place] = (),
) -> Ran:
    """One run of the lowering on real buffers, valid rows only."""
    lowering = Lowering(subject.program, bounds or subject.bounds, CPU, poison, clean)
    with torch.no_grad():
        outputs, checks = lowering.run_flat(batch.padded(group_caps(subject), poison or POISONS[0]))
    context = lowering.context
    return Ran([_valid(o, context) for o in outputs], [check for check, flag in checks if bool(flag)])


def _valid(output: Any, context: Any) -> Any:
    if isinstance(output, Bounded):
        return output.data[tuple(slice(int(context.count(s))) for s in output.sizes)]
    if isinstance(output, Size):
        return int(context.count(output))
    return output.value if isinstance(output, Number) else output


def swept(cases: Sequence[Case]) -> Any:
    """The parametrisation of a module's cases: every fourth one runs always, the others with --slow."""
    marked = [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if k % 4 else []) for k, case in enumerate(cases)
    ]
    return pytest.mark.parametrize("case", marked)


def check_case(case: Case, thorough: bool = True) -> None:
    """All that is asked of a case; less than `thorough` means two poisons, and no static FX graph."""
    if case.new and not TRACES_ALL:
        pytest.skip("this torch cannot trace it, or takes its results for another type")
    subject = prepare(case)
    expected = [eager(case, batch) for batch in subject.batches]
    clean = clean_pads(subject.program, subject.bounds, CPU)
    for batch, want in zip(subject.batches, expected, strict=True):
        poisons = POISONS if thorough else POISONS[::2]
        runs = [run_bounded(subject, batch, p, clean=clean if k % 2 else ()) for k, p in enumerate(poisons)]
        _same_status(runs, batch)
        _judge(case, batch, want, runs)
    if thorough:
        check_static(subject, expected)
    check_overflow(subject, POISONS if thorough else POISONS[:1])


def _same_status(runs: list[Ran], batch: Batch) -> None:
    kinds = [[c.what for c in run.failed] for run in runs]
    assert all(k == kinds[0] for k in kinds), f"{batch.counts}: the status depends on the poison: {kinds}"


def _judge(case: Case, batch: Batch, want: Any, runs: list[Ran]) -> None:
    failed = runs[0].failed
    due = case.fails(batch.counts)
    if due is not None:
        assert any(c.failure is due for c in failed), f"{batch.counts}: no {due.name} in {failed}"
        return
    if isinstance(want, Exception):
        assert failed, f"{batch.counts}: eager raises {want!r}, the status is clear"
        return
    if failed:
        small = min(batch.counts.values()) < 2
        assert all(c.failure is Failure.PRECONDITION for c in failed) and (small or not case.status_clear), (
            f"{batch.counts}: {failed}"
        )
        return
    for k, value in enumerate(want):
        for run in runs:
            assert_close(run.outputs[k], value, case.tolerance, f"{batch.counts}, output {k}")
        for run in runs[1:]:
            assert_identical(run.outputs[k], runs[0].outputs[k], f"{batch.counts}, output {k} depends on the poison")


def assert_close(got: Any, want: Any, tolerance: float, where: str) -> None:
    if not isinstance(want, torch.Tensor):
        assert float(got) == want or abs(float(got) - want) <= tolerance, f"{where}: {got} is not {want}"
        return
    assert isinstance(got, torch.Tensor), f"{where}: {got!r}"
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (
        f"{where}: {got.dtype}{list(got.shape)} is not {want.dtype}{list(want.shape)}"
    )
    if not want.dtype.is_floating_point:
        assert torch.equal(got, want), f"{where}: {got} is not {want}"
        return
    relative = max(tolerance, 2 * torch.finfo(want.dtype).eps)
    torch.testing.assert_close(got, want, rtol=relative, atol=relative, equal_nan=True, msg=lambda m: f"{where}: {m}")


def assert_identical(got: Any, want: Any, where: str) -> None:
    if isinstance(want, torch.Tensor):
        same = got.shape == want.shape and bool((got.eq(want) | (got.ne(got) & want.ne(want))).all())
        assert same, f"{where}: {got} is not {want}"
    else:
        assert got == want, f"{where}: {got} is not {want}"


def check_static(subject: Subject, expected: list[Any]) -> None:
    """One static FX graph serves the batches from the largest to the smallest: nothing of a run is left for the
    next."""
    program = subject.program
    lowered = lower(program, subject.bounds, CPU)
    verify_capturable(lowered, CPU)
    for batch, want in zip(subject.batches, expected, strict=True):
        flat = batch.padded(group_caps(subject), POISONS[0])
        head = 1 + program.lengths + len(program.arguments)
        hypers = len(program.hyperparameters)
        numbers = torch.tensor([n.value for n in flat[head : head + hypers]], dtype=torch.float64)
        given = [*flat[:head], numbers, *flat[head + hypers :]]
        # What the runtime puts in front (where to publish the status) is not the business of a rule.
        front = [
            torch.zeros(t.shape, dtype=t.dtype)
            for t in lowered.example_inputs[: len(lowered.example_inputs) - len(given)]
        ]
        with torch.no_grad():
            metadata, *tensors = lowered.fx_graph(*front, *given)
        slots = [int(v) for v in metadata]
        if lowered.layout.failed(slots) or isinstance(want, Exception) or subject.case.fails(batch.counts) is not None:
            continue
        counts = lowered.layout.count_values(slots)
        positioned = [o for o in lowered.outputs if isinstance(o, (TensorOutput, NumberOutput))]
        returned = dict(zip(positioned, tensors[len(tensors) - len(positioned) :], strict=True))
        for k, (output, value) in enumerate(zip(lowered.outputs, want, strict=True)):
            got = _static_output(subject, output, returned, counts)
            assert_close(got, value, subject.case.tolerance, f"static FX graph, {batch.counts}, output {k}")


def _static_output(
    subject: Subject, output: Any, returned: Mapping[Any, torch.Tensor], counts: Mapping[sympy.Symbol, int]
) -> Any:
    def size(expr: Any) -> int:
        return (
            expr
            if isinstance(expr, int)
            else int(evaluate(subject.program.shape_env.replace(expr), counts.__getitem__, {}))
        )  # type: ignore[arg-type]

    if isinstance(output, TensorOutput):
        return returned[output][tuple(slice(size(s)) for s in output.sizes)]
    if isinstance(output, NumberOutput):
        return returned[output].item()
    return size(output.expr) if isinstance(output, SizeOutput) else output.value


def check_overflow(subject: Subject, poisons: Sequence[Callable[[torch.dtype], Any]] = POISONS) -> None:
    """Capacities of half of what is needed, and of one row: the status says so, and ATen finds no index to complain
    about."""
    arguments = set(argument_symbols(subject.program, subject.case.inputs).values())
    for share in (0.5, 0.0):
        bounds = subject.capped(share)
        caps = {s: subject.bounds.caps[s] if s in arguments else c for s, c in bounds.caps.items()}
        if caps == subject.bounds.caps:
            return
        bounds = Bounds(_equalised(subject, caps), bounds.ids, bounds.names)
        for batch in subject.batches[:2]:
            for poison in poisons:
                ran = run_bounded(subject, batch, poison, bounds)
                if _exceeds(subject, batch, bounds):
                    assert any(c.failure is Failure.CAPACITY for c in ran.failed), (
                        f"{batch.counts}: an overflow at {share} goes unseen"
                    )


def _equalised(subject: Subject, caps: dict[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    for a, b in subject.program.equalities:
        if a in caps and b in caps:
            caps[a] = caps[b] = max(caps[a], caps[b])
    return caps


def _exceeds(subject: Subject, batch: Batch, bounds: Bounds) -> bool:
    try:
        counts = run_exact(subject.program, batch.exact()).counts
    except (ConditionFailed, IndexError, RuntimeError, ValueError, ZeroDivisionError):
        return False
    return any(count > bounds.caps[s] for s, count in counts.items() if s in bounds.caps)
