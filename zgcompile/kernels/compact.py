"""zgcompile::compact, for aten.nonzero of a 1-d mask: the positions of the True rows of a bounded mask.

flags bool [L], n 0-d int64, cap -> positions int64 [cap], count 0-d int64.
Positions ascend; rows past the count are 0. The count is the true one: above `cap` it reports an overflow, and the rows
that fit are right.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from zgcompile.kernels._define import define, require, require_count, require_size, valid_rows, workspace


def _check(flags: Tensor, n: Tensor, cap: int) -> None:
    require(flags.ndim == 1 and flags.dtype == torch.bool, "zgcompile::compact: flags must be a 1-d bool tensor")
    require_count("compact", "n", n, flags.device)
    require_size("compact", "cap", cap)


def _fake(flags: Tensor, n: Tensor, cap: int) -> tuple[Tensor, Tensor]:
    return n.new_empty(cap), n.new_empty(())


def reference(flags: Tensor, n: Tensor, cap: int) -> tuple[Tensor, Tensor]:
    """The op in ATen calls. Rows that are not kept, or do not fit, land in a dump row behind the output."""
    keep = flags & valid_rows(n, flags.shape[0])
    rank = keep.cumsum(0) - 1
    slot = torch.where(keep & (rank < cap), rank, cap)
    rows = torch.arange(flags.shape[0], device=flags.device)
    return n.new_zeros(cap + 1).scatter_(0, slot, rows)[:cap], keep.sum()


def _launch(native: ModuleType, stream: int, flags: Tensor, n: Tensor, cap: int) -> tuple[Tensor, Tensor]:
    flags = flags.contiguous()
    positions, count = _fake(flags, n, cap)
    length = flags.shape[0]
    scratch = workspace(native.compact_workspace(length), flags.device)
    native.compact(
        flags.data_ptr(),
        n.data_ptr(),
        length,
        cap,
        positions.data_ptr(),
        count.data_ptr(),
        scratch.data_ptr(),
        stream,
    )
    return positions, count


define(
    "compact(Tensor flags, Tensor n, int cap) -> (Tensor positions, Tensor count)",
    check=_check,
    fake=_fake,
    reference=reference,
    launch=_launch,
    kernels=("zg_compact_count", "zg_compact_emit"),
)
