from __future__ import annotations

import inspect
import warnings

import pytest
import torch

import zgcompile
from zgcompile.errors import CaptureWarning
from zgcompile.ir.envelope import EnvelopeWarning


def test_a_warning_is_shown_at_the_call_of_the_step():
    step = zgcompile.compile(lambda x: x.sum(), warmup=1, envelope=zgcompile.Envelope(caps={"nowhere:1": 3}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        step(torch.ones(4))
    (shown,) = [w for w in caught if issubclass(w.category, EnvelopeWarning)]
    assert (shown.filename, shown.lineno) == (__file__, line)


def test_state_that_is_too_large_to_watch():
    rows = {i: [i] for i in range(60_000)}

    def step(x):
        return x.sum() * len(rows)

    with pytest.warns(CaptureWarning, match="more Python state than is watched"):
        zgcompile.compile(step, warmup=1)(torch.ones(4))
