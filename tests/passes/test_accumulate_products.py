"""Sums of matrix products: the same sums, one buffer."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from zgcompile.passes.accumulate_products import ACCUMULATE, accumulate_products

aten = torch.ops.aten


def operands(dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(7, 5), (5, 3), (7, 4), (4, 3), (7, 6), (6, 3), (3,)]
    return [torch.randn(shape, dtype=torch.float64).mul(4).to(dtype) for shape in shapes]


def run(fn, *inputs):
    """The rewritten FX graph's number of accumulations, its results having been compared."""
    fx_graph = make_fx(fn, tracing_mode="fake")(*inputs)
    changed = accumulate_products(fx_graph)
    assert not accumulate_products(fx_graph)
    torch.testing.assert_close(fx_graph(*inputs), fn(*inputs), rtol=1e-12, atol=1e-12)
    found = [n for n in fx_graph.graph.nodes if n.target is ACCUMULATE]
    assert changed == bool(found)
    assert all(n.meta["val"].shape == (7, 3) for n in found)
    return len(found)


SUMS = {
    "two": (lambda a, b, c, d, e, f, g: (a @ b + c @ d).relu(), 1),
    "the later one is left": (lambda a, b, c, d, e, f, g: (lambda x, y: y + x)(a @ b, c @ d), 1),
    "bias": (lambda a, b, c, d, e, f, g: torch.addmm(g, a, b) + c @ d, 1),
    "three": (lambda a, b, c, d, e, f, g: a @ b + c @ d + e @ f, 2),
    "a later bias": (lambda a, b, c, d, e, f, g: (lambda x, y: x + y)(a @ b, torch.addmm(g, c, d)), 0),
    "read twice": (lambda a, b, c, d, e, f, g: (lambda x: (x + c @ d, x.relu()))(a @ b), 0),
    "the product is read twice": (lambda a, b, c, d, e, f, g: (lambda y: (a @ b + y, y.relu()))(c @ d), 0),
    "itself": (lambda a, b, c, d, e, f, g: (lambda x: x + x)(a @ b), 0),
    "scaled": (lambda a, b, c, d, e, f, g: torch.add(a @ b, c @ d, alpha=2), 0),
    "one product": (lambda a, b, c, d, e, f, g: a @ b + g, 0),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_products(name):
    fn, accumulations = SUMS[name]
    assert run(fn, *operands()) == accumulations


def test_integers_are_left():
    assert run(lambda a, b, c, d: a @ b + c @ d, *operands(torch.int64)[:4]) == 0
