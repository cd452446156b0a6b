"""Capacities over the life of a step: kept while calls bear them out, then fitted anew."""

from __future__ import annotations

import warnings

import torch

import zgcompile
from tests.frontend.envelopes import BATCH, draws, halves_step, held, pairs_step, two_halves
from zgcompile.frontend.drift import Drift
from zgcompile.ir.envelope import EnvelopeFit, EnvelopeWarning


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


def test_a_capacity_of_the_user_that_is_too_small_is_said_once_and_kept():
    first = pairs_step.__code__.co_firstlineno
    step = halves_step(zgcompile.Envelope(caps={f"envelopes.py:{first + 4}": 70}), warmup=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seeds in draws(0, 10_000, 50):
            step(seeds)
    said = [str(w.message) for w in caught if w.category is EnvelopeWarning]
    assert len(said) == 1
    assert f"envelopes.py:{first + 4} has 70 rows by Envelope(caps=), and a call needed 4" in said[0]
    assert step.stats.overflows == 49
    assert step.stats.captures == 1


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


def test_batches_that_always_outgrow_what_is_held_are_warned_of_once():
    step = halves_step(zgcompile.Envelope(headroom=1.0), warmup=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(64, 64 + 40):
            step(torch.arange(rows) * 90)
    said = [str(w.message) for w in caught if w.category is EnvelopeWarning]
    assert [text for text in said if "8 calls in a row" in text] == said[:1]


def test_a_warning_that_is_an_error_finds_nothing_changed():
    weight = torch.nn.Parameter(torch.ones(10_000))
    opt = torch.optim.SGD([weight], lr=0.1)
    table = two_halves()

    def step(seeds):
        loss = pairs_step(seeds, table) * weight[seeds].sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    first = pairs_step.__code__.co_firstlineno
    step = zgcompile.compile(step, warmup=1, envelope=zgcompile.Envelope(caps={f"envelopes.py:{first + 4}": 70}))
    raised = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seeds in draws(0, 10_000, 4):
            before, calls = weight.detach().clone(), step.stats.calls
            try:
                step(seeds)
            except EnvelopeWarning:
                raised += 1
                assert torch.equal(weight, before)
                assert step.stats.calls == calls
    assert raised == 1
