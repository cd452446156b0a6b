"""The order of a dictionary, long containers of numbers, and containers of the standard library and of torch."""

from __future__ import annotations

import collections
import weakref

import pytest
import torch
from torch import nn

from tests.frontend.rebound import Box, act_on, assert_case

CASES = {}


def case(build):
    CASES[build.__name__] = build
    return build


@case
def order_of_a_dict():
    table = {"a": 1.0, "b": 2.0}

    def read(x):
        for i, v in enumerate(table.values()):
            x = x * v + i + 1
        return x

    return act_on(lambda: table.update(a=table.pop("a")), read)


@case
def order_of_a_module_dict():
    acts = nn.ModuleDict({"a": nn.Sigmoid(), "b": nn.ReLU()})

    def read(x):
        for act in acts.values():
            x = act(x)
        return x

    return act_on(lambda: acts.update({"a": acts.pop("a")}), read)


@case
def order_of_a_parameter_dict():
    table = nn.ParameterDict({"a": torch.ones(6), "b": torch.zeros(6)})

    def read(x):
        for v in table.values():
            x = x * 0.5 + v
        return x

    def change():
        table["a"] = table.pop("a")

    return act_on(change, read)


@case
def order_of_a_sequential():
    model = nn.Sequential(nn.Sigmoid(), nn.ReLU())
    return act_on(lambda: model._modules.update({"0": model._modules.pop("0")}), lambda x: model(x) - 0.5)


@case
def long_list():
    numbers = [1.0] * 1500
    return act_on(lambda: numbers.__setitem__(3, 4.0), lambda x: x * numbers[3])


@case
def long_dict():
    numbers = dict.fromkeys(range(1500), 1.0)
    return act_on(lambda: numbers.update({3: 4.0}), lambda x: x * numbers[3])


@case
def long_list_of_ints_one_of_them_a_bool():
    numbers = [1] * 1500
    return act_on(lambda: numbers.__setitem__(3, True), lambda x: x * (2.0 if numbers[3] is True else 1.0))


# -- 9: containers of the standard library and of torch


@case
def user_dict():
    table = collections.UserDict(k=1.0)
    return act_on(lambda: table.update(k=2.0), lambda x: x * table["k"])


@case
def user_list():
    table = collections.UserList([1.0])
    return act_on(lambda: table.__setitem__(0, 2.0), lambda x: x * table[0])


@case
def chain_map():
    inner = {"k": 1.0}
    table = collections.ChainMap({}, inner)
    return act_on(lambda: inner.update(k=2.0), lambda x: x * table["k"])


@case
def tensors_of_a_data_set():
    data = torch.utils.data.TensorDataset(torch.ones(6))
    return act_on(lambda: setattr(data, "tensors", (torch.zeros(6),)), lambda x: x + data.tensors[0])


@case
def behind_a_weak_reference():
    box = Box()
    weak = weakref.ref(box)
    return act_on(lambda: setattr(box, "k", 2.0), lambda x: x * weak().k)


@case
def negative_zero():
    box = Box(0.0)
    return act_on(lambda: setattr(box, "k", -0.0), lambda x: torch.atan2(x * 0, x * 0 + box.k))


@pytest.mark.parametrize("name", CASES)
def test_a_change_between_calls_is_another_capture(name):
    assert_case(*CASES[name]())
