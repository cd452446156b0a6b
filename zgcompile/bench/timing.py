"""A paired timer: two functions measured in turns within one run, so that clock and load drift hit both."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample, in the sample's unit."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        """Quartiles by linear interpolation between order statistics. Raises ValueError on an empty sample."""
        if not sample:
            raise ValueError("no sample to summarise")
        if len(sample) == 1:
            return cls(sample[0], sample[0], sample[0])
        lower, median, upper = statistics.quantiles(sample, n=4, method="inclusive")
        return cls(median, lower, upper)

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.lower:.3f}, {self.upper:.3f}]"


@dataclass(frozen=True)
class PairedTiming:
    """Milliseconds a call of `a` and of `b`, and `ratio` = a / b block by block: above 1 where `b` is faster."""

    a: Spread
    b: Spread
    ratio: Spread
    blocks: int
    calls: int  # of each function in a block


def synchronize() -> None:
    """Waits for the current CUDA device; nothing without one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_block(
    fn: Callable[[int], object],
    first: int,
    calls: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sync: Callable[[], None] = synchronize,
) -> float:
    """Milliseconds a call over `fn(first)` to `fn(first + calls - 1)`, from idle device to idle device."""
    sync()
    start = clock()
    for i in range(first, first + calls):
        fn(i)
    sync()
    return (clock() - start) * 1e3 / calls


def paired(
    a: Callable[[int], object],
    b: Callable[[int], object],
    *,
    blocks: int = 15,
    calls: int = 20,
    warmup: int = 10,
    clock: Callable[[], float] = time.perf_counter,
    sync: Callable[[], None] = synchronize,
) -> PairedTiming:
    """Times `a(i)` and `b(i)` for the same i, `calls` a block, the order within a pair of blocks reversed from one pair
    to the next.

    Both get `warmup` untimed calls first. The ratio's spread is that of the pairs, which shared their conditions, not
    of the two medians.
    """
    if blocks < 1 or calls < 1 or warmup < 0:
        raise ValueError(f"blocks {blocks} and calls {calls} must be positive, warmup {warmup} not negative")
    for fn in (a, b):
        for i in range(warmup):
            fn(i)
    times: tuple[list[float], list[float]] = ([], [])
    for block in range(blocks):
        for which in (0, 1) if block % 2 == 0 else (1, 0):
            times[which].append(time_block((a, b)[which], warmup + block * calls, calls, clock=clock, sync=sync))
    ratio = [x / y for x, y in zip(*times, strict=True)]
    return PairedTiming(Spread.of(times[0]), Spread.of(times[1]), Spread.of(ratio), blocks, calls)
