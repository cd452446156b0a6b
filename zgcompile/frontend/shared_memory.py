"""Tensors over one memory, of which a step writes one: to the FX graph they are two inputs, and what is written through
one the other would miss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from zgcompile.errors import CaptureRefused
from zgcompile.frontend.functionalise import node_line
from zgcompile.ir.program import StepProgram


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and last address, the last exclusive; None for a tensor without memory of its own to compare."""
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.device.type == "meta":
        return None
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def refuse_aliases(program: StepProgram) -> None:
    """
    Raises:
        CaptureRefused: two lifted tensors share memory, and one of them is written by the step.
    """
    written = {w.lifted: w.output for w in program.state_writes}
    held: list[tuple[int, int, int, torch.Tensor]] = []
    for i, entry in enumerate(program.lifted):
        try:
            tensor = entry.resolve()
        except (KeyError, AssertionError):
            continue  # created by the first step: memory of its own
        extent = _extent(tensor) if isinstance(tensor, torch.Tensor) else None
        if extent is not None:
            held.append((*extent, i, tensor))
    held.sort(key=lambda h: h[:3])
    for k, (_, end, i, tensor) in enumerate(held):
        for start, _, j, other in held[k + 1 :]:
            if start >= end:
                break
            write = written.get(i, written.get(j))
            if write is not None and tensor is not other and tensor.device == other.device:
                node = program.outputs[write]
                raise CaptureRefused(
                    f"{program.lifted[i].name} and {program.lifted[j].name} share memory, "
                    "and the step writes one of them",
                    where=node_line(node) if isinstance(node, torch.fx.Node) else None,
                    advice="use one of the two in the step",
                )


class WrittenMemory:
    """The memory of the tensors that a step writes. An argument is copied into a static buffer, so that one over this
    memory would not see the step's own writes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.extents: dict[int, list[tuple[int, int]]] = {}
        for tensor in tensors:
            extent = _extent(tensor)
            if extent is not None:
                self.extents.setdefault(tensor.untyped_storage().data_ptr(), []).append(extent)

    def holds(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether one of these shares memory with it."""
        for argument in arguments:
            for start, end in self.extents.get(argument.untyped_storage().data_ptr(), ()):
                extent = _extent(argument)
                if extent is not None and extent[0] < end and start < extent[1]:
                    return True
        return False
