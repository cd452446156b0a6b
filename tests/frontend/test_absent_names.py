"""An attribute or name that was not there at the capture, and comes later."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import zgcompile
from tests.frontend.rebound import BATCH, FEATURES, Box, Cases, act_on, assert_case

case = Cases()


def set_global(name, value):
    globals()[name] = value


class Base:
    k = 1.0

    def scaled(self, x):
        return x


def subclass():
    return type("Sub", (Base,), {"__module__": __name__})


@case
def has_attribute():
    box = Box()
    return act_on(lambda: setattr(box, "flag", 1), lambda x: x * 2 if hasattr(box, "flag") else x)


@case
def get_attribute_with_default():
    box = Box()
    return act_on(lambda: setattr(box, "extra", 2.0), lambda x: x * getattr(box, "extra", 1.0))


@case
def tried_attribute():
    box = Box()

    def read(x):
        try:
            return x * box.flag
        except AttributeError:
            return x

    return act_on(lambda: setattr(box, "flag", 2.0), read)


@case
def has_attribute_of_a_module():
    class Model(nn.Module):
        def forward(self, x):
            return x * self.lora if hasattr(self, "lora") else x

    model = Model()
    return act_on(lambda: setattr(model, "lora", 2.0), lambda x: model(x))


@case
def made_up_attribute():
    class Magic:
        def __getattr__(self, name):
            return 1.0

    magic = Magic()
    return act_on(lambda: setattr(magic, "k", 2.0), lambda x: x * magic.k)


@case
def attribute_that_a_subclass_hides():
    sub = subclass()
    return act_on(lambda: setattr(sub, "k", 2.0), lambda x: x * sub.k)


@case
def method_that_a_subclass_hides():
    sub = subclass()()
    return act_on(lambda: setattr(type(sub), "scaled", lambda self, x: x * 2), lambda x: sub.scaled(x))


@case
def operator_that_a_class_gains():
    class Plain:
        def __getattr__(self, name):
            raise AttributeError(name)

    plain = Plain()
    return act_on(lambda: setattr(Plain, "__bool__", lambda self: False), lambda x: x * 2 if plain else x)


@case
def attribute_that_a_pattern_names():
    box = Box()

    def read(x):
        match box:
            case Box(k=1.0):
                return x
        return x * 2

    return act_on(lambda: setattr(box, "k", 2.0), read)


@case
def attribute_of_a_function():
    def helper(x):
        return x * getattr(helper, "k", 1.0)

    return act_on(lambda: setattr(helper, "k", 2.0), helper)


@case
def name_of_a_module():
    module = types.ModuleType("settings")
    return act_on(lambda: setattr(module, "extra", 2.0), lambda x: x * getattr(module, "extra", 1.0))


@case
def builtin_that_a_global_hides():
    return act_on(lambda: set_global("max", min), lambda x: x * max(1.0, 0.5), lambda: globals().pop("max", None))


@pytest.mark.parametrize("name", case)
def test_a_change_between_calls_is_another_capture(name):
    assert_case(*case[name]())


class Quiet(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 2)

    def forward(self, x):
        return self.lin(x)


def test_what_nobody_reads_may_come_and_change():
    model, module = Quiet(), types.ModuleType("settings")
    module.k = 1.0

    def step(ids):
        return model(FEATURES[ids] * module.k).sum()

    fn = zgcompile.compile(step, warmup=1)
    for epoch in range(6):
        for _ in range(2):
            torch.testing.assert_close(fn(BATCH), step(BATCH))
        model.best_acc = epoch / 10
        setattr(model, f"note_{epoch}", epoch)
        Quiet.seen = epoch
        setattr(module, f"note_{epoch}", epoch)
        set_global(f"_note_{epoch}", epoch)
        step.note = epoch
    assert fn.stats.traces == 1
    assert fn.stats.replays >= 9
    for epoch in range(6):
        globals().pop(f"_note_{epoch}")
    del Quiet.seen
