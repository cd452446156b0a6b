from __future__ import annotations

import numpy as np
import pytest
import torch

from zgcompile.bench.synthetic import SHAPES, SMALL, Shape, power_law, uniform


def degrees(graph):
    return np.diff(graph.indptr.numpy())


@pytest.mark.parametrize("shape", [SMALL, Shape(20_000, 300_000, 2, 3), Shape(64, 4_000, 2, 2)])
def test_in_degrees_follow_the_law(shape):
    weight = np.arange(1, shape.nodes + 1) ** -0.8
    expected = np.clip(np.floor(weight / weight.sum() * shape.edges), 1, shape.nodes // 4)
    got = np.sort(degrees(power_law(shape)))[::-1]
    # A sum in another order can tip a product over an integer.
    assert np.abs(got - expected).max() <= 1
    assert (got != expected).mean() < 0.01


def test_the_cap_and_the_floor_bind():
    tight = degrees(power_law(Shape(64, 4_000, 2, 2)))
    assert tight.max() == 16
    assert degrees(power_law(Shape(5_000, 5_000, 1, 2))).min() == 1


def test_ranks_are_a_random_permutation_of_ids():
    order = np.argsort(-degrees(power_law(SMALL)), kind="stable")
    assert order[:200].mean() == pytest.approx(SMALL.nodes / 2, rel=0.15)
    assert abs(np.corrcoef(order, np.arange(order.size))[0, 1]) < 0.1


def test_sources_are_drawn_with_the_weights_of_the_degrees():
    graph = power_law(SMALL)
    degree = degrees(graph)
    drawn = np.bincount(graph.indices.numpy(), minlength=SMALL.nodes)
    weight = np.arange(1, SMALL.nodes + 1) ** -0.8
    weight /= weight.sum()
    first, chi = 0, 0.0
    for low, high in [(200, np.inf), (60, 200), (30, 60), (15, 30), (0, 15)]:
        member = (degree >= low) & (degree < high)
        share = weight[first : first + member.sum()].sum() * degree.sum()
        chi += (drawn[member].sum() - share) ** 2 / share
        first += member.sum()
    assert chi < 18.5  # 0.999 quantile of chi-square with 4 degrees of freedom


def test_uniform_has_flat_degrees_and_exactly_its_edges():
    shape = Shape(300, 1_000, 2, 2)
    graph = uniform(shape)
    assert set(degrees(graph)) == {3, 4}
    assert graph.indices.numel() == 1_000
    drawn = np.bincount(graph.indices.numpy(), minlength=300)
    assert ((drawn - 10 / 3) ** 2 / (10 / 3)).sum() < 386  # 0.9995 quantile at 299 degrees of freedom


@pytest.mark.parametrize("make", [power_law, uniform])
def test_a_graph_is_valid_and_fixed_by_its_seed(make):
    a, b, c = make(SMALL), make(SMALL), make(SMALL, seed=1)
    assert a.indptr[0] == 0
    assert a.indptr[-1] == a.indices.numel()
    assert int(a.indices.min()) >= 0
    assert int(a.indices.max()) < SMALL.nodes
    assert a.feat.shape == (SMALL.nodes, SMALL.features)
    assert a.feat.dtype == torch.float32
    assert set(a.label.tolist()) == set(range(SMALL.classes))
    assert torch.equal(a.indices, b.indices)
    assert torch.equal(a.feat, b.feat)
    assert a.indices.shape != c.indices.shape or not torch.equal(a.indices, c.indices)


def test_the_published_sizes():
    assert SHAPES["reddit"] == Shape(232_965, 114_615_892, 602, 41)
    assert SHAPES["products"] == Shape(2_449_029, 123_718_280, 100, 47)
    assert SHAPES["arxiv"].nodes == 169_343
