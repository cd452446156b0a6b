"""A builtin, class, module, function or class attribute that is rebound between two calls is another capture."""

from __future__ import annotations

import functools
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.frontend.rebound import FEATURES, Box, Cases, act_on, assert_case
from zgcompile.frontend.python_state import PythonSnapshot

ACT, KIND, LIBRARY = torch.relu, None, None
FACTOR = 1.0

case = Cases()


def set_global(name, value):
    globals()[name] = value


class One:
    k = 1.0


class Two:
    k = 2.0


# -- 1: rebound to another builtin, class or module


@case
def builtin_as_global():
    return act_on(lambda: set_global("ACT", torch.tanh), lambda x: ACT(x), lambda: set_global("ACT", torch.relu))


@case
def class_as_global():
    set_global("KIND", One)
    return act_on(lambda: set_global("KIND", Two), lambda x: x * KIND.k)


@case
def module_as_global():
    a, b = types.ModuleType("a"), types.ModuleType("b")
    a.k, b.k = 1.0, 2.0
    set_global("LIBRARY", a)
    return act_on(lambda: set_global("LIBRARY", b), lambda x: x * LIBRARY.k)


@case
def library_as_global():
    set_global("LIBRARY", torch.nn.functional)
    return act_on(lambda: set_global("LIBRARY", torch), lambda x: x * (2.0 if LIBRARY is torch else 1.0))


@case
def builtin_as_attribute():
    box = SimpleNamespace(act=torch.relu)
    return act_on(lambda: setattr(box, "act", torch.tanh), lambda x: box.act(x))


@case
def builtin_as_attribute_of_a_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = torch.relu

        def forward(self, x):
            return self.act(x)

    model = Model()
    return act_on(lambda: setattr(model, "act", torch.tanh), lambda x: model(x))


@case
def class_as_dict_value():
    table = {"act": nn.ReLU}
    return act_on(lambda: table.update(act=nn.Tanh), lambda x: table["act"]()(x))


@case
def builtin_as_list_item():
    ops = [torch.relu, torch.neg]
    return act_on(lambda: ops.__setitem__(1, torch.abs), lambda x: ops[1](ops[0](x)))


@case
def library_class_in_a_closure():
    kind = int

    def change():
        nonlocal kind
        kind = float

    return act_on(change, lambda x: x * (2.0 if isinstance(1, kind) else 1.0))


# -- 2: what a class holds


def class_attribute(before, after, read):
    class Holder:
        member = before

    return act_on(lambda: setattr(Holder, "member", after), lambda x: read(Holder, x))


def within_a_class(member, change, read):
    class Holder:
        pass

    Holder.member = member
    return act_on(lambda: change(Holder.member), lambda x: read(Holder, x))


case |= {
    "object_in_a_class": lambda: within_a_class(Box(), lambda m: setattr(m, "k", 2.0), lambda c, x: x * c.member.k),
    "namespace_in_a_class": lambda: within_a_class(
        SimpleNamespace(k=1.0), lambda m: setattr(m, "k", 2.0), lambda c, x: x * c.member.k
    ),
    "object_in_a_class_rebound": lambda: class_attribute(Box(), Box(2.0), lambda c, x: x * c.member.k),
    "nested_class": lambda: within_a_class(
        type("Inner", (), {"k": 1.0, "__module__": __name__}),
        lambda m: setattr(m, "k", 2.0),
        lambda c, x: x * c.member.k,
    ),
    "array_in_a_class": lambda: within_a_class(
        np.ones(3), lambda m: m.__setitem__(0, 2.0), lambda c, x: x * float(c.member[0])
    ),
    "partial_in_a_class": lambda: class_attribute(
        functools.partial(torch.clamp, min=0.0), functools.partial(torch.clamp, min=0.5), lambda c, x: c.member(x)
    ),
    "keywords_of_a_partial": lambda: within_a_class(
        functools.partial(torch.clamp, min=0.0), lambda m: m.keywords.update(min=0.5), lambda c, x: c.member(x)
    ),
    "module_in_a_class": lambda: class_attribute(nn.ReLU(), nn.Tanh(), lambda c, x: c.member(x)),
    "setting_of_a_module_in_a_class": lambda: within_a_class(
        nn.LeakyReLU(0.1), lambda m: setattr(m, "negative_slope", 0.9), lambda c, x: c.member(x)
    ),
    "builtin_in_a_class": lambda: class_attribute(torch.relu, torch.tanh, lambda c, x: c.member(x)),
    "slice_in_a_class": lambda: class_attribute(slice(0, 2), slice(0, 3), lambda c, x: x[:, c.member]),
    "tensor_in_an_object_in_a_class": lambda: within_a_class(
        SimpleNamespace(table=torch.ones(6)),
        lambda m: setattr(m, "table", torch.zeros(6)),
        lambda c, x: x + c.member.table,
    ),
}


class Methods:
    k = 1.0

    def scaled(self, x, factor):
        return x * factor * self.k

    once = functools.partialmethod(scaled, factor=1.0)

    @functools.singledispatchmethod
    def dispatched(self, x):
        return x * self.k

    def __call__(self, x):
        return x * self.k

    def __mul__(self, x):
        return x


def replaced(name, value, read):
    before = vars(Methods)[name]
    return act_on(lambda: setattr(Methods, name, value), read, lambda: setattr(Methods, name, before))


def method_reads(read):
    owner = Methods()
    return act_on(lambda: setattr(owner, "k", 2.0), lambda x: read(owner, x))


case |= {
    "partialmethod_reads": lambda: method_reads(lambda m, x: m.once(x)),
    "singledispatchmethod_reads": lambda: method_reads(lambda m, x: m.dispatched(x)),
    "call_reads": lambda: method_reads(lambda m, x: m(x)),
    "partialmethod_replaced": lambda: replaced(
        "once", functools.partialmethod(Methods.scaled, factor=3.0), lambda x: Methods().once(x)
    ),
    "call_replaced": lambda: replaced("__call__", lambda self, x: x * 3, lambda x: Methods()(x)),
    "operator_replaced": lambda: replaced("__mul__", lambda self, x: x * 3, lambda x: Methods() * x),
}


class Lazy:
    """A descriptor of the user's own."""

    def __init__(self, fn):
        self.fn, self.k = fn, 1.0

    def __get__(self, instance, owner=None):
        return self.fn(instance) * self.k


class Described:
    def __init__(self):
        self.q = 1.0

    @Lazy
    def lazy(self):
        return self.q


@case
def what_a_descriptor_calls():
    owner = Described()
    return act_on(lambda: setattr(owner, "q", 2.0), lambda x: x * owner.lazy)


@case
def what_a_descriptor_holds():
    owner, lazy = Described(), vars(Described)["lazy"]
    return act_on(lambda: setattr(lazy, "k", 2.0), lambda x: x * owner.lazy, lambda: setattr(lazy, "k", 1.0))


@functools.singledispatch
def dispatched(x):
    return x


@dispatched.register
def _(x: torch.Tensor):
    return x * FACTOR


@case
def dispatched_anew():
    @functools.singledispatch
    def local(x):
        return x

    return act_on(lambda: local.register(torch.Tensor, lambda x: x * 2), lambda x: local(x))


@case
def attribute_of_a_metaclass():
    class Meta(type):
        k = 1.0

    class Made(metaclass=Meta):
        pass

    return act_on(lambda: setattr(Meta, "k", 2.0), lambda x: x * Made.k)


# -- functions themselves


@case
def defaults_of_a_function():
    def helper(x, k=1.0):
        return x * k

    return act_on(lambda: setattr(helper, "__defaults__", (2.0,)), lambda x: helper(x))


@case
def keyword_defaults_of_a_function():
    def helper(x, *, table=FEATURES[0]):
        return x * table

    return act_on(lambda: helper.__kwdefaults__.update(table=FEATURES[1]), lambda x: helper(x))


@case
def code_of_a_function():
    def helper(x):
        return x

    def other(x):
        return x * 2

    return act_on(lambda: setattr(helper, "__code__", other.__code__), lambda x: helper(x))


@pytest.mark.parametrize("name", case)
def test_a_change_between_calls_is_another_capture(name):
    assert_case(*case[name]())


def test_what_a_dispatched_function_reads(monkeypatch):
    snapshot = PythonSnapshot.take(lambda x: dispatched(x))
    assert snapshot.check() is None
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert snapshot.check().path == "global FACTOR"
