"""Every step counts once and in order, whichever check of the device fails in whichever step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import zgcompile
from zgcompile.ir.status import Failure
from zgcompile.testing import injected_draws

NODES = 80
SHARE = 0.05  # of the steps fail


class Ledger:
    """A step whose state is all integer, and the order of whose calls shows: nothing in it rounds."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        degree = torch.randint(0, 6, (NODES,), generator=generator)
        self.indptr = torch.zeros(NODES + 1, dtype=torch.int64)
        self.indptr[1:] = degree.cumsum(0)
        self.indices = torch.randint(0, NODES, (int(self.indptr[-1]),), generator=generator)
        self.visits = torch.zeros(NODES, dtype=torch.int64)
        self.last = torch.zeros(NODES, dtype=torch.int64)
        self.calls = torch.zeros((), dtype=torch.int64)
        self.checksum = torch.zeros(2, dtype=torch.int64)

    def step(self, seeds: Tensor) -> tuple[Tensor, Tensor]:
        start = self.indptr[seeds]
        degree = self.indptr[seeds + 1] - start
        row = torch.repeat_interleave(torch.arange(seeds.numel()), degree)
        offset = torch.arange(row.numel()) - (degree.cumsum(0) - degree)[row]
        edge = start[row] + offset
        ids = torch.unique(torch.cat([seeds, self.indices[edge[torch.rand(edge.numel()) < 0.6]]]))
        self.calls += 1
        self.visits[ids] += 1
        self.last[ids] = self.calls
        self.checksum.mul_(31).add_(torch.stack([ids.sum(), (ids * self.calls).sum()]))
        return ids, self.calls + 0

    def state(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in vars(self).items() if k in ("visits", "last", "calls", "checksum")}


def run_ledger(forced: Any, steps: int) -> None:
    torch.manual_seed(11)
    choose, twin, ledger = random.Random(5), Ledger(), Ledger()
    compiled = zgcompile.compile(ledger.step, warmup=2, envelope=zgcompile.Envelope(headroom=2.0))
    met: dict[str, int] = {}
    turn = 0
    for number in range(steps):
        size = choose.choice((12, 12, 12, 7, 1))
        batch = torch.randperm(NODES, generator=torch.Generator().manual_seed(number))[:size]
        before = torch.get_rng_state()
        with injected_draws():
            want = twin.step(batch)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        checks = forced.checks(compiled)
        if checks and choose.random() < SHARE:
            k, turn = turn % len(checks), turn + 1
            stats = compiled.stats
            with forced(compiled, k) as check:
                got = compiled(batch)
            met[check.what] = met.get(check.what, 0) + 1
            count = "overflows" if check.failure is Failure.CAPACITY else "preconditions"
            assert getattr(compiled.stats, count) == getattr(stats, count) + 1
        else:
            got = compiled(batch)
        assert torch.equal(torch.get_rng_state(), after)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"step {number}"
        for name, value in twin.state().items():
            assert torch.equal(ledger.state()[name], value), f"{name} after step {number}"
    stats = compiled.stats
    assert len(met) >= 3 and turn >= len(forced.checks(compiled)), f"{turn} forced failures at {sorted(met)}"
    assert stats.calls == steps and stats.replays + stats.eager_runs == steps
    assert int(ledger.calls) == steps


def test_integer_state_is_bit_equal_with_one_step_in_twenty_failing(forced):
    run_ledger(forced, 400)


@pytest.mark.slow
def test_integer_state_is_bit_equal_over_ten_thousand_steps(forced):
    run_ledger(forced, 10_000)


def run_training(forced: Any, pair: Any, same_state: Any, close: Any, steps: int) -> None:
    choose = random.Random(6)
    compiled, mine = pair.compiled, pair.mine
    turn = 0
    for number in range(steps):
        batch = mine.batch(1000 + number, choose.choice((16, 16, 9, 3)))
        if choose.random() >= SHARE:
            compiled(batch)
            continue
        before = mine.save()
        with forced(compiled, turn % len(forced.checks(compiled))):
            turn, again = turn + 1, compiled(batch)
        after = mine.save()
        mine.restore(before)
        replays = compiled.stats.replays
        replayed = compiled(batch)
        assert compiled.stats.replays == replays + 1
        close(again, replayed, f"step {number}, loss", 1e-12)
        same_state(after, mine.save(), 1e-12, f"step {number}, both ways:")
    assert turn >= steps * SHARE / 2


def test_a_forced_overflow_trains_as_the_replay_does(forced, pair, same_state, close):
    run_training(forced, pair, same_state, close, 400)


@pytest.mark.slow
def test_a_forced_overflow_trains_as_the_replay_does_over_ten_thousand_steps(forced, pair, same_state, close):
    run_training(forced, pair, same_state, close, 10_000)


def test_a_real_overflow_in_every_second_batch(forced, new_pair, new_trainer):
    """Capacities from small batches, then large ones: the device finds them too small, not a forced slot."""
    pair = new_pair(lambda: new_trainer(torch.optim.SGD), warmup=2, envelope=zgcompile.Envelope(headroom=1.0))
    quiet = torch.arange(2)  # isolated nodes: few rows
    for number in range(30):
        pair.call(quiet.repeat(8) if number < 4 or number % 2 else None)
    stats = pair.compiled.stats
    assert stats.overflows >= 3 and stats.replays + stats.eager_runs == stats.calls == 30
