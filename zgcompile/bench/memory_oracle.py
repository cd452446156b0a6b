"""Peak memory against an oracle that knows every size.

The bar: memory above what was allocated before the first call is at most 1.10 x what an execution that allocates exact
sizes, and frees each buffer after its last use, needs for the largest of 2,000 batches. Tables of the size of the node
set and staging are listed apart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from zgcompile.errors import ZgError

Counts = Mapping[str, int]


@dataclass(frozen=True)
class LiveBuffer:
    """A buffer of `size(counts)` bytes that lives from op `first`, its writer, to op `last`, its last reader."""

    name: str
    size: Callable[[Counts], int]
    first: int
    last: int

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ValueError(f"buffer {self.name} is last read at op {self.last}, before op {self.first} writes it")


@dataclass(frozen=True)
class OraclePeak:
    """The oracle's peak: `bytes` in `live` (name -> bytes) at op `op` of the batch with `counts`."""

    bytes: int
    op: int
    live: Mapping[str, int]
    counts: Counts


def live_peak(buffers: Sequence[LiveBuffer], counts: Counts, *, alignment: int = 1) -> OraclePeak:
    """The most bytes alive at any op at exact sizes, each rounded up to `alignment` (torch's allocator: 512)."""
    sizes = [-(-b.size(counts) // alignment) * alignment for b in buffers]
    # The live set only grows where a buffer starts, so a peak is reached at one of the starts.
    total, op = 0, 0
    for start in sorted({b.first for b in buffers}):
        alive = sum(size for b, size in zip(buffers, sizes, strict=True) if b.first <= start <= b.last)
        if alive > total:
            total, op = alive, start
    live = {b.name: size for b, size in zip(buffers, sizes, strict=True) if b.first <= op <= b.last and size}
    return OraclePeak(total, op, live, counts)


def oracle_bytes(buffers: Sequence[LiveBuffer], observed: Sequence[Counts], *, alignment: int = 1) -> OraclePeak:
    """The peak of the largest batch among `observed` count vectors: the batch that needs most, which no single count
    decides.

    Raises ZgError when nothing was observed.
    """
    if not observed:
        raise ZgError("a memory oracle without observed batches", advice="pass the counts of some 2,000 batches")
    return max((live_peak(buffers, counts, alignment=alignment) for counts in observed), key=lambda peak: peak.bytes)


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes above what was held before the call. A CUDA Graph's pool stays `reserved` after its tensors are no longer
    `allocated`.

    `allocated` is the peak of live tensors, `reserved` the peak of torch's segments, `device` what the driver lost
    until the end, which alone sees memory taken outside torch (and that of other processes).
    """

    allocated: int
    reserved: int
    device: int


def measured_bytes(fn: Callable[[], object], *, device: torch.device | int | None = None) -> MeasuredMemory:
    """Runs `fn()` once and reports its peaks on a CUDA device. Raises ZgError without one."""
    if not torch.cuda.is_available():
        raise ZgError("torch counts memory on a CUDA device only", advice="run the measurement on a GPU")
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    fn()
    torch.cuda.synchronize(device)
    return MeasuredMemory(
        torch.cuda.max_memory_allocated(device) - allocated,
        torch.cuda.max_memory_reserved(device) - reserved,
        free - torch.cuda.mem_get_info(device)[0],
    )
