"""`zgcompile.verify`: one step three ways, on the same state with the same random numbers, and all of it undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from zgcompile.backend.deferred import DeferredNumber
from zgcompile.backend.exact import ConditionFailed
from zgcompile.errors import CaptureRefused, StepError, VerificationFailed
from zgcompile.frontend.arguments import Arguments, check_not_empty, length_groups
from zgcompile.frontend.capture import capture
from zgcompile.frontend.comparison import Report, Result, Tolerances, compared, first_failures
from zgcompile.frontend.compiled_step import CompiledStep
from zgcompile.frontend.guards import Guards
from zgcompile.frontend.python_state import PythonSnapshot
from zgcompile.frontend.specialisation import Call, Specialisation
from zgcompile.frontend.state_tensors import MissingState, host_state_to, lifted_tensors, parameter_of
from zgcompile.frontend.stats import Counters
from zgcompile.frontend.undo import Undo, undo_around
from zgcompile.ir.draws import DrawStream, KeyedDraws
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.source import code_line
from zgcompile.ir.status import Check, Failure
from zgcompile.keyed_numbers import step_key

FX_GRAPH, COMPILED = "FX graph", "compiled step"
FALLBACKS = {
    Failure.CAPACITY: "a capacity overflows: this batch runs again at exact sizes",
    Failure.PRECONDITION: "a comparison came out otherwise than traced: the function itself runs this batch",
}


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
            1e-4 for float32 (5e-3 under TF32), 1e-2 for float16, 2e-2 for bfloat16; integers are exact; NaNs agree in
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
        report = _Check(_subject(step, fn, arguments), arguments, rtol, atol).report()
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
        for candidate in step.specialisations:
            if candidate.guards.hold(arguments):
                subject = copy.copy(candidate)
                subject.guards = Guards(fn, candidate.captured, arguments)
                subject.observed, subject.largest = copy.deepcopy(candidate.observed), dict(candidate.largest)
                subject.counters = Counters()
                return subject
        options = (step.modules, step.optimizers)
        envelope, lowering = step.envelope, step.lowering
    else:
        options, envelope, lowering = (None, None), Envelope(), "inductor"
    captured = capture(fn, arguments, length_groups(arguments.lengths(), []), *options)
    return Specialisation(fn, captured, arguments, 1, envelope, lowering, Counters())


class _Check:
    """One verification of `subject`, a private Specialisation."""

    def __init__(self, subject: Specialisation, arguments: Arguments, rtol: float | None, atol: float | None) -> None:
        self.subject, self.arguments = subject, arguments
        self.program, self.device = subject.program, subject.captured.device
        self.tolerances = Tolerances.of(self.program, self.device, rtol, atol)
        args, kwargs = arguments.rebuild({})
        self.call = Call(step_key(*DrawStream().peek(self.device)), args, kwargs)
        subject.guards.hypers = tuple(site.get() for site in subject.captured.hypers)

    def report(self) -> Report:
        whole = self.undo()
        try:
            self.create_state()
            return self.three_ways(self.undo())
        finally:
            whole.restore()

    def undo(self) -> Undo:
        return undo_around(self.subject, self.arguments.leaves)

    def create_state(self) -> None:
        try:
            self.lifted()
        except MissingState:
            self.run_function()
            host_state_to(self.subject.captured.found.optimizers, self.device)
            try:
                self.lifted()
            except MissingState as missing:
                raise CaptureRefused(
                    f"{missing} does not exist when a step begins, so no step is replayed",
                    where=code_line(self.subject.fn),
                    advice="keep gradients and optimizer state from one step to the next",
                ) from None

    def lifted(self) -> list[torch.Tensor]:
        return lifted_tensors(self.program, self.subject.guards.used)

    def three_ways(self, undo: Undo) -> Report:
        report = Report(getattr(self.subject.fn, "__name__", str(self.subject.fn)))
        before = {w.lifted: self.program.lifted[w.lifted].resolve().detach().clone() for w in self.program.state_writes}
        try:
            eager = self.eager()
            undo.restore()
            try:
                for way, run in ((FX_GRAPH, self.exact), (COMPILED, self.replayed)):
                    result = run(undo)
                    if isinstance(result, str):
                        report.note = result
                    else:
                        report.entries += compared(self.program, eager, result, before, way, self.tolerances)
                    undo.restore()
            except StepError as error:
                raise VerificationFailed(
                    f"the eager function runs this batch, the captured step does not: {error.what}", where=error.where
                ) from error
        finally:
            undo.restore()
        return report

    def run_function(self) -> Any:
        with KeyedDraws(torch.tensor(self.call.key, dtype=torch.int64, device=self.device)):
            return self.subject.fn(*self.call.args, **self.call.kwargs)

    def eager(self) -> Result:
        outputs = _outputs(self.run_function())
        grads = {g.lifted: parameter_of(self.program, g.lifted).grad for g in self.program.gradient_writes}
        state = {w.lifted: self.program.lifted[w.lifted].resolve() for w in self.program.state_writes}
        return Result(outputs, _cloned(grads), _cloned(state))

    def exact(self, undo: Undo) -> Result | str:
        del undo
        try:
            run = self.subject._exact(self.call, self.lifted())
        except ConditionFailed:
            return FALLBACKS[Failure.PRECONDITION]
        leaves = run.outputs[: self.program.user_outputs]
        outputs = _outputs(tree_unflatten(leaves, self.program.out_spec))
        grads = {g.lifted: None if g.output is None else run.outputs[g.output] for g in self.program.gradient_writes}
        return Result(
            outputs, _cloned(grads), _cloned({w.lifted: run.outputs[w.output] for w in self.program.state_writes})
        )

    def replayed(self, undo: Undo) -> Result | str:
        subject, lifted = self.subject, self.lifted()
        launch = subject._launch(self.call)
        if subject.replay is None or subject.replay.moved(lifted, subject.guards.used):
            subject.replay = None
            subject.fit(self.call, lifted)
        assert subject.replay is not None
        if not subject.replay.fits(launch):
            return FALLBACKS[Failure.CAPACITY]
        replayed = subject.replay.run(launch)
        failed = subject.replay.lowered.layout.failed(replayed.metadata)
        if failed:
            return self.untouched(failed, undo)
        outputs = _outputs(subject.results(replayed))
        buffers = iter(subject.replay.gradients)
        grads = {g.lifted: None if g.output is None else next(buffers) for g in self.program.gradient_writes}
        return Result(outputs, _cloned(grads), _cloned({w.lifted: lifted[w.lifted] for w in self.program.state_writes}))

    def untouched(self, failed: list[Check], undo: Undo) -> str:
        """A failed status must have written nothing."""
        changed = undo.changed()
        worst = max(failed, key=lambda check: check.failure)
        if changed:
            raise VerificationFailed(
                f"{worst.what}, and yet the replay wrote {len(changed)} tensors",
                where=worst.where,
                advice="report this: a write is not gated",
            )
        if worst.failure is Failure.USER_ERROR:
            raise StepError(worst.what, where=worst.where)
        return FALLBACKS[worst.failure]


def _outputs(result: Any) -> list[tuple[str, Any]]:
    """Leaves of what a step returned, named by their place, detached and copied; deferred numbers read."""
    named, _ = tree_flatten_with_path(result)
    return [(f"output{keystr(path)}", _value(leaf)) for path, leaf in named]


def _value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.value if isinstance(leaf, DeferredNumber) else leaf


def _cloned(tensors: dict[int, Any]) -> dict[int, Any]:
    return {index: _value(tensor) for index, tensor in tensors.items()}
