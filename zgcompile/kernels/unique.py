"""zgcompile::unique, for aten._unique2 and aten.unique_dim of ids below a known bound: sorted unique without a sort.

ids int32 or int64 [L], n 0-d int64, bound, cap, need_counts ->
  values [cap] in the dtype of ids, ascending;
  inverse int64 [L], clamped into [0, cap);
  counts int64 [cap], or [0] unless need_counts;
  count 0-d int64, the true number: above `cap` it reports an overflow, and the rows that fit are right;
  in_bound 0-d bool: every valid id lay in [0, bound).
Pads of all outputs are 0. Ids outside [0, bound) are skipped: their inverse is 0.

On CUDA a bitmap of `bound` bits is marked with atomicOr, one scan of the popcounts gives each word its rank, and the
rank of an id is the rank of its word plus the popcount below its bit: 8 bytes of scratch for 32 ids of the bound, and
no difference from run to run.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from zgcompile.kernels._define import define, require_count, require_ids, require_size, valid_rows, workspace

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _check(ids: Tensor, n: Tensor, bound: int, cap: int, need_counts: bool = True) -> None:
    require_ids("unique", "ids", ids)
    require_count("unique", "n", n, ids.device)
    require_size("unique", "bound", bound)
    require_size("unique", "cap", cap)


def _fake(ids: Tensor, n: Tensor, bound: int, cap: int, need_counts: bool = True) -> Outputs:
    counts = n.new_empty(cap if need_counts else 0)
    return ids.new_empty(cap), n.new_empty(ids.shape[0]), counts, n.new_empty(()), n.new_empty((), dtype=torch.bool)


def reference(ids: Tensor, n: Tensor, bound: int, cap: int, need_counts: bool = True) -> Outputs:
    """The op in ATen calls, by a sort, so that it costs the same at any bound. A dump row takes what does not fit."""
    valid, wide = valid_rows(n, ids.shape[0]), ids.to(torch.int64)
    inside = valid & (wide >= 0) & (wide < bound)
    key, order = torch.where(inside, wide, bound).sort()
    known = key < bound
    first = known & torch.cat([known[:1], key[1:] != key[:-1]])
    rank = first.cumsum(0) - 1
    fits = rank < cap
    values = ids.new_zeros(cap + 1).scatter_(0, torch.where(first & fits, rank, cap), key.to(ids.dtype))[:cap]
    inverse = torch.empty_like(rank).scatter_(0, order, torch.where(known, rank.clamp(max=max(cap - 1, 0)), 0))
    counts = n.new_zeros(cap + 1 if need_counts else 0)
    if need_counts:
        counts = counts.scatter_add_(0, torch.where(known & fits, rank, cap), known.to(torch.int64))[:cap]
    return values, inverse, counts, first.sum(), (inside == valid).all()


def _launch(
    native: ModuleType, stream: int, ids: Tensor, n: Tensor, bound: int, cap: int, need_counts: bool = True
) -> Outputs:
    ids = ids.contiguous()
    outputs = values, inverse, counts, count, in_bound = _fake(ids, n, bound, cap, need_counts)
    scratch = workspace(native.unique_workspace(bound), ids.device)
    native.unique(
        ids.data_ptr(),
        ids.element_size(),
        n.data_ptr(),
        ids.shape[0],
        bound,
        cap,
        need_counts,
        values.data_ptr(),
        inverse.data_ptr(),
        counts.data_ptr(),
        count.data_ptr(),
        in_bound.data_ptr(),
        scratch.data_ptr(),
        stream,
    )
    return outputs


define(
    "unique(Tensor ids, Tensor n, int bound, int cap, bool need_counts=True)"
    " -> (Tensor values, Tensor inverse, Tensor counts, Tensor count, Tensor in_bound)",
    check=_check,
    fake=_fake,
    reference=reference,
    launch=_launch,
    kernels=("zg_unique_clear", "zg_unique_mark", "zg_unique_rank", "zg_unique_inverse"),
)
