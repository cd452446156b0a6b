"""One capture of a step and how its calls run: first call, warm-up at exact sizes, replay, and what follows a failed
status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map, tree_unflatten

from zgcompile.backend.checked_indices import checked
from zgcompile.backend.cuda_graph import CudaGraphReplay
from zgcompile.backend.deferred import DeferredNumber
from zgcompile.backend.exact import ConditionFailed, ExactRun, run_exact
from zgcompile.backend.replay import Launch, ReferenceReplay, Replay, Replayed
from zgcompile.errors import BadInput, CaptureWarning, StepError, ZgError
from zgcompile.frontend.arguments import Arguments
from zgcompile.frontend.call import Call
from zgcompile.frontend.capacities import Capacities
from zgcompile.frontend.capture import Captured
from zgcompile.frontend.gradient_buffers import GradientBuffers
from zgcompile.frontend.guards import Guards
from zgcompile.frontend.lowering import lowered_step
from zgcompile.frontend.shared_memory import WrittenMemory, refuse_aliases
from zgcompile.frontend.state_tensors import host_state_to, parameter_of, same_layout, store_exact
from zgcompile.frontend.stats import CapacityUse, Counters
from zgcompile.frontend.three_ways import prove_replay
from zgcompile.frontend.training_flags import find
from zgcompile.frontend.undo import undo_around
from zgcompile.frontend.user_warning import warn_user
from zgcompile.ir.bounds import Observed
from zgcompile.ir.draws import KeyedDraws
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.lowered import ConstantOutput, LoweredStep, NumberOutput, SizeOutput, TensorOutput
from zgcompile.ir.sizes import evaluate
from zgcompile.ir.source import code_line, raised_by_user, user_line_from_traceback
from zgcompile.ir.spans import Span
from zgcompile.ir.status import Failure, decisive
from zgcompile.pipeline import canonical


class Specialisation:
    """A captured step under its guards."""

    def __init__(
        self,
        fn: Callable[..., Any],
        captured: Captured,
        arguments: Arguments,
        warmup: int,
        envelope: Envelope,
        lowering: str,
        counters: Counters,
    ) -> None:
        self.fn, self.captured, self.warmup, self.envelope, self.lowering = fn, captured, warmup, envelope, lowering
        self.counters = counters
        self.program = canonical(captured.program)
        self.guards = Guards(fn, captured, arguments)
        self.observed = Observed()
        self.warmed = 0
        self.outgrown = 0  # calls in a row that were no replay for want of capacity
        self.turned_away = 0  # calls that found a gradient where the trace had none, or none where it had one
        self.traced_on: tuple[bool, ...] | None = None  # which gradients there were, for a trace on them as found
        self.replay: Replay | None = None
        self.proven = False  # the replay has been compared with the eager function once
        self.largest: dict[str, int] = {}
        self.capacities = Capacities(self.program, envelope, fn)
        self.tables: list[tuple[torch.Tensor, int, Span]] = []
        self.gradients = GradientBuffers([])
        self.written: list[torch.Tensor] = []
        self.memory = WrittenMemory([])  # of the replay's state and gradients
        self.check_lowers(Call(0, *arguments.rebuild({})))

    def check_lowers(self, call: Call) -> None:
        """Refuse an op without a rule at the first call, before any step has run."""
        provisional = Observed()
        provisional.note(self._batch_counts(call), {})
        lowered_step(self.program, provisional, self.envelope, self._tables(), self.captured.device)

    # -- calls

    def ready_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """The guards hold, and all that the captured step runs on is there."""
        return self.guards.accept(args, kwargs) and self.guards.lifted is not None

    def __call__(self, call: Call) -> Any:
        lifted = self.guards.lifted
        if lifted is None:
            return self.run_user_function(call)
        if self.replay is None:
            if self._written_memory(lifted).holds(self._tensors(call)):
                return self.run_aliased(call)
            if self.warmed < self.warmup:
                self.warmed += 1
                return self.run_at_exact_sizes(call, lifted)
            self.fit(call, lifted)
        return self.run_replay(call, lifted)

    def run_user_function(self, call: Call) -> Any:
        """The user's own function, once, with the step's numbers: the first step that creates state, and failed
        preconditions."""
        self.counters.eager_runs += 1
        self.warmed += self.replay is None
        undo = undo_around(self, call.leaves)
        try:
            device = self.captured.device
            with checked(device), KeyedDraws(torch.tensor(call.key, dtype=torch.int64, device=device)):
                result = self.fn(*call.args, **call.kwargs)
        except BaseException as error:
            undo.restore()
            if isinstance(error, (BadInput, IndexError, RuntimeError, ValueError)) and not raised_by_user(error):
                raise _step_error(error) from error
            raise
        call.happened = True
        del undo
        self.capacities.ran_exactly(self._launch(call).arguments, None)
        host_state_to(self.captured.found.optimizers, self.captured.device)
        find(self.captured.flags)
        self.guards.refresh()
        return tree_map(_detached, result)

    def run_aliased(self, call: Call) -> Any:
        """An argument shares memory with what the step writes: only the user's own function sees its writes there."""
        self.counters.preconditions += 1
        warn_user(
            f"{code_line(self.fn)}: an argument shares memory with state that the step writes, so that the function "
            "itself runs this call\n  instead: read the state in the step, or pass a clone",
            CaptureWarning,
        )
        return self.run_user_function(call)

    def run_at_exact_sizes(self, call: Call, lifted: list[torch.Tensor]) -> Any:
        """The dynamic FX graph: warm-up steps and overflow re-runs."""
        try:
            run = self._exact(call, lifted)
        except ConditionFailed:
            self.counters.preconditions += 1
            return self.run_user_function(call)
        self.counters.eager_runs += 1
        counts = {**run.counts, **self._batch_counts(call)}
        self.observed.note(counts, run.ids)
        self.capacities.ran_exactly(self._launch(call).arguments, counts)
        call.happened = True
        store_exact(self.program, lifted, run.outputs)
        leaves = [tree_map(_detached, v) for v in run.outputs[: self.program.user_outputs]]
        return tree_unflatten(leaves, self.program.out_spec)

    def _exact(self, call: Call, lifted: list[torch.Tensor]) -> ExactRun:
        device = self.captured.device
        launch = self._launch(call)
        scalars = [torch.tensor(v, dtype=torch.int64, device=device) for v in (launch.key, *launch.lengths)]
        tensors = [t.detach() for t in launch.arguments]
        try:
            return run_exact(self.program, [*scalars, *tensors, *launch.hypers, *[t.detach() for t in lifted]])
        except (IndexError, RuntimeError, ValueError) as error:
            # The user's own function tells, whose step may handle it.
            raise ConditionFailed(str(error)) from error

    def run_replay(self, call: Call, lifted: list[torch.Tensor]) -> Any:
        assert self.replay is not None
        launch = self._launch(call)
        if not self.replay.fits(launch):
            return self.overflow(call, lifted)
        if self.replay.moved(lifted, self.guards.used):
            if not same_layout(self.program, lifted):
                self.guards.retire()
                return self.run_user_function(call)
            refuse_aliases(self.program)
            self.rebind(lifted, launch)
        elif self._tables_changed():
            self.fit(call, lifted)
        if self.memory.holds(launch.arguments):
            return self.run_aliased(call)
        if not self.proven:
            self.proven = prove_replay(self, call)
        self.gradients.release(self._graded())
        replayed = self.replay.run(launch)
        self.counters.host_reads += 1
        layout = self.replay.lowered.layout
        if any(replayed.metadata[: len(layout.checks)]):
            return self.failed(replayed, call, lifted)
        call.happened = True
        self.counters.replays += 1
        self.outgrown = 0
        self.capacities.drift.replayed(replayed.metadata)
        self.hand_out_gradients()
        torch.autograd.graph.increment_version(self.written)
        return self.results(replayed)

    def failed(self, replayed: Replayed, call: Call, lifted: list[torch.Tensor]) -> Any:
        """Nothing was written. A capacity runs the batch again at exact sizes; anything else, the user's own function,
        which raises what eager raises, or handles it."""
        assert self.replay is not None
        check = decisive(self.replay.lowered.layout.failed(replayed.metadata))
        if check.failure is Failure.CAPACITY:
            return self.overflow(call, lifted)
        self.counters.preconditions += 1
        return self.run_user_function(call)

    def overflow(self, call: Call, lifted: list[torch.Tensor]) -> Any:
        """Run once more, exactly, with the same numbers; re-fit when it happens more often than the fit says."""
        assert self.replay is not None
        self.capacities.warn_of_overflows(self.outgrown)
        self.counters.overflows += 1
        self.outgrown += 1
        before = self.capacities.exact
        result = self.run_at_exact_sizes(call, lifted)
        after = self.capacities.exact
        counts = after[-1] if after is not before else None
        if self.capacities.overflowed(self.replay.lowered, self.observed, counts):
            self.replay = None
        return result

    # -- fitting

    def fit(self, call: Call, lifted: list[torch.Tensor]) -> None:
        """Choose the capacities, lower, capture. Sizes that no exact run has shown yet, or none of as many rows, are
        measured on this batch, writing nothing."""
        known, lengths = bool(self.observed.counts), self._batch_counts(call)
        self.observed.note(lengths, {})
        if not known or self.capacities.lacks_counts(self.observed):
            try:
                run = self._exact(call, lifted)
                self.observed.note(run.counts, run.ids)
                self.capacities.measured({**run.counts, **lengths})
            except ConditionFailed:
                pass  # the replay finds it out too
        launch = self._launch(call)
        envelope = self.capacities.fit(launch, lifted, self.captured.device, self.observed)
        lowered = lowered_step(self.program, self.observed, envelope, self._tables(), self.captured.device)
        self.counters.captures += 1
        self.replay = self._captured_replay(lowered, lifted, launch)
        self.proven = False
        self.gradients = GradientBuffers(self.replay.gradients)
        self._note_written(lifted)

    def rebind(self, lifted: list[torch.Tensor], launch: Launch) -> None:
        """State that lies elsewhere now (`load_state_dict`, `p.data = ...`): capture again, at the same capacities.
        Where that fails the replay is gone, and the next call fits a new one."""
        assert self.replay is not None
        replay, self.replay = self.replay, None
        replay.rebind(lifted, launch)
        self.replay = replay
        self.counters.captures += 1
        self._note_written(lifted)

    def _note_written(self, lifted: list[torch.Tensor]) -> None:
        assert self.replay is not None
        self.written = [lifted[i] for i in self.replay.lowered.written_lifted()]
        self.memory = WrittenMemory([*self.written, *self.replay.gradients])

    def _written_memory(self, lifted: list[torch.Tensor]) -> WrittenMemory:
        """Before there is a replay."""
        grads = [parameter_of(self.program, g.lifted).grad for g in self.program.gradient_writes]
        state = [lifted[w.lifted] for w in self.program.state_writes]
        return WrittenMemory([*state, *(g for g in grads if g is not None)])

    def _captured_replay(self, lowered: LoweredStep, lifted: list[torch.Tensor], launch: Launch) -> Replay:
        """A CUDA Graph on a GPU. Where the capture fails, the lowered FX graph runs op by op from then on, with a
        warning: slower, with the same results."""
        device = self.captured.device
        if device.type == "cuda" and self.lowering != "reference":
            try:
                return CudaGraphReplay(lowered, lifted, device, launch, self.lowering)
            except Exception as error:
                where = code_line(self.fn)
                first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                warn_user(
                    f"{where}: the step could not be captured as a CUDA Graph "
                    f"({type(error).__name__}: {first}); it runs op by op",
                    CaptureWarning,
                )
        return ReferenceReplay(lowered, lifted, device)

    def _tables(self) -> dict[int, Span]:
        spans = {}
        self.tables = []
        for i, tensor in self.guards.tables():
            if tensor.numel():
                low, high = torch.aminmax(tensor)
                spans[i] = Span(int(low), int(high) + 1)
                self.tables.append((tensor, tensor._version, spans[i]))
        return spans

    def _tables_changed(self) -> bool:
        """A table that was written in place may hold values outside the range that the lowered step relies on."""
        for k, (tensor, version, span) in enumerate(self.tables):
            if tensor._version != version:
                low, high = torch.aminmax(tensor)
                if int(low) < span.low or int(high) >= span.high:
                    return True
                self.tables[k] = (tensor, tensor._version, span)
        return False

    # -- inputs and outputs

    def _tensors(self, call: Call) -> list[torch.Tensor]:
        return [call.leaves[t.position] for t in self.guards.tensors]

    def _launch(self, call: Call) -> Launch:
        tensors = self._tensors(call)
        lengths: dict[int, int] = {}
        for group, tensor in zip(self.captured.groups, tensors, strict=True):
            if group is not None:
                lengths[group] = tensor.shape[0]
        return Launch(call.key, [lengths[g] for g in sorted(lengths)], tensors, self.guards.hypers)

    def _batch_counts(self, call: Call) -> dict[Any, int]:
        lengths = dict(zip(self.program.placeholders[1:], self._launch(call).lengths, strict=False))
        counts = {}
        for node in self.program.fx_graph.graph.nodes:
            if node.target is torch.ops.zgcompile.dynamic_rows.default:
                symbol = next(iter(node.meta["unbacked_bindings"]))
                counts[symbol] = lengths[node.args[1]]
        return counts

    def hand_out_gradients(self) -> None:
        """Point `p.grad` at its buffer, or at None, as the step left it."""
        index = 0
        for gradient in self.program.gradient_writes:
            parameter = parameter_of(self.program, gradient.lifted)
            if gradient.output is None:
                if parameter.grad is not None:
                    parameter.grad = None
            else:
                self.gradients.hand_out(index, parameter)
                index += 1

    def _graded(self) -> list[torch.Tensor]:
        return [parameter_of(self.program, g.lifted) for g in self.program.gradient_writes if g.output is not None]

    def results(self, replayed: Replayed) -> Any:
        assert self.replay is not None
        lowered = self.replay.lowered
        counts = lowered.layout.count_values(replayed.metadata)
        for slot in lowered.layout.counts:
            if slot.cap is not None:
                self.largest[slot.name] = max(self.largest.get(slot.name, 0), counts[slot.symbol])
        replace = self.program.shape_env.replace
        memo: dict[Any, Any] = {}

        def exact(size: Any) -> int:
            return size if isinstance(size, int) else int(evaluate(replace(size), counts.__getitem__, memo))

        leaves: list[Any] = []
        for output in lowered.outputs:
            match output:
                case TensorOutput(position, sizes):
                    tensor = replayed.tensors[position]
                    for dim, size in enumerate(sizes):
                        if not isinstance(size, int):
                            tensor = tensor.narrow(dim, 0, exact(size))
                    leaves.append(tensor)
                case SizeOutput(expr):
                    leaves.append(exact(expr))
                case NumberOutput(position, is_int):
                    leaves.append(DeferredNumber(replayed.tensors[position], is_int, self.counters.read_deferred))
                case ConstantOutput(value):
                    leaves.append(value)
        return tree_unflatten(leaves, self.program.out_spec)

    def envelope_use(self) -> dict[str, CapacityUse]:
        if self.replay is None:
            return {}
        slots = [s for s in self.replay.lowered.layout.counts if s.cap is not None]
        return {s.name: CapacityUse(s.name, self.largest.get(s.name, 0), s.cap or 0) for s in slots}


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _step_error(error: Exception) -> Exception:
    """What an op raised, with the user's line."""
    where = user_line_from_traceback(error.__traceback__)
    if isinstance(error, BadInput) and error.where is None:  # the parameters of a draw
        return StepError.of_batch(error.what, where)
    if isinstance(error, ZgError):
        return error
    return StepError.of_batch(f"{type(error).__name__}: {error}", where)
