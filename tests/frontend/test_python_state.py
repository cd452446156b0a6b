"""What a step changes in Python is named with its path and line, and undone exactly."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from zgcompile.errors import PythonStateChanged
from zgcompile.frontend.python_state import PythonSnapshot

COUNT = 0
TABLE = {"n": 1, "m": 2}


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if f"# MARK {mark}" in line)


def changes_of(step, *args, roots=()):
    """Run `step` under a snapshot; return its changes after checking that `restore` leaves none."""
    before = PythonSnapshot.take(step, roots)
    step(*args)
    changes = before.diff()
    assert [str(c) for c in before.diff(PythonSnapshot.take(step, roots))] == [str(c) for c in changes]
    before.restore()
    assert before.diff() == []
    assert before.check() is None
    return changes


def only(changes):
    assert len(changes) == 1, [str(c) for c in changes]
    return changes[0]


class Model(torch.nn.Module):
    made = 0

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(3, 2)
        self.calls = 0
        self.log = []
        self.register_buffer("mem", torch.zeros(2))

    def forward(self, x):
        self.calls += 1  # MARK calls
        return self.lin(x)

    def remember(self, x):
        self.mem = x.detach()  # MARK mem

    def note(self, x):
        self.log.append(x)  # MARK log

    def count(self):
        Model.made += 1  # MARK made


def test_counter_of_a_module():
    model = Model()
    change = only(changes_of(lambda x: model(x), torch.ones(1, 3)))
    assert (change.path, change.kind, change.before, change.after) == ("model.calls", "value changed", "0", "1")
    assert change.where.line == line_of("calls")
    assert model.calls == 0
    error = change.error()
    assert isinstance(error, PythonStateChanged)
    assert f"test_python_state.py:{line_of('calls')}" in str(error)
    assert "model.calls" in str(error)


def test_counter_of_a_submodule_reached_through_the_module():
    holder = torch.nn.ModuleList([Model()])
    change = only(changes_of(lambda x: holder[0](x), torch.ones(1, 3)))
    assert change.path == "holder.0.calls"


def test_appended_list():
    history = [1]

    def step():
        history.append(2)  # MARK history

    change = only(changes_of(step))
    assert (change.path, change.kind) == ("closure history", "item appended")
    assert change.where.line == line_of("history")
    assert history == [1]


def test_list_in_an_attribute_changed_in_the_middle():
    model = Model()
    model.log = [1, 2, 3]
    keep = model.log

    def step():
        model.log[1] = 9  # MARK middle
        model.log.reverse()
        model.log.reverse()

    change = only(changes_of(step))
    assert (change.path, change.before, change.after) == ("model.log[1]", "2", "9")
    assert change.where.line == line_of("middle")
    assert model.log is keep
    assert keep == [1, 2, 3]


def test_method_that_appends():
    model = Model()
    change = only(changes_of(lambda: model.note(1)))
    assert (change.path, change.kind, change.where.line) == ("model.log", "item appended", line_of("log"))


def test_dict_writes_and_order():
    stats = {"a": 1, "b": 2}

    def step():
        stats["a"] = 5  # MARK dict
        del stats["b"]  # MARK del
        stats["c"] = 7  # MARK new

    found = {c.path: c for c in changes_of(step)}
    assert {p: (c.kind, c.where.line) for p, c in found.items()} == {
        "stats['a']": ("value changed", line_of("dict")),
        "stats['b']": ("item removed", line_of("del")),
        "stats['c']": ("item added", line_of("new")),
    }
    assert list(stats.items()) == [("a", 1), ("b", 2)]


def test_order_alone():
    stats = {"a": 1, "b": 2}
    ordered = collections.OrderedDict(a=1, b=2)

    def step():
        stats["a"] = stats.pop("a")
        ordered.move_to_end("a")

    assert [(c.path, c.kind) for c in changes_of(step)] == [
        ("closure ordered", "order changed"),
        ("closure stats", "order changed"),
    ]
    assert list(stats) == list(ordered) == ["a", "b"]


def test_global_counter_and_a_global_that_did_not_exist():
    def step():
        global COUNT, FRESH_NAME
        COUNT += 1  # MARK global
        FRESH_NAME = 1  # MARK fresh

    found = {c.path: c for c in changes_of(step)}
    assert found["global COUNT"].where.line == line_of("global")
    assert (found["global FRESH_NAME"].kind, found["global FRESH_NAME"].where.line) == ("name added", line_of("fresh"))
    assert COUNT == 0
    assert "FRESH_NAME" not in globals()


def _bump():
    TABLE["n"] += 1  # MARK helper


def test_global_dict_through_a_helper():
    change = only(changes_of(lambda: _bump()))
    assert (change.path, change.where.line, change.where.function) == ("TABLE['n']", line_of("helper"), "_bump")
    assert TABLE == {"n": 1, "m": 2}


def test_nonlocal():
    total = 0

    def step():
        nonlocal total
        total = total + 1  # MARK nonlocal

    change = only(changes_of(step))
    assert (change.path, change.kind, change.where.line) == ("closure total", "value changed", line_of("nonlocal"))
    assert total == 0


def test_cell_that_was_empty():
    def step():
        nonlocal late
        late = 4

    assert (only(changes_of(step)).kind) == "name added"
    with pytest.raises(NameError):
        late
    late = 1


def test_rebound_buffer_and_its_site():
    model = Model()
    old = model.mem
    (site,) = [s for s in PythonSnapshot.take(model.remember).tensors if s.path == "self.mem"]
    assert site.get() is old
    change = only(changes_of(model.remember, torch.ones(2)))
    assert (change.path, change.kind, change.where.line) == ("self.mem", "rebound", line_of("mem"))
    assert model.mem is old
    model.mem = torch.ones(2)
    assert site.get() is model.mem is not old
    del model.mem
    assert site.get() is None


def test_tensor_written_in_place_is_no_change_and_not_undone():
    state = torch.zeros(3)
    assert changes_of(lambda: state.add_(1)) == []
    assert state.tolist() == [1, 1, 1]


def test_module_in_a_dict_in_a_dataclass():
    @dataclasses.dataclass
    class Config:
        parts: dict
        rate: float = 0.5

    config = Config({"net": Model()})

    def step(x):
        config.parts["net"](x)
        config.rate = 1.0  # MARK rate

    found = {c.path: c for c in changes_of(step, torch.ones(1, 3))}
    assert set(found) == {"config.rate", "config.parts['net'].calls"}
    assert found["config.rate"].where.line == line_of("rate")
    paths = {s.path for s in PythonSnapshot.take(step).tensors}
    assert {"config.parts['net'].lin.weight", "config.parts['net'].mem"} <= paths


def test_optimizer_state_made_inside_the_step_is_undone():
    model = Model()
    opt = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x):
        model.lin(x).sum().backward()
        opt.step()
        opt.param_groups[0]["lr"] = 0.01  # MARK lr
        opt.zero_grad()

    groups, betas, state = opt.param_groups, opt.param_groups[0]["betas"], opt.state
    params = list(opt.param_groups[0]["params"])
    changes = changes_of(step, torch.ones(1, 3))
    assert [(c.path.split("[")[0], c.kind) for c in changes if c.kind == "item added"] == [
        ("opt.state", "item added")
    ] * 2
    assert [c.where.line for c in changes if c.path == "opt.param_groups[0]['lr']"] == [line_of("lr")]
    assert len(changes) == 3
    assert opt.state is state
    assert len(state) == 0
    assert opt.param_groups is groups
    assert groups[0]["lr"] == 0.1
    assert groups[0]["betas"] is betas
    assert all(a is b for a, b in zip(groups[0]["params"], params, strict=True))
    step(torch.ones(1, 3))
    inner = {p: (s, dict(s)) for p, s in opt.state.items()}
    snapshot = PythonSnapshot.take(step)
    opt.state = collections.defaultdict(dict)
    opt.param_groups[0]["params"] = []
    snapshot.restore()
    assert opt.state.keys() == inner.keys()
    assert all(
        opt.state[p] is s and list(s) == list(kept) and all(s[k] is kept[k] for k in s)
        for p, (s, kept) in inner.items()
    )
    assert len(opt.param_groups[0]["params"]) == 2
    assert any(s.path.endswith("['exp_avg']") for s in snapshot.tensors)


def test_bound_method_and_partial():
    class Trainer:
        def __init__(self):
            self.seen = 0
            self._secret = 0

        def step(self):
            self.seen += 1  # MARK seen
            self.__hidden = 3

    trainer = Trainer()
    assert [(c.path, c.kind) for c in changes_of(trainer.step)] == [
        ("self.seen", "value changed"),
        ("self._Trainer__hidden", "attribute added"),
    ]
    assert list(vars(trainer)) == ["seen", "_secret"]

    def step(owner, *, extra):
        owner.seen += 1
        extra.append(1)

    extra = []
    found = {(c.path, c.kind) for c in changes_of(functools.partial(step, trainer, extra=extra))}
    assert found == {("argument extra", "item appended"), ("owner.seen", "value changed")}


def test_default_argument():
    def step(memo={}):
        memo["k"] = 1  # MARK memo

    change = only(changes_of(step))
    assert (change.path, change.where.line) == ("memo['k']", line_of("memo"))
    assert step.__defaults__ == ({},)


def test_function_attribute():
    def step():
        step.calls += 1  # MARK attribute

    step.calls = 0
    change = only(changes_of(step))
    assert (change.path, change.where.line, step.calls) == ("step.calls", line_of("attribute"), 0)


def test_class_attribute():
    model = Model()
    change = only(changes_of(lambda: model.count()))
    assert (change.path, change.where.line, Model.made) == ("Model.made", line_of("made"), 0)


def test_cycles_slots_deque_set():
    class Node:
        __slots__ = ("next", "value")

    a, b = Node(), Node()
    a.next, b.next, a.value = b, a, 1
    queue, seen = collections.deque([1, 2], maxlen=3), {1}

    def step():
        a.value = 2  # MARK slot
        b.value = 3
        queue.append(3)
        queue.append(4)  # drops the first
        seen.add(5)  # MARK set

    found = {c.path: c for c in changes_of(step)}
    assert {p: c.kind for p, c in found.items()} == {
        "a.value": "value changed",
        "b.value": "attribute added",
        "closure queue": "items changed",
        "closure seen": "item added",
    }
    assert found["a.value"].where.line == line_of("slot")
    assert found["closure seen"].where.line == line_of("set")
    assert not hasattr(b, "value")
    assert queue == collections.deque([1, 2])
    assert queue.maxlen == 3
    assert seen == {1}


def test_tuple_and_namedtuple_contents():
    Pair = collections.namedtuple("Pair", "model n")
    pair = Pair(Model(), 1)
    change = only(changes_of(lambda x: pair.model(x), torch.ones(1, 3)))
    assert change.path == "pair[0].calls"


def test_decorated_functions_are_followed():
    hits = []

    def decorator(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            return fn(*args)

        return wrapper

    @decorator
    @torch.no_grad()
    @functools.lru_cache
    def helper(k):
        hits.append(k)  # MARK decorated

    change = only(changes_of(lambda: helper(1)))
    assert (change.path, change.where.line) == ("closure hits", line_of("decorated"))


def test_pyg_data_and_layers():
    from torch_geometric.data import Data
    from torch_geometric.nn import SAGEConv

    data, conv = Data(x=torch.ones(4, 3), edge_index=torch.tensor([[0, 1], [1, 0]])), SAGEConv(3, 2)

    def step():
        conv.aggr_module = torch.nn.Identity()  # MARK aggr
        data.y = torch.zeros(1)  # MARK y
        return conv(data.x, data.edge_index)

    snapshot = PythonSnapshot.take(step)
    assert {"data.x", "data.edge_index", "conv.lin_l.weight"} <= {s.path for s in snapshot.tensors}
    data.y = torch.zeros(1)
    conv.aggr_module, old = torch.nn.Identity(), conv.aggr_module
    assert {(c.path, c.where.line) for c in snapshot.diff()} == {
        ("data.y", line_of("y")),
        ("conv.aggr_module", line_of("aggr")),
    }
    snapshot.restore()
    assert conv.aggr_module is old
    assert "y" not in data


def test_random_generators_and_arrays_in_the_closure():
    rng, py, gen = np.random.default_rng(0), random.Random(0), torch.Generator().manual_seed(0)
    counts = np.zeros(4, dtype=np.int64)

    def step():
        counts[1] += 1  # MARK counts
        return rng.integers(100), py.random(), torch.rand(1, generator=gen).item()

    snapshot = PythonSnapshot.take(step)
    first = step()
    found = {c.path: c for c in snapshot.diff()}
    assert {p: c.kind for p, c in found.items()} == {
        "closure counts": "items changed",
        "closure rng": "advanced",
        "closure py": "advanced",
        "closure gen": "advanced",
    }
    assert found["closure counts"].where.line == line_of("counts")
    snapshot.restore()
    assert counts.tolist() == [0, 0, 0, 0]
    assert step() == first


def test_long_lists_of_numbers_are_one_entry():
    ids = list(range(5000))

    def step():
        ids.append(1)

    snapshot = PythonSnapshot.take(step)
    assert not [s for s in snapshot.scalars if "ids" in s.path]
    change = only(changes_of(step))
    assert (change.path, change.kind, len(ids)) == ("closure ids", "items changed", 5000)
    ids[3] = -1
    snapshot.restore()
    assert ids == list(range(5000))


def test_one_cycle_schedule_between_calls_trips_nothing():
    model = Model()
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=9)

    def step():
        model.lin(torch.ones(1, 3)).sum().backward()
        opt.step()

    step()
    snapshot = PythonSnapshot.take(step)
    for _ in range(3):
        step()
        schedule.step()
        assert snapshot.check() is None
    changes = changes_of(lambda: schedule.step())
    assert "schedule.last_epoch" in {c.path for c in changes}
