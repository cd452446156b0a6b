"""Checks that a benchmark must pass before its times mean anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zgcompile.bench.timing import synchronize
from zgcompile.errors import ZgError

Step = Callable[[Tensor], Tensor]


class CompiledStep(Protocol):
    """What the benchmark uses of a compiled step."""

    @property
    def stats(self) -> Any: ...
    def __call__(self, seeds: Tensor) -> Tensor: ...
    def synchronize(self) -> None: ...
    def kernel_plan(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Startup:
    """Wall seconds from the first call to the end of the first replay, the `calls`-th call."""

    seconds: float
    calls: int


def first_replay(step: CompiledStep, batches: Sequence[Tensor], *, limit: int = 64) -> Startup:
    """Calls `step` until `stats.replays` is not 0. Raises ZgError after `limit` calls without a replay."""
    synchronize()
    start = time.perf_counter()
    for call in range(limit):
        step(batches[call % len(batches)])
        if step.stats.replays:
            synchronize()
            return Startup(time.perf_counter() - start, call + 1)
    raise ZgError(f"no replay in the first {limit} calls", advice="zgcompile.explain shows what keeps it from capture")


@dataclass(frozen=True)
class InputResponse:
    """Losses of one step from the same state and random numbers: `same` batch `first` twice, then `other`."""

    first: float
    same: float
    other: float

    @property
    def repeats(self) -> bool:
        """Equal but for the order of atomic sums."""
        return abs(self.first - self.same) <= 1e-4 * max(1.0, abs(self.first))

    @property
    def responds(self) -> bool:
        return abs(self.first - self.other) > 1e-4 * max(1.0, abs(self.first))


def input_response(
    step: Step, opt: torch.optim.Optimizer, batch: Tensor, other: Tensor, *, seed: int = 7
) -> InputResponse:
    """Whether new inputs reach the result. Every call starts from the same parameters (learning rate 0) and the same
    random numbers, so only the batch can move the loss: a replay of kernels that never read it does not respond.

    Parameters and learning rates are as before afterwards; the optimizer's moments and the default generator are not.
    """
    rates = [group["lr"] for group in opt.param_groups]
    try:
        for group in opt.param_groups:
            group["lr"] = 0.0
        losses = []
        for seeds in (batch, batch, other):
            torch.manual_seed(seed)
            losses.append(float(step(seeds)))
    finally:
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate
    return InputResponse(*losses)


@dataclass(frozen=True)
class MemoryDrift:
    """Bytes by which torch's tensors (`allocated`) and segments (`reserved`) grew until the last of `calls` calls."""

    allocated: int
    reserved: int
    calls: int


def memory_drift(step: Step, batches: Sequence[Tensor], *, settle: int) -> MemoryDrift:
    """Runs all `batches` and compares memory after the first `settle` with the end. Needs a CUDA device."""
    seen = []
    for call, seeds in enumerate(batches, start=1):
        step(seeds)
        if call in (settle, len(batches)):
            synchronize()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    return MemoryDrift(seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1], len(batches))
