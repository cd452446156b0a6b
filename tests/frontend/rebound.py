"""A step, what its user changes in Python between two calls, and the proof that the next call is as the function
itself."""

from __future__ import annotations

import torch

import zgcompile

BATCH = torch.arange(9)
FEATURES = torch.linspace(-1, 2, 54).reshape(9, 6)


class Cases(dict):
    """Name -> what builds a case: `@case` on each, where `case = Cases()`."""

    def __call__(self, build):
        self[build.__name__] = build
        return build


class Box:
    def __init__(self, k=1.0):
        self.k = k


def act_on(change, read, undo=None):
    """(a step that is `read` on the gathered rows, what the user does between two calls, what puts the test's module
    back or None)."""

    def step(ids):
        return read(FEATURES[ids])

    return step, change, undo


def assert_followed(step, change):
    fn = zgcompile.compile(step, warmup=1)
    for _ in range(4):
        assert torch.equal(fn(BATCH), step(BATCH))
    assert fn.stats.replays >= 2
    assert fn.stats.traces == 1
    before = step(BATCH)
    change()
    wanted = step(BATCH)
    assert (
        wanted.shape != before.shape or not torch.equal(wanted, before) or wanted.signbit().ne(before.signbit()).any()
    )
    for _ in range(3):
        torch.testing.assert_close(fn(BATCH), wanted)
    assert fn.stats.traces == 2


def assert_case(step, change, undo):
    try:
        assert_followed(step, change)
    finally:
        if undo is not None:
            undo()
