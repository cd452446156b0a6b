from __future__ import annotations

import pytest
import torch

from zgcompile.bench.memory_oracle import LiveBuffer, live_peak, measured_bytes, oracle_bytes
from zgcompile.bench.sage import batch_counts, exact_buffers
from zgcompile.bench.synthetic import SMALL, power_law
from zgcompile.errors import ZgError

# op        0  1  2  3
# ids       x  x
# rows         x  x
# grad            x  x     and 100 bytes of state throughout
HAND = [
    LiveBuffer("ids", lambda c: 4 * c["n"], 0, 1),
    LiveBuffer("rows", lambda c: 10 * c["e"], 1, 2),
    LiveBuffer("grad", lambda c: 20 * c["e"], 2, 3),
    LiveBuffer("state", lambda c: 100, 0, 3),
]


def test_peak_of_a_hand_case():
    peak = live_peak(HAND, {"n": 50, "e": 2})
    assert (peak.bytes, peak.op, dict(peak.live)) == (320, 1, {"ids": 200, "rows": 20, "state": 100})
    peak = live_peak(HAND, {"n": 5, "e": 20})
    assert (peak.bytes, peak.op, dict(peak.live)) == (700, 2, {"rows": 200, "grad": 400, "state": 100})


def test_a_buffer_is_alive_at_its_last_op():
    buffers = [
        LiveBuffer("a", lambda c: 8, 0, 1),
        LiveBuffer("b", lambda c: 8, 1, 1),
        LiveBuffer("c", lambda c: 9, 2, 2),
    ]
    assert live_peak(buffers, {}).bytes == 16


def test_the_largest_batch_is_the_one_that_needs_most():
    observed = [{"n": 50, "e": 2}, {"n": 5, "e": 20}, {"n": 60, "e": 1}]
    peak = oracle_bytes(HAND, observed)
    assert peak.bytes == 700
    assert peak.counts == {"n": 5, "e": 20}


def test_alignment_rounds_each_buffer_up():
    assert live_peak(HAND, {"n": 1, "e": 0}, alignment=512).bytes == 1024
    assert live_peak(HAND, {"n": 129, "e": 0}, alignment=512).bytes == 1024 + 512


def test_impossible_inputs_are_refused():
    with pytest.raises(ValueError, match="before op 3 writes it"):
        LiveBuffer("x", lambda c: 1, 3, 2)
    with pytest.raises(ZgError, match="without observed batches"):
        oracle_bytes(HAND, [])
    assert live_peak([], {}).bytes == 0


def test_sage_buffers_by_hand():
    counts = {"nodes0": 10, "nodes1": 5, "nodes2": 2, "edges1": 12, "edges2": 6}
    peak = live_peak(exact_buffers((4, 3, 2)), counts)
    # Parameters: 2 x 4 x 3 + 3 and 2 x 3 x 2 + 2 floats. The peak is the backward pass of layer 2.
    adam = 2 * 4 * (27 + 14)
    layer2 = (
        2 * 2 * 4 + 2 * 4 + 2 * 4 + 6 * 4 + 2 * (2 * 3 * 4) + 2 * 3 * 4 + 14 * 4
    )  # logits, edges, inputs, their gradient
    layer1 = 2 * (5 * 4 * 4) + 5 * 3 + 5 * 3 * 4  # inputs, mask, gradient of the hidden rows
    assert (peak.op, peak.bytes) == (5, adam + layer2 + layer1)


def test_batch_counts_of_a_full_neighbourhood():
    graph = power_law(SMALL)
    seeds = torch.tensor([3, 77, 1500])
    counts = batch_counts(graph, seeds, [10_000])
    neighbours = [graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist() for v in seeds.tolist()]
    assert counts["nodes1"] == 3
    assert counts["edges1"] == sum(map(len, neighbours))
    assert counts["nodes0"] == len({*seeds.tolist(), *(v for row in neighbours for v in row)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_measuring_needs_cuda():
    with pytest.raises(ZgError, match="CUDA device"):
        measured_bytes(lambda: None)


@pytest.mark.gpu
def test_measured_peak_counts_what_is_freed_again_and_not_what_was_there():
    kept = torch.zeros(1 << 20, device="cuda")
    memory = measured_bytes(lambda: torch.zeros(3 << 20, dtype=torch.uint8, device="cuda").fill_(1))
    assert 3 << 20 <= memory.allocated < (3 << 20) + 4096
    assert memory.reserved >= 0
    assert kept.numel() == 1 << 20
