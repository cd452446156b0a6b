"""zgcompile::keyed_bits, for every random ATen op: `zgcompile.keyed_numbers` as one opaque op of an FX graph.

key 0-d int64, ordinal, size -> int64 of `size` on the key's device. Inductor inlines the arithmetic, so a draw fuses
into its consumer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zgcompile.kernels._define import LIBRARY, require
from zgcompile.keyed_numbers import keyed_bits_reference

if TYPE_CHECKING:
    from collections.abc import Sequence


def _check(key: Tensor) -> None:
    require(key.ndim == 0 and key.dtype == torch.int64, "zgcompile::keyed_bits: key must be a 0-d int64 tensor")


def _fake(key: Tensor, ordinal: int, size: Sequence[int]) -> Tensor:
    _check(key)
    return key.new_empty(size)


def _checked(key: Tensor, ordinal: int, size: Sequence[int]) -> Tensor:
    _check(key)
    return keyed_bits_reference(key, ordinal, size)


LIBRARY.define("keyed_bits(Tensor key, int ordinal, SymInt[] size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("keyed_bits", _checked, "CompositeExplicitAutograd")
torch.library.register_fake("zgcompile::keyed_bits", _fake, lib=LIBRARY)
