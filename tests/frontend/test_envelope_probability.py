"""Envelopes with a stated overflow probability, against an independent sampler in numpy."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

import zgcompile
from tests.frontend.envelopes import AUTO, BATCH, FAMILIES, FANOUTS, SHAPE, compiled, held, seeds_of
from zgcompile.bench.sage import SAGE, make_step
from zgcompile.frontend import calibration
from zgcompile.frontend.calibration import Calibrator

BATCHES = 20_000  # of the oracle


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


@pytest.fixture
def all_batches(monkeypatch):
    """As many dry runs as are wanted, however busy the machine is."""
    for name in ("ASKED", "DEFAULT"):
        monkeypatch.setattr(calibration, name, (getattr(calibration, name)[0], math.inf))


def test_same_step_same_capacities(graphs, fitted, all_batches):
    step, _ = compiled(graphs["uniform"], zgcompile.Envelope(max_overflow_probability=1e-2))
    caps, fit, _ = fitted("uniform", 1e-2)
    assert held(step) == caps.tolist()
    assert step.stats.envelope_fit == fit


def test_capacities_do_not_depend_on_the_first_batches(graphs, all_batches):
    """So that a second run of a script without a fixed seed finds its compiled code."""
    held_by = []
    for seed in range(4):
        step, _ = compiled(graphs["power-law"], None, seeds=seed)
        assert step.stats.envelope_fit.source == "random batches"
        held_by.append(held(step))
    assert held_by == held_by[:1] * 4


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
