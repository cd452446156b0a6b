"""What users write in a step and what must work, from the first call on: hooks nothing, freezes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn import functional as F

import zgcompile


def test_sizes_and_numbers_read_in_the_step(new_world, compare, batches_of):
    """int(t.item()), len, min, max, size(0) and items in arithmetic, sizes in tensors."""

    def build() -> Any:
        w = new_world()

        def step(seeds):
            _row, neighbour = w.neighbours(seeds)
            n = len(seeds)
            k = min(3, n)
            m = max(1, len(neighbour))
            degree = w.indptr[seeds + 1] - w.indptr[seeds]
            total = int(degree.sum().item())
            padded = torch.zeros(total + k, w.x.size(1)).index_put((torch.arange(total),), w.x[neighbour])
            loss = F.cross_entropy(w.model(w.x[seeds]), w.y[seeds], reduction="sum") / n + padded.sum() / m
            w.train(loss)
            sizes = torch.tensor([n, total])
            return (
                loss,
                k,
                m,
                total,
                n * 2 + total,
                n / 2,
                float(loss),
                loss.item() / n,
                seeds[:k],
                sizes,
                x_mean(w.x[seeds]),
            )

        def x_mean(x):
            return x.sum(0) / x.size(0)

        return step, w

    compiled = compare(build, batches_of(8, 8, 5, 1, 2, 8))
    assert compiled.stats.replays + compiled.stats.preconditions >= 4


def _writes_slices() -> bool:
    """This torch traces `x[:n] = y` where only the device knows that y has n rows."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        n, rows = (mode.shape_env.create_unbacked_symint() for _ in range(2))
        torch._check(n >= 0)
        try:
            torch.zeros(n + 3).narrow(0, 0, n).copy_(torch.ones(rows))
        except GuardOnDataDependentSymNode:
            return False
        return True


def test_rows_written_up_to_an_item(new_world, compare, check_refused, batches_of):
    """Where torch cannot trace it, it is refused with what to write."""

    def build() -> Any:
        w = new_world()

        def step(seeds):
            _row, neighbour = w.neighbours(seeds)
            total = int((w.indptr[seeds + 1] - w.indptr[seeds]).sum().item())
            padded = torch.zeros(total + 3, w.x.size(1))
            padded[:total] = w.x[neighbour]  # HERE
            w.train(w.loss(seeds) + padded.sum())
            return padded.sum()

        return step, w

    if _writes_slices():
        assert compare(build, batches_of(8, 8, 5, 1, 2, 8)).stats.replays >= 4
    else:
        assert "out[rows] = x" in check_refused(build()[0], *batches_of(8)).advice


def test_constants_made_from_python_numbers(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()
        scales = [0.5, 2.0]

        def step(seeds):
            weight = torch.tensor([1.0, 2.0, 0.5])
            pair = torch.tensor(scales)
            loss = F.cross_entropy(w.model(w.x[seeds]), w.y[seeds], weight=weight) * pair.prod() + torch.as_tensor(3.0)
            w.train(loss)
            return loss, torch.arange(3), torch.full((2,), 7)

        return step, w

    compare(build, batches_of(8, 8, 8, 5))


@pytest.mark.parametrize(
    ("place", "to_none"),
    [
        ("before", True),
        ("between", False),
        ("after", True),
        ("after", False),
        *(
            pytest.param(p, n, marks=pytest.mark.slow)
            for p, n in (("before", False), ("between", True), ("twice", True), ("twice", False))
        ),
    ],
)
def test_zero_grad_in_every_place(new_world, compare, batches_of, place, to_none):
    def build() -> Any:
        w = new_world()

        def step(seeds):
            if place in ("before", "twice"):
                w.opt.zero_grad(set_to_none=to_none)
            loss = w.loss(seeds)
            if place == "between":
                w.opt.zero_grad(set_to_none=to_none)
            loss.backward()
            w.opt.step()
            if place in ("after", "twice"):
                w.opt.zero_grad(set_to_none=to_none)
            return loss

        return step, w

    compare(build, batches_of(8, 8, 8, 8, 3))


def test_gradients_accumulate_when_they_are_not_zeroed(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()

        def step(seeds):
            loss = w.loss(seeds)
            loss.backward()
            (w.model(w.x[seeds]) ** 2).sum().backward()
            w.opt.step()
            return loss

        return step, w

    compare(build, batches_of(8, 8, 8, 8, 3))


def test_backward_without_a_step(new_world, compare, batches_of):
    """Gradient accumulation: the optimizer runs outside."""

    def build() -> Any:
        w = new_world()

        def step(seeds):
            loss = w.loss(seeds)
            loss.backward()
            return loss

        return step, w

    def between(i: int, w: Any) -> None:
        if i and i % 2 == 0:
            w.opt.step()
            w.opt.zero_grad()

    compare(build, batches_of(*[8] * 7), between)


def test_evaluation_without_an_optimizer(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()

        @torch.no_grad()
        def step(seeds):
            logits = w.model(w.x[seeds])
            return logits, (logits.argmax(1) == w.y[seeds]).float().mean()

        return step, w

    compare(build, batches_of(8, 8, 8, 3))


OPTIMIZERS = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, foreach=True),
    "sgd_maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.05, foreach=True, weight_decay=0.1),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "adam_capturable": lambda p: torch.optim.Adam(p, lr=0.05, foreach=False),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
}


QUICK = ("sgd_nesterov", "adam_fused", "adam_amsgrad", "adamw", "adagrad", "rmsprop")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS])
def test_optimizers(new_world, compare, batches_of, name):
    """Seven steps: bias correction is right at the first, the second and the last."""

    def build() -> Any:
        w = new_world()
        w.opt = OPTIMIZERS[name](w.model.parameters())

        def step(seeds):
            loss = w.loss(seeds)
            w.train(loss)
            return loss

        return step, w

    compiled = compare(build, batches_of(8, 8, 8, 3, 8, 8, 8), tolerance=2e-5)
    assert compiled.stats.replays >= 5


def test_two_optimizers_groups_clipping_and_frozen_parameters(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()
        w.model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        torch.manual_seed(2)
        for p in w.model.parameters():
            nn.init.uniform_(p, -0.5, 0.5)
        w.model[2].requires_grad_(False)
        first = torch.optim.SGD(
            [
                {"params": [w.model[0].weight], "lr": 0.3},
                {"params": [w.model[0].bias], "lr": 0.01, "weight_decay": 0.1},
            ],
            lr=0.1,
        )
        second = torch.optim.AdamW(w.model[4].parameters(), lr=0.02)

        def step(seeds):
            loss = w.loss(seeds)
            first.zero_grad()
            second.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(w.model.parameters(), 0.05)
            nn.utils.clip_grad_value_(w.model.parameters(), 0.02)
            first.step()
            second.step()
            return loss, norm

        return step, w, first, second

    compare(build, batches_of(8, 8, 8, 8, 3))


def test_batch_norm_counters_and_embeddings(new_world, compare, batches_of):
    """Buffers written in place, a visit counter, a learnable embedding, one parameter used twice."""

    def build() -> Any:
        w = new_world()
        torch.manual_seed(2)
        table = nn.Embedding(40, 5)
        norm = nn.BatchNorm1d(5)
        w.opt = torch.optim.Adam([*table.parameters(), *norm.parameters(), *w.model.parameters()], lr=0.05)
        last = torch.zeros(40, 5)

        def step(seeds):
            w.visits[seeds] += 1
            h = norm(table(seeds) + w.x[seeds])
            scores = w.model(h) @ w.model.weight @ table.weight.t()
            loss = F.cross_entropy(scores, seeds) + F.cross_entropy(w.model(h), w.y[seeds])
            w.train(loss)
            last[seeds] = h.detach()
            return loss, w.visits[seeds]

        return step, w, table, norm, last

    compiled = compare(build, batches_of(8, 8, 5, 8, 2), tolerance=1e-4)
    assert compiled.stats.replays == 4


def test_dropout_draws_the_keyed_numbers(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()

        def step(seeds):
            noise = torch.rand(seeds.numel(), 5)
            pick = torch.randint(0, 40, (seeds.numel(),))
            h = F.dropout(w.x[seeds] + 0.1 * noise + w.x[pick], 0.5)
            loss = F.cross_entropy(w.model(h), w.y[seeds])
            w.train(loss)
            return loss, noise, pick

        return step, w

    compiled = compare(build, batches_of(8, 8, 5, 8))
    assert compiled.stats.replays == 3


def test_a_model_that_is_first_met_in_the_step(new_world, compare, batches_of):
    """Found through the forward hook, behind an object that the walk does not open."""

    def build() -> Any:
        w = new_world()
        hidden = {"step": lambda seeds: w.loss(seeds)}.__getitem__

        def step(seeds):
            loss = hidden("step")(seeds)
            w.train(loss)
            return loss

        return step, w

    compare(build, batches_of(8, 8, 8))


def test_forms_of_a_step(new_world, batches_of):
    """A method, a partial, a callable object, a decorated function, keyword arguments."""
    from functools import partial

    class Trainer:
        def __init__(self) -> None:
            self.w = new_world()

        @zgcompile.compile(warmup=1)
        def step(self, seeds, scale=1.0):
            loss = self.w.loss(seeds) * scale
            self.w.train(loss)
            return loss

        def plain(self, seeds, scale=1.0):
            loss = self.w.loss(seeds) * scale
            self.w.train(loss)
            return loss

    class Callable:
        def __init__(self) -> None:
            self.trainer = Trainer()

        def __call__(self, seeds):
            return self.trainer.plain(seeds)

    batches = batches_of(8, 8, 8, 3)
    oracle = Trainer()
    want = [oracle.plain(b).item() for b in batches]
    a, b = Trainer(), Trainer()
    assert [a.step(s).item() for s in batches] == pytest.approx(want)
    assert [b.step(seeds=s).item() for s in batches] == pytest.approx(want), "two instances share nothing"
    assert a.step.stats.calls == b.step.stats.calls == 4
    for fn in (Callable(), partial(Trainer().plain, scale=1.0)):
        assert [zgcompile.compile(fn, warmup=1)(s).item() for s in batches] == pytest.approx(want)
