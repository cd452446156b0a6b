"""Captures into a memory pool no larger than the step's own peak.

A CUDA Graph keeps the memory of its buffers for life. torch's allocator takes segments of 20 MiB for what is between 1
and 10 MiB, and a segment of its own for what is larger, so that a pool can be several times the peak of what lives in
it. One free block in the pool before the capture, from which all buffers are cut, avoids that; its size is found by
bisection over captures, which launch nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")
GRAIN = 2 << 20  # bytes: what the allocator rounds a large segment to


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of `device` on which steps are captured: cuBLAS keeps a workspace (32 MiB on Hopper) for each."""
    return torch.cuda.Stream(device)


def capture(body: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """`body` captured, with what it returned. It runs several times, always under capture; the last run counts."""
    graph, result = _captured(body, device, 0)
    most = _large_bytes(graph)
    enough, short = most, 0
    while enough - short > GRAIN:
        size = (short + enough) // 2 // GRAIN * GRAIN
        del graph, result  # their pool, before the next one is taken
        graph, result = _captured(body, device, size)
        if _large_bytes(graph) <= size:
            enough = size
        else:
            short = size
    if _large_bytes(graph) > enough:
        del graph, result
        graph, result = _captured(body, device, enough)
    return graph, result


def _captured(body: Callable[[], T], device: torch.device, size: int) -> tuple[torch.cuda.CUDAGraph, T]:
    """One capture, into a pool that starts with a free block of `size` bytes."""
    stream = capture_stream(device)
    graph, pool = torch.cuda.CUDAGraph(), None
    if size:
        first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, stream=stream, capture_error_mode="thread_local"):
            block = torch.empty(size, dtype=torch.uint8, device=device)
            torch.zeros(1, device=device)  # a CUDA Graph without a node draws a warning
            del block
        pool = first.pool()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = body()
    return graph, result


def _large_bytes(graph: torch.cuda.CUDAGraph) -> int:
    """Bytes of the segments that hold the buffers above 1 MiB."""
    return sum(s["total_size"] for s in pool_segments(graph) if s["segment_type"] == "large")


def pool_segments(graph: torch.cuda.CUDAGraph) -> list[dict[str, Any]]:
    """The allocator's segments in the pool of `graph`, as `torch.cuda.memory_snapshot` describes them."""
    pool = tuple(graph.pool())
    return [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool]
