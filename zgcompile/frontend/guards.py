"""What must hold for a capture to serve a call: checked on the host before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from zgcompile.frontend.ambient import ambient
from zgcompile.frontend.arguments import Arguments
from zgcompile.frontend.capture import Captured
from zgcompile.frontend.discovery import has_hooks
from zgcompile.frontend.python_state import Change, PythonSnapshot, hyperparameters
from zgcompile.frontend.reach import reachable
from zgcompile.frontend.state_tensors import MissingState, host_state_to, lifted_tensors, used_lifted
from zgcompile.ir.program import StepProgram

SCHEDULED = "_wrapped_by_lr_sched"  # how a scheduler marks the `optimizer.step` that it has wrapped


class Guards:
    """The guards of one capture. `refresh` re-reads the Python state after a step that was the user's own function.

    `lifted` are the tensors to run on, or None while some do not exist yet; they are looked up anew only when what
    holds them changed.
    """

    def __init__(self, fn: Any, captured: Captured, arguments: Arguments) -> None:
        self.fn, self.captured = fn, captured
        self.key = arguments.guard_key()
        self.ambient = ambient(captured.device)
        self.signature = _flat_signature(arguments)
        self.tensors = list(arguments.tensors)
        self.groups = captured.groups
        self.hypers = self._hypers()
        self.used = used_lifted(captured.program)
        self.lifted: list[torch.Tensor] | None = None
        self.refresh()

    def refresh(self) -> None:
        for optimizer in self.captured.found.optimizers:
            if hasattr(optimizer.step, SCHEDULED):
                # The wrapper would note it, for a warning about the order; a replay does not pass through it.
                optimizer._opt_called = True  # type: ignore[attr-defined]
        self.snapshot = PythonSnapshot.take(self.fn, self.captured.roots)
        self.options = _options(self.captured.found.optimizers)
        self.resolve()

    def resolve(self) -> None:
        """Look up the lifted tensors and note where they are held."""
        program = self.captured.program
        try:
            lifted = lifted_tensors(program, self.used)
            # A gradient by another tensor over its memory: who else refers to it is counted (`GradientBuffers`).
            kinds = [entry.kind for entry in program.lifted]
            self.lifted = [t.detach() if k == "grad" else t for k, t in zip(kinds, lifted, strict=True)]
        except MissingState:
            self.lifted = None
        # Traced with no gradient on entry.
        entered = self.captured.entered
        self.without = [program.lifted[g.lifted].resolve() for g in program.gradient_writes if g.lifted not in entered]
        # Traced with one that decided something, though its values may not be needed.
        self.within = [program.lifted[i].resolve() for i in self.captured.looked_at]
        self._look_for_stray_gradients()
        wanted = {id(t) for t in self.captured.found.tensors} | {id(t) for t in self.lifted or ()}
        self.sites = [
            (s.container, s.key, s.tensor, s.tensor.requires_grad)
            for s in self.snapshot.tensors
            if id(s.tensor) in wanted
        ]
        grads = [e for e, used in zip(program.lifted, self.used, strict=True) if e.kind == "grad" and used]
        self.grads = [(e.resolve, t) for e, t in zip(program.lifted, self.lifted or (), strict=False) if e in grads]

    def _look_for_stray_gradients(self) -> None:
        if self.stray_gradients():
            self.lifted = None

    def stray_gradients(self) -> bool:
        """Some tensor has a gradient now that had none in the trace, or lacks one that the trace looked at."""
        return any(p.grad is not None for p in self.without) or any(p.grad is None for p in self.within)

    def only_gradients_differ(self) -> bool:
        """All that the step runs on is there, but for a gradient that is None and was not in the trace, or the other
        way round."""
        program = self.captured.program
        try:
            for entry, used in zip(program.lifted, self.used, strict=True):
                if used and entry.kind != "grad" and entry.resolve() is None:
                    return False
        except (KeyError, AssertionError, AttributeError):
            return False
        return self.lifted is None

    def gradients(self) -> tuple[bool, ...]:
        """Which leaves of the step have a gradient now."""
        return tuple(t.grad is not None for t in self.captured.found.tensors if t.is_leaf and t.requires_grad)

    def tables(self) -> list[tuple[int, torch.Tensor]]:
        """Integer lifted inputs that the step never writes: their value ranges are proven from their data."""
        written = {w.lifted for w in self.captured.program.state_writes}
        found = []
        for i, entry in enumerate(self.captured.program.lifted):
            if entry.kind == "tensor" and i not in written:
                tensor = entry.resolve()
                if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype != torch.bool:
                    found.append((i, tensor))
        return found

    def retire(self) -> None:
        """From now on this capture serves no call: something under it changed that no guard looks at."""
        self.key, self.signature = ("retired",), None

    # -- every call

    def accept(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """The quick yes for a call whose arguments are plain tensors and scalars, like those of the capture. A no says
        only that the call has to be looked at closely."""
        signature = self.signature
        if signature is None or kwargs or len(args) != len(signature):
            return False
        for value, (dtype, device, trailing, constant) in zip(args, signature, strict=True):
            if dtype is None:
                if value is not constant and (type(value) is not type(constant) or value != constant):
                    return False
            elif (
                not isinstance(value, torch.Tensor)
                or value.dtype is not dtype
                or value.device != device
                or value.requires_grad
                or (value.dim() == 0) != (trailing is None)
                or (trailing is not None and (value.shape[1:] != trailing or value.shape[0] == 0))
            ):
                return False
        lengths = [
            v.shape[0] if s[2] is not None else None for v, s in zip(args, signature, strict=True) if s[0] is not None
        ]
        return self.lengths_agree(lengths) and self.state_holds()

    def hold(self, arguments: Arguments) -> bool:
        return (
            arguments.guard_key() == self.key
            and len(arguments.tensors) == len(self.tensors)
            and self.lengths_agree(arguments.lengths())
            and self.state_holds()
        )

    def state_holds(self) -> bool:
        """Modes around the call, Python values, held tensors, gradients that the step reads, comparisons on
        hyperparameters."""
        if ambient(self.captured.device) != self.ambient:
            return False
        if self.snapshot.check() is not None and not self._adopt_loaded_state():
            return False
        try:
            for container, key, tensor, requires_grad in self.sites:
                if container[key] is not tensor or tensor.requires_grad is not requires_grad:
                    return False
                if requires_grad and has_hooks(tensor):
                    return False
        except (KeyError, IndexError):
            return False
        try:
            if self.lifted is None or any(_elsewhere(resolve(), tensor) for resolve, tensor in self.grads):
                self.resolve()
        except AssertionError:
            self.lifted = None
        self._look_for_stray_gradients()
        hypers = self._hypers()
        if not all(isinstance(hyper, (int, float)) for hyper in hypers):
            return False  # a learning rate that is a tensor now
        if hypers != self.hypers:
            if not hyper_guards_hold(self.captured.program, hypers):
                return False
            self.hypers = hypers
        return True

    def _hypers(self) -> tuple[float, ...]:
        return tuple([site.get() for site in self.captured.hypers])

    def lengths_agree(self, lengths: Sequence[int | None]) -> bool:
        """Arguments that share a size symbol have the same length now."""
        if len(self.groups) == 1:
            return True
        seen: dict[int, int] = {}
        for group, length in zip(self.groups, lengths, strict=True):
            if group is not None and length is not None and seen.setdefault(group, length) != length:
                return False
        return True

    def _adopt_loaded_state(self) -> bool:
        """`optimizer.load_state_dict` replaces state and group dictionaries, a new scheduler adds floats to the groups
        and wraps `optimizer.step`: with equal options, the capture goes on."""
        optimizers = self.captured.found.optimizers
        if not all(self._is_optimizer_state(change) for change in self.snapshot.diff()):
            return False
        if _options(optimizers) != self.options:
            return False
        found = {site.path: site for site in hyperparameters(optimizers)}
        paths = self.captured.program.hyperparameters
        if not found.keys() >= set(paths):
            return False
        if len(found) > len(paths) and not all(type(o).__module__.startswith("torch.optim.") for o in optimizers):
            return False  # torch's own never look at what a scheduler has put there (`initial_lr`)
        if self._step_holds_former_groups():
            return False
        self.captured.hypers = [found[path] for path in paths]
        host_state_to(optimizers, self.captured.device)
        self.refresh()
        return self.snapshot.check() is None

    def _step_holds_former_groups(self) -> bool:
        """The step reads a group dictionary by a name of its own, which the optimizer has replaced: its numbers and
        the optimizer's are two things now."""
        groups = {id(group) for optimizer in self.captured.found.optimizers for group in optimizer.param_groups}
        former = {id(site.group) for site in self.captured.hypers} - groups
        return (
            any(id(node.owner) in former for node in reachable(self.fn, self.captured.roots).nodes) if former else False
        )

    def _is_optimizer_state(self, change: Change) -> bool:
        if any(change.owner is site.group and change.key == site.key for site in self.captured.hypers):
            return True  # a scheduler had moved it, in a group that `load_state_dict` has replaced since
        for optimizer in self.captured.found.optimizers:
            if change.owner is optimizer and change.key in ("state", "param_groups"):
                return True
            if change.owner is optimizer and change.key == "step" and hasattr(optimizer.step, SCHEDULED):
                return True
            owned = [optimizer.state, optimizer.param_groups, *optimizer.param_groups, *optimizer.state.values()]
            if any(change.owner is o for o in owned):
                return True
        return False


def _elsewhere(grad: torch.Tensor, known: torch.Tensor) -> bool:
    return grad.data_ptr() != known.data_ptr() or grad.shape != known.shape or grad.dtype is not known.dtype


def _options(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Everything of the param groups but the parameters' tensors and the floats: what a trace depends on."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            plain = {
                k: v
                for k, v in group.items()
                if k != "params" and not isinstance(v, (float, tuple, list, torch.Tensor))
            }
            found.append((plain, [id(p) for p in group["params"]]))
    return found


def _flat_signature(arguments: Arguments) -> list[tuple[Any, Any, Any, Any]] | None:
    """(dtype, device, trailing shape, constant) of each positional argument; None where the call is not that simple."""
    args, kwargs = arguments.rebuild({})
    if (
        kwargs
        or len(args) != len(arguments.leaves)
        or any(a is not b for a, b in zip(args, arguments.leaves, strict=True))
    ):
        return None  # a tuple of one tensor is no leaf
    signature: list[tuple[Any, Any, Any, Any]] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return None
            signature.append((value.dtype, value.device, value.shape[1:] if value.dim() else None, None))
        else:
            signature.append((None, None, None, value))
    return signature


def hyper_guards_hold(program: StepProgram, hypers: Sequence[float]) -> bool:
    values = {symbol: sympy.Float(value) for symbol, value in zip(program.hyper_symbols, hypers, strict=True)}
    return all(bool(expr.subs(values)) for expr, _ in program.hyper_guards)
