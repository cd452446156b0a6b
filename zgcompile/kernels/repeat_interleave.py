"""zgcompile::repeat_interleave, for aten.repeat_interleave.Tensor: row i of a bounded count vector, repeats[i] times.

repeats int32 or int64 [L], n 0-d int64, cap -> index [cap] in the dtype of repeats (as ATen's), total 0-d int64.
Rows of index past the total are 0. The total is the true one: above `cap` it reports an overflow, and the rows that fit
are right. A negative repeat counts as 0 and makes the total -1, upon which the caller raises.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from zgcompile.kernels._define import define, require_count, require_ids, require_size, valid_rows, workspace


def _check(repeats: Tensor, n: Tensor, cap: int) -> None:
    require_ids("repeat_interleave", "repeats", repeats)
    require_count("repeat_interleave", "n", n, repeats.device)
    require_size("repeat_interleave", "cap", cap)


def _fake(repeats: Tensor, n: Tensor, cap: int) -> tuple[Tensor, Tensor]:
    return repeats.new_empty(cap), n.new_empty(())


def reference(repeats: Tensor, n: Tensor, cap: int) -> tuple[Tensor, Tensor]:
    """The op in ATen calls: output row r belongs to the first input row whose running sum exceeds r."""
    valid = torch.where(valid_rows(n, repeats.shape[0]), repeats, 0)
    ends = valid.clamp(min=0).cumsum(0, dtype=torch.int64)
    total = ends[-1] if repeats.shape[0] else torch.zeros_like(n)
    row = torch.arange(cap, device=repeats.device)
    index = torch.where(row < total, torch.searchsorted(ends, row, right=True), 0)
    return index.to(repeats.dtype), torch.where((valid < 0).any(), -1, total)


def _launch(native: ModuleType, stream: int, repeats: Tensor, n: Tensor, cap: int) -> tuple[Tensor, Tensor]:
    repeats = repeats.contiguous()
    index, total = _fake(repeats, n, cap)
    length = repeats.shape[0]
    scratch = workspace(native.repeat_interleave_workspace(length), repeats.device)
    native.repeat_interleave(
        repeats.data_ptr(),
        repeats.element_size(),
        n.data_ptr(),
        length,
        cap,
        index.data_ptr(),
        total.data_ptr(),
        scratch.data_ptr(),
        stream,
    )
    return index, total


define(
    "repeat_interleave(Tensor repeats, Tensor n, int cap) -> (Tensor index, Tensor total)",
    check=_check,
    fake=_fake,
    reference=reference,
    launch=_launch,
    kernels=("zg_repeat_interleave_sum", "zg_repeat_interleave_emit"),
)
