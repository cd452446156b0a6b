"""zgcompile::index_add, for aten.index_add of rows into zeros: out[index[i]] += source[i] for i < n.

index int32 or int64 [L], source [L, ...] of a dtype in DTYPES, n 0-d int64, rows -> [rows, ...].
Valid rows whose index lies outside [0, rows) are skipped; pads may hold anything, NaN included. On CUDA the sums are
atomic: integers are exact, floats are rounded in an order that differs from run to run, as ATen's are.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from zgcompile.kernels._define import define, require, require_count, require_ids, require_size, valid_rows

# The order is that of the dtype codes in csrc/index_add.cu.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)


def _check(index: Tensor, source: Tensor, n: Tensor, rows: int) -> None:
    require_ids("index_add", "index", index)
    require(source.dtype in DTYPES, f"zgcompile::index_add: no sum of {source.dtype} rows")
    require(
        source.ndim >= 1 and source.shape[0] == index.shape[0],
        f"zgcompile::index_add: source {tuple(source.shape)} needs one row for each of the {index.shape[0]} indices",
    )
    on = f"source is on {source.device}, index on {index.device}"
    require(source.device == index.device, f"zgcompile::index_add: {on}")
    require_count("index_add", "n", n, index.device)
    require_size("index_add", "rows", rows)


def _fake(index: Tensor, source: Tensor, n: Tensor, rows: int) -> Tensor:
    return source.new_empty((rows, *source.shape[1:]))


def reference(index: Tensor, source: Tensor, n: Tensor, rows: int) -> Tensor:
    """The op in ATen calls. A dump row behind the output takes every row that must not count."""
    index = index.to(torch.int64)
    inside = valid_rows(n, index.shape[0]) & (index >= 0) & (index < rows)
    out = source.new_zeros((rows + 1, *source.shape[1:]))
    return out.index_add_(0, torch.where(inside, index, rows), source)[:rows]


def _launch(native: ModuleType, stream: int, index: Tensor, source: Tensor, n: Tensor, rows: int) -> Tensor:
    index, source = index.contiguous(), source.contiguous()
    out = _fake(index, source, n, rows)
    native.index_add(
        index.data_ptr(),
        index.element_size(),
        source.data_ptr(),
        DTYPES.index(source.dtype),
        n.data_ptr(),
        index.shape[0],
        rows,
        source.shape[1:].numel(),
        out.data_ptr(),
        stream,
    )
    return out


define(
    "index_add(Tensor index, Tensor source, Tensor n, int rows) -> Tensor",
    check=_check,
    fake=_fake,
    reference=reference,
    launch=_launch,
    kernels=("zg_index_add_clear", "zg_index_add_rows"),
)
