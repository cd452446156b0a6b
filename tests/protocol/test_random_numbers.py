"""Where a step's random numbers come from: the default generator's seed and offset, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zgcompile
from zgcompile.errors import CaptureRefused
from zgcompile.ir.status import Failure
from zgcompile.testing import injected_draws


class Drawing:
    """A step that returns what it draws; how much depends on the batch."""

    def __init__(self) -> None:
        self.degree = torch.arange(40) % 5
        self.total = torch.zeros((), dtype=torch.float64)

    def step(self, seeds: Tensor) -> tuple[Tensor, ...]:
        row = torch.repeat_interleave(seeds, self.degree[seeds])
        uniform = torch.rand(row.numel(), dtype=torch.float64)
        kept = row[uniform < 0.5]
        self.total += uniform.sum()
        return (
            uniform,
            kept,
            torch.randn(seeds.numel(), 2),
            torch.randint(0, 9, (kept.numel(),)),
            torch.randperm(seeds.numel()),
        )


BATCHES = [torch.randperm(40, generator=torch.Generator().manual_seed(i))[: 12 if i % 3 else 5] for i in range(40)]


def eager_draws(seed: int, batches: list[Tensor]) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    step, draws = Drawing().step, []
    for batch in batches:
        with injected_draws():
            draws.append(step(batch))
    return draws


def equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


@pytest.fixture(scope="module")
def drawing(forced) -> zgcompile.CompiledStep:
    compiled = zgcompile.compile(Drawing().step, warmup=1)
    for batch in BATCHES[:4]:
        compiled(batch)
    assert compiled.stats.replays >= 2
    return compiled


def test_manual_seed(drawing):
    """Seeds give eager's injected draws: the same for the same seed, others for another."""
    for seed in (1, 2, 1):
        want = eager_draws(seed, BATCHES[:5])
        torch.manual_seed(seed)
        assert equal([drawing(b) for b in BATCHES[:5]], want)
    assert not equal(eager_draws(1, BATCHES[:1]), eager_draws(2, BATCHES[:1]))


def test_two_steps_never_draw_the_same(drawing):
    torch.manual_seed(3)
    first, second = drawing(BATCHES[1]), drawing(BATCHES[1])
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[2], second[2])


def test_reseeding_after_a_capture(drawing):
    """In the middle of training, twice with one seed; nothing is captured anew for it."""
    traces, captures = drawing.stats.traces, drawing.stats.captures
    torch.manual_seed(4)
    first = [drawing(b) for b in BATCHES[:3]]
    for _ in range(2):
        drawing(BATCHES[7])
    torch.manual_seed(4)
    assert equal([drawing(b) for b in BATCHES[:3]], first)
    assert (drawing.stats.traces, drawing.stats.captures) == (traces, captures)


def test_get_and_set_rng_state(drawing):
    torch.manual_seed(5)
    drawing(BATCHES[0])
    state = torch.get_rng_state()
    first = [drawing(b) for b in BATCHES[1:5]]
    torch.set_rng_state(state)
    assert equal([drawing(b) for b in BATCHES[1:5]], first)
    with torch.random.fork_rng():
        torch.set_rng_state(state)
        assert equal([drawing(b) for b in BATCHES[1:5]], first)


def test_resume_in_a_new_process(drawing):
    """A run of 8 steps is one of 3 and, from the saved generator state, one of 5 through a new compiled step."""
    want = eager_draws(6, BATCHES[:8])
    torch.manual_seed(6)
    first = [drawing(b) for b in BATCHES[:3]]
    state = torch.get_rng_state()
    resumed = zgcompile.compile(Drawing().step, warmup=2)
    torch.set_rng_state(state)
    assert equal(first + [resumed(b) for b in BATCHES[3:8]], want)
    assert resumed.stats.replays >= 2


@pytest.mark.parametrize(("warmup", "headroom"), [(1, 1.0), (4, 3.0), (2, None)])
def test_same_draws_for_any_warm_up_and_headroom(forced, warmup, headroom):
    """Padding, capacities, warm-up, forced and real overflows and new captures change no draw."""
    want = eager_draws(8, BATCHES[:24])
    compiled = zgcompile.compile(Drawing().step, warmup=warmup, envelope=zgcompile.Envelope(headroom=headroom))
    torch.manual_seed(8)
    got = []
    for number, batch in enumerate(BATCHES[:24]):
        subject = compiled.specialisations[0] if number else None
        if subject is not None and subject.replay is not None and number % 5 == 0:
            with forced(compiled, forced.first(compiled, Failure.CAPACITY)):
                got.append(compiled(batch))
            continue
        if number == 17 and subject is not None:
            subject.replay = None  # captured anew
        got.append(compiled(batch))
    assert equal(got, want)
    assert compiled.stats.overflows >= 3 and compiled.stats.captures >= 2


def refused(step: Callable[..., Any]) -> CaptureRefused:
    state = torch.get_rng_state()
    with pytest.raises(CaptureRefused) as caught:
        zgcompile.compile(step, warmup=1)(BATCHES[1])
    error = caught.value
    assert error.where is not None and error.where.text.endswith("# HERE"), error
    assert error.advice
    assert torch.equal(torch.get_rng_state(), state), "the refusal moved the generator"
    return error


def test_a_generator_of_the_users_is_refused_by_name():
    mine = torch.Generator().manual_seed(1)

    def step(seeds):
        return seeds + torch.rand(seeds.numel(), generator=mine)  # HERE

    state = mine.get_state()
    assert "rand" in refused(step).what and "generator" in refused(step).what
    assert torch.equal(mine.get_state(), state)


def poisson(x: Tensor) -> Tensor:
    return torch.poisson(x.double())  # HERE


def cauchy(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float64).cauchy_()  # HERE


def host_python(x: Tensor) -> Tensor:
    return x * random.random()  # HERE


def host_numpy(x: Tensor) -> Tensor:
    return x * float(np.random.rand())  # HERE


def seeding(x: Tensor) -> Tensor:
    torch.manual_seed(3)  # HERE
    return x * 2


DRAWS = {"poisson": poisson, "cauchy_": cauchy, "random": host_python, "numpy.random": host_numpy, "torch": seeding}


@pytest.mark.parametrize("name", list(DRAWS))
def test_what_has_no_keyed_numbers_is_refused_by_name(name):
    """An op without an answer, and every generator of the host."""
    draw = DRAWS[name]

    def step(seeds):
        return draw(seeds).sum()

    before = random.getstate(), np.random.get_state()[1].tolist()
    assert name in refused(step).what
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
