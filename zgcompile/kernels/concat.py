"""zgcompile::concat, for aten.cat along dimension 0 of bounded tensors: the valid rows of the pieces, back to back.

pieces k tensors [L_j, ...] of one dtype and trailing shape, counts int64 [k], cap -> [cap, ...].
Piece j gives its rows [0, counts[j]), at most L_j. Rows past the sum are 0; rows past `cap` are dropped.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from zgcompile.kernels._define import define, require, require_size, valid_rows


def _check(pieces: list[Tensor], counts: Tensor, cap: int) -> None:
    require(len(pieces) > 0, "zgcompile::concat: needs at least one piece")
    require(
        counts.dtype == torch.int64 and counts.ndim == 1 and counts.shape[0] == len(pieces),
        f"zgcompile::concat: counts must be int64 [{len(pieces)}], one for each piece",
    )
    first = pieces[0]
    for j, piece in enumerate(pieces):
        require(
            piece.ndim >= 1 and piece.dtype == first.dtype and piece.shape[1:] == first.shape[1:],
            f"zgcompile::concat: piece {j} is {piece.dtype} {tuple(piece.shape)}, "
            f"piece 0 {first.dtype} {tuple(first.shape)}",
        )
        on = f"piece {j} is on {piece.device}, counts on {counts.device}"
        require(piece.device == counts.device, f"zgcompile::concat: {on}")
    require_size("concat", "cap", cap)


def _fake(pieces: list[Tensor], counts: Tensor, cap: int) -> Tensor:
    return pieces[0].new_empty((cap, *pieces[0].shape[1:]))


def reference(pieces: list[Tensor], counts: Tensor, cap: int) -> Tensor:
    """The op in ATen calls. A dump row behind the output takes pads and what does not fit."""
    out = pieces[0].new_zeros((cap + 1, *pieces[0].shape[1:]))
    offset = torch.zeros_like(counts[0])
    for piece, count in zip(pieces, counts.unbind(), strict=True):
        length = piece.shape[0]
        row = torch.arange(length, device=counts.device) + offset
        out.index_copy_(0, torch.where(valid_rows(count, length) & (row < cap), row, cap), piece)
        offset = offset + count.clamp(0, length)
    return out[:cap]


def _launch(native: ModuleType, stream: int, pieces: list[Tensor], counts: Tensor, cap: int) -> Tensor:
    limit = native.concat_limit()
    if len(pieces) > limit:  # more than one launch takes: a tree of calls
        groups = [slice(j, j + limit) for j in range(0, len(pieces), limit)]
        caps = [sum(piece.shape[0] for piece in pieces[g]) for g in groups]
        valid = torch.stack([counts[j].clamp(0, piece.shape[0]) for j, piece in enumerate(pieces)])
        joined = [_launch(native, stream, pieces[g], valid[g], size) for g, size in zip(groups, caps, strict=True)]
        return _launch(native, stream, joined, torch.stack([valid[g].sum() for g in groups]), cap)
    pieces = [piece.contiguous() for piece in pieces]
    counts = counts.contiguous()
    out = _fake(pieces, counts, cap)
    native.concat(
        [piece.data_ptr() for piece in pieces],
        [piece.shape[0] for piece in pieces],
        counts.data_ptr(),
        cap,
        out.element_size() * out.shape[1:].numel(),
        out.data_ptr(),
        stream,
    )
    return out


define(
    "concat(Tensor[] pieces, Tensor counts, int cap) -> Tensor",
    check=_check,
    fake=_fake,
    reference=reference,
    launch=_launch,
    kernels=("zg_concat",),
)
