"""Masks between the passes: the same values, as bits where they wait long enough."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from zgcompile.passes.pack_masks import PACK, UNPACK, pack_masks

ROWS, COLUMNS = 512, 160  # 81,920 elements


def later(y, steps=40):
    for _ in range(steps):
        y = y.cos()
    return y


def waiting(x, steps=40):
    """Dropout by hand: the mask is read early and late."""
    mask = x > 0.3
    return torch.where(mask, later(torch.where(mask, x, 0), steps), 0)


def run(fn, *inputs):
    """The ops of the rewritten FX graph, its results having been compared."""
    fx_graph = make_fx(lambda *a: fn(*a), tracing_mode="fake")(*inputs)
    changed = pack_masks(fx_graph)
    assert not pack_masks(fx_graph)
    torch.testing.assert_close(fx_graph(*inputs), fn(*inputs), rtol=0, atol=0)
    targets = [n.target for n in fx_graph.graph.nodes]
    assert changed == (PACK in targets) and targets.count(PACK) <= targets.count(UNPACK)
    return targets


def x(rows=ROWS):
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0))


def test_a_mask_that_waits_is_packed():
    targets = run(waiting, x())
    assert targets.count(PACK) == targets.count(UNPACK) == 1
    where = torch.ops.aten.where.self
    assert targets.index(PACK) < targets.index(where) < targets.index(UNPACK)


def test_several_late_readers_share_the_unpacked():
    def fn(x):
        mask = x > 0.3
        y = later(torch.where(mask, x, 0))
        return torch.where(mask, y, 0), torch.where(mask, 0, y), mask.any()

    assert run(fn, x()).count(UNPACK) == 1


@pytest.mark.parametrize(
    ("fn", "rows"),
    [
        (waiting, 100),
        (lambda x: waiting(x, steps=0), ROWS),
        (lambda x: (lambda m: (later(torch.where(m, x, 0)), m))(x > 0), ROWS),
        (lambda x: (lambda m: torch.where(m.t(), later(torch.where(m, x, 0)).t(), 0))(x > 0), ROWS),
        (lambda x: (lambda m: torch.where(m, later(x), 0))(x > 0), ROWS),
        (lambda x: waiting(x.t()), ROWS),
    ],
    ids=["small", "read at once", "returned", "a view", "read once", "not dense"],
)
def test_left_alone(fn, rows):
    assert PACK not in run(fn, x(rows))
