"""From a user's function and the arguments of one call to a `StepProgram`, with the Python state as it was before
(design 3)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zgcompile.errors import CaptureRefused, PythonStateChanged, SourceLine
from zgcompile.frontend.arguments import Arguments, TensorArgument, argument_name
from zgcompile.frontend.discovery import Discovery, discover
from zgcompile.frontend.functionalise import functionalise
from zgcompile.frontend.locate import line_of_change
from zgcompile.frontend.private_copy import (
    PrivateCopies,
    PrivateCopy,
    private_copy,
    private_modules,
    without_private_methods,
)
from zgcompile.frontend.python_state import Change, HostRandom, PythonSnapshot, hyperparameters
from zgcompile.frontend.refusal import refusals
from zgcompile.frontend.shape_env import EnvelopeShapeEnv
from zgcompile.frontend.shared_memory import refuse_aliases
from zgcompile.frontend.state_tensors import host_state_to, put_back
from zgcompile.frontend.step_logging import silent_logging
from zgcompile.frontend.symbolic_builtins import OVERRIDES, marked_formatting
from zgcompile.frontend.trace import TraceRequest, compare_returned, compare_traces, trace
from zgcompile.frontend.training_flags import TrainingFlag, is_training_flag, training_flags
from zgcompile.ir.program import ArgumentInput, StepProgram
from zgcompile.ir.source import code_line

FIRST_ROWS, SECOND_ROWS = 48, 80  # of the fake argument buffers in the two traces


@dataclass
class Captured:
    """A traced step. `first_step_differs`: the next step creates state, so it has to be the user's own function."""

    program: StepProgram
    found: Discovery
    roots: list[Any]
    groups: list[int | None]
    device: torch.device
    hypers: list[Any]
    entered: frozenset[int]  # as `Traced.entered`
    looked_at: frozenset[int]  # as `Traced.looked_at`
    flags: list[TrainingFlag]


def capture(
    fn: Callable[..., Any],
    arguments: Arguments,
    groups: Sequence[int | None],
    modules: Sequence[torch.nn.Module] | None = None,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    as_found: bool = False,
) -> Captured:
    """Discover, trace twice, compare, functionalise. Nothing of the user's is changed, whether this succeeds or raises.

    A step is traced as a later one, on the gradients that it leaves; with `as_found`, on those that there are now.

    Raises:
        CaptureRefused: the step cannot be one FX graph; PythonStateChanged: it changes Python state. Both name the
        user's line.
    """
    device = step_device(fn, arguments)
    session = _Session(fn, arguments, list(modules or []), list(optimizers or []), device)
    try:
        with silent_logging():
            return _captured(fn, arguments, groups, session, device, as_found)
    except CaptureRefused as error:
        put_back(session.moved)
        raise session.decided_by_length(error) from error.__cause__
    except BaseException:
        put_back(session.moved)
        raise


def _captured(
    fn: Callable[..., Any],
    arguments: Arguments,
    groups: Sequence[int | None],
    session: _Session,
    device: torch.device,
    as_found: bool,
) -> Captured:
    found = session.discover(groups)
    rows = sorted({g for g in groups if g is not None})
    hypers = hyperparameters(found.optimizers)
    names = session.names()

    def traced(first_rows: int) -> Any:
        request = TraceRequest(
            session.run,
            arguments,
            groups,
            found,
            hypers,
            names,
            device,
            session.modes,
            [first_rows + g for g in rows],
            as_found,
        )
        with session.undone():
            result = trace(request)
            result.shape_env.raise_swallowed()
            return result

    first = traced(FIRST_ROWS)
    second = traced(SECOND_ROWS)
    compare_traces(first.fx_graph, second.fx_graph)
    compare_returned(first.constants, second.constants, code_line(fn))
    inputs = [
        ArgumentInput(argument_name(fn, t.position), t.position, groups[i], t.dtype, t.device, t.trailing or ())
        for i, t in enumerate(arguments.tensors)
    ]
    with refusals():
        program = functionalise(first, inputs, len(rows))
    refuse_aliases(program)
    return Captured(
        program, found, session.roots, list(groups), device, hypers, first.entered, first.looked_at, session.flags
    )


def step_device(fn: Callable[..., Any], arguments: Arguments) -> torch.device:
    """The device of the tensor arguments; of the modules' parameters where there is none."""
    devices = {t.device for t in arguments.tensors}
    accelerated = [d for d in devices if d.type != "cpu"]
    if accelerated:
        return accelerated[0]
    if devices:
        return devices.pop()
    sites = PythonSnapshot.take(fn).tensors
    return next((s.tensor.device for s in sites if s.tensor.device.type != "cpu"), torch.device("cpu"))


class _Session:
    """The user's Python around a capture: private copies to run, snapshots to undo what running does."""

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        modules: list[Any],
        optimizers: list[Any],
        device: torch.device,
    ) -> None:
        self.fn, self.arguments = fn, arguments
        reached_first = PythonSnapshot.take(fn, [*modules, *optimizers, *_objects(arguments)]).reached
        self.moved = host_state_to(_unique([*optimizers, *reached_first.optimizers]), device)
        self.roots: list[Any] = [*modules, *optimizers, *_objects(arguments)]
        self.snapshots = [PythonSnapshot.take(fn, self.roots)]
        self.flags: list[TrainingFlag] = []
        self.lengths: dict[sympy.Symbol, TensorArgument] = {}
        self.copies = PrivateCopies(OVERRIDES)
        self.run: PrivateCopy = private_copy(fn, OVERRIDES, self.copies)
        reached = self.snapshots[0].reached
        self.found = Discovery(
            modules=_unique([*modules, *reached.modules]), optimizers=_unique([*optimizers, *reached.optimizers])
        )

    def modes(self) -> contextlib.AbstractContextManager[Any]:
        return private_modules([*self.found.modules, *self.snapshots[0].reached.objects], OVERRIDES, self.copies)

    def discover(self, groups: Sequence[int | None]) -> Discovery:
        known = [*self.found.modules, *self.found.optimizers]

        def meet(new: Any) -> None:
            if not any(new is k for k in known):
                known.append(new)
                self.roots.append(new)
                with without_private_methods(self.copies):
                    self.snapshots.insert(0, PythonSnapshot.take(self.fn, [*self.roots]))

        def run() -> Any:
            first: dict[int, torch.Tensor] = {}
            rows: dict[int, Any] = {}
            for i, tensor in enumerate(self.arguments.tensors):
                group = groups[i]
                shape = () if group is None else (FIRST_ROWS + group, *(tensor.trailing or ()))
                buffer = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
                if group is not None:
                    length = torch.empty((), dtype=torch.int64, device=tensor.device)
                    if group in first:
                        buffer = torch.ops.zgcompile.dynamic_rows_like(buffer, first[group])
                    else:
                        buffer = first[group] = torch.ops.zgcompile.dynamic_rows(buffer, length)
                        self.lengths[buffer.shape[0].node.expr] = tensor
                rows[tensor.position] = buffer
            args, kwargs = self.arguments.rebuild(rows)
            with self.modes():
                return self.run(*args, **kwargs)

        def found_again() -> None:
            again = FakeTensorMode(allow_non_fake_inputs=True, shape_env=EnvelopeShapeEnv())
            discover(
                run,
                again,
                Discovery(modules=list(self.found.modules), optimizers=list(self.found.optimizers)),
                lambda _: None,
            )

        last = None
        while True:
            met = len(self.roots)
            fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=EnvelopeShapeEnv())
            try:
                with self.undone(found_again):
                    return discover(run, fake_mode, self.found, meet)
            except Exception:
                new = len(self.roots) - met
                if new == 0 or (last is not None and new >= last):
                    raise  # as many as before: the step itself makes them (an optimizer), anew each time
                last = new
                # What was first met on the way ran without its private copies: once more, with them.

    def decided_by_length(self, error: CaptureRefused) -> CaptureRefused:
        """A refusal that says which argument it is about, where the length of one with several dimensions was compared
        with a number: often it is one whose first dimension never changes, such as an `edge_index` [2, E]."""
        condition = getattr(error.__cause__, "cond", None)
        argument = self.lengths.get(next(iter(getattr(condition, "free_symbols", ())), None))
        if not isinstance(condition, sympy.core.relational.Relational) or len(condition.free_symbols) > 1:
            return error
        if argument is None or not argument.trailing:
            return error
        name, shape = argument_name(self.fn, argument.position), tuple(self.arguments.leaves[argument.position].shape)
        return CaptureRefused(
            f"a decision by the length of argument {name}, {list(shape)}: dimension 0 of an argument is the one that "
            "may change from call to call",
            where=error.where,
            advice="pass it with the dimension that changes first, x.t() for an edge_index [2, E], and transpose it in "
            "the step; or keep what never changes outside, where the step can name it",
        )

    @contextlib.contextmanager
    def undone(self, again: Callable[[], None] | None = None) -> Iterator[None]:
        """Run the user's Python; put everything back; refuse when it changed what a replay would freeze.

        `again` does the same once more, to find the line that made the change.
        """
        host = HostRandom.take()
        try:
            with refusals(), marked_formatting():
                yield
        finally:
            changes, writes, drawn = self._changes(), self.run.global_writes(), _drawn(host)
            self.flags = training_flags(changes)
            changes = [c for c in changes if not is_training_flag(c)]
            self._put_back(host)

        def line(appeared: Callable[[], bool]) -> SourceLine | None:
            found = line_of_change(again, appeared) if again is not None else None
            self._put_back(host)
            return found or code_line(self.fn)

        if changes:
            path, kind = changes[0].path, changes[0].kind
            where = (
                line(lambda: any(c.path == path and c.kind == kind for c in self._changes()))
                if again
                else changes[0].where
            )
            raise dataclasses.replace(changes[0], where=where).error()
        if writes:
            (module, name), (before, after) = next(iter(writes.items()))
            raise PythonStateChanged(
                f"the step writes the global {name} of {module}: {before!r} -> {after!r}",
                where=line(lambda: (module, name) in self.run.global_writes()),
                advice="keep it in a tensor that the step updates in place, or move the line out of the step",
            )
        if drawn:
            raise CaptureRefused(
                f"the step draws from or seeds a random generator of the host ({', '.join(drawn)}): "
                "a replay would repeat it",
                where=line(lambda: bool(_drawn(host))),
                advice="draw with torch on the step's device, and seed outside the step",
            )

    def _changes(self) -> list[Change]:
        return [c for s in self.snapshots for c in s.diff() if not self._is_created_state(c)]

    def _put_back(self, host: HostRandom) -> None:
        for snapshot in self.snapshots:
            snapshot.restore()
        host.restore()

    def _is_created_state(self, change: Change) -> bool:
        """Optimizer state that the first step creates is expected; a state tensor that is rebound is not."""
        for optimizer in self.found.optimizers:
            state = optimizer.state
            inner = [s for s in state.values() if isinstance(s, dict)]
            if change.owner is state or any(change.owner is s for s in inner):
                return change.kind in ("item added", "attribute added", "name added")
        return False

    def names(self) -> dict[int, str]:
        return {id(site.tensor): site.path for snapshot in self.snapshots for site in snapshot.tensors}


def _drawn(host: HostRandom) -> list[str]:
    return host.changed()


def _objects(arguments: Arguments) -> list[Any]:
    plain = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
    return [leaf for leaf in arguments.constants() if not isinstance(leaf, plain)]


def _unique(objects: Sequence[Any]) -> list[Any]:
    return list({id(o): o for o in objects}.values())
