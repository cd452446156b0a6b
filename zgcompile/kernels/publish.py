"""zgcompile::publish: the status and the counts of a step, handed to the host in the middle of its CUDA Graph.

metadata int64 [k], launch int64 [2] = (launch id, address of a host-mapped record of 1 + k int64, or 0) -> int64 [1],
the launch id.

On CUDA the record's k metadata words are written first and its word 0, the launch id, last: a host that sees the id
sees the rest (`_native.await_record`). Elsewhere the op only returns the id, and the host reads `metadata` itself. The
result has to be an output of the FX graph, or the op would be dead code.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from zgcompile.kernels._define import define, require


def _check(metadata: Tensor, launch: Tensor) -> None:
    require(
        metadata.ndim == 1 and metadata.dtype == torch.int64, "zgcompile::publish: metadata must be a 1-d int64 tensor"
    )
    require(launch.shape == (2,) and launch.dtype == torch.int64, "zgcompile::publish: launch must be int64 [2]")
    require(
        launch.device == metadata.device,
        f"zgcompile::publish: launch is on {launch.device}, metadata on {metadata.device}",
    )


def _fake(metadata: Tensor, launch: Tensor) -> Tensor:
    del metadata
    return launch.new_empty(1)


def reference(metadata: Tensor, launch: Tensor) -> Tensor:
    """The op in ATen calls: no record is written."""
    del metadata
    return launch[:1].clone()


def _launch(native: ModuleType, stream: int, metadata: Tensor, launch: Tensor) -> Tensor:
    metadata, launch = metadata.contiguous(), launch.contiguous()
    published = _fake(metadata, launch)
    native.publish(metadata.data_ptr(), metadata.shape[0], launch.data_ptr(), published.data_ptr(), stream)
    return published


define(
    "publish(Tensor metadata, Tensor launch) -> Tensor",
    check=_check,
    fake=_fake,
    reference=reference,
    launch=_launch,
    kernels=("zg_publish",),
)
