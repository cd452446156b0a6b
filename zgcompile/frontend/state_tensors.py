"""The user's tensors around a step: read as inputs, written in place, saved and put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zgcompile.ir.program import StepProgram


class MissingState(Exception):
    """A lifted tensor does not exist (yet): the optimizer has no state, a gradient is None."""


def host_state_to(
    optimizers: Sequence[torch.optim.Optimizer], device: torch.device
) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Move 0-d optimizer state that lives on the host (Adam's `step`) to the device of the step, where a replay can
    count it.

    Every optimizer of torch.optim accepts it there, and so does `load_state_dict`. Returns what was moved, for
    `put_back`.
    """
    moved: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    if device.type == "cpu":
        return moved
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in list(state.items()):
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu":
                    moved.append((state, name, value))
                    state[name] = value.to(device)
    return moved


def put_back(moved: Sequence[tuple[dict[str, Any], str, torch.Tensor]]) -> None:
    for state, name, value in moved:
        state[name] = value


def used_lifted(program: StepProgram) -> list[bool]:
    """Which lifted inputs the FX graph reads or writes; one that it does not may be absent."""
    written = {w.lifted for w in program.state_writes}
    placeholders = program.placeholders[program.first_lifted() :]
    return [bool(p.users) or i in written for i, p in enumerate(placeholders)]


def lifted_tensors(program: StepProgram, used: Sequence[bool]) -> list[torch.Tensor]:
    """The tensors to run on, now; an unused one that is absent, or a gradient that would be kept alive, has a stand-in
    of its shape and no memory.

    Raises:
        MissingState: one that the step needs does not exist, or has another shape than traced.
    """
    tensors = []
    placeholders = program.placeholders[program.first_lifted() :]
    for entry, needed, placeholder in zip(program.lifted, used, placeholders, strict=True):
        like = placeholder.meta["val"]
        try:
            tensor = entry.resolve() if needed or entry.kind != "grad" else None
            if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise KeyError(entry.name)
        except (KeyError, AssertionError, AttributeError) as error:
            if needed:
                raise MissingState(entry.name) from error
            tensor = torch.empty((), dtype=like.dtype, device=like.device).expand(tuple(like.shape))
        tensors.append(tensor)
    return tensors


def same_layout(program: StepProgram, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the lifted tensors still have the shapes and dtypes of the trace (`.data =` may change them unseen)."""
    likes = [p.meta["val"] for p in program.placeholders[program.first_lifted() :]]
    return all(t.shape == like.shape and t.dtype == like.dtype for t, like in zip(tensors, likes, strict=True))


def parameter_of(program: StepProgram, lifted: int) -> torch.Tensor:
    return program.lifted[lifted].resolve()


def store_exact(program: StepProgram, lifted: Sequence[torch.Tensor], outputs: Sequence[Any]) -> None:
    """Write new state in place and hand out new gradients, as the eager step would have."""
    with torch.no_grad():
        for write in program.state_writes:
            new = outputs[write.output]
            if new is not lifted[write.lifted]:
                lifted[write.lifted].copy_(new)
        for gradient in program.gradient_writes:
            parameter = parameter_of(program, gradient.lifted)
            parameter.grad = None if gradient.output is None else outputs[gradient.output].clone()


class SavedState:
    """Copies of everything that one step may write: put back by `restore`, exactly, identities included."""

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        for write in program.state_writes:
            try:
                tensor = program.lifted[write.lifted].resolve()
            except (KeyError, AssertionError):
                continue
            self.tensors.append((tensor, tensor.detach().clone()))
        self.grads = []
        for gradient in program.gradient_writes:
            parameter = parameter_of(program, gradient.lifted)
            value = None if parameter.grad is None else parameter.grad.detach().clone()
            self.grads.append((parameter, parameter.grad, value))

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, saved in self.tensors:
                tensor.copy_(saved)
            for parameter, grad, value in self.grads:
                if grad is not None and value is not None:
                    grad.copy_(value)
                parameter.grad = grad
