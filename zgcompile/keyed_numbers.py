"""Keyed random numbers: 64 bits an element from (step key, op ordinal, logical index), and the conversions from bits.

Counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) on the finaliser of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), all modulo 2**64:

    stream  = finalise(key + (ordinal + 1) * GOLDEN)
    element = finalise(stream + i0 * dimension_stride(0) + i1 * dimension_stride(1) + ...)

The shape of the buffer does not enter, so padding any dimension changes no number of a logical index. Everything is
wrapping int64 arithmetic, so that Inductor fuses a draw into its consumer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zgcompile.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFT = (30, 27, 31)
_WORD = 1 << 64
_INT64_MAX = (1 << 63) - 1
# Bits of a uniform number: as many as the significand holds, so that no value rounds up to 1.
_SIGNIFICAND = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def step_key(seed: int, offset: int) -> int:
    """The key of a step, in int64's range. For a fixed seed it is a bijection of the offset (both modulo 2**64)."""
    return _signed(_finalise_int(_finalise_int(seed + GOLDEN) + offset * GOLDEN))


def dimension_stride(dimension: int) -> int:
    """The odd multiplier of the index of `dimension`, counted from the front, in int64's range."""
    return _signed(_finalise_int((dimension + 1) * GOLDEN) | 1)


def element_bits(key: Any, ordinal: int, indices: Sequence[Any]) -> Any:
    """The 64 bits at `indices`, one a dimension: int64 tensors that broadcast, or whatever else has + * ^ & and >>."""
    bits = _finalise(key + _signed((ordinal + 1) * GOLDEN))
    for dimension, index in enumerate(indices):
        bits = bits + index * dimension_stride(dimension)
    return _finalise(bits)


def keyed_bits_reference(key: Tensor, ordinal: int, size: Sequence[int]) -> Tensor:
    """zgcompile::keyed_bits in ATen calls: key int64 [] -> int64 `size` on the key's device, all 64 bits random."""
    indices = [
        torch.arange(length, dtype=torch.int64, device=key.device).view(length, *[1] * (len(size) - 1 - dimension))
        for dimension, length in enumerate(size)
    ]
    return element_bits(key, ordinal, indices)


def uniform_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform on the multiples of 2**-b in [0, 1): b = 53, 24, 11, 8 for float64, float32, float16, bfloat16."""
    width = _width(dtype)
    return _top(bits, width).to(dtype) * 2.0**-width


def bernoulli_from_bits(bits: Tensor, p: float | Tensor) -> Tensor:
    """bool: the float64 uniform of the bits is below p, so True with probability p to 2**-53, and exactly at 0 and 1.

    A number, a symbolic number and a tensor (which broadcasts) that hold the same p decide alike. BadInput: a number
    outside [0, 1]; a tensor is not read.
    """
    if isinstance(p, (int, float)):
        if not 0 <= p <= 1:
            raise BadInput(f"a probability must be in [0, 1], not {p}")
        # u < p with u = k / 2**53 is k < p * 2**53, an exact product: no floating point on the device.
        return _top(bits, 53) < math.ceil(p * 2.0**53)
    return uniform_from_bits(bits, torch.float64) < (p.to(torch.float64) if isinstance(p, Tensor) else p)


def normal_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal, always finite.

    float64: inverse CDF of an odd multiple of 2**-53, exact in float64; |z| <= 8.3. Otherwise float32 Box-Muller with
    40 bits of radius and 24 of angle, |z| <= 7.5: an inverse CDF from 24 bits would thin out above 5.
    """
    if dtype == torch.float64:
        odd = (bits >> 10) | 1
        return torch.erfinv(odd.to(dtype) * 2.0**-53) * 2.0**0.5
    _width(dtype)
    radius = torch.sqrt(-2.0 * torch.log((_top(bits, 40) + 1).to(torch.float32) * 2.0**-40))
    # The sine of half a turn covers each value once, and a small result keeps its relative accuracy.
    angle = ((bits << 40) >> 40).to(torch.float32) * (torch.pi * 2.0**-24)
    return (radius * torch.sin(angle)).to(dtype)


def exponential_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponential of rate 1, in [eps / 2, 36.8] with the eps of float64, or of float32 for every other dtype."""
    _width(dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    uniform = (_top(bits, 53) + 1).to(compute) * 2.0**-53
    # Never 0, the logarithm of which callers take.
    return -torch.log(uniform.clamp(max=1 - torch.finfo(compute).eps / 2)).to(dtype)


def integers_from_bits(bits: Tensor, low: int | Tensor, high: int | Tensor) -> Tensor:
    """int64, uniform on [low, high), which may span all of int64; the bias is at most (high - low) / 2**63.

    The bounds are numbers, symbolic numbers or 0-d int64 tensors. BadInput: numbers with low >= high; where a bound is
    not known an empty range gives low.
    """
    if isinstance(low, int) and isinstance(high, int):
        span = high - low
        if span <= 0:
            raise BadInput(f"a random integer needs low < high, not low={low}, high={high}")
        if span == _WORD:
            return bits
        if span > _INT64_MAX:
            # bits mod span, both unsigned: at most one subtraction.
            below = (bits >= 0) | (bits < span - _WORD)
            return torch.where(below, bits, bits - _signed(span)) + low
        return torch.remainder(bits & _INT64_MAX, span) + low
    first = _as_tensor(low, bits)
    return torch.remainder(bits & _INT64_MAX, (_as_tensor(high, bits) - first).clamp(min=1)) + first


def _as_tensor(bound: int | Tensor, like: Tensor) -> Tensor:
    return bound if isinstance(bound, Tensor) else torch.full((), bound, dtype=torch.int64, device=like.device)


def _width(dtype: torch.dtype) -> int:
    if dtype not in _SIGNIFICAND:
        raise BadInput(f"no random numbers of dtype {dtype}", advice="draw float32 and convert")
    return _SIGNIFICAND[dtype]


def _top(bits: Tensor, width: int) -> Tensor:
    return (bits >> (64 - width)) & ((1 << width) - 1)


def _finalise(z: Any) -> Any:
    # int64 >> copies the sign; the mask makes the shift logical.
    for shift, multiplier in zip(_SHIFT, (*_MULTIPLY, None), strict=True):
        z = z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))
        if multiplier is not None:
            z = z * _signed(multiplier)
    return z


def _finalise_int(z: int) -> int:
    z %= _WORD
    z = (z ^ (z >> _SHIFT[0])) * _MULTIPLY[0] % _WORD
    z = (z ^ (z >> _SHIFT[1])) * _MULTIPLY[1] % _WORD
    return z ^ (z >> _SHIFT[2])


def _signed(word: int) -> int:
    return (word + (1 << 63)) % _WORD - (1 << 63)
