"""zgcompile::publish: the status and the counts of a step, handed to the host in the middle of its CUDA Graph, and the
gate of everything that the step writes.

metadata int64 [k], launch int64 [2] = (launch id, address of a host-mapped record of 1 + k int64, or 0), checks in
[0, k] -> int64 [2], (launch id, 1 if the first `checks` words are all zero, otherwise 0).

On CUDA the record's k metadata words are written first and its word 0, the launch id, last: a host that sees the id
sees the rest (`_native.await_record`). Elsewhere no record is written, and the host reads `metadata` itself. The result
has to be an output of the FX graph, or in a step without state the op would be dead code.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from zgcompile.kernels._define import define, require


def _check(metadata: Tensor, launch: Tensor, checks: int) -> None:
    require(
        metadata.ndim == 1 and metadata.dtype == torch.int64, "zgcompile::publish: metadata must be a 1-d int64 tensor"
    )
    require(launch.shape == (2,) and launch.dtype == torch.int64, "zgcompile::publish: launch must be int64 [2]")
    require(
        launch.device == metadata.device,
        f"zgcompile::publish: launch is on {launch.device}, metadata on {metadata.device}",
    )
    require(
        0 <= checks <= metadata.shape[0],
        f"zgcompile::publish: checks must be in [0, {metadata.shape[0]}], the metadata's size, not {checks}",
    )


def _fake(metadata: Tensor, launch: Tensor, checks: int) -> Tensor:
    del metadata, checks
    return launch.new_empty(2)


def reference(metadata: Tensor, launch: Tensor, checks: int) -> Tensor:
    """The op in ATen calls: no record is written."""
    good = ~metadata[:checks].any()
    return torch.stack([launch[0], good.to(torch.int64)])


def _launch(native: ModuleType, stream: int, metadata: Tensor, launch: Tensor, checks: int) -> Tensor:
    metadata, launch = metadata.contiguous(), launch.contiguous()
    published = _fake(metadata, launch, checks)
    native.publish(metadata.data_ptr(), metadata.shape[0], checks, launch.data_ptr(), published.data_ptr(), stream)
    return published


define(
    "publish(Tensor metadata, Tensor launch, int checks) -> Tensor",
    check=_check,
    fake=_fake,
    reference=reference,
    launch=_launch,
    kernels=("zg_publish",),
)
