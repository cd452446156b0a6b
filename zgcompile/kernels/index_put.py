"""zgcompile::index_put, for aten.index_put with one 1-d index and no accumulate: a copy with out[index[i]] = values[i].

self [R, ...], index int32 or int64 [L], values [L, ...] of self's dtype and trailing shape, n 0-d int64 -> [R, ...].
Only rows i < n are written. An index outside [0, R) is skipped: a negative one does not wrap. Which of two equal
indices wins is undefined, as in ATen.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from zgcompile.kernels._define import define, require, require_count, require_ids, valid_rows


def _check(self: Tensor, index: Tensor, values: Tensor, n: Tensor) -> None:
    require_ids("index_put", "index", index)
    shape = (index.shape[0], *self.shape[1:])
    require(
        self.ndim >= 1 and values.dtype == self.dtype and values.shape == shape,
        f"zgcompile::index_put: values must be {self.dtype} {shape}, not {values.dtype} {tuple(values.shape)}",
    )
    require(
        self.device == index.device == values.device,
        f"zgcompile::index_put: self is on {self.device}, index on {index.device}, values on {values.device}",
    )
    require_count("index_put", "n", n, self.device)


def _fake(self: Tensor, index: Tensor, values: Tensor, n: Tensor) -> Tensor:
    return self.new_empty(self.shape)


def reference(self: Tensor, index: Tensor, values: Tensor, n: Tensor) -> Tensor:
    """The op in ATen calls. A dump row behind the copy takes every row that must not count."""
    rows, index = self.shape[0], index.to(torch.int64)
    inside = valid_rows(n, index.shape[0]) & (index >= 0) & (index < rows)
    out = torch.cat([self, self.new_zeros((1, *self.shape[1:]))])
    return out.index_copy_(0, torch.where(inside, index, rows), values)[:rows]


def _launch(native: ModuleType, stream: int, self: Tensor, index: Tensor, values: Tensor, n: Tensor) -> Tensor:
    self, index, values = self.contiguous(), index.contiguous(), values.contiguous()
    out = _fake(self, index, values, n)
    native.index_put(
        self.data_ptr(),
        self.shape[0],
        index.data_ptr(),
        index.element_size(),
        values.data_ptr(),
        n.data_ptr(),
        index.shape[0],
        self.element_size() * self.shape[1:].numel(),
        out.data_ptr(),
        stream,
    )
    return out


define(
    "index_put(Tensor self, Tensor index, Tensor values, Tensor n) -> Tensor",
    check=_check,
    fake=_fake,
    reference=reference,
    launch=_launch,
    kernels=("zg_index_put_copy", "zg_index_put_rows"),
)
