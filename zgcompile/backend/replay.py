"""One way to run a lowered step: fill the static buffers, run, read the metadata buffer, hand out fresh results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zgcompile.ir.lowered import LoweredStep
from zgcompile.kernels import registered_kernels


@dataclass(frozen=True)
class Launch:
    """What differs from call to call: the step key, the true lengths, the argument tensors, the hyperparameters."""

    key: int
    lengths: Sequence[int]
    arguments: Sequence[torch.Tensor]
    hypers: Sequence[float]


@dataclass(frozen=True)
class Replayed:
    """`metadata` as the layout says; `tensors`: the returned tensors at cap, fresh for this call."""

    metadata: list[int]
    tensors: list[torch.Tensor]


class Replay(ABC):
    """A lowered step bound to the user's own state tensors. `gradients` are the buffers that `p.grad` points to after a
    step."""

    def __init__(self, lowered: LoweredStep, lifted: Sequence[torch.Tensor], device: torch.device) -> None:
        self.lowered, self.device = lowered, device
        self.bind(lifted)
        self.gradients = [_zeros(like) for like in lowered.gradient_inputs]
        self.buffers = [_zeros(like) for like in lowered.argument_inputs]

    def bind(self, lifted: Sequence[torch.Tensor]) -> None:
        """Note the tensors to run on, and where they lie."""
        # `.data` has a version counter of its own: a failed step bumps none of the user's.
        self.lifted = [t.data for t in lifted]
        self.addresses = [t.data_ptr() for t in self.lifted]

    def rebind(self, lifted: Sequence[torch.Tensor], launch: Launch) -> None:
        """Run on other tensors of the same shapes from now on; `launch` is the call at hand."""
        del launch
        self.bind(lifted)

    def moved(self, lifted: Sequence[torch.Tensor], used: Sequence[bool]) -> bool:
        """Some tensor that the step uses lies at another address than it was bound to."""
        return any(u and t.data_ptr() != a for u, t, a in zip(used, lifted, self.addresses, strict=True))

    def fits(self, launch: Launch) -> bool:
        """Every argument fits into its buffer."""
        return all(
            not cap or tensor.shape[0] <= cap
            for cap, tensor in zip(self.lowered.argument_caps, launch.arguments, strict=True)
        )

    def fill(self, launch: Launch) -> None:
        """Copy the arguments into the static buffers; rows beyond keep whatever they held."""
        for buffer, tensor, cap in zip(self.buffers, launch.arguments, self.lowered.argument_caps, strict=True):
            if cap == 0:
                continue
            if buffer.dim():
                buffer[: tensor.shape[0]].copy_(tensor, non_blocking=True)
            else:
                buffer.copy_(tensor, non_blocking=True)

    def memory(self) -> int:
        """Bytes that this replay holds: static buffers, and on a GPU the CUDA Graph's pool."""
        return sum(t.numel() * t.element_size() for t in (*self.buffers, *self.gradients))

    @abstractmethod
    def run(self, launch: Launch) -> Replayed: ...

    @abstractmethod
    def kernel_plan(self) -> dict[str, int]:
        """What one step launches of ours: kernel name -> launches on a GPU, op name -> calls elsewhere."""


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def own_ops(lowered: LoweredStep) -> dict[str, int]:
    """How often the lowered FX graph calls each `zgcompile::` op."""
    found: dict[str, int] = {}
    for node in lowered.fx_graph.graph.nodes:
        name = str(node.target)
        if node.op == "call_function" and name.startswith("zgcompile."):
            op = name.split(".")[1]
            found[op] = found.get(op, 0) + 1
    return found


def planned_kernels(lowered: LoweredStep) -> dict[str, int]:
    """Launches of each own CUDA kernel in one step, as the ops of the lowered FX graph register them. Ops without a
    kernel of their own (keyed draws, which Inductor inlines) are not in it."""
    plan: dict[str, int] = {}
    kernels = registered_kernels()
    for op, calls in own_ops(lowered).items():
        for kernel in kernels.get(op, ()):
            plan[kernel] = plan.get(kernel, 0) + calls
    return plan


class ReferenceReplay(Replay):
    """Runs the lowered FX graph op by op through each op's torch reference: the path without a GPU, and
    `lowering="aten"` without capture."""

    def run(self, launch: Launch) -> Replayed:
        self.fill(launch)
        scalars = [torch.tensor(v, dtype=torch.int64, device=self.device) for v in (launch.key, *launch.lengths)]
        hypers = torch.tensor(list(launch.hypers), dtype=torch.float64, device=self.device)
        launch_block = torch.zeros(2, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            metadata, _, *tensors = self.lowered.fx_graph(
                launch_block, *scalars, *self.buffers, hypers, *self.lifted, *self.gradients
            )
        held = {t.untyped_storage().data_ptr() for t in (*self.buffers, *self.lifted, *self.gradients)}
        fresh = [t.clone() if t.untyped_storage().data_ptr() in held else t for t in tensors]
        return Replayed(metadata.tolist(), fresh)

    def kernel_plan(self) -> dict[str, int]:
        return own_ops(self.lowered)
