"""Named faults put into the code on purpose: each makes a named check fail, and the check passes without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zgcompile.passes import lower
from zgcompile.passes.rules.context import Context

import zgcompile
from zgcompile import Envelope
from zgcompile.backend.replay import ReferenceReplay
from zgcompile.frontend import compiled_step
from zgcompile.testing import injected_draws

NODES = 40


class Task:
    """A tiny step over masked rows, with BatchNorm, a draw and Adam."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(NODES, 5, generator=generator)
        self.y = torch.randint(0, 3, (NODES,), generator=generator)
        self.limit = torch.tensor([30])
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, seeds: torch.Tensor) -> torch.Tensor:
        rows = seeds[seeds < self.limit]
        h = self.x[rows] * (torch.rand(rows.numel(), 1) + 0.5)
        loss = F.cross_entropy(self.model(h), self.y[rows]) + self.model(h).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss


def batches(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randperm(NODES, generator=generator)[:n] for n in lengths]


def trains_like_eager(seeds: list[torch.Tensor], limits: list[int] | None = None, **options: Any) -> None:
    eager, task = Task(), Task()
    compiled = zgcompile.compile(task.step, warmup=2, **options)
    limits = limits or [30] * len(seeds)
    torch.manual_seed(5)
    want = []
    for batch, limit in zip(seeds, limits, strict=True):
        eager.limit.fill_(limit)
        with injected_draws():
            want.append(eager.step(batch).detach())
    torch.manual_seed(5)
    for i, (batch, limit) in enumerate(zip(seeds, limits, strict=True)):
        task.limit.fill_(limit)
        try:
            loss = compiled(batch)
        except zgcompile.ZgError as error:
            raise AssertionError(f"call {i}: {error}") from error
        assert torch.allclose(loss, want[i], atol=1e-4), f"call {i}: loss {loss} instead of {want[i]}"
    for (name, a), b in zip(task.model.state_dict().items(), eager.model.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), f"{name}: {a} instead of {b}"


def check_pads() -> None:
    """Rows beyond the count reach nothing: counts that shrink from call to call."""
    trains_like_eager(batches(*[20] * 6), [30, 25, 28, 15, 10, 20])


def check_status() -> None:
    """A batch with a bad index raises and changes nothing."""
    task = Task()
    compiled = zgcompile.compile(task.step, warmup=2)
    for batch in batches(20, 20, 20):
        compiled(batch)
    before = {k: v.clone() for k, v in task.model.state_dict().items()}
    bad = batches(20)[0].clone()
    bad[3] = -NODES - 5
    try:
        compiled(bad)
    except zgcompile.ZgError:
        raised = True
    else:
        raised = False
    assert raised, "a bad index went through"
    assert all(torch.equal(v, before[k]) for k, v in task.model.state_dict().items())


def check_randomness() -> None:
    """Each replay draws its own numbers, those of its place in the stream."""
    trains_like_eager(batches(*[20] * 5))


def check_gate() -> None:
    """A batch that outgrows a capacity is trained on once."""
    line = Task.step.__code__.co_firstlineno + 1
    trains_like_eager(
        batches(*[20] * 6), [8, 8, 8, 30, 30, 8], envelope=Envelope(caps={f"test_mutations.py:{line}": 10})
    )


def check_lengths() -> None:
    """A partial last batch is as long as it is."""
    trains_like_eager(batches(20, 20, 20, 13, 20, 7))


def drop_the_selects(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Context, "select", lambda self, value, fill, dims=None: self.raw(value))


def ignore_the_status(patch: pytest.MonkeyPatch) -> None:
    real = ReferenceReplay.run

    def run(self: Any, launch: Any) -> Any:
        replayed = real(self, launch)
        checks = len(self.lowered.layout.checks)
        return dataclasses.replace(replayed, metadata=[0] * checks + replayed.metadata[checks:])

    patch.setattr(ReferenceReplay, "run", run)


def freeze_the_draws(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compiled_step, "step_key", lambda seed, offset: 1234)


def skip_the_gate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lower, "_write_gated", lambda good, target, new: target.copy_(new.to(target.dtype)))


def bake_the_batch_size(patch: pytest.MonkeyPatch) -> None:
    real = ReferenceReplay.run
    first: dict[int, Any] = {}

    def run(self: Any, launch: Any) -> Any:
        lengths = first.setdefault(id(self), launch.lengths)
        return real(self, dataclasses.replace(launch, lengths=lengths))

    patch.setattr(ReferenceReplay, "run", run)


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "drop the selects": (drop_the_selects, check_pads),
    "ignore the status": (ignore_the_status, check_status),
    "ignore the status of an overflow": (ignore_the_status, check_gate),
    "freeze the draws": (freeze_the_draws, check_randomness),
    "skip the gate": (skip_the_gate, check_gate),
    "bake the batch size": (bake_the_batch_size, check_lengths),
}


@pytest.mark.parametrize(
    "check", sorted({check for _, check in MUTATIONS.values()}, key=lambda c: c.__name__), ids=lambda c: c.__name__
)
def test_the_checks_pass(check):
    check()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name, monkeypatch):
    mutate, check = MUTATIONS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check()
