from __future__ import annotations

import inspect
import warnings

import torch

import zgcompile


def test_a_warning_is_shown_at_the_call_of_the_step():
    step = zgcompile.compile(lambda x: x.sum(), warmup=1, envelope=zgcompile.Envelope(caps={"nowhere:1": 3}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        step(torch.ones(4))
    (shown,) = [w for w in caught if issubclass(w.category, zgcompile.errors.EnvelopeWarning)]
    assert (shown.filename, shown.lineno) == (__file__, line)
