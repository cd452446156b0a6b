"""What may not change in Python between calls is noticed, what may passes, and quickly."""

from __future__ import annotations

import argparse
import collections
import enum
import time

import numpy as np
import pytest
import torch

from zgcompile.frontend.held_state import same
from zgcompile.frontend.python_state import PythonSnapshot, hyperparameters

EPOCH = 3


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(3, 2)
        self.log = []
        self.register_buffer("mem", torch.zeros(2))

    def forward(self, x):
        return self.lin(x)

    def note(self, x):
        self.log.append(x)


def guard_case():
    model = Model()
    args = argparse.Namespace(hops=2, mode=Mode.FAST, dtype=torch.float32, name=None, ratio=0.5)
    table = {"a": 1}

    def step(x):
        return model(x) * EPOCH, args, table

    return model, args, table, step


@pytest.mark.parametrize(
    ("act", "path"),
    [
        (lambda m, a, t: m.eval(), "model.training"),
        (lambda m, a, t: m.lin.train(False), "model.lin.training"),
        (lambda m, a, t: setattr(a, "hops", 3), "args.hops"),
        (lambda m, a, t: setattr(a, "hops", 2.0), "args.hops"),
        (lambda m, a, t: setattr(a, "mode", Mode.SLOW), "args.mode"),
        (lambda m, a, t: setattr(a, "dtype", torch.float16), "args.dtype"),
        (lambda m, a, t: setattr(a, "extra", 1), "args.extra"),
        (lambda m, a, t: delattr(a, "name"), "args.name"),
        (lambda m, a, t: setattr(m, "lin", torch.nn.Linear(3, 2)), "model.lin"),
        (lambda m, a, t: t.update(b=2), "table['b']"),
        (lambda m, a, t: (t.clear(), t.update(b=1)), "table['a']"),
        (lambda m, a, t: m.log.append(1), "model.log"),
        (lambda m, a, t: m.register_forward_hook(print), None),
        (lambda m, a, t: globals().update(EPOCH=4), "global EPOCH"),
    ],
)
def test_check_notices(act, path):
    model, args, table, step = guard_case()
    snapshot = PythonSnapshot.take(step)
    assert snapshot.check() is None
    act(model, args, table)
    try:
        change = snapshot.check()
        assert change is not None
        assert path is None or change.path == path
    finally:
        snapshot.restore()
    assert snapshot.check() is None


def test_check_lets_equal_values_and_tensors_pass():
    model, args, _, step = guard_case()
    args.big, args.nan, args.pair = 10**6, float("nan"), (1, (2.5, "x"))
    snapshot = PythonSnapshot.take(step)
    args.big, args.nan, args.pair = int("1000000"), float("nan"), (1, (float("2.5"), "x"))
    model.mem = torch.ones(2)
    assert snapshot.check() is None
    args.pair = (1, (2.5, 1))
    assert snapshot.check().path == "args.pair"


def test_check_does_not_create_defaultdict_entries():
    table = collections.defaultdict(list, a=[1])
    snapshot = PythonSnapshot.take(lambda: table["a"])
    del table["a"]
    assert snapshot.check().path == "table['a']"
    assert len(table) == 0


def test_hyperparameters_are_no_guards_but_ints_and_flags_are():
    model = Model()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0)
    step = lambda: opt.step()
    snapshot = PythonSnapshot.take(step)
    sites = {s.path: s for s in hyperparameters([opt])}
    assert {p.removeprefix("optimizer0.param_groups[0]") for p in sites} == {
        "['lr']",
        "['betas'][0]",
        "['betas'][1]",
        "['eps']",
    }
    opt.param_groups[0]["lr"] = 0.2
    opt.param_groups[0]["betas"] = (0.5, 0.6)
    assert snapshot.check() is None
    assert sites["optimizer0.param_groups[0]['betas'][1]"].get() == 0.6
    assert sites["optimizer0.param_groups[0]['lr']"].get() == 0.2
    opt.param_groups[0]["weight_decay"] = 1
    assert snapshot.check().path == "opt.param_groups[0]['weight_decay']"
    snapshot.restore()
    opt.param_groups[0]["amsgrad"] = True
    assert snapshot.check().path == "opt.param_groups[0]['amsgrad']"


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        (0.0, -0.0, False),
        (-0.0, -0.0, True),
        (float("nan"), float("nan"), True),
        (complex(0.0, 1.0), complex(-0.0, 1.0), False),
        (complex(2.0, 1.0), complex(2.0, 1.0), True),
        ((1, (0.0,)), (1, (-0.0,)), False),
        (np.float32(0.0), np.float32(-0.0), False),
        (1, True, False),
    ],
)
def test_what_counts_as_the_same(a, b, alike):
    assert same(a, b) is alike


def test_a_new_attribute_that_is_not_read_is_looked_at_once():
    model = Model()
    snapshot = PythonSnapshot.take(lambda x: model(x))
    model.best_acc = 0.9
    assert snapshot.check() is None
    assert snapshot._sizes == [*map(len, snapshot._sized)]
    best = min(_timed(snapshot.check) for _ in range(50))
    assert best < 100e-6, f"{best * 1e6:.0f} us"


def test_equal_keys_in_the_same_order_are_no_change():
    table = {"a" * 20: 1, "b" * 20: 2, 3: 4}
    snapshot = PythonSnapshot.take(lambda: table)
    items = [("".join([*key]) if isinstance(key, str) else key, value) for key, value in table.items()]
    table.clear()
    table.update(items)
    assert snapshot.check() is None
    table[3] = table.pop(3)
    assert snapshot.check() is None
    table["a" * 20] = table.pop("a" * 20)
    assert snapshot.check().kind == "order changed"


def test_check_is_quick():
    model = torch.nn.Sequential(*(torch.nn.Dropout(0.5) for _ in range(100)))
    snapshot = PythonSnapshot.take(lambda x: model(x))
    assert len(snapshot.scalars) >= 300
    best = min(_timed(snapshot.check) for _ in range(50))
    assert best < 500e-6, f"{best * 1e6:.0f} us"


def _timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
