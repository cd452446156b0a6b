"""Capacities from counts: the numeric pieces against known values, the whole against laws whose tails are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zgcompile.ir import tail
from zgcompile.ir.tail import binomial_cdf, clopper_pearson_upper, fit_joint, generalised_pareto, order_statistic

LAWS = {
    "independent": lambda g, n: g.normal(3000, 30, (n, 4)),
    "equal": lambda g, n: g.normal(3000, 30, (n, 1)).repeat(4, axis=1),
    "lognormal": lambda g, n: np.exp(g.normal(7, 0.15, (n, 3))),
    "gamma": lambda g, n: g.gamma(20, 50, (n, 3)),
}


def counts(law, n, seed):
    return np.rint(LAWS[law](np.random.default_rng(seed), n)).astype(np.int64)


def rate(sample, rows):
    return (sample > np.array(rows)).any(axis=1).mean()


@pytest.mark.parametrize(
    ("k", "n", "p"), [(0, 10, 0.2), (3, 10, 0.2), (30, 1000, 0.04), (9, 10, 0.99), (500, 1000, 0.5)]
)
def test_binomial_against_exact_sums(k, n, p):
    exact = math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
    assert binomial_cdf(k, n, p) == pytest.approx(exact, rel=1e-9)


def test_binomial_at_its_ends():
    assert [binomial_cdf(-1, 5, 0.5), binomial_cdf(5, 5, 0.5), binomial_cdf(0, 5, 0.0), binomial_cdf(4, 5, 1.0)] == [
        0,
        1,
        1,
        0,
    ]
    assert binomial_cdf(2000, 4000, 0.999) == pytest.approx(0, abs=1e-300)


def test_clopper_pearson_against_known_values():
    assert clopper_pearson_upper(0, 100) == pytest.approx(1 - 0.01 ** (1 / 100))
    assert (
        clopper_pearson_upper(0, 298, 0.95) > 1e-2 > clopper_pearson_upper(0, 299, 0.95)
    )  # Wilks: 299 for 99 % at 95 % confidence
    # The rule's quantiles of chi-square with 2 (k + 1) degrees of freedom, for small p: 18.307 / 2 for k = 4, at 95 %.
    assert clopper_pearson_upper(4, 100_000, 0.95) == pytest.approx(18.307 / 2 / 100_000, rel=1e-3)
    assert clopper_pearson_upper(5, 5) == pytest.approx(1)


def test_order_statistic_is_the_last_whose_bound_holds():
    assert order_statistic(458, 1e-2) is None
    for n, p in ((459, 1e-2), (2048, 1e-2), (2048, 0.3)):
        k = order_statistic(n, p)
        assert clopper_pearson_upper(k, n) <= p < clopper_pearson_upper(k + 1, n)


@pytest.mark.parametrize(("shape", "scale"), [(0.0, 2.0), (0.1, 1.0), (0.3, 5.0)])
def test_generalised_pareto_finds_its_parameters(shape, scale):
    u = 1 - np.random.default_rng(1).random(200_000)
    excess = -np.log(u) * scale if shape == 0 else (u**-shape - 1) / shape * scale
    found = generalised_pareto(np.sort(excess))
    assert found[0] == pytest.approx(shape, abs=0.03)
    assert found[1] == pytest.approx(scale, rel=0.04)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("n", "p"), [(2048, 1e-2), (2048, 1e-3), (256, 1e-2)])
def test_bound_holds_as_often_as_it_says(law, n, p):
    """Over 40 samples the true rate is above the bound in 1 % of them (3 of 40 has a chance of 1 % then)."""
    truth = counts(law, 200_000, 1)
    fits = [fit_joint(counts(law, n, 100 + i), p) for i in range(40)]
    rates = np.array([rate(truth, fit.rows) for fit in fits])
    bounds = np.array([fit.bound for fit in fits])
    assert (rates > bounds).sum() < 3
    assert np.median(bounds) <= 2 * p  # the 1.15 limit may keep a wide law from its target
    if n == 2048 and p == 1e-2:
        assert (bounds <= p).all()
        assert (rates > 2e-3).mean() > 0.95


def test_sizes_fail_together():
    """Equal columns need the capacities of one; independent ones more. Fitted one by one, neither would hold."""
    equal, apart = (fit_joint(counts(law, 2048, 5), 1e-2) for law in ("equal", "independent"))
    single = fit_joint(counts("equal", 2048, 5)[:, :1], 1e-2)
    assert equal.rows == single.rows * 4
    assert rate(counts("equal", 100_000, 1), equal.rows) > 2e-3
    truth = counts("independent", 100_000, 1)
    assert rate(truth, apart.rows) <= apart.bound <= 1e-2
    one_by_one = [fit_joint(counts("independent", 2048, 5)[:, j : j + 1], 1e-2).rows[0] for j in range(4)]
    assert rate(truth, one_by_one) > 1e-2


def test_a_tail_that_does_not_fit_is_not_believed():
    """2 % of the batches meet a hub: the tail that fits the rest ends far below them."""

    def hubs(n, seed):
        generator = np.random.default_rng(seed)
        return np.rint(generator.normal(3000, 30, (n, 1)) + 5000 * (generator.random((n, 1)) < 0.02)).astype(np.int64)

    truth = hubs(100_000, 1)
    for seed in range(20):
        fit = fit_joint(hubs(2048, 50 + seed), 1e-2)
        assert rate(truth, fit.rows) <= max(fit.bound, 1e-2)


@pytest.mark.parametrize("p", [1e-2, 1e-4, 1e-6])
def test_no_capacity_is_far_above_the_largest_seen(p):
    for law in LAWS:
        sample = counts(law, 256, 3)
        fit = fit_joint(sample, p)
        assert (np.array(fit.rows) <= 1.15 * sample.max(axis=0)).all()
        assert fit.bound >= fit.estimated > 0


def test_rounding_is_small_against_the_spread():
    generator = np.random.default_rng(0)
    spread = np.array([0.0, 2.0, 40.0, 1200.0])
    sample = np.rint(generator.normal(20_000, spread, (2048, 4))).astype(np.int64)
    rows = fit_joint(sample, 1e-2).rows
    assert rows[0] == 20_000
    assert rows[2] % 2 == 0
    assert rows[3] % tail.ROWS_PER_TILE == 0
    assert rows[1] <= sample[:, 1].max()


def test_constant_counts_say_only_what_their_number_allows():
    fit = fit_joint(np.full((100, 2), 7), 1e-2)
    assert fit.rows == (7, 7)
    assert fit.bound == pytest.approx(1 - 0.01 ** (1 / 100))


def test_least_capacity():
    assert fit_joint(counts("equal", 256, 1), 1e-2, least=9999).rows == (9999,) * 4
