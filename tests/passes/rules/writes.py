"""What the cases of writes by index share: inputs, batches, and small functions that write."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Fixed, Rows

LONG, INT, BOOL = torch.int64, torch.int32, torch.bool
N4, M4, T, V = Rows("n", (4,)), Rows("m", (4,)), Fixed((7, 4)), Fixed((7,))
TO_TABLE, TO_ROWS = Rows("n", (), LONG, 0, 7), Rows("n", (), LONG, 0, "m")
WIDE = {"batches": ({"n": 9, "m": 6}, {"n": 8, "m": 2}, {"n": 2, "m": 5})}
# Two sizes that eager wants equal: they are, one is 1 (eager may broadcast), and neither.
NUMBERS = ({"n": 6, "m": 6}, {"n": 9, "m": 1}, {"n": 9, "m": 4}, {"n": 2, "m": 2})


def always(failure):
    return lambda counts: failure if counts["n"] else None


def masked_add(out, x, m, w):
    out = out.clone()
    out[m] += x[m] @ w
    return out


def written(h, m, v):
    h = h.clone()
    h[m] = v
    return h


def set_at(t, i, v):
    t = t.clone()
    t[i] = v
    return t


def reduced(reduce, include_self=True):
    def run(t, i, x):
        return t.scatter_reduce(0, i.unsqueeze(1).expand(-1, 4), x, reduce, include_self=include_self)

    return run


def sliced(place):
    def run(t, v):
        t = t.clone()
        t[place] = v
        return t

    return run
