"""The protocol benchmark's parts, on the CPU: what it compares must be what it says."""

from __future__ import annotations

import pytest
import torch

import zgcompile
from zgcompile.bench.protocol import measure, ungated
from zgcompile.bench.synthetic import Shape, power_law
from zgcompile.errors import StepError


def test_measures_every_pair():
    found = measure(power_law(Shape(400, 4000, 8, 3)), batch=16, hidden=8, blocks=2, pairs=2)
    assert [timing.blocks for timing in (found.waiting, *found.gates)] == [2, 2, 2]
    ratios = [timing.ratio.median for timing in found.gates]
    assert min(ratios) > 0
    assert found.gate == sum(ratios) / 2


def test_the_first_of_a_pair_is_each_kind_in_turn(monkeypatch):
    """What is compiled first pays for the tuning, and may tune differently: neither kind is to have that always."""
    from zgcompile.bench import protocol

    order = []
    monkeypatch.setattr(protocol, "compiled", lambda *_: order.append(protocol.lower._write_gated is gate) or len)
    monkeypatch.setattr(protocol, "not_waiting", lambda step: step)
    gate = protocol.lower._write_gated
    measure(power_law(Shape(40, 400, 8, 3)), batch=16, hidden=8, blocks=1, pairs=3)
    assert order == [True, False, False, True, True, False]


def test_an_ungated_step_writes_whatever_the_status_says():
    """A batch with a wrong id changes nothing, but in a step whose gates are gone."""

    def visits_after_a_bad_batch(kind):
        visits = torch.zeros(10, dtype=torch.int64)

        def step(seeds):
            visits.add_(1)
            return visits[seeds].sum()

        def build():
            compiled = zgcompile.compile(step, warmup=1)
            for _ in range(3):
                compiled(torch.arange(4))
            return compiled

        with pytest.raises(StepError):
            kind(build)(torch.tensor([3, 12]))
        return int(visits[0])

    assert visits_after_a_bad_batch(lambda build: build()) == 3
    assert visits_after_a_bad_batch(ungated) == 4
