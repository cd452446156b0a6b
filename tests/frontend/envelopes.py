"""Steps whose sizes need an envelope, and their batches."""

from __future__ import annotations

import torch

import zgcompile
from zgcompile.bench.sage import SAGE, make_step
from zgcompile.bench.synthetic import Shape, power_law, uniform

AUTO = zgcompile.Envelope(max_overflow_probability="auto")
SHAPE = Shape(20_000, 400_000, 4, 3)
FANOUTS, BATCH = (10, 5), 64
FAMILIES = {"uniform": uniform, "power-law": power_law}


def compiled(graph, envelope, lengths=(BATCH,) * 4, seeds=5, **options):
    """A step after its warm-up and one replay."""
    torch.manual_seed(seeds)
    model = SAGE([4, 4, 3])
    step = zgcompile.compile(
        make_step(model, torch.optim.SGD(model.parameters(), lr=0.1), graph, FANOUTS), envelope=envelope, **options
    )
    for batch in seeds_of(lengths, seeds):
        step(batch)
    return step, model


def seeds_of(lengths, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(SHAPE.nodes, generator=generator)[:n] for n in lengths]


def held(step):
    """Capacities of edges and nodes of both hops."""
    return [use.held for use in step.stats.envelope.values()][1:]


def pairs_step(seeds, table):
    """All (row, neighbour) pairs of `seeds`, counted; `table` is (indptr, weight)."""
    indptr, weight = table
    start = indptr[seeds]
    row = torch.repeat_interleave(torch.arange(seeds.shape[0], device=seeds.device), indptr[seeds + 1] - start)
    return (weight[seeds[row]] * 2).sum()


def two_halves():
    """Degree 4 below node 5,000 and 12 from there on."""
    degree = torch.where(torch.arange(10_000) < 5_000, 4, 12)
    return torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)]), torch.ones(10_000)


def draws(low, high, number, seed=3, rows=BATCH):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randperm(high - low, generator=generator) + low)[:rows] for _ in range(number)]


def halves_step(envelope=AUTO, **options):
    table = two_halves()

    def step(seeds):
        return pairs_step(seeds, table)

    return zgcompile.compile(step, envelope=envelope, **options)
