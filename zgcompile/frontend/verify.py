"""`zgcompile.verify`: one step three ways, on the same state with the same random numbers, and all of it undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from zgcompile.errors import VerificationFailed
from zgcompile.frontend.arguments import Arguments, check_not_empty, length_groups
from zgcompile.frontend.call import Call
from zgcompile.frontend.capture import capture
from zgcompile.frontend.comparison import Report, first_failures
from zgcompile.frontend.compiled_step import CompiledStep
from zgcompile.frontend.guards import Guards
from zgcompile.frontend.python_state import PythonSnapshot
from zgcompile.frontend.specialisation import Specialisation
from zgcompile.frontend.stats import Counters
from zgcompile.frontend.three_ways import ThreeWays
from zgcompile.ir.draws import DrawStream
from zgcompile.ir.envelope import DEFAULT_HEADROOM, Envelope
from zgcompile.ir.source import code_line
from zgcompile.keyed_numbers import step_key


def verify(
    step: CompiledStep | Callable[..., Any],
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> Report:
    """Check a step on one batch against the user's function, and change no state.

    The function itself runs under the draws of the next call, then the dynamic FX graph at exact sizes, then the
    lowered, replayed step. Outputs, gradients and state of the last two are compared with those of the first. A plain
    function is captured for this check alone, as is a `CompiledStep` whose current capture does not fit the batch or is
    not lowered yet. Where the optimizer has no state yet, a first step by the function itself, undone like the rest,
    creates it.

    Args:
        rtol, atol: a difference of `atol + rtol * largest magnitude` of a tensor passes. By default 1e-9 for float64,
            1e-3 for float32 (5e-3 under TF32), 1e-2 for float16, 2e-2 for bfloat16; integers are exact; NaNs agree in
            place. Where a gradient is smaller than its tolerance, a parameter and its optimizer state may differ by the
            size of their update.

    Raises:
        VerificationFailed: with the `Report` as its `report`. Any other ZgError: the step cannot be compiled. What the
        function raises.
    """
    fn = step.fn if isinstance(step, CompiledStep) else step
    arguments = Arguments.of(args, kwargs)
    check_not_empty(fn, arguments)
    named = [*(step.modules or ()), *(step.optimizers or ())] if isinstance(step, CompiledStep) else []
    objects = [leaf for leaf in arguments.constants() if hasattr(leaf, "__dict__")]
    before = PythonSnapshot.take(fn, [*named, *objects])  # a capture moves Adam's step counters to the device
    try:
        report = _checked(_subject(step, fn, arguments), arguments, rtol, atol)
    finally:
        before.restore()
    if not report.ok:
        failed = report.failures
        failure = VerificationFailed(
            f"{report.step} differs from the eager function in {len(failed)} of {len(report.entries)} comparisons: "
            f"{first_failures(failed)}",
            where=code_line(fn),
            advice="pass rtol= if that is rounding; otherwise train without zgcompile and report it",
        )
        failure.report = report
        raise failure
    return report


def _subject(step: CompiledStep | Callable[..., Any], fn: Callable[..., Any], arguments: Arguments) -> Specialisation:
    """What the next call would run, with counters, guards and observations of its own."""
    if isinstance(step, CompiledStep):
        held = [candidate for candidate in step.specialisations if candidate.guards.hold(arguments)]
        candidate = min(held, key=lambda c: c.guards.lifted is None, default=None)
        if candidate is not None and not candidate.guards.stray_gradients():
            subject = copy.copy(candidate)
            subject.guards = Guards(fn, candidate.captured, arguments)
            subject.observed, subject.largest = copy.deepcopy(candidate.observed), dict(candidate.largest)
            subject.capacities = copy.copy(candidate.capacities)
            subject.counters = Counters()
            return subject
        options = (step.modules, step.optimizers)
        envelope, lowering = step.envelope, step.lowering
    else:
        options, envelope, lowering = (None, None), Envelope(headroom=DEFAULT_HEADROOM), "inductor"
    groups = length_groups(arguments.lengths(), [])

    def captured(as_found: bool) -> Specialisation:
        found = capture(fn, arguments, groups, *options, as_found=as_found)
        return Specialisation(fn, found, arguments, 1, envelope, lowering, Counters())

    made = captured(as_found=False)
    return captured(as_found=True) if made.guards.stray_gradients() else made


def _checked(subject: Specialisation, arguments: Arguments, rtol: float | None, atol: float | None) -> Report:
    args, kwargs = arguments.rebuild({})
    call = Call(step_key(*DrawStream().peek(subject.captured.device)), args, kwargs)
    subject.guards.hypers = tuple(site.get() for site in subject.captured.hypers)
    return ThreeWays(subject, call, rtol, atol).report()
