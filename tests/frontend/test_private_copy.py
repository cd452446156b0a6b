"""Private copies see other builtins; whatever is shared stays as it was."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import operator
import sys

import pytest
import torch

import zgcompile
from zgcompile.errors import CaptureRefused
from zgcompile.frontend.private_copy import ABSENT, PrivateCopies, private_copy, private_modules


class Size:
    """Like a symbolic size: a real int() of it fails."""

    def __int__(self):
        raise TypeError("int() of a symbolic size")


OVERRIDES = {"int": lambda v=0: "symbolic" if isinstance(v, Size) else builtins.int(v), "len": lambda v: "length"}
SIZE = Size()

HELPERS = """
import functools
import torch

COUNT = 0
def deep(x):
    return int(x)

def helper(x):
    return deep(x)

def bump():
    global COUNT, MADE
    COUNT += 1
    MADE = "new"
    return COUNT

def read():
    return COUNT

@functools.lru_cache
def cached(x):
    return int(x)

@torch.no_grad()
def guarded(x):
    return int(x), torch.is_grad_enabled()

AGGREGATORS = {"deep": [deep], "n": 1}

class Base(torch.nn.Module):
    def forward(self, x):
        return "base", int(x)
"""
SHADOW = "def int(x):\n    return 'own'\ndef f(x):\n    return int(x)\n"


@pytest.fixture
def helpers(tmp_path, monkeypatch):
    (tmp_path / "zg_helpers.py").write_text(HELPERS)
    (tmp_path / "zg_shadow.py").write_text(SHADOW)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("zg_helpers")
    for name in ("zg_helpers", "zg_shadow"):
        sys.modules.pop(name, None)


def same_everywhere(fn, *args):
    """The original must still fail, and the copy must not: returns what the copy gives."""
    with pytest.raises(TypeError, match="symbolic size"):
        fn(*args)
    result = private_copy(fn, OVERRIDES)(*args)
    with pytest.raises(TypeError, match="symbolic size"):
        fn(*args)
    return result


def plain(x):
    return int(x)


def test_builtin_replaced_only_in_the_copy():
    assert same_everywhere(plain, SIZE) == "symbolic"
    assert builtins.int is int
    assert "int" not in globals()


def test_everything_else_is_the_original():
    copy = private_copy(plain, OVERRIDES)
    assert copy("7") == 7
    assert copy.__wrapped__ is plain
    assert copy.function is not plain
    assert copy.function.__code__ is plain.__code__
    assert (copy.function.__name__, copy.function.__module__) == ("plain", __name__)
    assert copy.function.__globals__ is not plain.__globals__
    with pytest.raises(ValueError, match="invalid literal") as caught:
        copy("x")
    assert caught.traceback[-1].path.name in ("test_private_copy.py",)


def test_helpers_in_another_module(helpers):
    from zg_helpers import helper

    before = dict(vars(helpers))
    assert same_everywhere(lambda x: helper(x), SIZE) == "symbolic"
    assert same_everywhere(lambda x: helpers.helper(x), SIZE) == "symbolic"
    assert vars(helpers) == before


def test_import_inside_the_function(helpers):
    def whole(x):
        import zg_helpers

        return zg_helpers.helper(x)

    def named(x):
        from zg_helpers import deep

        return deep(x)

    def library(x):
        import math

        return math.floor(2.5), int(x)

    assert same_everywhere(whole, SIZE) == "symbolic"
    assert same_everywhere(named, SIZE) == "symbolic"
    assert same_everywhere(library, SIZE) == (2, "symbolic")
    import math

    assert sys.modules["math"] is math


def test_decorated_and_cached(helpers):
    assert same_everywhere(lambda x: helpers.guarded(x), SIZE) == ("symbolic", False)
    assert same_everywhere(lambda x: helpers.cached(x), SIZE) == "symbolic"
    assert helpers.cached.cache_info().currsize == 0


def test_wraps_follows_the_closure():
    def decorator(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            return [fn(*args)]

        return wrapper

    @decorator
    def step(x):
        return int(x)

    assert same_everywhere(step, SIZE) == ["symbolic"]
    assert step.__wrapped__ is not private_copy(step, OVERRIDES).function


def test_functions_in_containers_partials_and_defaults(helpers):
    def with_default(x, fn=plain, *, other=plain):
        return fn(x), other(x)

    bound = functools.partial(plain)
    table = {"f": [plain, (plain,)]}
    assert same_everywhere(lambda x: helpers.AGGREGATORS["deep"][0](x), SIZE) == "symbolic"
    assert same_everywhere(lambda x: (table["f"][0](x), table["f"][1][0](x)), SIZE) == ("symbolic", "symbolic")
    assert same_everywhere(with_default, SIZE) == ("symbolic", "symbolic")
    assert same_everywhere(functools.partial(with_default, fn=plain), SIZE) == ("symbolic", "symbolic")
    assert same_everywhere(lambda x: bound(x), SIZE) == "symbolic"
    assert table["f"][0] is plain
    assert with_default.__defaults__ == (plain,)


def fact(n, x):
    return [int(x)] if n == 0 else [*fact(n - 1, x), int(x)]


def test_recursion_global_and_local():
    def local(n, x):
        return [int(x)] if n == 0 else [*local(n - 1, x), int(x)]

    assert same_everywhere(fact, 2, SIZE) == ["symbolic"] * 3
    assert same_everywhere(local, 2, SIZE) == ["symbolic"] * 3


def test_mutual_recursion():
    def even(n, x):
        return int(x) if n == 0 else odd(n - 1, x)

    def odd(n, x):
        return even(n - 1, x)

    assert same_everywhere(even, 4, SIZE) == "symbolic"
    with pytest.raises(TypeError, match="symbolic size"):
        odd(1, SIZE)


def test_closure_cells_are_shared():
    total, log = 0, []

    def add(x):
        nonlocal total
        total += 1
        log.append(int(x))

    private_copy(lambda x: add(x), OVERRIDES)(SIZE)
    assert (total, log) == (1, ["symbolic"])


def test_cell_filled_later():
    def step(x):
        return late(x)

    with pytest.raises(NameError):
        private_copy(step, OVERRIDES)(SIZE)

    def late(x):
        return int(x)

    assert same_everywhere(step, SIZE) == "symbolic"


def test_generators_comprehensions_and_nested_functions():
    def step(xs):
        def inner(x):
            return int(x)

        def produce():
            for x in xs:
                yield int(x)

        return [int(x) for x in xs], list(produce()), list(map(inner, xs)), [*(int(x) for x in xs)]

    assert same_everywhere(step, [SIZE]) == (["symbolic"],) * 4


def test_a_name_of_the_module_wins(helpers):
    shadow = importlib.import_module("zg_shadow")
    assert private_copy(shadow.f, OVERRIDES)(SIZE) == "own"


def test_bound_method_keeps_its_object():
    class Trainer:
        def __init__(self):
            self.seen = []

        def step(self, x):
            self.seen.append(int(x))

    trainer = Trainer()
    private_copy(trainer.step, OVERRIDES)(SIZE)
    assert trainer.seen == ["symbolic"]
    with pytest.raises(TypeError, match="symbolic size"):
        trainer.step(SIZE)


def test_callable_object():
    class Step:
        def __call__(self, x):
            return int(x)

    assert same_everywhere(Step(), SIZE) == "symbolic"


def test_function_attributes_are_shared():
    def step():
        step.calls += 1

    step.calls = 0
    private_copy(step, OVERRIDES)()
    assert step.calls == 1


@pytest.mark.parametrize("fn", [operator.add, torch.relu, print])
def test_nothing_to_copy_is_refused(fn):
    with pytest.raises(CaptureRefused, match="not a Python function of yours"):
        private_copy(fn, OVERRIDES)


def test_a_library_function_runs_as_it_is():
    copy = private_copy(torch.nn.functional.relu, OVERRIDES)
    assert copy.function is torch.nn.functional.relu
    assert copy(torch.tensor([-1.0])).item() == 0


def test_global_writes_are_seen_and_kept_private(helpers):
    copy = private_copy(lambda: (helpers.bump(), helpers.bump(), helpers.read()), OVERRIDES)
    for _ in range(2):  # a second run starts from the originals again
        assert copy() == (1, 2, 2)
        assert copy.global_writes() == {("zg_helpers", "COUNT"): (0, 2), ("zg_helpers", "MADE"): (ABSENT, "new")}
    assert helpers.COUNT == 0
    assert not hasattr(helpers, "MADE")
    helpers.COUNT = 10
    assert copy() == (11, 12, 12)


def test_writes_through_the_module_object_and_to_copied_tables(helpers):
    def step():
        helpers.COUNT = 5
        helpers.AGGREGATORS["n"] = 2
        return helpers.read()

    copy = private_copy(step, OVERRIDES)
    for _ in range(2):
        assert copy() == 5
        writes = copy.global_writes()
        assert set(writes) == {("zg_helpers", "COUNT"), ("zg_helpers", "AGGREGATORS")}
        assert writes["zg_helpers", "AGGREGATORS"][0]["n"] == 1
        assert writes["zg_helpers", "AGGREGATORS"][1]["n"] == 2
    assert helpers.COUNT == 0
    assert helpers.AGGREGATORS["n"] == 1


def test_refresh_sees_new_functions(helpers):
    copy = private_copy(lambda x: helpers.helper(x), OVERRIDES)
    assert copy(SIZE) == "symbolic"
    helpers.deep = lambda x: ["new", int(x)]
    assert copy(SIZE) == ["new", "symbolic"]
    assert copy.global_writes() == {}


# ---- modules


@pytest.fixture
def model(helpers):
    class Model(helpers.Base):
        scale = 2

        def forward(self, x):
            kept = lambda: self
            return super().forward(x), self.own(x), self.fixed(x), self.made(x), kept() is self, __class__ is Model

        def own(self, x):
            return super(Model, self).forward(x)[1]

        @staticmethod
        def fixed(x):
            return int(x)

        @classmethod
        def made(cls, x):
            return cls.scale, int(x)

        @property
        def broken(self):
            return int(SIZE)

    return Model()


def test_methods_of_a_module(model):
    before, own = list(vars(model).items()), dict(vars(type(model)))
    with private_modules([model, model], OVERRIDES):
        assert model(SIZE) == (("base", "symbolic"), "symbolic", "symbolic", (2, "symbolic"), True, True)
        with pytest.raises(TypeError, match="symbolic size"):
            model.broken
    assert list(vars(model).items()) == before
    assert dict(vars(type(model))) == own
    with pytest.raises(TypeError, match="symbolic size"):
        model(SIZE)


def test_undone_after_an_exception(model):
    before = list(vars(model).items())
    with contextlib.suppress(ZeroDivisionError), private_modules([model], OVERRIDES):
        assert list(vars(model).items()) != before
        raise ZeroDivisionError
    assert list(vars(model).items()) == before


def test_library_modules_are_untouched():
    linear = torch.nn.Linear(2, 2)
    with private_modules([linear], OVERRIDES):
        assert "forward" not in vars(linear)


def test_instance_attributes(model):
    model.forward = lambda x: int(x)
    model.act = torch.relu
    patched = model.forward
    before = list(vars(model).items())
    with private_modules([model], OVERRIDES):
        assert model(SIZE) == "symbolic"
        assert model.act is torch.relu
        model.calls = 1
    assert model.forward is patched
    assert list(vars(model).items()) == [*before, ("calls", 1)]


def test_plain_objects_too():
    class Sampler:
        def sample(self, x):
            return int(x)

    sampler = Sampler()
    with private_modules([sampler], OVERRIDES):
        assert sampler.sample(SIZE) == "symbolic"
    assert vars(sampler) == {}


def test_one_set_of_globals_for_step_and_modules(helpers):
    class Net(torch.nn.Module):
        def forward(self):
            return helpers.bump()

    net = Net()
    copies = PrivateCopies(OVERRIDES)
    step = private_copy(lambda: (helpers.bump(), net(), helpers.read()), {}, copies)
    with private_modules([net], {}, copies):
        assert step() == (1, 2, 2)
    assert copies.global_writes()["zg_helpers", "COUNT"] == (0, 2)
    assert helpers.COUNT == 0


def test_other_files_can_be_included():
    from torch_geometric.utils.num_nodes import maybe_num_nodes

    index = torch.tensor([[0, 4], [1, 2]])
    copies = PrivateCopies({"int": lambda v: "mine"}, lambda name: name == maybe_num_nodes.__code__.co_filename)
    if copies.value(maybe_num_nodes) is maybe_num_nodes:
        pytest.skip("this PyG compiles it")
    assert private_copy(lambda: 0, {}, PrivateCopies({}))() == 0
    with pytest.raises(TypeError, match="can only concatenate str"):
        copies.value(maybe_num_nodes)(index)
    assert maybe_num_nodes(index) == 5


SCALE = 1.0


@functools.singledispatch
def scaled(x):
    raise TypeError(type(x))


@scaled.register
def _(x: torch.Tensor):
    return x * SCALE


def test_singledispatch_keeps_nothing_of_a_trace(monkeypatch):
    fn = zgcompile.compile(lambda x: scaled(x).sum(), warmup=1)
    for factor in (1.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", factor)
        for n in (4, 5, 4):
            assert float(fn(torch.ones(n))) == factor * n
    assert float(scaled(torch.ones(2)).sum()) == 6
