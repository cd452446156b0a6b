"""zgcompile::accumulate_mm: a matrix product added to another value, in that value's own buffer.

total [n, m], left [n, k], right [k, m] -> total + left @ right [n, m], as aten.addmm; floats of one dtype. It takes
cuBLAS's kernels and none of its own. In Inductor's code it is `accumulate_mm_`, which writes `total`: whoever makes a
node of the functional op sees to it that nothing else reads `total`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zgcompile.kernels._define import LIBRARY, require


def _check(total: Tensor, left: Tensor, right: Tensor) -> None:
    require(
        left.ndim == right.ndim == 2
        and left.shape[1] == right.shape[0]
        and total.shape == (left.shape[0], right.shape[1])
        and total.dtype == left.dtype == right.dtype,
        f"zgcompile::accumulate_mm: {list(left.shape)} @ {list(right.shape)} into {list(total.shape)}",
    )


def reference(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The op in ATen calls."""
    _check(total, left, right)
    return torch.addmm(total, left, right)


def _fake(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    _check(total, left, right)
    return torch.empty_like(total)


def _in_place(total: Tensor, left: Tensor, right: Tensor) -> None:
    _check(total, left, right)
    total.addmm_(left, right)


LIBRARY.define("accumulate_mm(Tensor total, Tensor left, Tensor right) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("accumulate_mm", reference, "CompositeExplicitAutograd")
torch.library.register_fake("zgcompile::accumulate_mm", _fake, lib=LIBRARY)

LIBRARY.define("accumulate_mm_(Tensor(a!) total, Tensor left, Tensor right) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("accumulate_mm_", _in_place, "CompositeExplicitAutograd")
torch.library.register_fake("zgcompile::accumulate_mm_", _check, lib=LIBRARY)
