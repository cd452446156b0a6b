"""The memory of a captured step: a tight pool whose contents between launches do not matter."""

from __future__ import annotations

import copy

import pytest
import torch

import zgcompile
from zgcompile.backend.tight_pool import GRAIN, capture, pool_segments
from zgcompile.bench.sage import SAGE, make_step, sample_blocks
from zgcompile.bench.synthetic import Shape, power_law
from zgcompile.testing import injected_draws

pytestmark = pytest.mark.gpu
SHAPE = Shape(3000, 60_000, 32, 7)
DIMS, FANOUTS = (32, 48, 7), (10, 5)


class Raw:
    """Bytes at an address, as the CUDA array interface describes them."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def fill(segments, byte):
    for segment in segments:
        torch.as_tensor(Raw(segment["address"], segment["total_size"]), device="cuda").fill_(byte)
    torch.cuda.synchronize()


def eager_losses(eager, seeds):
    """The losses of an untouched step under injected draws; the generator is then as it was before."""
    losses = []
    torch.manual_seed(5)
    for batch in seeds:
        with injected_draws(device="cuda"):
            losses.append(float(eager(batch)))
    torch.manual_seed(5)
    return losses


def batches(lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(SHAPE.nodes, generator=generator)[:n].cuda() for n in lengths]


@pytest.fixture(scope="module")
def input_graph():
    return power_law(SHAPE, device="cuda")


def counting_step(input_graph, visits):
    """Integers only: how often each node was sampled, and a checksum of the ids."""

    def step(seeds):
        nodes, blocks = sample_blocks(input_graph, seeds, FANOUTS)
        visits.index_add_(0, nodes, torch.ones_like(nodes))
        return nodes.sum(), blocks[0][0].sum()

    return step


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x41])
def test_integers_do_not_depend_on_what_the_pool_holds(input_graph, byte):
    seeds = batches([64] * 4 + [40, 17, 1, 64, 2, 64])
    expected, visits = [], torch.zeros(SHAPE.nodes, dtype=torch.int64, device="cuda")
    eager, twin = counting_step(input_graph, visits), torch.zeros_like(visits)
    torch.manual_seed(5)
    for batch in seeds:
        with injected_draws(device="cuda"):
            expected.append([int(v) for v in eager(batch)])
    step = zgcompile.compile(counting_step(input_graph, twin))
    torch.manual_seed(5)
    for batch, want in zip(seeds, expected, strict=True):
        for specialisation in step.specialisations:
            if specialisation.replay is not None:
                fill(pool_segments(specialisation.replay.graph), byte)
        assert [int(v) for v in step(batch)] == want
    assert torch.equal(visits, twin)
    assert step.stats.replays == len(seeds) - 3


@pytest.mark.parametrize("byte", [0xFF, 0x7F])
def test_training_does_not_depend_on_what_the_pool_holds(input_graph, byte):
    torch.manual_seed(0)
    model = SAGE(DIMS).cuda()
    twin = copy.deepcopy(model)
    eager = make_step(model, torch.optim.Adam(model.parameters(), lr=1e-2), input_graph, FANOUTS)
    step = zgcompile.compile(
        make_step(twin, torch.optim.Adam(twin.parameters(), lr=1e-2), input_graph, FANOUTS), warmup=2
    )
    seeds = batches([64, 64, 64, 40, 17, 1, 64, 2, 64, 64])
    expected, losses = eager_losses(eager, seeds), []
    for batch in seeds:
        if step.stats.captures:
            fill(pool_segments(step.specialisations[0].replay.graph), byte)
        losses.append(float(step(batch)))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert step.stats.replays == len(seeds) - 2


def test_the_pool_is_the_peak_of_what_lives_in_it():
    """Five buffers of 9 MiB, of which two live at a time: at most 18 MiB and a grain, not five segments of 20."""
    source = torch.randn(9 << 18, device="cuda")

    def chain():
        value = source
        for _ in range(5):
            value = torch.sin(value)
        return value.sum()

    graph, result = capture(chain, source.device)
    graph.replay()
    expected = source.sin().sin().sin().sin().sin().sum()
    assert torch.allclose(result, expected)
    large = [s["total_size"] for s in pool_segments(graph) if s["segment_type"] == "large"]
    assert sum(large) <= (18 << 20) + GRAIN


def test_calls_from_several_streams_run_in_order(input_graph):
    """The static buffers serve one launch at a time, whatever the stream; a slow kernel in front makes a race show."""
    torch.manual_seed(0)
    model = SAGE(DIMS).cuda()
    twin = copy.deepcopy(model)
    eager = make_step(model, torch.optim.SGD(model.parameters(), lr=1e-2), input_graph, FANOUTS)
    step = zgcompile.compile(
        make_step(twin, torch.optim.SGD(twin.parameters(), lr=1e-2), input_graph, FANOUTS), warmup=2
    )
    seeds = batches([64] * 24)
    expected, losses = eager_losses(eager, seeds), []
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for i, batch in enumerate(seeds):
        with torch.cuda.stream(streams[i % 2]):
            torch.cuda._sleep(2_000_000)
            losses.append(step(batch))
    torch.cuda.synchronize()
    assert [float(loss) for loss in losses] == pytest.approx(expected, rel=1e-4)
