"""The `p.grad` that a replay hands out: tensors over its buffers, and a copy for whoever keeps one past the next
step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch


@functools.cache
def _references_of_grad() -> tuple[int, int]:
    """Python references to a tensor in a list, as `_references` counts them: while it is nobody's gradient, and while
    it is one's."""
    parameter = torch.zeros(1, device="cpu", requires_grad=True)
    held = [torch.zeros(1, device="cpu")]
    free = _references(held, 0)
    parameter.grad = held[0]
    return free, _references(held, 0)


def _references(held: list[torch.Tensor], index: int) -> int:
    return sys.getrefcount(held[index])


class GradientBuffers:
    """Eager makes new gradient tensors after `zero_grad()`, so one that the user has kept must not change under him."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.buffers = buffers
        self.handed: list[torch.Tensor] = [b.detach() for b in buffers]

    def release(self, parameters: Sequence[torch.Tensor]) -> None:
        """Before a replay writes the buffers: a handed-out tensor that something else refers to gets memory of its own.

        A view that the user has taken of one is not seen.
        """
        free, as_gradient = _references_of_grad()
        for i, (buffer, parameter) in enumerate(zip(self.buffers, parameters, strict=True)):
            if self._moved(i):
                self.handed[i] = buffer.detach()
                continue
            expected = as_gradient if parameter.grad is self.handed[i] else free
            if _references(self.handed, i) > expected:
                self.handed[i].data = buffer.clone()
                self.handed[i] = buffer.detach()

    def _moved(self, index: int) -> bool:
        """The user gave a handed-out tensor memory of its own: `p.grad.data = ...`."""
        return self.handed[index].data_ptr() != self.buffers[index].data_ptr()

    def hand_out(self, index: int, parameter: torch.Tensor) -> None:
        """Point `parameter.grad` at its buffer."""
        if self._moved(index):
            self.handed[index] = self.buffers[index].detach()
        if parameter.grad is not self.handed[index]:
            parameter.grad = self.handed[index]
