"""zgcompile::pack_bits and unpack_bits: flags as single bits, for what the forward pass leaves to the backward pass.

pack_bits: flags bool of any shape, L elements -> uint8 [2 * ceil(L / 16)]; element i, counted over the shape with the
last dimension fastest, is bit i % 8 (0 the lowest) of byte i // 8, and the bits behind the last element are 0.
unpack_bits: bits as above, size -> bool of `size`. It has no kernel of its own: Inductor inlines it into its reader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from zgcompile.kernels._define import LIBRARY, define, require

BITS = 8
GRAIN = 16  # flags that one thread packs


def packed_bytes(length: int) -> int:
    """Bytes that hold `length` bits."""
    return -(-length // GRAIN) * (GRAIN // BITS)


def _check(flags: Tensor) -> None:
    require(flags.dtype == torch.bool, f"zgcompile::pack_bits: flags must be bool, not {flags.dtype}")


def _fake(flags: Tensor) -> Tensor:
    return flags.new_empty(packed_bytes(flags.numel()), dtype=torch.uint8)


def reference(flags: Tensor) -> Tensor:
    """pack_bits in ATen calls."""
    flat = flags.reshape(-1).to(torch.uint8)
    flat = torch.nn.functional.pad(flat, [0, packed_bytes(flat.shape[0]) * BITS - flat.shape[0]])
    places = torch.arange(BITS, dtype=torch.uint8, device=flags.device)
    return (flat.view(-1, BITS) << places).sum(1, dtype=torch.uint8)


def _launch(native: ModuleType, stream: int, flags: Tensor) -> Tensor:
    flags = flags.contiguous()
    bits = _fake(flags)
    native.pack_bits(flags.data_ptr(), flags.numel(), bits.data_ptr(), stream)
    return bits


define(
    "pack_bits(Tensor flags) -> Tensor",
    check=_check,
    fake=_fake,
    reference=reference,
    launch=_launch,
    kernels=("zg_pack_bits",),
)


def _check_unpack(bits: Tensor, size: Sequence[int]) -> None:
    require(
        bits.dtype == torch.uint8 and bits.ndim == 1 and bits.shape[0] == packed_bytes(math.prod(size)),
        f"zgcompile::unpack_bits: bits must be uint8 [{packed_bytes(math.prod(size))}] for a size of {list(size)}",
    )


def _fake_unpack(bits: Tensor, size: Sequence[int]) -> Tensor:
    _check_unpack(bits, size)
    return bits.new_empty(size, dtype=torch.bool)


def unpack_reference(bits: Tensor, size: Sequence[int]) -> Tensor:
    """unpack_bits in ATen calls."""
    _check_unpack(bits, size)
    places = torch.arange(BITS, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(1) >> places) & 1).bool().view(-1)[: math.prod(size)].view(size).clone()


LIBRARY.define("unpack_bits(Tensor bits, int[] size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("unpack_bits", unpack_reference, "CompositeExplicitAutograd")
torch.library.register_fake("zgcompile::unpack_bits", _fake_unpack, lib=LIBRARY)
