"""Any order of events in a training run gives what the eager function gives under injected draws, call by call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from zgcompile.errors import StepError

SIZES = st.sampled_from([3, 5, 16, 16, 16])  # 17 does not fit
ACTION = st.one_of(
    st.tuples(st.just("step"), SIZES),
    st.tuples(st.just("forced"), st.integers(0, 63)),
    st.tuples(st.just("long batch"), st.just(17)),
    st.tuples(st.just("user error"), SIZES),
    st.tuples(st.just("reseed"), st.integers(0, 3)),
    st.tuples(st.just("scheduler"), st.sampled_from([0.5, 1.0, 1.5])),
    st.tuples(st.just("checkpoint"), st.just(0)),
    st.tuples(st.just("zero grad"), st.booleans()),
    st.tuples(st.just("mode"), st.booleans()),
    st.tuples(st.just("new capture"), st.just(0)),
)
FEW = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


class Run:
    """One training run in both worlds."""

    def __init__(self, pair: Any, forced: Any, same_state: Any) -> None:
        self.pair, self.forced, self.same_state = pair.begin(), forced, same_state
        torch.manual_seed(0)
        schedulers = []
        pair.both(
            lambda t: schedulers.append(torch.optim.lr_scheduler.MultiplicativeLR(t.optimizer, lambda _: self.factor))
        )
        self.schedulers, self.factor = schedulers, 1.0

    def act(self, action: str, value: Any) -> None:
        pair, compiled = self.pair, self.pair.compiled
        match action:
            case "step" | "long batch":
                pair.call(pair.mine.batch(pair.calls, value))
            case "forced":
                pair.call()  # so that the capture in use serves the next call too
                checks = self.forced.checks(compiled)
                if not checks:
                    return
                before = compiled.stats.calls
                with self.forced(compiled, value % len(checks)):
                    pair.call()
                assert compiled.stats.calls == before + 1
            case "user error":
                bad = pair.mine.batch(3, value)
                bad[0] = -pair.mine.nodes - 1
                before_state = pair.mine.save()
                with pytest.raises(StepError):
                    compiled(bad)
                self.same_state(pair.mine.save(), before_state, 0.0, "after a user error,")
            case "reseed":
                torch.manual_seed(value)
            case "scheduler":
                self.factor = value
                for scheduler in self.schedulers:
                    scheduler.step()
            case "checkpoint":
                pair.both(checkpoint)
            case "zero grad":
                pair.both(lambda t: t.optimizer.zero_grad(set_to_none=value))
            case "mode":
                pair.both(lambda t: t.model.train(value))
            case "new capture":
                compiled.specialisations[0].replay = None
        pair.check()


def checkpoint(trainer: Any) -> None:
    model, optimizer = (copy.deepcopy(o.state_dict()) for o in (trainer.model, trainer.optimizer))
    trainer.model.load_state_dict(model)
    trainer.optimizer.load_state_dict(optimizer)


@settings(max_examples=4, **FEW)
@given(actions=st.lists(ACTION, min_size=6, max_size=12))
def test_any_order_of_events_few(sgd, forced, same_state, actions):
    run = Run(sgd, forced, same_state)
    for action in actions:
        run.act(*action)


@pytest.mark.slow
@settings(max_examples=60, **{**FEW, "phases": [Phase.generate, Phase.shrink]})
@given(actions=st.lists(ACTION, min_size=4, max_size=40))
def test_any_order_of_events_many(adam, forced, same_state, actions):
    run = Run(adam, forced, same_state)
    for action in actions:
        run.act(*action)
