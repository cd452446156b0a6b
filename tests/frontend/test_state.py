"""State around a step: written once, in place, on the user's own storage; usable both ways with eager training."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import zgcompile
from zgcompile.testing import injected_draws


def adam(new_world: Any) -> Any:
    def build() -> Any:
        w = new_world()
        w.opt = torch.optim.Adam(w.model.parameters(), lr=0.1)

        def step(seeds):
            w.visits[seeds] += 1
            loss = w.loss(seeds)
            w.train(loss)
            return loss

        return step, w

    return build


def test_state_stays_where_it_is(new_world, batches_of):
    step, w = adam(new_world)()
    compiled = zgcompile.compile(step, warmup=1)
    batches = batches_of(*[8] * 6)
    compiled(batches[0])
    held = [*w.model.parameters(), w.visits, *(v for s in w.opt.state.values() for v in s.values())]
    where = [(id(t), t.data_ptr()) for t in held]
    group, state = w.opt.param_groups[0], w.opt.state
    for batch in batches[1:]:
        compiled(batch)
    now = [*w.model.parameters(), w.visits, *(v for s in w.opt.state.values() for v in s.values())]
    assert where == [(id(t), t.data_ptr()) for t in now]
    assert w.opt.param_groups[0] is group and w.opt.state is state
    assert type(group["lr"]) is float and "capturable" not in {k for k, v in group.items() if v is True}
    assert group["foreach"] is None and group["fused"] is None


def test_versions_move_so_that_a_stale_backward_is_noticed(new_world, batches_of):
    step, w = adam(new_world)()
    compiled = zgcompile.compile(step, warmup=1)
    for batch in batches_of(8, 8, 8):
        compiled(batch)
    pending = (w.model(w.x[:3]) @ w.model.weight).sum()
    version = w.model.weight._version
    compiled(*batches_of(8))
    assert w.model.weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pending.backward()


def test_a_checkpoint_goes_both_ways(new_world, batches_of):
    """Saved from compiled and resumed in eager; saved from eager and resumed in compiled."""
    batches = batches_of(*[8] * 9)
    step, w = adam(new_world)()
    torch.manual_seed(1)
    for batch in batches:
        with injected_draws():
            step(batch)
    for first_compiled in (True, False):
        a_step, a = adam(new_world)()
        b_step, b = adam(new_world)()
        torch.manual_seed(1)
        run = zgcompile.compile(a_step, warmup=1) if first_compiled else a_step
        for batch in batches[:5]:
            run(batch)
        b.model.load_state_dict(copy.deepcopy(a.model.state_dict()))
        b.opt.load_state_dict(copy.deepcopy(a.opt.state_dict()))
        run = b_step if first_compiled else zgcompile.compile(b_step, warmup=1)
        for batch in batches[5:]:
            run(batch)
        assert torch.allclose(b.model.weight, w.model.weight, atol=1e-5)
        assert float(b.opt.state[b.model.weight]["step"]) == 9


def test_eager_and_compiled_calls_interleave(new_world, compare, batches_of):
    """Five eager steps first, the last loss still alive; then both, turn by turn."""
    batches = batches_of(*[8] * 12)
    step, w = adam(new_world)()
    oracle, v = adam(new_world)()
    kept = [step(b) for b in batches[:5]]
    compiled = zgcompile.compile(step, warmup=1)
    for i, batch in enumerate(batches[5:]):
        kept.append(step(batch) if i == 4 else compiled(batch))
    want = [oracle(b) for b in batches]
    assert torch.allclose(torch.stack([k.detach() for k in kept]), torch.stack([t.detach() for t in want]), atol=1e-5)
    assert torch.allclose(w.model.weight, v.model.weight, atol=1e-5)
    assert torch.equal(w.visits, v.visits)


def test_two_compiled_steps_share_one_model(new_world, batches_of):
    """A training and an evaluation step, and a second training step, on one model, interleaved."""

    def build(w: Any) -> Any:
        w.opt = torch.optim.Adam(w.model.parameters(), lr=0.1)

        def train(seeds):
            loss = w.loss(seeds)
            w.train(loss)
            return loss

        def regularise(seeds):
            loss = w.model(w.x[seeds]).pow(2).mean()
            w.train(loss)
            return loss

        def evaluate(seeds):
            with torch.no_grad():
                return (w.model(w.x[seeds]).argmax(1) == w.y[seeds]).float().mean()

        return train, regularise, evaluate

    w, v = new_world(), new_world()
    compiled = [zgcompile.compile(f, warmup=1) for f in build(w)]
    for batch in batches_of(*[8] * 6):
        for f, g in zip(compiled, build(v) if not hasattr(v, "steps") else v.steps, strict=True):
            if not hasattr(v, "steps"):
                v.steps = build(v)
            assert torch.allclose(f(batch), g(batch), atol=1e-5)
    assert all(f.stats.replays >= 4 for f in compiled)


def test_inputs_may_be_freed(new_world, batches_of):
    """Nothing of the first calls is needed later."""
    step, _w = adam(new_world)()
    oracle, _ = adam(new_world)()
    compiled = zgcompile.compile(step, warmup=1)
    batches = batches_of(*[8] * 5)
    want = [oracle(b).item() for b in batches]
    got = []
    for i in range(5):
        batch = batches[i].clone()
        got.append(compiled(batch).item())
        batch.fill_(10**9)
        del batch
    assert got == pytest.approx(want, abs=1e-5)


def test_a_compiled_step_goes_away(new_world, batches_of):
    """The capture holds no reference cycle that keeps the model alive for ever."""
    import weakref

    step, w = adam(new_world)()
    compiled = zgcompile.compile(step, warmup=1)
    for batch in batches_of(8, 8, 8):
        compiled(batch)
    dead = weakref.ref(w.model)
    del step, w, compiled
    gc.collect()
    assert dead() is None


def test_seeds_and_generator_state_resume(new_world, batches_of):
    """manual_seed, get_rng_state and set_rng_state work as users expect, in warm-up and in replay."""
    w = new_world()

    def step(seeds):
        with torch.no_grad():
            return torch.rand(seeds.numel()), nn.functional.dropout(w.x[seeds], 0.5)

    compiled = zgcompile.compile(step, warmup=2)
    (batch,) = batches_of(8)
    torch.manual_seed(11)
    first = [compiled(batch) for _ in range(6)]
    torch.manual_seed(11)
    again = [compiled(batch) for _ in range(6)]
    assert all(torch.equal(a[k], b[k]) for a, b in zip(first, again, strict=True) for k in (0, 1))
    assert not torch.equal(first[0][0], first[1][0]) and not torch.equal(first[3][0], first[4][0])
    state = torch.get_rng_state()
    a = compiled(batch)
    torch.set_rng_state(state)
    assert torch.equal(compiled(batch)[0], a[0])
    torch.manual_seed(12)
    assert not torch.equal(compiled(batch)[0], first[0][0])
    one_warm_up = zgcompile.compile(step, warmup=1)
    torch.manual_seed(11)
    assert all(torch.equal(one_warm_up(batch)[0], f[0]) for f in first), "the length of the warm-up changes no draw"


def test_capture_draws_nothing_and_runs_no_python_twice(new_world, batches_of):
    """Captures leave the host's generators alone, and the user's function runs for real only where state is created."""
    import random

    import numpy as np

    step, _ = adam(new_world)()
    compiled = zgcompile.compile(step, warmup=1)
    random.seed(3)
    np.random.seed(3)
    want = random.Random(3).random(), np.random.RandomState(3).rand()
    for batch in batches_of(8, 8, 8, 8):
        compiled(batch)
    assert (random.random(), np.random.rand()) == want
