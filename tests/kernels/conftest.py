"""What the kernel tests share: devices, counts, poisons, and the capture of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def poisoned() -> Callable[[np.ndarray, int, int], np.ndarray]:
    """`poisoned(rows, n, which)`: a copy whose rows from `n` on hold the dtype's worst values, of two kinds."""

    def poison(rows: np.ndarray, n: int, which: int) -> np.ndarray:
        rows = rows.copy()
        if rows.dtype == np.bool_:
            rows[n:] = which == 0
        elif rows.dtype.kind == "f":
            rows[n:] = (np.nan, np.finfo(rows.dtype).max)[which]
        elif rows.dtype == np.int64:
            rows[n:] = (2**40, -7_000_000_000)[which]
        else:
            rows[n:] = (np.iinfo(rows.dtype).max, np.iinfo(rows.dtype).min)[which]
        return rows

    return poison


@pytest.fixture
def replay() -> Callable[..., list[Any]]:
    """`replay(call, batches)`: captures `call` once over buffers, then refills them with each batch and replays.

    The buffers hold the first batch while capturing. A launch on any stream but the capturing one is not in the CUDA
    Graph, and the second batch shows it.
    """

    def run(call: Callable[..., Any], batches: list[list[Tensor]]) -> list[Any]:
        buffers = [tensor.clone() for tensor in batches[0]]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(*buffers)
        torch.cuda.current_stream().wait_stream(stream)
        cuda_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cuda_graph, stream=stream):
            outputs = call(*buffers)
        results = []
        for batch in batches:
            for buffer, tensor in zip(buffers, batch, strict=True):
                buffer.copy_(tensor)
            cuda_graph.replay()
            results.append(torch.utils._pytree.tree_map(torch.clone, outputs))
        torch.cuda.synchronize()
        return results

    return run
