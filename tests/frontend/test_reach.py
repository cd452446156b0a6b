"""Which Python state a step can reach, and where the walk stops."""

from __future__ import annotations

import functools
import re

import numpy as np
import torch

from zgcompile.frontend.python_state import PythonSnapshot, reachable

COUNT = 0
EPOCH = 3
TABLE = {"n": 1, "m": 2}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self):
        self.calls += 1


def test_only_the_methods_used_are_followed():
    class Sampler:
        def sample(self):
            return EPOCH

        def plot(self):
            return COUNT

    sampler = Sampler()
    paths = {s.path for s in PythonSnapshot.take(lambda: sampler.sample()).scalars}
    assert "global EPOCH" in paths
    assert "global COUNT" not in paths


def test_methods_that_a_followed_method_names_are_followed():
    class Sampler:
        def inner(self):
            return TABLE["n"]

        def outer(self):
            return self.inner()

    sampler = Sampler()
    assert "TABLE['n']" in {s.path for s in PythonSnapshot.take(lambda: sampler.outer()).scalars}
    assert "TABLE['n']" not in {s.path for s in PythonSnapshot.take(lambda: sampler).scalars}


def test_library_objects_stay_closed():
    import logging

    log = logging.getLogger("x")

    class Holder:
        logger, generator, library, pattern = log, torch.nn.functional, np, re.compile("x")

    reached = reachable(lambda: (log, torch, np, Holder.logger, Holder.generator, Holder.library, Holder.pattern))
    assert reached.cut is None
    assert len(reached.nodes) <= 6


def test_the_walk_is_bounded():
    table = {i: [str(i)] for i in range(60_000)}
    assert reachable(lambda: table).cut == "table"
    assert PythonSnapshot.take(lambda: table).reached.cut == "table"
    assert reachable(lambda: TABLE).cut is None


def test_where_the_walk_gave_up_always_has_a_name():
    held = {str(i): str(i) for i in range(60_000)}
    assert reachable(functools.partial(lambda **given: given, **held)).cut


def test_iterators_are_told():
    batches = iter([1, 2])
    assert reachable(lambda: next(batches)).iterators == [("closure batches", batches)]


def test_extra_roots_are_named():
    model = Model()
    fn = lambda: None
    assert "net.calls" in {s.path for s in PythonSnapshot.take(fn, {"net": model}).scalars}
    assert "model.calls" in {s.path for s in PythonSnapshot.take(fn, [model]).scalars}
