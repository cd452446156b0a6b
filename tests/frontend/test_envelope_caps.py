"""What an envelope accepts, and capacities that the user sets."""

from __future__ import annotations

import pytest

import zgcompile
from tests.frontend.envelopes import FAMILIES, SHAPE, compiled, draws, halves_step, held, pairs_step
from zgcompile.errors import BadInput
from zgcompile.ir.envelope import EnvelopeWarning


@pytest.fixture(scope="module")
def graphs():
    return {name: make(SHAPE) for name, make in FAMILIES.items()}


@pytest.mark.parametrize(("options", "what"), [
    ({"headroom": 1.1, "max_overflow_probability": 1e-3}, "two ways"),
    ({"headroom": 0.9}, "below 1"),
    ({"headroom": float("nan")}, "below 1"),
    ({"max_overflow_probability": 0.0}, "between 0 and 1"),
    ({"max_overflow_probability": 1.0}, "between 0 and 1"),
    ({"max_overflow_probability": float("nan")}, "between 0 and 1"),
    ({"batches": [1]}, "not a callable"),
    ({"caps": {"a.py:3": 0}}, "positive whole number"),
    ({"caps": {3: 70}}, "is no line"),
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


def test_one_of_the_sizes_of_a_line_has_a_capacity(graphs):
    caps = {"sage.py:38 #2": 4444}
    step, _ = compiled(graphs["uniform"], zgcompile.Envelope(caps=caps))
    assert held(step)[1] != 4444
    assert held(step)[3] == 4444
    caps = {"sage.py:38": 5555, "sage.py:38 #1": 444}
    step, _ = compiled(graphs["uniform"], zgcompile.Envelope(caps=caps))
    assert held(step)[1::2] == [444, 5555]


def test_a_capacity_of_no_size_is_named(graphs):
    caps = {"sage.py:7": 4444}
    with pytest.warns(EnvelopeWarning, match=r"sage\.py:\d+: Envelope\(caps=\{'sage.py:7'.*sage\.py:38 #2"):
        compiled(graphs["uniform"], zgcompile.Envelope(caps=caps))


def test_no_probability_is_stated_of_capacities_that_the_user_sets():
    first = pairs_step.__code__.co_firstlineno
    step = halves_step(zgcompile.Envelope(caps={f"envelopes.py:{first + 4}": 1500}), warmup=1)
    for seeds in draws(0, 10_000, 3):
        step(seeds)
    fit = step.stats.envelope_fit
    assert (fit.source, fit.bound, held(step)) == ("headroom", None, [1500])
    assert "Envelope(caps=) sets every capacity" in str(fit)
