"""The ops of zgcompile, one a file: importing this package registers every schema, fake and torch reference."""

from __future__ import annotations

from zgcompile.kernels import (
    accumulate_mm,
    compact,
    concat,
    dynamic_rows,
    index_add,
    index_put,
    keyed_draw,
    pack_bits,
    publish,
    repeat_interleave,
    stack_scalars,
    unique,
)
from zgcompile.kernels._define import KERNELS
from zgcompile.kernels._load import native

__all__ = [
    "accumulate_mm",
    "compact",
    "concat",
    "dynamic_rows",
    "index_add",
    "index_put",
    "keyed_draw",
    "native",
    "pack_bits",
    "publish",
    "registered_kernels",
    "repeat_interleave",
    "stack_scalars",
    "unique",
]


def registered_kernels() -> dict[str, tuple[str, ...]]:
    """Op name -> the CUDA kernels that one call launches, in order, one entry a launch: for the audit of a trace.

    An entry is a substring of the kernel's name in a profiler trace. Two exceptions: an output without elements needs
    no launch of a kernel that would only fill it, and `concat` of more than 128 pieces launches once for each 128 and
    once to join them.
    """
    return dict(KERNELS)
