"""Capacities from a sample of counts, such that a batch outgrows any of them with a bounded probability."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS_PER_TILE = 64
CONFIDENCE = 0.99
LARGEST_GROWTH = 1.15  # of the largest count in the sample
REPLICATES = 512
TAIL_SHARE, TAIL_ROWS = 0.1, 32  # of the sample that a generalised Pareto tail is fitted to
LARGEST_SHAPE = 0.5  # of a fitted tail; above it the variance is infinite
GRAINS_A_DEVIATION = 16
MISFIT = 0.1  # the chance of as many batches above the margin as there are, below which a fitted tail is not believed


@dataclass(frozen=True)
class JointFit:
    """`rows`: one capacity a column. A batch outgrows one of them with probability `estimated`, at most `bound` with 99
    % confidence, and at most `any_law` whatever their law. `extrapolated`: the sample is too small to show `bound`,
    which holds if the tail goes on as fitted."""

    rows: tuple[int, ...]
    estimated: float
    bound: float
    any_law: float
    extrapolated: bool


def fit_joint(counts: NDArray[np.int64], p: float, *, least: int = 1) -> JointFit:
    """Capacities for `counts` [batches, sizes] whose bound is at most `p` where the sample allows it.

    The statistic of a batch is its largest standardised count over all sizes, so that one number, a quantile of it,
    gives every capacity: mean + margin x standard deviation. It is read off a fitted tail, whose bound is bootstrapped:
    that wastes half as much as an order statistic of the same sample. Where p is not in the tail, or more batches are
    above the margin than the tail says, and there are 4.6 / p in all, it is that order statistic and the bound Clopper
    and Pearson's, free of any law. Capacities are rounded up to a grain: 64 rows, less where 64 is not small against
    the spread, as rounding by a spread or more would make the stated probability meaningless. None is below `least`,
    and none above 1.15 x the largest count seen where that is above `least`.
    """
    centre, spread = counts.mean(axis=0), counts.std(axis=0)
    varies = spread > 0
    largest = counts.max(axis=0)
    statistic = np.zeros(len(counts))
    if varies.any():
        statistic = ((counts[:, varies] - centre[varies]) / spread[varies]).max(axis=1)
    allowed = order_statistic(len(counts), p)
    tail = Tail.fitted(statistic)
    margin = statistic.max() if tail is None else tail.margin(p)
    if tail is not None and allowed is not None:
        above = int((statistic > margin).sum())
        if p > TAIL_SHARE / 2 or 1 - binomial_cdf(above - 1, len(counts), tail.estimated(margin)) < MISFIT:
            tail, margin = None, np.sort(statistic)[-1 - allowed]
    wanted = np.ceil(centre + margin * spread - 1e-6).astype(np.int64)
    grain = np.exp2(np.floor(np.log2(np.clip(spread / GRAINS_A_DEVIATION, 1, ROWS_PER_TILE)))).astype(np.int64)
    rows = np.where(varies, -(-wanted // grain) * grain, largest)
    rows = np.maximum(np.minimum(rows, np.floor(largest * LARGEST_GROWTH).astype(np.int64)), least)
    over = int((counts > rows).any(axis=1).sum())
    estimated = (over + 1) / (len(counts) + 1)
    if tail is not None:
        margin = ((rows - centre)[varies] / spread[varies]).min()
        estimated, bound = tail.estimated(margin), tail.bound(margin)
    else:
        bound = clopper_pearson_upper(max(over, allowed or 0), len(counts))
    any_law = clopper_pearson_upper(over, len(counts))
    return JointFit(tuple(int(r) for r in rows), estimated, bound, any_law, tail is not None and allowed is None)


# -- the binomial law


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X <= k) of n trials with probability p."""
    if k < 0:
        return 0.0
    if k >= n or p <= 0:
        return 1.0
    if p >= 1:
        return 0.0
    odds = math.log(p) - math.log1p(-p)
    term = total = n * math.log1p(-p)
    for i in range(k):
        term += math.log((n - i) / (i + 1)) + odds
        total = max(total, term) + math.log1p(math.exp(-abs(total - term)))
    return min(math.exp(total), 1.0)


def clopper_pearson_upper(k: int, n: int, confidence: float = CONFIDENCE) -> float:
    """The one-sided upper bound of a probability after k events in n trials (Clopper and Pearson, Biometrika 1934)."""
    low, high = k / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_cdf(k, n, middle) > 1 - confidence else (low, middle)
    return high


def order_statistic(n: int, p: float, confidence: float = CONFIDENCE) -> int | None:
    """The most of n batches above a limit for which its probability is at most p; None where n is too small."""
    allowed = None
    while (k := 0 if allowed is None else allowed + 1) < n and binomial_cdf(k, n, p) <= 1 - confidence:
        allowed = k
    return allowed


# -- the tail


@dataclass(frozen=True)
class Tail:
    """Above `threshold`, exceeded with probability `share`, the excess is generalised Pareto; one (share, shape, scale)
    a bootstrap replicate too. The shape is kept in [0, 0.5]: sums of many draws are lighter than exponential, where a
    fitted end point would be below the next record."""

    threshold: float
    point: tuple[float, float, float]
    replicates: NDArray[np.float64]  # [3, replicates]

    @staticmethod
    def fitted(statistic: NDArray[np.float64]) -> Tail | None:
        """None where nothing is above the threshold, as where many batches reach a limit."""
        n = len(statistic)
        size = min(max(int(n * TAIL_SHARE), TAIL_ROWS), n - 1)
        ordered = np.sort(statistic)
        threshold = ordered[-size - 1]
        if threshold == ordered[-1]:
            return None
        excess = ordered[-size:] - threshold
        generator = np.random.Generator(np.random.Philox(n))
        again = np.sort(generator.choice(excess, (REPLICATES, size)), axis=1)
        shares = generator.binomial(n, size / n, REPLICATES) / n
        shape, scale = generalised_pareto(again)
        point = generalised_pareto(excess)
        return Tail(float(threshold), (size / n, float(point[0]), float(point[1])), np.stack([shares, shape, scale]))

    def estimated(self, margin: float) -> float:
        return float(_exceeding(margin - self.threshold, *np.asarray(self.point)))

    def bound(self, margin: float) -> float:
        return max(
            float(np.quantile(_exceeding(margin - self.threshold, *self.replicates), CONFIDENCE)),
            self.estimated(margin),
        )

    def margin(self, p: float) -> float:
        """The least margin above the threshold whose bound is at most p."""
        low, high = self.threshold, self.threshold + 1.0
        while self.bound(high) > p and high < 1e6:
            low, high = high, high + 2 * (high - self.threshold)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.bound(middle) > p else (low, middle)
        return high


def generalised_pareto(excess: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(shape, scale) of ascending excesses along the last dimension, by probability-weighted moments (Hosking and
    Wallis, Technometrics 1987); with the shape at a limit the scale keeps the mean."""
    n = excess.shape[-1]
    weight = (n - 1 - np.arange(n)) / max(n - 1, 1)
    first, second = excess.mean(axis=-1), (excess * weight).mean(axis=-1)
    shape = 2 - first / np.maximum(first - 2 * second, 1e-300)
    shape = np.clip(shape, 0.0, LARGEST_SHAPE)
    return shape, np.maximum(first * (1 - shape), 1e-300)


def _exceeding(
    excess: float, share: NDArray[np.float64], shape: NDArray[np.float64], scale: NDArray[np.float64]
) -> NDArray[np.float64]:
    scaled = max(excess, 0.0) / scale
    tiny = np.maximum(shape, 1e-9)
    return share * np.exp(-np.log1p(tiny * scaled) / tiny)
