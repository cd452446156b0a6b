"""The search for the size of a CUDA Graph's pool, against an allocator that is a few lines of Python."""

from __future__ import annotations

import weakref

import pytest
import torch

from zgcompile.backend import tight_pool
from zgcompile.backend.tight_pool import GRAIN, capture

MIB = 1 << 20
SEGMENT = 20 * MIB  # what torch's allocator takes for a buffer of 1 to 10 MiB


class Allocator:
    """`need` bytes are cut from the free block; what does not fit takes segments of its own."""

    def __init__(self, need):
        self.need, self.alive, self.most, self.captures = need, weakref.WeakSet(), 0, 0

    def captured(self, body, device, size):
        graph = type("Graph", (), {})()
        graph.large = size if size >= self.need else size + -(-(self.need - size) // SEGMENT) * SEGMENT
        self.alive.add(graph)
        self.most, self.captures = max(self.most, len(self.alive)), self.captures + 1
        return graph, body()


@pytest.mark.parametrize("need", [0, 1, GRAIN, 3 * MIB, SEGMENT, 29 * MIB + 5, 113 * MIB, 999 * MIB + 1])
def test_the_pool_is_the_peak_rounded_up(monkeypatch, need):
    allocator = Allocator(need)
    monkeypatch.setattr(tight_pool, "_captured", allocator.captured)
    monkeypatch.setattr(tight_pool, "_large_bytes", lambda graph: graph.large)
    graph, result = capture(lambda: "result", torch.device("cuda", 0))
    assert result == "result"
    assert need <= graph.large <= need + 2 * GRAIN
    assert allocator.most == 1, "two pools at a time"
    assert allocator.captures <= 2 + max(need // GRAIN + SEGMENT // GRAIN, 1).bit_length()
