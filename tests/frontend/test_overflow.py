"""A batch that outgrows a capacity changes nothing in the replay, runs once more at exact sizes, and training goes
on as eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from zgcompile import Envelope
from zgcompile.frontend.specialisation import Specialisation

HERE = Path(__file__)


def sites() -> dict[str, str]:
    """Name -> "file:line" of the lines marked `# SITE name`."""
    lines = HERE.read_text().splitlines()
    marked = ((i, line.rpartition("  # SITE ")) for i, line in enumerate(lines, 1))
    return {name: f"{HERE.name}:{i}" for i, (_, mark, name) in marked if mark and name.isidentifier()}


def make(new_world: Any) -> Any:
    """A sampled step with one dynamic size a line, and a draw, a table, dropout and Adam state to go wrong."""

    def build() -> Any:
        w = new_world()
        w.opt = torch.optim.Adam(w.model.parameters(), lr=0.1)

        def step(seeds):
            start = w.indptr[seeds]
            degree = w.indptr[seeds + 1] - start
            taken = degree.clamp(max=3)
            row = torch.repeat_interleave(torch.arange(seeds.numel()), taken)  # SITE edges
            draw = torch.rand(row.numel())
            neighbour = w.indices[start[row] + (draw * degree[row]).long()]
            nodes, inverse = torch.cat([seeds, neighbour]).unique(return_inverse=True)  # SITE nodes
            kept = torch.rand(row.numel()) < 0.7
            row, column = row[kept], inverse[seeds.numel() :][kept]  # SITE kept
            late = nodes[w.y[nodes] == 1]  # SITE late
            w.visits[nodes] += 1
            h = F.dropout(w.model(w.x[nodes]), 0.3)
            out = torch.zeros(seeds.numel(), 3).index_add(0, row, h[column]) + h[inverse[: seeds.numel()]]
            loss = F.cross_entropy(out, w.y[seeds])
            w.train(loss)
            return loss, nodes, late, row.numel(), int(taken.sum())

        return step, w

    return build


SMALL = torch.tensor([0, 1, 39])  # isolated nodes: no edge, three nodes
BATCHES = [
    torch.tensor(v)
    for v in ([5, 9, 14, 22], [30, 2, 7, 18], [0, 1, 39], [11, 12, 13, 14], [25, 26, 27, 28], [8, 3], [6, 16, 33, 36])
]


@pytest.mark.parametrize(
    "site",
    ["edges", "late", pytest.param("kept", marks=pytest.mark.slow), pytest.param("nodes", marks=pytest.mark.slow)],
)
def test_overflow_at_each_site(site, new_world, compare, monkeypatch, take_image):
    """The capacity of one size is 2 or 5; what the failed replay left behind is looked at before the batch runs
    again."""
    seen: list[int] = []
    real_overflow, real_call = Specialisation.overflow, Specialisation.run_replay
    before: list[Any] = []

    def run_replay(self: Any, call: Any, lifted: Any) -> Any:
        before[:] = [take_image(self.fn)]
        return real_call(self, call, lifted)

    def overflow(self: Any, call: Any, lifted: Any) -> Any:
        assert take_image(self.fn) == before[0], "the failed replay wrote something"
        seen.append(1)
        return real_overflow(self, call, lifted)

    monkeypatch.setattr(Specialisation, "run_replay", run_replay)
    monkeypatch.setattr(Specialisation, "overflow", overflow)
    cap = 2 if site == "late" else 5
    compiled = compare(make(new_world), BATCHES, warmup=2, envelope=Envelope(caps={sites()[site]: cap}, headroom=3.0))
    stats = compiled.stats
    assert seen, f"no overflow at {site}"
    assert stats.overflows == len(seen)
    assert stats.calls == len(BATCHES) == stats.replays + stats.eager_runs
    assert stats.replays >= 1, "a batch that fits is replayed"


@pytest.mark.slow
def test_no_overflow_without_a_small_capacity(new_world, compare):
    compiled = compare(make(new_world), BATCHES, warmup=2, envelope=Envelope(headroom=3.0))
    assert compiled.stats.overflows == 0
    assert compiled.stats.replays == len(BATCHES) - 2


def test_an_argument_longer_than_its_capacity(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()

        def step(seeds):
            loss = F.cross_entropy(F.dropout(w.model(w.x[seeds]), 0.3), w.y[seeds])
            w.train(loss)
            return loss, seeds.size(0)

        return step, w

    compiled = compare(build, batches_of(8, 8, 20, 8, 21, 40, 40, 30, 8, 1))
    stats = compiled.stats
    assert stats.overflows >= 2
    assert stats.captures >= 2, "it fits again after repeated overflow"
    assert stats.traces == 1
    assert stats.replays >= 5


def test_repeated_overflow_fits_again(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()
        w.limit = torch.tensor([1])

        def step(seeds):
            chosen = seeds.repeat(8)[: seeds.size(0) * 8]
            chosen = chosen[chosen % 40 < w.limit]
            loss = w.loss(seeds) + w.model(w.x[chosen]).sum() * 0.01
            w.train(loss)
            return loss, chosen

        return step, w

    def between(i: int, w: Any) -> None:
        w.limit.fill_(2 if i < 3 else 40)

    batch = torch.arange(16)
    compiled = compare(build, [batch] * 14, between, tolerance=1e-4)
    stats = compiled.stats
    assert stats.overflows >= 1
    assert 2 <= stats.captures <= 3
    assert stats.replays >= 7
