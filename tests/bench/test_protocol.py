"""The protocol benchmark's parts, on the CPU: what it compares must be what it says."""

from __future__ import annotations

import pytest
import torch

import zgcompile
from zgcompile.bench.protocol import measure, ungated
from zgcompile.bench.synthetic import Shape, power_law
from zgcompile.errors import StepError


def test_measures_every_compilation_of_both_kinds():
    found = measure(power_law(Shape(400, 4000, 8, 3)), batch=16, hidden=8, blocks=2, compiles=1)
    assert len(found.gated) == len(found.plain) == 1
    assert min(*found.gated, *found.plain) > 0
    assert found.gate.ratio.median > 0


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
