"""What a compiled step returns: fresh values of the true shape, in the user's own structure."""

from __future__ import annotations

import json
import pickle
from collections import namedtuple
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

import zgcompile

Pair = namedtuple("Pair", "loss hits")


def test_kept_losses_are_values_of_their_own(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()

        def step(seeds):
            loss = w.loss(seeds)
            w.train(loss)
            return loss

        return step, w

    batches = batches_of(*[8] * 50)
    w_step, _w = build()
    torch.manual_seed(7)
    want = [w_step(b).detach() for b in batches]
    step, _ = build()
    compiled = zgcompile.compile(step, warmup=2)
    kept = [compiled(b) for b in batches]
    assert torch.allclose(torch.stack(kept), torch.stack(want), atol=1e-6)
    assert len({t.data_ptr() for t in kept}) == 50
    assert compiled.stats.replays == 48
    total = sum(kept)
    assert isinstance(total, torch.Tensor) and torch.isclose(total, torch.stack(want).sum())


def test_rows_have_their_true_shape_and_are_never_overwritten(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()

        def step(seeds):
            row, neighbour = w.neighbours(seeds)
            logits = w.model(w.x[torch.cat([seeds, neighbour])])
            loss = torch.nn.functional.cross_entropy(logits[: seeds.numel()], w.y[seeds])
            w.train(loss)
            return logits[: seeds.numel()], row, neighbour.unique(), logits[: seeds.numel()].argmax(1) == w.y[seeds]

        return step, w

    compiled = compare(build, batches_of(8, 8, 5, 8, 1, 7))
    assert compiled.stats.replays == 5
    step, _w = build()
    compiled = zgcompile.compile(step, warmup=1)
    kept = [compiled(b) for b in batches_of(8, 8, 5, 8)]
    copies = [tuple(t.clone() for t in out) for out in kept]
    for batch in batches_of(8, 8, 8):
        compiled(batch)
    for out, copy in zip(kept, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(out, copy, strict=True))
    assert kept[2][0].shape == (5, 3)
    assert not kept[2][0].requires_grad


def test_any_structure_of_outputs(new_world, compare, batches_of):
    outside = torch.arange(4.0)

    def build() -> Any:
        w = new_world()

        def step(seeds):
            loss = w.loss(seeds)
            w.train(loss)
            return {
                "loss": loss,
                "pair": Pair(loss * 2, [seeds, None, (3, "text", 2.5, True)]),
                "rows": seeds.size(0),
                "twice": seeds.size(0) * 2 + 1,
                "seeds": seeds,
                "outside": outside,
                "weight": w.model.weight,
                "visits": w.visits,
            }

        return step, w

    compiled = compare(build, batches_of(8, 8, 8, 3))
    assert compiled.stats.replays == 3


def test_nothing_returned(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()

        def step(seeds):
            w.train(w.loss(seeds))

        return step, w

    compare(build, batches_of(8, 8, 8, 3))


def test_a_returned_state_tensor_is_a_copy(new_world, batches_of):
    w = new_world()

    @zgcompile.compile(warmup=1)
    def step(seeds):
        w.train(w.loss(seeds))
        return w.model.weight

    kept = [step(b) for b in batches_of(8, 8, 8)]
    assert not torch.equal(kept[1], kept[2])
    assert torch.equal(kept[2], w.model.weight)
    kept[2].zero_()
    assert w.model.weight.abs().sum() > 0


@pytest.fixture(scope="module")
def returned(new_world, batches_of):
    w = new_world()

    @zgcompile.compile(warmup=1)
    def step(seeds):
        loss = w.loss(seeds)
        w.train(loss)
        hits = (w.model(w.x[seeds]).argmax(1) == w.y[seeds]).sum()
        return (
            float(loss),
            loss.item(),
            int(hits),
            hits.item(),
            seeds.size(0),
            loss.item() * 2 + 1,
            hits.item() / len(seeds),
        )

    batches = batches_of(8, 8, 8)
    torch.manual_seed(0)
    for batch in batches[:2]:
        step(batch)
    v = new_world()
    torch.manual_seed(0)
    losses = []
    for batch in batches:
        loss = v.loss(batch)
        v.train(loss)
        losses.append(loss.item())
    hits = int((v.model(v.x[batches[2]]).argmax(1) == v.y[batches[2]]).sum())
    return step, step(batches[2]), losses[2], hits


def test_returned_numbers_are_numbers(returned):
    step, (loss, item, hits, count, rows, derived, accuracy), want, want_hits = returned
    assert step.stats.deferred_reads == 0, "a returned number was read before the user asked"
    assert float(loss) == pytest.approx(want, abs=1e-6) and float(item) == float(loss)
    assert f"{loss:.4f}" == f"{want:.4f}" and str(loss).startswith(f"{want:.3f}"[:4])
    assert int(hits) == want_hits == count and hits == want_hits
    assert rows == 8 and type(rows) is int
    assert float(derived) == pytest.approx(want * 2 + 1, abs=1e-5)
    assert float(accuracy) == pytest.approx(want_hits / 8)
    assert np.isclose(np.asarray(loss), want) and np.mean([loss, item]) == pytest.approx(want)
    assert np.float64(loss) == pytest.approx(want)
    assert json.dumps(float(loss)) == repr(float(loss))
    assert (loss < 1e9) is True and loss > -1 and loss >= item and item <= loss
    assert sum([loss, item]) == pytest.approx(2 * want, abs=1e-5)
    assert max(loss, 0) == loss and min([item, 1e9]) == item and abs(-loss) == abs(loss)
    assert round(loss, 2) == round(float(loss), 2) and loss + 1 == 1 + loss and loss / 2 == float(loss) / 2
    assert [10, 20, 30, 40, 50, 60, 70, 80, 90][hits] == (want_hits + 1) * 10 and list(range(hits)) == list(
        range(want_hits)
    )
    assert bool(loss) and hash(loss) == hash(float(loss))
    assert torch.tensor(float(loss)).item() == pytest.approx(want)
    assert step.stats.deferred_reads > 0


def test_a_kept_number_does_not_change(new_world, batches_of):
    w = new_world()

    @zgcompile.compile(warmup=1)
    def step(seeds):
        loss = w.loss(seeds)
        w.train(loss)
        return loss, loss.item()

    kept = [step(b) for b in batches_of(*[8] * 6)]
    assert [float(number) for _, number in kept] == pytest.approx([float(t) for t, _ in kept])
    assert len({float(n) for _, n in kept}) == 6


@pytest.mark.parametrize(
    ("make", "kind"), [(lambda x: x.sum().item(), int), (lambda x: float(x.float().mean()), float)]
)
def test_a_returned_number_is_saved_as_a_plain_one(make, kind, tmp_path):
    step = zgcompile.compile(lambda seeds: make(seeds.unique()), warmup=1)
    for _ in range(3):
        number = step(torch.arange(6))
    assert step.stats.replays == 2
    assert type(number) is not kind
    torch.save({"best": number}, tmp_path / "checkpoint.pt")
    assert type(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["best"]) is kind
    assert type(deepcopy(number)) is kind
    assert pickle.loads(pickle.dumps(number)) == number == make(torch.arange(6))
