from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import zgcompile
from zgcompile.bench import reddit
from zgcompile.bench.checks import first_replay, input_response
from zgcompile.bench.sage import SAGE, make_step, sample_blocks
from zgcompile.bench.synthetic import Shape, power_law
from zgcompile.errors import ZgError

TINY = ["--small", "--device=cpu", "--batch", "8", "16", "--fanout=4,3", "--hidden=8"]
TINY += ["--blocks=2", "--calls=2", "--oracle-batches=3"]


@pytest.fixture
def subject():
    torch.manual_seed(0)
    graph = power_law(Shape(300, 3_000, 6, 3))
    model = SAGE((6, 8, 3))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    return SimpleNamespace(graph=graph, model=model, opt=opt, step=make_step(model, opt, graph, (4, 3)))


class Replaying:
    """Stands in for a compiled step: calls the function, and replays from the third call on."""

    def __init__(self, fn, warmup=2) -> None:
        self.fn, self.warmup, self.calls = fn, warmup, 0

    def __call__(self, seeds):
        self.calls += 1
        return self.fn(seeds)

    @property
    def stats(self):
        replays = max(0, self.calls - self.warmup)
        envelope = {"train.py:1": (7, 8)}
        return SimpleNamespace(
            calls=self.calls,
            replays=replays,
            eager_runs=2,
            overflows=0,
            captures=1,
            host_reads=replays,
            envelope=envelope,
        )

    def synchronize(self) -> None: ...

    def kernel_plan(self):
        return {}


def test_eager_only_prints_a_table_and_a_json_line(capsys):
    reddit.main([*TINY, "--eager-only"])
    out = capsys.readouterr().out
    record = json.loads(out.strip().splitlines()[-1])
    assert [r["batch"] for r in record["results"]] == [8, 16]
    for r in record["results"]:
        assert 0 < r["eager_ms"]["lower"] <= r["eager_ms"]["median"] <= r["eager_ms"]["upper"]
        assert r["timing"] is None
        assert r["oracle"]["bytes"] > 0
    assert record["torch"] == torch.__version__
    assert record["fanout"] == [4, 3]
    assert "batch 16" in out
    assert "no trace audit" in out


def test_compiled_columns(capsys, monkeypatch):
    monkeypatch.setattr(zgcompile, "compile", lambda fn, warmup, envelope: Replaying(fn), raising=False)
    monkeypatch.setattr(zgcompile, "Envelope", lambda headroom: headroom, raising=False)
    monkeypatch.setattr(zgcompile, "verify", lambda fn, seeds: SimpleNamespace(max_error=2e-7), raising=False)
    reddit.main(TINY)
    out = capsys.readouterr().out
    first = json.loads(out.strip().splitlines()[-1])["results"][0]
    assert first["startup"]["calls"] == 3
    assert first["startup"]["seconds"] > 0
    assert first["parity_error"] == 2e-7
    assert (first["timing"]["blocks"], first["timing"]["calls"]) == (2, 2)
    assert all(first["timing"][part]["lower"] > 0 for part in ("a", "b", "ratio"))
    # 3 to the first replay, 20 batches, 3 for the response to inputs, 10 of warm-up, 2 blocks of 2 calls
    assert first["stats"]["calls"] == 3 + 20 + 3 + 10 + 4
    assert first["stats"]["envelope"] == {"train.py:1": [7, 8]}
    for part in ("eager / compiled", "new inputs, new loss", "yes", "2.0e-07"):
        assert part in out


def test_a_step_without_replay_is_reported(subject):
    with pytest.raises(ZgError, match="no replay in the first 4 calls"):
        first_replay(Replaying(subject.step, warmup=9), [torch.arange(8)], limit=4)


def test_input_response_of_an_honest_step_leaves_parameters_alone(subject):
    before = [p.clone() for p in subject.model.parameters()]
    response = input_response(subject.step, subject.opt, torch.arange(8), torch.arange(50, 58))
    assert response.repeats
    assert response.responds
    assert all(torch.equal(a, b) for a, b in zip(before, subject.model.parameters(), strict=True))
    assert subject.opt.param_groups[0]["lr"] == 0.01


def test_input_response_catches_a_baked_batch_and_frozen_parameters_do_not_hide_it(subject):
    baked = input_response(
        lambda seeds: subject.step(torch.arange(8)), subject.opt, torch.arange(8), torch.arange(50, 58)
    )
    assert baked.repeats
    assert not baked.responds


def test_input_response_restores_the_rate_when_the_step_raises(subject):
    with pytest.raises(IndexError):
        input_response(subject.step, subject.opt, torch.tensor([10_000]), torch.arange(4))
    assert subject.opt.param_groups[0]["lr"] == 0.01


def test_sage_step_learns_and_its_blocks_are_edges(subject):
    graph = subject.graph
    nodes, blocks = sample_blocks(graph, torch.arange(20), (4, 3))
    row, col, _, num_dst = blocks[-1]
    assert num_dst == 20
    assert torch.bincount(row, minlength=20).max() <= 4
    hop = nodes[blocks[0][2]]  # the ids that the last layer reads are the destinations of the first
    for dst, src in zip(torch.arange(20)[row].tolist(), hop[col].tolist(), strict=True):
        assert src in graph.indices[graph.indptr[dst] : graph.indptr[dst + 1]]
    losses = [float(subject.step(torch.arange(60))) for _ in range(60)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
