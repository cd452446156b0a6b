"""Envelopes with a stated overflow probability, against an independent sampler in numpy."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

import zgcompile
from zgcompile.bench.sage import SAGE, make_step
from zgcompile.bench.synthetic import Shape, power_law, uniform
from zgcompile.errors import BadInput
from zgcompile.frontend import calibration
from zgcompile.frontend.calibration import Calibrator
from zgcompile.frontend.drift import Drift
from zgcompile.ir.envelope import EnvelopeFit, EnvelopeWarning

AUTO = zgcompile.Envelope(max_overflow_probability="auto")
SHAPE = Shape(20_000, 400_000, 4, 3)
FANOUTS, BATCH = (10, 5), 64
BATCHES = 20_000  # of the oracle
FAMILIES = {"uniform": uniform, "power-law": power_law}


# -- the oracle


def oracle_counts(graph, batches, seed):
    """[batches, 4]: edges and nodes of both hops of uniform seeds without replacement; shares nothing with
    zgcompile."""
    generator = np.random.default_rng(seed)
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    nodes = len(indptr) - 1
    found = []
    for first in range(0, batches, 500):
        size = min(500, batches - first)
        seeds = generator.integers(nodes, size=(size, BATCH))
        while (twice := (np.diff(np.sort(seeds, axis=1), axis=1) == 0).any(axis=1)).any():
            seeds[twice] = generator.integers(nodes, size=(int(twice.sum()), BATCH))
        marked = np.zeros((size, nodes), dtype=bool)
        np.put_along_axis(marked, seeds, True, axis=1)
        columns = []
        for fanout in FANOUTS:
            batch, dst = np.nonzero(marked)
            start = indptr[dst]
            degree = indptr[dst + 1] - start
            number = np.minimum(degree, fanout)
            row = np.repeat(np.arange(len(dst)), number)
            place = np.arange(len(row)) - (np.cumsum(number) - number)[row]
            drawn = (generator.random(len(row)) * degree[row]).astype(np.int64)
            at = np.where(degree[row] > fanout, drawn, place)
            marked[batch[row], indices[start[row] + at]] = True
            columns += [np.bincount(batch, number, minlength=size), marked.sum(axis=1)]
        found.append(np.stack(columns, axis=1))
    return np.concatenate(found).astype(np.int64)


@pytest.fixture(scope="module")
def graphs():
    return {name: make(SHAPE) for name, make in FAMILIES.items()}


@pytest.fixture(scope="module")
def oracle(graphs):
    known = {}

    def counts(name):
        if name not in known:
            known[name] = oracle_counts(graphs[name], BATCHES, 11)
        return known[name]

    return counts


def compiled(graph, envelope, lengths=(BATCH,) * 4, **options):
    """A step after its warm-up and one replay."""
    torch.manual_seed(0)
    model = SAGE([4, 4, 3])
    step = zgcompile.compile(
        make_step(model, torch.optim.SGD(model.parameters(), lr=0.1), graph, FANOUTS), envelope=envelope, **options
    )
    for seeds in seeds_of(lengths):
        step(seeds)
    return step, model


def seeds_of(lengths, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(SHAPE.nodes, generator=generator)[:n] for n in lengths]


def held(step):
    """Capacities of edges and nodes of both hops."""
    return [use.held for use in step.stats.envelope.values()][1:]


@pytest.fixture(scope="module")
def fitted(graphs):
    known = {}

    def fit(name, p):
        if (name, p) not in known:
            samples = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(calibration, "ASKED", (calibration.ASKED[0], math.inf))  # however busy the machine is
                sample_of = Calibrator._sample
                patch.setattr(
                    Calibrator, "_sample", lambda self, run: samples.append(sample_of(self, run)) or samples[-1]
                )
                step, _ = compiled(graphs[name], zgcompile.Envelope(max_overflow_probability=p))
            known[name, p] = (np.array(held(step)), step.stats.envelope_fit, samples[0])
        return known[name, p]

    return fit


# -- the probability


@pytest.mark.parametrize("p", [1e-2, 1e-3])
@pytest.mark.parametrize("name", FAMILIES)
def test_observed_rate_is_inside_the_stated_bound(name, p, fitted, oracle):
    caps, fit, _ = fitted(name, p)
    sample = oracle(name)
    observed = (sample > caps).any(axis=1).mean()
    largest = sample.max(axis=0)
    print(
        f"{name} p={p:.0e}: observed {observed:.2e} in {BATCHES}; {fit}; held / largest {np.round(caps / largest, 3)}"
    )
    assert fit.target == p
    assert fit.source == "random batches"
    assert observed <= fit.bound <= p
    assert (caps <= 1.15 * largest).all()
    if p == 1e-2:
        assert observed > 2e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_random_batches_have_the_counts_of_the_oracle(name, fitted, oracle):
    """Mean, spread and upper quantile of each size of the dry runs."""
    _, _, dry = fitted(name, 1e-2)
    want = oracle(name)
    error = want.std(axis=0) / len(dry) ** 0.5
    assert (abs(dry.mean(axis=0) - want.mean(axis=0)) <= 5 * error + 1e-9).all()
    assert dry.std(axis=0) == pytest.approx(want.std(axis=0), rel=0.1)
    assert np.quantile(dry, 0.97, axis=0) == pytest.approx(np.quantile(want, 0.97, axis=0), rel=0.01)


def test_same_step_same_capacities(graphs, fitted):
    step, _ = compiled(graphs["uniform"], zgcompile.Envelope(max_overflow_probability=1e-2))
    caps, fit, _ = fitted("uniform", 1e-2)
    assert held(step) == caps.tolist()
    assert step.stats.envelope_fit == fit


def test_batches_are_as_long_as_the_longest_call(graphs, fitted):
    """A partial batch before the capture does not shrink them."""
    caps, _, _ = fitted("uniform", 1e-2)
    step, _ = compiled(graphs["uniform"], zgcompile.Envelope(max_overflow_probability=1e-2), lengths=(64, 64, 9, 5))
    assert held(step)[0] == 640
    assert np.array(held(step)) == pytest.approx(caps, rel=0.01)


def test_auto_chooses_by_cost(graphs):
    step, _ = compiled(graphs["power-law"], AUTO)
    fit = step.stats.envelope_fit
    assert 1e-4 <= fit.target <= 1e-2
    assert fit.source == "random batches"
    assert fit.batches <= calibration.DEFAULT[0]
    assert all(rows >= 64 for rows in held(step))


def test_cheapest_weighs_pads_against_runs_again():
    generator = np.random.default_rng(0)
    narrow, wide = (np.rint(generator.normal(3000, s, (256, 3))).astype(np.int64) for s in (3, 400))
    assert calibration.cheapest(narrow)[0] < calibration.cheapest(wide)[0]


# -- what must not change


def test_dry_runs_leave_no_trace(graphs, monkeypatch):
    def image():
        np_state = np.random.get_state()[1].tolist(), np.random.get_state()[2]
        return [
            torch.get_rng_state().tolist(),
            np_state,
            random.getstate(),
            *[t.clone() for t in model.state_dict().values()],
        ]

    images = []
    sample_of = Calibrator._sample

    def around(self, run):
        images.append(image())
        sample = sample_of(self, run)
        images.append(image())
        return sample

    monkeypatch.setattr(Calibrator, "_sample", around)
    torch.manual_seed(0)
    model = SAGE([4, 4, 3])
    graph = graphs["uniform"]
    step = zgcompile.compile(
        make_step(model, torch.optim.Adam(model.parameters()), graph, FANOUTS), warmup=2, envelope=AUTO
    )
    loader = torch.utils.data.DataLoader(torch.arange(SHAPE.nodes), batch_size=BATCH, shuffle=True)
    given = zgcompile.Envelope(batches=lambda: loader)
    other = zgcompile.compile(
        make_step(model, torch.optim.Adam(model.parameters()), graph, FANOUTS), warmup=2, envelope=given
    )
    for seeds in seeds_of([BATCH] * 3):
        step(seeds)
        other(seeds)
    assert other.stats.envelope_fit.source == "given batches"
    assert len(images) == 4
    for before, after in (images[:2], images[2:]):
        assert before[:3] == after[:3]
        assert all(torch.equal(a, b) for a, b in zip(before[3:], after[3:], strict=True))


def test_training_does_not_depend_on_the_envelope(graphs):
    results = []
    for envelope in (AUTO, zgcompile.Envelope(headroom=1.1), zgcompile.Envelope(max_overflow_probability=0.3)):
        step, model = compiled(graphs["power-law"], envelope, lengths=[BATCH] * 12)
        results.append(([p.detach().clone() for p in model.parameters()], torch.get_rng_state(), step.stats))
    assert results[2][2].overflows > 0
    for parameters, generator, _ in results[1:]:
        assert torch.equal(generator, results[0][1])
        torch.testing.assert_close(parameters, results[0][0], rtol=1e-4, atol=1e-6)


def test_headroom_is_as_it_was(graphs, monkeypatch):
    monkeypatch.setattr(Calibrator, "_sample", None)
    step, _ = compiled(graphs["uniform"], zgcompile.Envelope(headroom=1.1))
    assert step.stats.envelope_fit is None
    assert all(rows % 64 == 0 for rows in held(step)[1:])
    sizes = step.specialisations[0].observed.counts
    assert held(step)[1:] == [-(-int(np.ceil(n * 1.1)) // 64) * 64 for n in list(sizes.values())[2:5]]


# -- where no probability can be had


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


def pairs_step(seeds, table):
    """All (row, neighbour) pairs of `seeds`, counted; `table` is (indptr, weight)."""
    indptr, weight = table
    start = indptr[seeds]
    row = torch.repeat_interleave(torch.arange(seeds.shape[0]), indptr[seeds + 1] - start)
    return (weight[seeds[row]] * 2).sum()


def two_halves():
    """Degree 4 below node 5,000 and 12 from there on."""
    degree = torch.where(torch.arange(10_000) < 5_000, 4, 12)
    return torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)]), torch.ones(10_000)


def draws(low, high, number, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randperm(high - low, generator=generator) + low)[:BATCH] for _ in range(number)]


def halves_step(envelope=AUTO, **options):
    table = two_halves()

    def step(seeds):
        return pairs_step(seeds, table)

    return zgcompile.compile(step, envelope=envelope, **options)


def test_batches_unlike_the_calls_are_not_trusted():
    """Two ids span the whole range, the rest are of the heavy half: uniform draws need a third less."""
    step = halves_step()
    for seeds in draws(5_000, 10_000, 4):
        seeds[0] = 0
        step(seeds)
    fit = step.stats.envelope_fit
    assert fit.source == "headroom"
    assert "a call has needed 76" in fit.reason
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


@pytest.mark.parametrize(("options", "what"), [
    ({"headroom": 1.1, "max_overflow_probability": 1e-3}, "two ways"),
    ({"headroom": 0.9}, "below 1"),
    ({"headroom": float("nan")}, "below 1"),
    ({"max_overflow_probability": 0.0}, "between 0 and 1"),
    ({"max_overflow_probability": 1.0}, "between 0 and 1"),
    ({"max_overflow_probability": float("nan")}, "between 0 and 1"),
    ({"batches": [1]}, "not a callable"),
    ({"caps": {"a.py:3": 0}}, "positive whole number"),
])  # fmt: skip
def test_bad_envelopes(options, what):
    with pytest.raises(BadInput, match=what) as caught:
        zgcompile.Envelope(**options)
    assert caught.value.advice


def test_capacities_of_the_user_are_kept(graphs):
    step, _ = compiled(graphs["uniform"], zgcompile.Envelope(max_overflow_probability=1e-2, caps={"sage.py:38": 4444}))
    assert held(step)[1] == 4444
    assert held(step)[3] == 4444
    assert step.stats.envelope_fit.source == "random batches"


# -- drift


def test_drift_is_more_than_the_bound_explains():
    fit = EnvelopeFit("random batches", 1e-2, 5e-3, 9e-3)
    drift = Drift(fit)
    assert [drift.overflowed({}) for _ in range(3)] == [False, False, True]
    drift = Drift(fit)
    answers = []
    for call in range(10_000):
        drift.replayed([])
        if call % 150 == 0:  # below the bound
            answers.append(drift.overflowed({}))
    assert not any(answers)
    drift = Drift(None)  # by headroom: the same rule at one in a hundred
    for _ in range(3):
        for _ in range(3_000):
            drift.replayed([])
        assert not drift.overflowed({})
    assert [drift.overflowed({}) for _ in range(30)].count(True) > 0


def test_a_fit_that_does_not_last_waits_longer():
    first = Drift(None)
    while not first.overflowed({}):
        pass
    second = Drift(None, first)
    assert sum(not second.overflowed({}) for _ in range(6)) == 5
    second.total = 5_000
    assert Drift(None, second).needed == 3


def test_sizes_that_cannot_be_held_do_not_capture_for_ever():
    first = pairs_step.__code__.co_firstlineno
    step = halves_step(zgcompile.Envelope(caps={f"test_envelope_probability.py:{first + 4}": 70}), warmup=1)
    for seeds in draws(0, 10_000, 50):
        step(seeds)
    assert step.stats.overflows == 49
    assert step.stats.captures <= 5


def test_new_batches_are_fitted_from_what_calls_need():
    step = halves_step(zgcompile.Envelope(max_overflow_probability=1e-2))
    for seeds in draws(0, 10_000, 80):
        step(seeds)
    before = step.stats
    assert before.envelope_fit.source == "random batches"
    for seeds in draws(5_000, 10_000, 40):
        step(seeds)
    after = step.stats
    assert after.envelope_fit.source == "calls"
    assert after.envelope_fit.batches >= 64
    assert after.captures == 2
    assert 3 <= after.overflows - before.overflows <= 6
    assert held(step) >= [12 * BATCH]


def test_longer_batches_are_drawn_anew():
    step = halves_step(zgcompile.Envelope(max_overflow_probability=1e-2))
    generator = torch.Generator().manual_seed(0)
    for rows in [64] * 4 + [128] * 10:
        step(torch.randperm(10_000, generator=generator)[:rows])
    stats = step.stats
    assert stats.envelope_fit.source == "random batches"
    assert (stats.overflows, stats.captures) == (3, 2)
    assert 1024 < held(step)[0] < 1200  # 8 a seed, +- 45
