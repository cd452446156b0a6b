from __future__ import annotations

import pytest

from zgcompile.bench.timing import Spread, paired, time_block


class Device:
    """A clock on which queued work takes time only when waited for; each job is slower than the last by `drift`."""

    def __init__(self, drift: float = 1.0) -> None:
        self.now, self.queued, self.factor, self.drift = 0.0, 0.0, 1.0, drift
        self.log: list[tuple[str, int]] = []

    def job(self, name: str, seconds: float):
        def fn(i: int) -> None:
            self.log.append((name, i))
            self.queued += seconds * self.factor
            self.factor *= self.drift

        return fn

    def sync(self) -> None:
        self.now += self.queued
        self.queued = 0.0

    def clock(self) -> float:
        return self.now

    def paired(self, a: float, b: float, **options):
        return paired(self.job("a", a), self.job("b", b), clock=self.clock, sync=self.sync, **options)


def test_milliseconds_a_call_and_their_ratio():
    timing = Device().paired(0.003, 0.001, blocks=4, calls=5, warmup=2)
    assert timing.a.median == pytest.approx(3)
    assert timing.b.median == pytest.approx(1)
    assert timing.ratio.median == pytest.approx(3)
    assert timing.ratio.upper == pytest.approx(3)
    assert (timing.blocks, timing.calls) == (4, 5)


def test_queued_work_is_waited_for_at_both_ends_of_a_block():
    device = Device()
    device.job("earlier", 100.0)(0)
    assert time_block(device.job("a", 0.002), 0, 10, clock=device.clock, sync=device.sync) == pytest.approx(2)


def test_blocks_alternate_in_reversed_order_over_the_same_inputs():
    device = Device()
    device.paired(1, 1, blocks=2, calls=2, warmup=1)
    assert device.log == [
        ("a", 0),
        ("b", 0),
        *[("a", 1), ("a", 2), ("b", 1), ("b", 2)],
        *[("b", 3), ("b", 4), ("a", 3), ("a", 4)],
    ]


def test_drift_cancels_in_the_ratio():
    timing = Device(drift=1.01).paired(0.001, 0.001, blocks=20, calls=5, warmup=0)
    assert timing.a.upper / timing.a.lower > 2
    assert timing.ratio.median == pytest.approx(1, abs=0.01)
    assert timing.ratio.lower < 1 < timing.ratio.upper


def test_spread_interpolates_quartiles():
    assert Spread.of([4.0, 1.0, 2.0, 3.0]) == Spread(2.5, 1.75, 3.25)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert str(Spread(2.5, 1.75, 3.25)) == "2.500 [1.750, 3.250]"
    with pytest.raises(ValueError, match="no sample"):
        Spread.of([])


@pytest.mark.parametrize("options", [{"blocks": 0}, {"calls": 0}, {"warmup": -1}])
def test_senseless_options_are_refused(options):
    with pytest.raises(ValueError, match="must be positive"):
        Device().paired(1, 1, **options)
