"""Random batches for the dry runs: where they come from, and where there can be none."""

from __future__ import annotations

import warnings

import pytest
import torch

import zgcompile
from tests.frontend.envelopes import (
    AUTO,
    BATCH,
    FAMILIES,
    FANOUTS,
    SHAPE,
    compiled,
    draws,
    halves_step,
    held,
    pairs_step,
    two_halves,
)
from zgcompile.bench.sage import SAGE, make_step
from zgcompile.errors import BadInput
from zgcompile.frontend import calibration
from zgcompile.frontend.calibration import Calibrator
from zgcompile.frontend.prefix import SamplingPrefix
from zgcompile.ir.envelope import EnvelopeWarning


@pytest.fixture(scope="module")
def graphs():
    return {name: make(SHAPE) for name, make in FAMILIES.items()}


def test_sorted_argument_is_refused_with_the_reason(graphs):
    torch.manual_seed(0)
    model = SAGE([4, 4, 3])
    step = zgcompile.compile(
        make_step(model, torch.optim.SGD(model.parameters(), lr=0.1), graphs["uniform"], FANOUTS),
        envelope=zgcompile.Envelope(max_overflow_probability=1e-2),
    )
    for first in range(0, 3 * BATCH, BATCH):
        step(torch.arange(first, first + BATCH))
    with pytest.warns(EnvelopeWarning, match=r"sage\.py:\d+.*'seeds' is sorted in every batch"):
        step(torch.arange(3 * BATCH, 4 * BATCH))
    fit = step.stats.envelope_fit
    assert fit.source == "headroom"
    assert fit.bound is None
    assert "largest seen x 1.1" in str(fit)


def test_batches_unlike_the_calls_are_not_trusted():
    """Two ids span the whole range, the rest are of the heavy half: uniform draws need a third less."""
    step = halves_step()
    for seeds in draws(5_000, 10_000, 4):
        seeds[0] = 0
        step(seeds)
    fit = step.stats.envelope_fit
    assert fit.source == "headroom"
    assert "calls have needed 76" in fit.reason
    assert step.stats.overflows == 0


def test_integers_of_two_dimensions_are_refused():
    table = two_halves()
    step = zgcompile.compile(lambda pairs: pairs_step(pairs.reshape(-1), table), warmup=1, envelope=AUTO)
    for seeds in draws(0, 10_000, 2):
        step(seeds.view(-1, 2))
    assert "integers in more than one dimension" in step.stats.envelope_fit.reason


def test_failing_prefix_is_named():
    """A table with a hole that no call meets."""
    table = two_halves()
    hole = torch.arange(10_000)
    hole[4_000:6_000] = 50_000
    step = zgcompile.compile(lambda seeds: pairs_step(hole[seeds], table), warmup=1, envelope=AUTO)
    outside = [s[(s < 4_000) | (s >= 6_000)][:40] for s in draws(0, 10_000, 2)]
    for seeds in outside:
        step(seeds)
    assert step.stats.envelope_fit.source == "headroom"
    assert "the sampling fails on a dry run" in step.stats.envelope_fit.reason


def test_a_step_without_sizes_of_its_own_never_overflows():
    weight = torch.randn(100)
    step = zgcompile.compile(lambda seeds: (weight[seeds] ** 2).sum(), warmup=1, envelope=AUTO)
    for seeds in (torch.randperm(100)[:9], torch.randperm(100)[:9]):
        step(seeds)
    fit = step.stats.envelope_fit
    assert (fit.source, fit.bound) == ("fixed", 0.0)
    assert "every size follows" in str(fit)


def test_only_part_of_a_table_is_drawn_from_where_calls_show_only_a_part():
    """The light half, of which no batch needs as much as a mixed one."""
    step = halves_step(None)
    for seeds in draws(0, 5_000, 4):
        step(seeds)
    assert step.stats.envelope_fit.source == "random batches"
    assert held(step) == [4 * BATCH]


def test_an_invalid_id_of_a_table_has_ids_drawn_from_where_calls_were():
    table, renamed = two_halves(), torch.arange(10_000)
    renamed[-1] = 50_000
    ranges = []
    sample_of = Calibrator._sample

    def sample(self, run):
        ranges.append((run.pool.seen[0].low, run.pool.seen[0].high))
        return sample_of(self, run)

    step = zgcompile.compile(lambda seeds: pairs_step(renamed[seeds], table))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibrator, "_sample", sample)
        for seeds in draws(0, 9_999, 4):
            step(seeds)
    whole, seen = ranges
    assert whole == (0, 9_999)
    assert seen[0] > 0
    assert seen[1] < 9_999
    assert step.stats.envelope_fit.source == "random batches"


def test_the_default_goes_by_cost_and_by_headroom_where_it_cannot(graphs):
    step, _ = compiled(graphs["uniform"], None)
    assert step.stats.envelope_fit.source == "random batches"
    assert step.stats.envelope_fit.target in calibration.PROBABILITIES
    table = two_halves()
    step = zgcompile.compile(lambda seeds: pairs_step(seeds, table), warmup=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody asked for a probability
        for first in range(0, 4 * BATCH, BATCH):
            step(torch.arange(first, first + BATCH))
    assert "is sorted in every batch" in str(step.stats.envelope_fit)
    assert held(step) == [320]  # 256 x 1.1, up to 64


def test_arguments_that_are_no_ids_are_drawn_by_row():
    """The mask decides the count, the ids do not."""
    step = zgcompile.compile(
        lambda ids, keep: (ids[keep > 0.3] * 2).sum(),
        warmup=1,
        envelope=zgcompile.Envelope(max_overflow_probability=1e-2),
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        keep = torch.rand(1000, generator=generator)
        step(torch.randperm(5_000, generator=generator)[:1000], keep)
    fit = step.stats.envelope_fit
    assert fit.source == "random batches"
    (rows,) = held(step)
    assert 20 < rows - int((keep > 0.3).sum()) < 60  # +- 14.5: rows of the current batch are drawn


def test_given_batches_decide():
    """All of them heavy, which no uniform draw is."""
    heavy = zgcompile.Envelope(max_overflow_probability=1e-2, batches=lambda: draws(5_000, 10_000, 50))
    step = halves_step(heavy)
    for seeds in draws(0, 10_000, 4):
        step(seeds)
    assert step.stats.envelope_fit.source == "given batches"
    assert held(step) == [12 * BATCH]


@pytest.mark.parametrize(("given", "what"), [
    (list, "gave no batch"),
    (lambda: [torch.zeros(3)], r"gave a torch.float32 tensor of shape \(3,\) for argument 'seeds'"),
    (lambda: [()], "gave NoneType for argument 'seeds'"),
])  # fmt: skip
def test_given_batches_must_be_batches(given, what):
    step = halves_step(zgcompile.Envelope(batches=given), warmup=1)
    first, second = draws(0, 10_000, 2)
    step(first)
    with pytest.raises(BadInput, match=what):
        step(second)


# -- sizes that batches do not decide


def test_sizes_that_the_state_decides_go_by_headroom():
    visited, table = torch.zeros(20_000, dtype=torch.bool), two_halves()
    visited[:5_000] = True

    def step(seeds):
        visited[seeds + 10_000] = True
        return visited.nonzero().sum() + pairs_step(seeds, table)

    step = zgcompile.compile(step)
    for seeds in draws(0, 10_000, 6):
        step(seeds)
    fit = step.stats.envelope_fit
    assert fit.source == "random batches"
    assert "sizes that depend on what the step changes go by headroom" in str(fit)
    assert sorted(held(step))[-1] == 5760  # 5,192 x 1.1, up to 64
    assert step.stats.overflows == 0


def test_where_the_state_decides_all_sizes_no_probability_is_stated():
    visited = torch.zeros(10_000, dtype=torch.bool)

    def step(seeds):
        visited[seeds] = True
        return visited.nonzero().sum()

    step = zgcompile.compile(step)
    for seeds in draws(0, 10_000, 4):
        step(seeds)
    assert step.stats.envelope_fit.source == "headroom"
    assert "no size depends on the batch" in step.stats.envelope_fit.reason


def test_an_argument_that_no_size_needs_may_be_anything():
    table = two_halves()
    step = zgcompile.compile(lambda time, flags, seeds: pairs_step(seeds, table) * time.float().mean() + flags.sum())
    for i, seeds in enumerate(draws(0, 10_000, 4)):
        step(torch.arange(64) + 64 * i, torch.ones(64, 5, dtype=torch.int64), seeds)
    assert step.stats.envelope_fit.source == "random batches"


# -- batches that no call is like


def hubs():
    """Degree 5, but 40,000 at 20 of 10,000 nodes."""
    degree = torch.full((10_000,), 5)
    degree[::500] = 40_000
    return torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)]), torch.ones(10_000)


def without_hubs(number):
    return [s[s % 500 != 0][:BATCH] for s in draws(0, 10_000, number, rows=100)]


def test_capacities_are_near_what_calls_have_needed():
    table = hubs()
    step = zgcompile.compile(lambda seeds: pairs_step(seeds, table))
    for seeds in without_hubs(4):
        step(seeds)
    assert held(step) == [384]  # 320 x 1.1, up to 64
    assert "where calls have needed 320" in step.stats.envelope_fit.reason


def test_the_batch_at_hand_is_counted_where_no_call_was():
    """The first call is the user's own function, as the optimizer has no state yet; nothing else is before the fit."""
    indptr, weight = two_halves()
    scale = torch.nn.Parameter(torch.ones(()))
    opt = torch.optim.Adam([scale])

    def step(seeds):
        loss = pairs_step(seeds, (indptr, weight)) * scale
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    step = zgcompile.compile(step, warmup=1)
    for seeds in draws(5_000, 10_000, 2):
        seeds[0] = 0
        step(seeds)
    assert "calls have needed 76" in step.stats.envelope_fit.reason


def test_degrees_that_sum_to_more_than_there_is_end_the_dry_runs():
    """No call meets the nodes whose degree is not known yet."""
    degree = torch.randint(3, 9, (10_000,), generator=torch.Generator().manual_seed(0))
    degree[::50] = 2**63 - 1
    weight = torch.ones(10_000)
    step = zgcompile.compile(lambda seeds: weight[torch.repeat_interleave(seeds, degree[seeds])].sum())
    for seeds in draws(0, 10_000, 4, rows=100):
        step(seeds[seeds % 50 != 0][:BATCH])
    assert "index out of range in aten.repeat_interleave" in step.stats.envelope_fit.reason
    assert step.stats.replays == 1


def test_hashes_are_no_ids():
    generator = torch.Generator().manual_seed(0)
    step = zgcompile.compile(lambda keys: torch.unique(keys).sum())
    for _ in range(5):
        step(torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator))
    assert "holds numbers that are no ids" in step.stats.envelope_fit.reason
    assert step.stats.replays == 2


def test_whatever_fails_in_a_dry_run_leaves_headroom(monkeypatch):
    def counts(self, inputs):
        raise TypeError("unheard of")

    monkeypatch.setattr(SamplingPrefix, "counts", counts)
    step = halves_step(None)
    for seeds in draws(0, 10_000, 5):
        step(seeds)
    assert step.stats.envelope_fit.reason == "the sampling fails on a dry run: unheard of"
    assert step.stats.replays == 2


def test_slow_dry_runs_are_not_tried_twice(monkeypatch):
    monkeypatch.setattr(calibration, "DEFAULT", (256, 0.0))
    samples = []
    sample_of = Calibrator._sample
    monkeypatch.setattr(Calibrator, "_sample", lambda self, run: samples.append(0) or sample_of(self, run))
    step = halves_step(None)
    for seeds in draws(0, 10_000, 4):
        step(seeds)
    assert len(samples) == 1
    assert "1 dry runs of the sampling took" in step.stats.envelope_fit.reason


# -- given loaders


def test_the_generator_of_a_given_loader_is_put_back():
    generator = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.arange(10_000), BATCH, shuffle=True, generator=generator)
    expected = [batch for _ in range(2) for batch, _ in zip(loader, range(5), strict=False)]
    generator.manual_seed(0)
    step = halves_step(zgcompile.Envelope(batches=lambda: loader))
    met = []
    for _ in range(2):
        for seeds, _ in zip(loader, range(5), strict=False):
            met.append(seeds)
            step(seeds)
    assert step.stats.envelope_fit.source == "given batches"
    assert all(torch.equal(a, b) for a, b in zip(expected, met, strict=True))


def test_a_given_loader_in_use_is_refused():
    loader = torch.utils.data.DataLoader(torch.arange(10_000), BATCH, num_workers=1, persistent_workers=True)
    step = halves_step(zgcompile.Envelope(batches=lambda: loader), warmup=1)
    first, second = draws(0, 10_000, 2)
    step(first)
    with pytest.raises(BadInput, match="persistent workers"):
        step(second)
