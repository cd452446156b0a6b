"""`zgcompile.compile`: a training step as its user wrote it, run as one replay."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from zgcompile.errors import BadInput, CaptureRefused, CaptureWarning
from zgcompile.frontend.arguments import Arguments, check_arguments, check_not_empty, length_groups
from zgcompile.frontend.bound_steps import BoundSteps
from zgcompile.frontend.call import Call
from zgcompile.frontend.capture import capture
from zgcompile.frontend.many_captures import MANY_CAPTURES, warn_of_many_captures
from zgcompile.frontend.specialisation import Specialisation
from zgcompile.frontend.stats import Counters, Stats
from zgcompile.frontend.training_flags import leave
from zgcompile.frontend.user_warning import warn_user
from zgcompile.ir.draws import DrawStream, KeyedDraws
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.source import adopt, code_line, current_user_line
from zgcompile.keyed_numbers import step_key

GRADIENT_PATTERNS = 4  # captures of one step that differ in which gradients are None
LOWERINGS = ("inductor", "aten", "reference")


class CompiledStep:
    """A step function under zgcompile, which is `fn`. Call it as the original; it owns everything from sampling to the
    optimizer.

    The first `warmup` calls train at exact sizes and are counted; then the step is lowered, captured and replayed.
    Returned tensors are fresh and carry no autograd history; a returned `float(x)` or `x.item()` is a number that waits
    when it is read. Random numbers are keyed by the default generator's seed and offset; they differ from stock eager
    PyTorch's.

    Raises, from a call:
        CaptureRefused, UnsupportedOp, BadInput, StepError (all ZgError): with the user's line; state and generators as
        before.
    """

    already_compiled = True  # so that `compile` leaves it as it is

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        warmup: int = 3,
        envelope: Envelope | None = None,
        modules: Sequence[torch.nn.Module] | None = None,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
        lowering: str = "inductor",
    ) -> None:
        if not callable(fn):
            raise BadInput(f"zgcompile.compile needs a function, not {type(fn).__name__}")
        if warmup < 1:
            raise BadInput(
                f"warmup={warmup}: at least one call has to run at exact sizes", advice="use warmup=1 or more"
            )
        if lowering not in LOWERINGS:
            raise BadInput(f"lowering={lowering!r} is not one of {', '.join(LOWERINGS)}")
        if envelope is not None and not isinstance(envelope, Envelope):
            raise BadInput(
                f"envelope={envelope!r} is no Envelope", advice="write envelope=zgcompile.Envelope(headroom=...)"
            )
        adopt(fn)
        self.fn, self.warmup, self.envelope, self.lowering = fn, warmup, envelope or Envelope(), lowering
        self.modules, self.optimizers = modules, optimizers
        self.specialisations: list[Specialisation] = []
        self._counters = Counters()
        self._draws = DrawStream()
        self._turn = threading.RLock()  # static buffers serve one call at a time
        self._lengths_seen: list[list[int | None]] = []
        functools.update_wrapper(self, fn, updated=())  # its attributes may have the names of ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        specialisation = next((s for s in self.specialisations if s.ready_for(args, kwargs)), None)
        if specialisation is None:
            specialisation = self._specialisation(Arguments.of(args, kwargs))
        elif specialisation is not self.specialisations[0]:
            self._to_front(specialisation)
        device = specialisation.captured.device
        state = torch.default_generator.get_state() if device.type == "cpu" else None
        seed, offset = self._draws.take(device)
        call: Call | None = None
        try:
            call = Call(step_key(seed, offset), args, kwargs)
            result = specialisation(call)
            leave(specialisation.captured.flags)
            return result
        except BaseException:
            if call is None or not call.happened:
                self._draws.put_back(device, offset, state)
            raise
        finally:
            self._counters.calls += call is not None and call.happened

    def _specialisation(self, arguments: Arguments) -> Specialisation:
        """The capture that serves this call, first in the list from now on; a new one where none does.

        One that waits for a gradient, or for none, runs the function itself the first time; when that happens again
        (gradients are accumulated over several calls) the step is captured on the gradients that there are.
        """
        if any(isinstance(mode, KeyedDraws) for mode in _get_current_dispatch_mode_stack()):
            name = getattr(self.fn, "__name__", "step")
            raise CaptureRefused(
                f"the compiled step {name} is called inside another step",
                where=current_user_line(),
                advice=f"call the function itself there: {name}.fn(...)",
            )
        waiting: list[Specialisation] = []
        for candidate in self.specialisations:
            guards = candidate.guards
            if arguments.guard_key() != guards.key or len(arguments.tensors) != len(guards.tensors):
                continue
            check_arguments(self.fn, arguments, guards.tensors)
            if guards.hold(arguments):
                if guards.lifted is not None:
                    return self._to_front(candidate)
                waiting.append(candidate)
        if waiting and not self._another_on_these_gradients(waiting):
            return self._to_front(waiting[0])
        check_not_empty(self.fn, arguments)
        lengths = arguments.lengths()
        self._lengths_seen = [past for past in self._lengths_seen if len(past) == len(lengths)]
        groups = length_groups(lengths, self._lengths_seen)
        self._lengths_seen.append(lengths)
        captured = capture(self.fn, arguments, groups, self.modules, self.optimizers, as_found=bool(waiting))
        self._counters.traces += 1
        made = Specialisation(self.fn, captured, arguments, self.warmup, self.envelope, self.lowering, self._counters)
        made.traced_on = made.guards.gradients() if waiting else None
        self.specialisations.insert(0, made)
        cut = made.guards.snapshot.reached.cut
        if cut is not None:
            warn_user(
                f"{code_line(self.fn)}: the step can reach more Python state than is watched (up to {cut}); a change "
                "behind that is not noticed\n  instead: keep large containers where the step does not name them",
                CaptureWarning,
            )
        if not waiting and sum(s.traced_on is None for s in self.specialisations) == MANY_CAPTURES:
            warn_of_many_captures(self.fn, self.specialisations[1].guards, arguments)
        return made

    def _another_on_these_gradients(self, waiting: list[Specialisation]) -> bool:
        if not all(candidate.guards.only_gradients_differ() for candidate in waiting):
            return False
        for candidate in waiting:
            candidate.turned_away += 1
        traced = [candidate.traced_on for candidate in waiting]
        return (
            waiting[-1].turned_away > 1
            and len(waiting) <= GRADIENT_PATTERNS
            and waiting[0].guards.gradients() not in traced
        )

    def _to_front(self, specialisation: Specialisation) -> Specialisation:
        self.specialisations.remove(specialisation)
        self.specialisations.insert(0, specialisation)
        return specialisation

    @property
    def stats(self) -> Stats:
        """A snapshot of the counters, and the envelope of the capture in use."""
        envelope = self.specialisations[0].envelope_use() if self.specialisations else {}
        memory = sum(s.replay.memory() for s in self.specialisations if s.replay is not None)
        fit = self.specialisations[0].capacities.record if self.specialisations else None
        return Stats(**vars(self._counters), memory=memory, envelope=envelope, envelope_fit=fit)

    def synchronize(self) -> None:
        """Wait until nothing of this step is pending on its device."""
        for specialisation in self.specialisations:
            if specialisation.captured.device.type == "cuda":
                torch.cuda.synchronize(specialisation.captured.device)

    def kernel_plan(self) -> dict[str, int]:
        """Own kernels of the captured step: kernel name -> launches in one replay (on the CPU, op name -> calls). Empty
        before the first capture."""
        replays = [s.replay for s in self.specialisations if s.replay is not None]
        return replays[0].kernel_plan() if replays else {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A compiled method: bound anew for each instance, its captures kept with the instance."""
        if instance is None:
            return self
        steps = BoundSteps.of(instance).by_descriptor
        bound: CompiledStep | None = steps.get(self)
        if bound is None:
            bound = steps[self] = _compiled_anew(self.fn.__get__(instance, owner), self._options())
        return bound

    def _options(self) -> dict[str, Any]:
        names = ("warmup", "envelope", "modules", "optimizers", "lowering")
        return {name: getattr(self, name) for name in names}

    # Copies and pickles are of the function with its options, as those of a function are by name: what is captured
    # refers to the memory of this process and of these tensors.

    def __copy__(self) -> CompiledStep:
        return _compiled_anew(self.fn, self._options())

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStep:
        fn, options = copy.deepcopy(self.fn, memo), self._options()
        # A plain function is not copied, so neither are the modules that it names.
        return _compiled_anew(fn, options if fn is self.fn else copy.deepcopy(options, memo))

    def __reduce__(self) -> str | tuple[Any, ...]:
        instance, name = getattr(self.fn, "__self__", None), getattr(self.fn, "__name__", "")
        if isinstance(getattr(type(instance), name, None), CompiledStep):
            return getattr, (instance, name)
        named = getattr(sys.modules.get(getattr(self.fn, "__module__", "")), name, None)
        if named is self:
            return name  # decorated: its name is that of the compiled step
        if isinstance(named, CompiledStep) and named.fn is self.fn:
            return copy.copy, (named,)
        return _compiled_anew, (self.fn, self._options())


def _compiled_anew(fn: Callable[..., Any], options: dict[str, Any]) -> CompiledStep:
    return CompiledStep(fn, **options)


@overload
def compile(
    fn: Callable[..., Any],
    *,
    warmup: int = 3,
    envelope: Envelope | None = None,
    modules: Sequence[torch.nn.Module] | None = None,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    lowering: str = "inductor",
) -> CompiledStep: ...
@overload
def compile(
    fn: None = None,
    *,
    warmup: int = 3,
    envelope: Envelope | None = None,
    modules: Sequence[torch.nn.Module] | None = None,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    lowering: str = "inductor",
) -> Callable[[Callable[..., Any]], CompiledStep]: ...


def compile(
    fn: Callable[..., Any] | None = None,
    *,
    warmup: int = 3,
    envelope: Envelope | None = None,
    modules: Sequence[torch.nn.Module] | None = None,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    lowering: str = "inductor",
) -> CompiledStep | Callable[[Callable[..., Any]], CompiledStep]:
    """Compile a whole training step; a decorator with or without options.

    Args:
        fn: the step; a compiled one stays as it is. Dimension 0 of each tensor argument may change from call to call;
        all else it closes over is found by itself.
        warmup: calls that train at exact sizes before the capture; they also measure the sizes.
        envelope: how capacities are chosen.
        modules, optimizers: named here only where hooks cannot find them (they are found in the first call).
        lowering: "inductor" (on a GPU), "aten" (captured op by op) or "reference" (no capture); the CPU always runs the
        reference.
    """
    if getattr(type(fn), "already_compiled", False):
        return fn  # type: ignore[return-value]
    if fn is None:
        return functools.partial(
            compile, warmup=warmup, envelope=envelope, modules=modules, optimizers=optimizers, lowering=lowering
        )
    return CompiledStep(fn, warmup=warmup, envelope=envelope, modules=modules, optimizers=optimizers, lowering=lowering)
