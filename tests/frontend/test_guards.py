"""What may change between calls: either the capture still serves, or another one is made; never a stale result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zgcompile

TABLE = torch.arange(40) % 3
SCALE = 1.0


def simple(new_world: Any, optimizer: Any = None) -> Any:
    def build() -> Any:
        w = new_world()
        if optimizer is not None:
            w.opt = optimizer(w.model.parameters())

        def step(seeds):
            loss = w.loss(seeds)
            w.train(loss)
            return loss

        return step, w

    return build


def test_train_and_eval_flips_are_two_captures(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()
        w.model = nn.Sequential(w.model, nn.Dropout(0.5), nn.BatchNorm1d(3))

        def step(seeds):
            loss = w.loss(seeds)
            if w.model.training:
                w.train(loss)
            return loss

        return step, w

    def between(i: int, w: Any) -> None:
        w.model.train(i % 2 == 0)

    compiled = compare(build, batches_of(*[8] * 20), between)
    assert compiled.stats.traces == 2
    assert compiled.stats.captures == 2


def test_a_rebound_tensor_of_the_same_shape(new_world, compare, batches_of):
    """An attribute, a closure variable and a global, one after the other."""
    global TABLE
    first = TABLE

    def build() -> Any:
        global TABLE
        TABLE = first
        w = new_world()
        bias = torch.zeros(40)

        def step(seeds):
            loss = F.cross_entropy(w.model(w.x[seeds]) + bias[seeds, None], TABLE[seeds])
            w.train(loss)
            return loss, bias[seeds]

        def rebind() -> None:
            nonlocal bias
            bias = torch.arange(40.0)

        w.rebind = rebind
        return step, w

    def between(i: int, w: Any) -> None:
        global TABLE
        if i == 3:
            w.x = w.x.flip(0).clone()
        if i == 5:
            w.rebind()
        if i == 7:
            TABLE = TABLE.flip(0).clone()

    try:
        compare(build, batches_of(*[8] * 9), between)
    finally:
        TABLE = first


def test_a_python_number_that_changes(new_world, compare, batches_of):
    global SCALE

    def build() -> Any:
        global SCALE
        SCALE = 1.0
        w = new_world()
        w.k = 2
        settings = {"fanout": 3}

        def step(seeds, factor):
            loss = w.loss(seeds) * SCALE * w.k * factor
            w.train(loss)
            return loss, seeds[: settings["fanout"]]

        w.settings = settings
        return step, w

    def between(i: int, w: Any) -> None:
        global SCALE
        SCALE = 1.0 if i < 3 else 0.5
        w.k = 2 if i < 5 else 3
        w.settings["fanout"] = 3 if i < 7 else 4

    batches = [(b, 1.0 if i != 8 else 2.0) for i, b in enumerate(batches_of(*[8] * 9))]
    compiled = compare(build, batches, between)
    assert compiled.stats.traces == 5


def test_a_scheduler_needs_no_new_capture(new_world, compare, batches_of):
    build = simple(new_world, lambda p: torch.optim.Adam(p, lr=0.1))

    def build_with_scheduler() -> Any:
        step, w = build()
        w.scheduler = torch.optim.lr_scheduler.OneCycleLR(w.opt, max_lr=0.2, total_steps=20)
        return step, w

    def between(i: int, w: Any) -> None:
        if i:
            w.scheduler.step()

    compiled = compare(build_with_scheduler, batches_of(*[8] * 12), between)
    assert (compiled.stats.traces, compiled.stats.captures) == (1, 1)
    assert compiled.stats.replays == 11


@pytest.mark.slow
def test_a_learning_rate_of_any_number(new_world, compare, batches_of):
    def between(i: int, w: Any) -> None:
        w.opt.param_groups[0]["lr"] = (0.1, 1, 0.5, 0.25, 2, 0.0, 0.1)[i]

    compare(simple(new_world), batches_of(*[8] * 7), between)


def test_weight_decay_that_is_switched_on(new_world, compare, batches_of):
    def between(i: int, w: Any) -> None:
        w.opt.param_groups[0]["weight_decay"] = 0.0 if i < 4 else 0.1

    for optimizer in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), lambda p: torch.optim.Adam(p, lr=0.1)):
        compiled = compare(simple(new_world, optimizer), batches_of(*[8] * 8), between)
        assert compiled.stats.traces <= 2


@pytest.mark.slow
def test_momentum_that_is_switched_on_and_off(new_world, compare, batches_of):
    def between(i: int, w: Any) -> None:
        w.opt.param_groups[0]["momentum"] = 0.5 if 3 <= i < 6 else 0.0
        w.opt.param_groups[0]["nesterov"] = 3 <= i < 5

    compare(simple(new_world), batches_of(*[8] * 9), between)


def test_an_index_table_that_grows_its_values_in_place(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()
        w.remap = torch.arange(40) % 10

        def step(seeds):
            ids, inverse = w.remap[seeds].unique(return_inverse=True)
            loss = F.cross_entropy(w.model(w.x[ids])[inverse], w.y[seeds])
            w.train(loss)
            return loss, ids

        return step, w

    def between(i: int, w: Any) -> None:
        if i == 4:
            w.remap.copy_(torch.arange(40).flip(0))
        if i == 6:
            w.remap[:] = 39
        if i == 7:
            w.indptr += 0

    compare(build, batches_of(*[12] * 9), between)


def scheduled_losses(compiled, opt, loss_of, between, calls):
    """The losses of a training step on five seeds, `between(i)` behind call i; and the step that was called."""

    def step(seeds):
        loss = loss_of(seeds)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    fn, losses = zgcompile.compile(step, warmup=1) if compiled else step, []
    for i in range(calls):
        losses.append(float(fn(torch.arange(5))))
        between(i)
    return losses, fn


def test_load_state_dict_behind_a_scheduler_is_no_new_trace():
    def train(compiled):
        weight = torch.nn.Parameter(torch.ones(50, 3))
        opt = torch.optim.AdamW([weight], lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50)

        def between(i):
            scheduler.step()
            if i == 6:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))

        return scheduled_losses(compiled, opt, lambda seeds: weight[seeds].pow(2).sum(), between, calls=12)

    losses, compiled = train(True)
    assert losses == pytest.approx(train(False)[0], rel=1e-6)
    assert compiled.stats.traces == 1
    assert compiled.stats.replays == 11


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_a_group_that_the_step_holds_is_no_longer_the_optimizers(scheduled, listed):
    def train(compiled):
        weight = torch.nn.Parameter(torch.ones(50, 3))
        opt = torch.optim.SGD([weight], lr=0.01)
        held = opt.param_groups if listed else opt.param_groups[0]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) if scheduled else None

        def between(i):
            if scheduler is not None:
                scheduler.step()
            if i == 3:
                state = copy.deepcopy(opt.state_dict())
                state["param_groups"][0]["lr"] = 1.0
                opt.load_state_dict(state)

        def loss_of(seeds):
            return weight[seeds].pow(2).sum() * (held[0] if listed else held)["lr"]

        return scheduled_losses(compiled, opt, loss_of, between, calls=8)[0]

    assert train(True) == pytest.approx(train(False), rel=1e-6)


def test_load_state_dict_in_the_middle(new_world, compare, batches_of):
    """The model's is a write in place; the optimizer's replaces every state tensor."""
    other_step, other = simple(new_world, lambda p: torch.optim.Adam(p, lr=0.1))()
    for batch in batches_of(8, 8, 8):
        other_step(batch)

    def between(i: int, w: Any) -> None:
        if i == 4:
            w.model.load_state_dict(copy.deepcopy(other.model.state_dict()))
        if i == 5:
            w.opt.load_state_dict(copy.deepcopy(other.opt.state_dict()))
        if i == 7:
            w.opt.load_state_dict(copy.deepcopy(w.opt.state_dict()))

    compare(simple(new_world, lambda p: torch.optim.Adam(p, lr=0.1)), batches_of(*[8] * 9), between)


def test_a_new_optimizer(new_world, compare, batches_of):
    def between(i: int, w: Any) -> None:
        if i == 3:
            w.opt = torch.optim.Adam(w.model.parameters(), lr=0.02)
        if i == 6:
            w.opt.state.clear()

    compare(simple(new_world), batches_of(*[8] * 9), between)


def test_gradients_that_the_user_sets(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()

        def step(seeds):
            loss = w.loss(seeds)
            loss.backward()
            w.opt.step()
            return loss

        return step, w

    def between(i: int, w: Any) -> None:
        if i in (3, 6):
            w.model.weight.grad = None
        if i == 4:
            w.model.bias.grad = torch.ones(3)
        if i == 7:
            w.opt.zero_grad(set_to_none=True)
        if i == 8:
            w.model.weight.grad.mul_(0.5)

    compare(build, batches_of(*[8] * 10), between)


def test_a_gradient_kept_by_the_user_is_not_overwritten(new_world, batches_of):
    """Eager makes a new gradient tensor after `zero_grad()`: an alias of the old one keeps its value."""
    import zgcompile

    step, w = simple(new_world)()
    compiled = zgcompile.compile(step, warmup=1)
    kept, copies = [], []
    for batch in batches_of(*[8] * 5):
        compiled(batch)
        kept.append(w.model.weight.grad)
        copies.append(w.model.weight.grad.clone())
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_parameters_moved_by_data(new_world, compare, batches_of):
    def between(i: int, w: Any) -> None:
        if i == 3:
            w.model.weight.data = w.model.weight.data.clone() * 0.5
        if i == 5:
            w.x.data = w.x.data.flip(0).clone()
        if i == 6:
            w.indptr.data = w.indptr.data.clone()

    compare(simple(new_world), batches_of(*[8] * 8), between)


def test_a_replaced_parameter(new_world, compare, batches_of):
    def between(i: int, w: Any) -> None:
        if i == 3:
            w.model.bias = nn.Parameter(torch.ones(3))
            w.opt = torch.optim.SGD(w.model.parameters(), lr=0.1)
        if i == 5:
            w.model.weight.requires_grad_(False)
        if i == 7:
            w.model.weight.requires_grad_(True)

    compare(simple(new_world), batches_of(*[8] * 9), between)


@pytest.mark.slow
def test_a_hook_registered_between_calls(new_world, compare, batches_of):
    def between(i: int, w: Any) -> None:
        if i == 3:
            w.handle = w.model.register_forward_hook(lambda module, args, out: out * 2)
        if i == 5:
            w.handle.remove()

    compare(simple(new_world), batches_of(*[8] * 7), between)


def test_a_table_that_grows_out_of_range_raises_as_eager(new_world, compare, batches_of):
    """The range of an index table was proven when the step was lowered; a write in place ends the proof."""

    def build() -> Any:
        w = new_world()
        w.remap = torch.arange(40) % 10
        w.small = torch.randn(10, 5, generator=torch.Generator().manual_seed(0))

        def step(seeds):
            loss = F.cross_entropy(w.model(w.small[w.remap[seeds]]), w.y[seeds])
            w.train(loss)
            return loss

        return step, w

    def between(i: int, w: Any) -> None:
        w.remap.copy_(torch.arange(40) % (10 if i != 3 else 11))

    batches = batches_of(8, 8, 8, 8, 8)
    batches[3] = torch.tensor([1, 10, 2, 21])
    compare(build, batches, between)


def test_state_of_the_trainer_that_the_step_does_not_read(new_world, compare, batches_of):
    """`self.epoch`, `self.history`, a new attribute: no capture for what the step never names."""

    class Trainer(nn.Module):
        limit = 3

        def __init__(self) -> None:
            super().__init__()
            self.w = new_world()
            self.net = self.w.model
            self.epoch, self.history = 0, []

        def step(self, seeds):
            loss = self.w.loss(seeds)
            self.w.train(loss)
            return loss, seeds[: self.limit]

    def build() -> Any:
        trainer = Trainer()
        return trainer.step, trainer

    def between(i: int, trainer: Any) -> None:
        trainer.epoch += 1
        trainer.history.append({"epoch": i})
        trainer.w.n += 1
        if i == 5:
            trainer.comment = "new"
        if i == 7:
            trainer.limit = 4

    compiled = compare(build, batches_of(*[8] * 9), between)
    assert compiled.stats.traces == 2


@pytest.mark.slow
def test_parameters_that_change_shape_by_data(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()
        w.bonus = torch.ones(40)

        def step(seeds):
            loss = w.loss(seeds) * w.bonus.mean() + w.bonus.numel()
            w.train(loss)
            return loss

        return step, w

    def between(i: int, w: Any) -> None:
        if i == 3:
            w.bonus.data = torch.full((7,), 2.0)

    compare(build, batches_of(*[8] * 6), between)


def test_a_stray_gradient_where_the_step_leaves_none(new_world, compare, batches_of):
    """`zero_grad()` at the end: each step starts without gradients, until the user sets one."""

    def build() -> Any:
        w = new_world()

        def step(seeds):
            loss = w.loss(seeds)
            loss.backward()
            w.opt.step()
            w.opt.zero_grad()
            return loss

        w.model.bias.grad = torch.ones(3)
        return step, w

    def between(i: int, w: Any) -> None:
        if i == 4:
            w.model.weight.grad = torch.ones(3, 5)

    compiled = compare(build, batches_of(*[8] * 7), between)
    assert compiled.stats.replays >= 3


@pytest.mark.slow
def test_a_frozen_parameter_with_an_old_gradient(new_world, compare, batches_of):
    def build() -> Any:
        w = new_world()

        def step(seeds):
            loss = w.loss(seeds)
            loss.backward()
            w.opt.step()
            return loss

        w.model.weight.grad = torch.ones(3, 5)
        w.model.weight.requires_grad_(False)
        return step, w

    compare(build, batches_of(*[8] * 4))
