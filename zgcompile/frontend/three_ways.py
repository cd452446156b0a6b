"""One step of a captured function three ways on the same state with the same random numbers: eager, dynamic FX graph,
replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from zgcompile.backend.checked_indices import checked
from zgcompile.backend.deferred import DeferredNumber
from zgcompile.backend.exact import ConditionFailed
from zgcompile.errors import CaptureRefused, StepError, VerificationFailed
from zgcompile.frontend.call import Call
from zgcompile.frontend.comparison import Report, Result, Tolerances, compared, first_failures
from zgcompile.frontend.state_tensors import MissingState, host_state_to, lifted_tensors, parameter_of
from zgcompile.frontend.training_flags import find
from zgcompile.frontend.undo import Undo, undo_around
from zgcompile.ir.draws import KeyedDraws
from zgcompile.ir.source import code_line
from zgcompile.ir.status import Check, Failure, decisive

if TYPE_CHECKING:
    from zgcompile.frontend.specialisation import Specialisation

# A wrong capture is wrong by the size of its values. The shadow step must never stop a right one whose rounding is
# unlucky (deep
# nets with vanishing gradients), so it is this many times as patient as `verify`.
GROSS = 100.0
FX_GRAPH, COMPILED = "FX graph", "compiled step"
FALLBACKS = {
    Failure.CAPACITY: "a capacity overflows: this batch runs again at exact sizes",
    Failure.PRECONDITION: "a comparison came out otherwise than traced: the function itself runs this batch",
}


class ThreeWays:
    """One comparison of `subject` on one call. All that runs is undone."""

    def __init__(
        self, subject: Specialisation, call: Call, rtol: float | None = None, atol: float | None = None
    ) -> None:
        self.subject, self.call = subject, call
        self.program, self.device = subject.program, subject.captured.device
        self.tolerances = Tolerances.of(self.program, self.device, rtol, atol)

    def report(self) -> Report:
        whole = self.undo()
        try:
            self.create_state()
            return self.compare(self.undo(), (FX_GRAPH, COMPILED))
        finally:
            whole.restore()

    def undo(self) -> Undo:
        return undo_around(self.subject, self.call.leaves)

    def create_state(self) -> None:
        try:
            self.lifted()
        except MissingState:
            leaves = [t for t in self.subject.captured.found.tensors if t.is_leaf and t.grad is not None]
            grads = [(t, t.grad) for t in leaves]
            self.run_function()
            for tensor, grad in grads:
                tensor.grad = grad if tensor.grad is None else tensor.grad  # dropped by the step that was to add to it
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

    def compare(self, undo: Undo, ways: tuple[str, ...]) -> Report:
        report = Report(getattr(self.subject.fn, "__name__", str(self.subject.fn)))
        before = {w.lifted: self.program.lifted[w.lifted].resolve().detach().clone() for w in self.program.state_writes}
        try:
            eager = self.eager()
            undo.restore()
            try:
                for way in ways:
                    result = self.exact(undo) if way == FX_GRAPH else self.replayed(undo)
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
        try:
            key = torch.tensor(self.call.key, dtype=torch.int64, device=self.device)
            with checked(self.device), KeyedDraws(key):
                return self.subject.fn(*self.call.args, **self.call.kwargs)
        finally:
            find(self.subject.captured.flags)

    def eager(self) -> Result:
        written = {w.lifted: self.program.lifted[w.lifted] for w in self.program.state_writes}
        before = {index: entry.resolve() for index, entry in written.items()}
        outputs = _outputs(self.run_function())
        grads = {g.lifted: parameter_of(self.program, g.lifted).grad for g in self.program.gradient_writes}
        # A gradient that the step adds to and then drops is written all the same.
        state = {i: before[i] if entry.kind == "grad" else entry.resolve() for i, entry in written.items()}
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
        worst = decisive(failed)
        if changed:
            raise VerificationFailed(
                f"{worst.what}, and yet the replay wrote {len(changed)} tensors",
                where=worst.where,
                advice="report this: a write is not gated",
            )
        if worst.failure is Failure.USER_ERROR:
            raise StepError.of_batch(worst.what, worst.where)
        return FALLBACKS[worst.failure]


def _outputs(result: Any) -> list[tuple[str, Any]]:
    """Leaves of what a step returned, named by their place, detached and copied; deferred numbers read."""
    named, _ = tree_flatten_with_path(result)
    return [(f"output{keystr(path)}", _value(leaf)) for path, leaf in named]


def _value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.peek() if isinstance(leaf, DeferredNumber) else leaf


def _cloned(tensors: dict[int, Any]) -> dict[int, Any]:
    return {index: _value(tensor) for index, tensor in tensors.items()}


def prove_replay(subject: Specialisation, call: Call) -> bool:
    """The shadow step behind a capture (design 3.7): the eager function and the new replay on the next call, all
    undone.

    False when this batch says nothing, since it falls back or is wrong itself: the next one will tell.

    Raises:
        VerificationFailed: the replay differs; nothing was changed.
    """
    check = ThreeWays(subject, call)
    try:
        report = check.compare(check.undo(), (COMPILED,))
    except (StepError, IndexError, RuntimeError, ValueError):
        return False
    if report.note:
        return False
    wrong = [e for e in report.failures if not e.tolerance or e.max_rel_error > GROSS * e.tolerance]
    if wrong:
        raise VerificationFailed(
            f"the captured step differs from the eager function: {first_failures(wrong)}; nothing was changed",
            where=code_line(subject.fn),
            advice="train without zgcompile and report it",
        )
    return True
