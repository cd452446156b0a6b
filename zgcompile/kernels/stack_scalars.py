"""zgcompile::stack_scalars, for the status of a step: `torch.stack` of 0-d tensors as one opaque op of an FX graph.

scalars: at least one 0-d int64 tensor, all on one device -> int64 [len(scalars)]. Inductor writes a stack of more than
a few pieces as a kernel a piece; it inlines this one as a single loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zgcompile.kernels._define import LIBRARY, require

if TYPE_CHECKING:
    from collections.abc import Sequence


def _check(scalars: Sequence[Tensor]) -> None:
    require(
        len(scalars) > 0 and all(s.ndim == 0 and s.dtype == torch.int64 for s in scalars),
        "zgcompile::stack_scalars: scalars must be at least one 0-d int64 tensor, and nothing else",
    )


def _fake(scalars: Sequence[Tensor]) -> Tensor:
    _check(scalars)
    return scalars[0].new_empty(len(scalars))


def _checked(scalars: Sequence[Tensor]) -> Tensor:
    _check(scalars)
    return torch.stack(list(scalars))


LIBRARY.define("stack_scalars(Tensor[] scalars) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("stack_scalars", _checked, "CompositeExplicitAutograd")
torch.library.register_fake("zgcompile::stack_scalars", _fake, lib=LIBRARY)
