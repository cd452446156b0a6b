"""What one FX graph cannot hold is refused at the first call, by the user's line, with nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zgcompile
from tests.frontend.refused import Refused, check_case
from zgcompile.errors import CaptureRefused, UnsupportedOp, ZgError

COUNT = 0
SEEN: dict[str, int] = {}
refused = Refused()


@refused(CaptureRefused)
def branch_on_any(w):
    def step(seeds):
        mask = w.y[seeds] == 1
        if mask.any():  # HERE
            w.train(w.loss(seeds))

    return step


@refused(CaptureRefused)
def branch_in_a_helper(w):
    def keep(t):
        return t if t.sum() > 0 else -t  # HERE

    def step(seeds):
        return keep(w.x[seeds])

    step.source = keep
    return step


@refused(CaptureRefused)
def a_branch_whose_refusal_is_caught(w):
    def step(seeds):
        loss = w.loss(seeds)
        try:
            if loss > 100:  # HERE
                loss = loss * 0
        except Exception:
            pass
        w.train(loss)

    return step


@refused(CaptureRefused)
def loop_over_a_device_count(w):
    def step(seeds):
        rounds = w.y[seeds].max()
        total = w.loss(seeds)
        for _ in range(rounds):  # HERE
            total = total + 1
        w.train(total)

    return step


@refused(CaptureRefused)
def loop_over_an_item(w):
    def step(seeds):
        rounds = int(w.y[seeds].sum().item())
        for _ in range(rounds):  # HERE
            w.train(w.loss(seeds))

    return step


@refused(CaptureRefused)
def loop_over_rows(w):
    def step(seeds):
        total = w.loss(seeds)
        for s in seeds:  # HERE
            total = total + s
        w.train(total)

    return step


@refused(CaptureRefused)
def while_a_frontier_is_left(w):
    def step(seeds):
        frontier = seeds
        while frontier.numel():  # HERE
            frontier = frontier[w.y[frontier] > 1]
        w.train(w.loss(seeds))

    return step


@refused(CaptureRefused)
def assertion_on_values(w):
    def step(seeds):
        assert (w.x[seeds] > -100).all()  # HERE
        w.train(w.loss(seeds))

    return step


@refused(CaptureRefused)
def truth_of_a_tensor(w):
    def step(seeds):
        w.train(w.loss(seeds))
        return bool((seeds > 3).all())  # HERE

    return step


@refused(CaptureRefused)
def comparison_of_the_loss(w):
    def step(seeds):
        loss = w.loss(seeds)
        if loss > 3:  # HERE
            return loss
        w.train(loss)
        return loss

    return step


@refused(CaptureRefused)
def comparison_of_an_item(w):
    def step(seeds):
        loss = w.loss(seeds)
        if loss.item() < 1e9:  # HERE
            w.train(loss)
        return loss

    return step


@refused(CaptureRefused)
def and_of_tensors(w):
    def step(seeds):
        loss = w.loss(seeds)
        return (loss > 0) and (loss < 3)  # HERE

    return step


@refused(UnsupportedOp)
def an_op_without_a_rule(w):
    def step(seeds):
        w.train(w.loss(seeds))
        return torch.cdist(w.x[seeds], w.x[seeds])  # HERE

    return step


@refused(CaptureRefused)
def a_write_to_the_argument(w):
    def step(seeds):
        seeds.clamp_(max=20)  # HERE
        w.train(w.loss(seeds))

    return step


@refused(CaptureRefused)
def numpy_of_a_tensor(w):
    def step(seeds):
        loss = w.loss(seeds)
        w.train(loss)
        return loss.detach().numpy()  # HERE

    return step


@refused(CaptureRefused)
def tolist_of_a_tensor(w):
    def step(seeds):
        w.train(w.loss(seeds))
        return seeds.tolist()  # HERE

    return step


@refused(CaptureRefused)
def sparse_adam(w):
    table = nn.Embedding(40, 5, sparse=True)
    opt = torch.optim.SparseAdam(table.parameters(), lr=0.1)

    def step(seeds):
        opt.zero_grad()
        table(seeds).sum().backward()
        opt.step()  # HERE

    return step


@refused(CaptureRefused)
def lbfgs(w):
    opt = torch.optim.LBFGS(w.model.parameters())

    def step(seeds):
        def closure():
            opt.zero_grad()
            loss = w.loss(seeds)
            loss.backward()
            return loss

        opt.step(closure)  # HERE

    return step


def _optimizer(kind):
    @refused(CaptureRefused)
    def case(w):
        w.opt = kind(w.model.parameters())

        def step(seeds):
            loss = w.loss(seeds)
            w.opt.zero_grad()
            loss.backward()
            w.opt.step()  # HERE

        return step

    refused[kind.__name__.lower()] = refused.pop("case")
    return case


for _kind in (torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop):
    _optimizer(_kind)


@refused(CaptureRefused)
def clip_that_raises(w):
    def step(seeds):
        w.opt.zero_grad()
        w.loss(seeds).backward()
        nn.utils.clip_grad_norm_(w.model.parameters(), 1.0, error_if_nonfinite=True)  # HERE
        w.opt.step()

    return step


@refused(CaptureRefused)
def a_skip_on_the_norm(w):
    def step(seeds):
        w.opt.zero_grad()
        w.loss(seeds).backward()
        norm = nn.utils.clip_grad_norm_(w.model.parameters(), 1.0)
        if norm < 10:  # HERE
            w.opt.step()

    return step


@refused(CaptureRefused)
def a_grad_scaler(w):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(seeds):
        w.opt.zero_grad()
        scaler.scale(w.loss(seeds)).backward()
        scaler.step(w.opt)  # HERE
        scaler.update()

    return step


@refused(CaptureRefused)
def an_index_into_a_list(w):
    scales = [1.0, 2.0, 3.0]

    def step(seeds):
        k = w.y[seeds].max().item()
        w.train(w.loss(seeds) * scales[k])  # HERE

    return step


@refused(CaptureRefused)
def a_formatted_value(w):
    def step(seeds):
        loss = w.loss(seeds)
        w.train(loss)
        return f"loss {loss.item():.3f}"  # HERE

    return step


@pytest.mark.parametrize("name", refused)
def test_refused(name, new_world, check_refused, batches_of):
    error = check_case(refused, name, new_world, check_refused, batches_of)
    if name in ("sparse_adam", "lbfgs", "radam", "asgd", "rprop"):
        assert name.replace("_", "") in error.what.lower(), "refused by name"


def test_a_corrected_step_works_after_a_refusal(new_world, compare, check_refused, batches_of):
    def build() -> Any:
        w = new_world()
        w.opt = torch.optim.Adam(w.model.parameters(), lr=0.1)

        def wrong(seeds):
            loss = w.loss(seeds)
            w.train(loss)
            if loss > 3:  # HERE
                w.n += 1
            return loss

        def right(seeds):
            loss = w.loss(seeds)
            w.train(loss)
            return loss

        check_refused(wrong, *batches_of(8), roots=[w])
        return right, w

    compiled = compare(build, batches_of(8, 8, 8, 3))
    assert compiled.stats.replays >= 2


def test_the_refused_function_still_runs_eagerly(new_world, check_refused, batches_of):
    w, v = new_world(), new_world()

    def build(world: Any) -> Any:
        def step(seeds):
            world.n += 1  # HERE
            loss = world.loss(seeds)
            world.train(loss)
            return loss

        return step

    step = build(w)
    check_refused(step, *batches_of(8), roots=[w])
    for batch in batches_of(8, 8):
        assert torch.equal(step(batch), build(v)(batch))
    assert w.n == v.n == 2


def test_an_exception_of_the_step_is_the_users_own(new_world, take_image, batches_of):
    w = new_world()

    def step(seeds):
        w.train(w.loss(seeds))
        raise KeyError("mine")

    compiled = zgcompile.compile(step, warmup=1)
    before = take_image(step, w)
    with pytest.raises(KeyError, match="mine"):
        compiled(*batches_of(8))
    assert take_image(step, w) == before


def test_a_refusal_of_a_step_that_makes_its_optimizer_ends():
    """Each run of it meets a new optimizer."""
    weight = torch.zeros(3, requires_grad=True)

    def step(seeds):
        opt = torch.optim.SGD([weight], lr=0.1)
        loss = (weight - 1).pow(2).sum() * seeds.float().mean()
        loss.backward()
        opt.step()
        if loss > 1:
            loss = loss * 2
        return loss.detach()

    with pytest.raises(CaptureRefused, match="if"):
        zgcompile.compile(step)(torch.arange(4))
    assert weight.grad is None and not weight.any()


def test_an_envelope_that_is_none():
    with pytest.raises(ZgError, match=r"write envelope=zgcompile.Envelope\(headroom"):
        zgcompile.compile(lambda seeds: seeds.sum(), envelope=1.1)


def test_not_a_function():
    with pytest.raises(ZgError):
        zgcompile.compile(3)
    with pytest.raises(ZgError):
        zgcompile.compile(lambda s: s, warmup=0)
    with pytest.raises(ZgError):
        zgcompile.compile(lambda s: s, lowering="magic")


def test_a_compiled_step_inside_a_step():
    inner = zgcompile.compile(lambda x: x.sum(), warmup=1)

    def outer(x):
        return inner(x) * 2

    with pytest.raises(CaptureRefused, match=r"inside another step(.|\n)*\.fn\("):
        zgcompile.compile(outer, warmup=1)(torch.ones(4))
    assert inner.stats.traces == 0

    direct = zgcompile.compile(lambda x: inner.fn(x) * 2, warmup=1)
    assert [float(direct(torch.ones(n))) for n in (4, 4, 3)] == [8, 8, 6]


def test_a_tensor_made_of_numpy_data_in_the_step():
    values = np.arange(6.0)

    def step(x):
        return (x * torch.from_numpy(values)[:1]).sum()  # HERE

    with pytest.raises(CaptureRefused, match="makes a tensor anew") as raised:
        zgcompile.compile(step, warmup=1)(torch.ones(4))
    assert raised.value.where is not None
    assert "# HERE" in raised.value.where.text
