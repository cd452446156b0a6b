"""A method that is replaced between two calls, on the instance or on its class, is a new capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zgcompile


class Scaled(nn.Module):
    factor = 2.0

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.scaled(x) * self.twice

    def scaled(self, x):
        return self.shifted(self.lin(x))

    @staticmethod
    def shifted(x):
        return x + 1

    @property
    def twice(self):
        return 2.0


def replacements():
    """name -> what a user does to `model` between two calls."""
    return {
        "method of the instance": lambda m: setattr(m, "scaled", lambda x: m.lin(x) * 100),
        "forward of the instance": lambda m: setattr(m, "forward", lambda x: m.lin(x) * 100),
        "forward of a torch module": lambda m: setattr(m.lin, "forward", lambda x: x * 100),
        "method of the class": lambda m: setattr(Scaled, "scaled", lambda self, x: self.lin(x) * 100),
        "forward of the class": lambda m: setattr(Scaled, "forward", lambda self, x: self.lin(x) * 100),
        "static method": lambda m: setattr(Scaled, "shifted", staticmethod(lambda x: x + 100)),
        "property": lambda m: setattr(Scaled, "twice", property(lambda self: 200.0)),
    }


@pytest.mark.parametrize("name", replacements())
def test_a_method_that_is_replaced(name, monkeypatch):
    for attribute in ("scaled", "forward", "shifted", "twice"):
        monkeypatch.setattr(Scaled, attribute, vars(Scaled)[attribute])  # put back afterwards
    model = Scaled()

    def step(seeds):
        return model(seeds[:, None].float()).sum()

    fn = zgcompile.compile(step, warmup=1)
    batches = [torch.arange(n) for n in (9, 8, 9, 8)]
    for batch in batches:
        torch.testing.assert_close(fn(batch), step(batch).detach())
    replays = fn.stats.replays
    replacements()[name](model)
    for batch in batches:
        torch.testing.assert_close(fn(batch), step(batch).detach())
    assert fn.stats.traces == 2
    assert fn.stats.replays > replays
