"""One way to register an op: schema, argument check, fake, torch reference and CUDA launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zgcompile.errors import BadInput, InternalError
from zgcompile.kernels._load import native

# Holds the registrations: they are undone when this object goes.
LIBRARY = torch.library.Library("zgcompile", "FRAGMENT")
# Op name -> the CUDA __global__ functions of one call in launch order, one entry a launch.
KERNELS: dict[str, tuple[str, ...]] = {}


def define(
    schema: str,
    *,
    check: Callable[..., None],
    fake: Callable[..., Any],
    reference: Callable[..., Any],
    launch: Callable[..., Any],
    kernels: tuple[str, ...],
) -> None:
    """Registers `zgcompile::<name of schema>`.

    `check` sees the arguments of every call, real or fake, and raises BadInput. `fake` allocates the outputs.
    `reference` is written in ATen calls that read nothing back to the host: it runs on the CPU, and on CUDA without
    `_native`. `launch(native, stream, *arguments)` calls the CUDA launcher on the current stream of the arguments'
    device. The op is functional: outputs are fresh, inputs untouched.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def checked_fake(*arguments: Any) -> Any:
        check(*arguments)
        return fake(*arguments)

    def on_cpu(*arguments: Any) -> Any:
        check(*arguments)
        return reference(*arguments)

    def on_cuda(*arguments: Any) -> Any:
        module = native()
        if module is None:
            return on_cpu(*arguments)
        check(*arguments)
        device = _device(arguments)
        with torch.cuda.device(device):
            try:
                return launch(module, torch.cuda.current_stream(device).cuda_stream, *arguments)
            except module.LaunchError as error:
                raise InternalError(f"zgcompile::{name}: {error}") from error

    torch.library.register_fake(f"zgcompile::{name}", checked_fake, lib=LIBRARY)
    LIBRARY.impl(name, on_cpu, "CPU")
    LIBRARY.impl(name, on_cuda, "CUDA")
    KERNELS[name] = kernels


def require(condition: bool, what: str) -> None:
    """Raises BadInput(what) unless `condition` holds."""
    if not condition:
        raise BadInput(what)


def require_count(op: str, name: str, count: Tensor, device: torch.device) -> None:
    """Raises BadInput unless `count` is a 0-d int64 tensor on `device`."""
    require(count.ndim == 0 and count.dtype == torch.int64, f"zgcompile::{op}: {name} must be a 0-d int64 tensor")
    require(count.device == device, f"zgcompile::{op}: {name} is on {count.device}, the data on {device}")


def require_ids(op: str, name: str, ids: Tensor) -> None:
    """Raises BadInput unless `ids` is a 1-d int32 or int64 tensor."""
    require(
        ids.ndim == 1 and ids.dtype in (torch.int32, torch.int64),
        f"zgcompile::{op}: {name} must be a 1-d int32 or int64 tensor, not {ids.dtype} of rank {ids.ndim}",
    )


def require_size(op: str, name: str, size: int) -> None:
    """Raises BadInput unless `size` is at least 0."""
    require(size >= 0, f"zgcompile::{op}: {name} must be at least 0, not {size}")


def valid_rows(n: Tensor, length: int) -> Tensor:
    """bool [length]: the first `n` rows. Any `n` is safe: above `length` (as after an overflow), or negative."""
    return torch.arange(length, device=n.device) < n


def workspace(size: int, device: torch.device) -> Tensor:
    """Uninitialised scratch of `size` bytes; aligned to 256 bytes by the allocator, where the kernels need 16."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def _device(arguments: tuple[Any, ...]) -> torch.device:
    for argument in arguments:
        first = argument[0] if isinstance(argument, (list, tuple)) else argument
        if isinstance(first, Tensor):
            return first.device
    raise InternalError("an op of zgcompile was called without a tensor")
