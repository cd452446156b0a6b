"""One test a kind of state: who writes it, and that a failed status leaves it alone (or moves it exactly once).

Each goes through an ordinary step, a forced overflow, a forced precondition and a user error, beside eager.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zgcompile
from zgcompile.errors import StepError
from zgcompile.ir.status import Failure


@pytest.fixture
def fail(forced):
    """`fail(pair, failure)`: one call whose replay fails so; for a user error it raises."""

    def run(pair: Any, failure: Failure) -> Any:
        pair.ready()
        with forced(pair.compiled, forced.first(pair.compiled, failure)):
            return pair.call()

    return run


def bad_batch(pair: Any) -> torch.Tensor:
    """Eager raises for it."""
    batch = pair.mine.batch(1)
    batch[3] = pair.mine.nodes + 5
    return batch


def raises_and_changes_nothing(pair: Any, same_state: Any) -> None:
    before = pair.mine.save()
    with pytest.raises(StepError, match=r"index.*out of range|out of bounds"):
        pair.compiled(bad_batch(pair))
    same_state(pair.mine.save(), before, 0.0, "after a user error,")


def through_all(pair: Any, fail: Any, same_state: Any) -> None:
    """An ordinary step after each way to fail."""
    pair.call()
    for failure in (Failure.CAPACITY, Failure.PRECONDITION):
        if any(check.failure is failure for check in pair.compiled.specialisations[0].replay.lowered.layout.checks):
            fail(pair, failure)
        pair.call()
    raises_and_changes_nothing(pair, same_state)
    pair.call()


def test_parameters_optimizer_state_buffers_and_tables(pair, fail, same_state):
    """In place on the user's own storage, gated."""
    held = {name: (id(t), t.data_ptr()) for name, t in pair.mine.tensors().items()}
    assert {
        "0.weight",
        "1.running_mean",
        "1.num_batches_tracked",
        "0.weight.exp_avg",
        "0.weight.step",
        "visits",
        "embedding",
    } <= set(held)
    through_all(pair, fail, same_state)
    assert {name: (id(t), t.data_ptr()) for name, t in pair.mine.tensors().items()} == held


def test_a_failed_replay_alone_writes_nothing(pair, forced, same_state):
    """The replay itself, without what follows it: the gate is on the device."""
    pair.call()
    subject = pair.compiled.specialisations[0]
    before, gradients = pair.mine.save(), [g.clone() for g in subject.replay.gradients]
    seen = []
    run = subject.replay.run

    def spied(launch: Any) -> Any:
        replayed = run(launch)
        same_state({**pair.mine.save(), "random": before["random"]}, before, 0.0, "right after the replay,")
        assert all(torch.equal(g, h) for g, h in zip(subject.replay.gradients, gradients, strict=True))
        seen.append(replayed.metadata)
        pair.mine.restore(before)
        raise ZeroDivisionError

    subject.replay.run = spied
    try:
        for k in range(len(forced.checks(pair.compiled))):
            with forced(pair.compiled, k), pytest.raises(ZeroDivisionError):
                pair.compiled(pair.mine.batch(17))
            assert seen[-1][k] == 1
    finally:
        subject.replay.run = run
    pair.call()


ZEROING = [("before", False), ("between", True), ("between", False), ("after", True), ("after", False), ("never", True)]


@pytest.mark.parametrize(("zero", "to_none"), ZEROING)
def test_p_grad(forced, new_pair, new_trainer, fail, same_state, zero, to_none):
    """None stays None, a live gradient is eager's, wherever zero_grad stands; untouched by a step that fails."""
    pair = new_pair(lambda: new_trainer(torch.optim.SGD, zero=zero, to_none=to_none, light=True)).ready()
    through_all(pair, fail, same_state)
    grads = [p.grad for p in pair.mine.parameters().values()]
    if zero == "after":
        assert all((g is None) if to_none else not g.any() for g in grads)
    else:
        assert all(g is not None and g.any() for g in grads)


def test_p_grad_accumulates_over_calls(forced, new_pair, new_trainer, fail, same_state):
    """The optimizer steps outside, after a few calls; zero_grad to None there takes the next call back to the start."""
    pair = new_pair(lambda: new_trainer(zero="never", step_inside=False, light=True))
    for _ in range(3):
        for _ in range(3):
            pair.call()
        pair.both(lambda t: (t.optimizer.step(), t.optimizer.zero_grad(set_to_none=False)))
    assert pair.compiled.stats.replays >= 4
    through_all(pair, fail, same_state)
    pair.both(lambda t: (t.optimizer.step(), t.optimizer.zero_grad()))
    for _ in range(3):
        pair.call()
    through_all(pair, fail, same_state)


def test_a_gradient_kept_by_the_user_does_not_change(pair, fail):
    kept = pair.call() is not None and pair.mine.model[0].weight.grad
    value = kept.clone()
    for failure in (None, Failure.CAPACITY, Failure.PRECONDITION):
        pair.call() if failure is None else fail(pair, failure)
        assert torch.equal(kept, value)
        assert pair.mine.model[0].weight.grad is not kept


def test_the_rng_offset(pair, forced, fail):
    """One int64 of the generator a step, whatever became of the step; none for a call that raises."""

    def moved(action: Any) -> int:
        before = torch.get_rng_state()
        action()
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        for count in range(4):
            if torch.equal(torch.get_rng_state(), after):
                return count
            torch.empty((), dtype=torch.int64).random_()
        raise AssertionError("the generator moved on by more than three steps")

    assert moved(pair.call) == 1
    for failure in Failure:
        pair.ready()
        assert moved(lambda failure=failure: fail(pair, failure)) == 1
    pair.ready()

    def user_error() -> None:
        with pytest.raises(StepError):
            pair.compiled(bad_batch(pair))

    assert moved(user_error) == 0


def test_the_hyperparameter_block(pair, fail, same_state):
    """Read from the user's param_groups at each call, an overflow included, and never written to."""
    traces, captures = pair.compiled.stats.traces, pair.compiled.stats.captures
    group = pair.mine.optimizer.param_groups[0]
    for lr, betas in ((0.02, (0.8, 0.99)), (0.005, (0.9, 0.999)), (0.0, (0.5, 0.9))):
        pair.both(lambda t, lr=lr, betas=betas: t.optimizer.param_groups[0].update(lr=lr, betas=betas))
        pair.call()
        fail(pair, Failure.CAPACITY)
        assert (group["lr"], group["betas"]) == (lr, betas) and type(group["lr"]) is float
    pair.both(lambda t: t.optimizer.param_groups[0].update(lr=0.01))
    raises_and_changes_nothing(pair, same_state)
    pair.call()
    assert pair.compiled.stats.traces == traces
    assert pair.compiled.stats.captures - captures <= 1  # three overflows in a row may re-fit


def test_the_metadata_buffer(pair, fail):
    """Counts and relabel tables are the call's own: no failed step and no larger one leaves anything in them."""
    compiled = pair.compiled
    small = torch.arange(3)
    first = compiled.specialisations[0]
    pair.call(small)
    launch = first._launch(_call(small))
    before, state = pair.mine.save(), torch.get_rng_state()
    metadata = first.replay.run(launch).metadata
    for action in (
        lambda: pair.mine.restore(before),
        lambda: first.replay.run(first._launch(_call(pair.mine.batch(5, 16)))),
    ):
        action()
        pair.mine.restore(before)
        assert first.replay.run(launch).metadata == metadata
    pair.mine.restore(before)
    torch.set_rng_state(state)
    fail(pair, Failure.CAPACITY)
    pair.call(small)
    checks = len(first.replay.lowered.layout.checks)
    assert not any(metadata[:checks])
    assert metadata[checks:] == [3, *metadata[checks + 1 :]]


def _call(batch: torch.Tensor) -> Any:
    from zgcompile.frontend.call import Call

    return Call(5, (batch,), {})


def versions(trainer: Any) -> dict[str, int]:
    return {name: t._version for name, t in trainer.tensors().items()}


def test_tensor_version_counters(pair, fail, same_state):
    """A backward that saved a parameter before a step fails after it, as in eager; not after a step that raised."""
    weight = pair.mine.model[0].weight
    for failure in (None, Failure.CAPACITY, Failure.PRECONDITION):
        before = [versions(t) for t in (pair.mine, pair.twin)]
        x = torch.ones(2, weight.shape[1], dtype=weight.dtype, requires_grad=True)
        stale = (x @ weight.t()).sum()
        pair.call() if failure is None else fail(pair, failure)
        mine, twin = (
            {k for k, v in versions(t).items() if v > b[k]} for t, b in zip((pair.mine, pair.twin), before, strict=True)
        )
        assert mine >= twin >= {"0.weight", "embedding", "visits", "0.weight.exp_avg"}
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
    x = torch.ones(2, weight.shape[1], dtype=weight.dtype, requires_grad=True)
    fresh = (x @ weight.t()).sum()
    raises_and_changes_nothing(pair, same_state)
    fresh.backward()


def test_schedulers_hooks_and_ema_outside_the_step(pair, fail, same_state):
    """What the user's Python does between steps sees the new state, once a step."""
    held: dict[int, Any] = {}
    for trainer in (pair.mine, pair.twin):
        average = torch.optim.swa_utils.AveragedModel(
            trainer.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        held[id(trainer)] = (average, torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.9), [])

    def between(trainer: Any) -> None:
        average, scheduler, seen = held[id(trainer)]
        average.update_parameters(trainer.model)
        scheduler.step()
        seen.append(trainer.optimizer.param_groups[0]["lr"])

    for failure in (None, Failure.CAPACITY, None, Failure.PRECONDITION, None):
        pair.call() if failure is None else fail(pair, failure)
        pair.both(between)
    raises_and_changes_nothing(pair, same_state)
    pair.call()
    (mine, _, a), (twin, _, b) = held[id(pair.mine)], held[id(pair.twin)]
    assert a == b and len(set(a)) == 5
    for p, q in zip(mine.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_optimizer_hooks_inside_the_step_run_or_are_refused(new_trainer, same_state):
    """A step that calls a hook's Python cannot replay it: refused by name, with nothing changed."""
    trainer = new_trainer(light=True)
    calls: list[int] = []
    trainer.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = trainer.save()
    with pytest.raises(zgcompile.errors.ZgError):
        zgcompile.compile(trainer.step, warmup=1)(trainer.batch(1))
    same_state(trainer.save(), before, 0.0)
    assert calls == []
