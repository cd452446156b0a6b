"""Selections by boolean masks."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept

LONG, INT, BOOL = torch.int64, torch.int32, torch.bool
X, T = Rows("m", (4,)), Fixed((7, 4))
TO_ROWS, TO_TABLE = Rows("n", (), LONG, 0, "m"), Rows("n", (), LONG, 0, 7)
ANY_SIGN = Rows("n", (), LONG, -7, 7)


def always(failure):
    return lambda counts: failure if counts["n"] else None


CASES = [
    Case("mask", backward(lambda x, m: x[m]), (Rows("n", (4,)), Rows("n", (), BOOL))),
    Case(
        "one mask twice",
        backward(lambda x, y, m: x[m] * y[m].unsqueeze(1)),
        (Rows("n", (4,)), Rows("n"), Rows("n", (), BOOL)),
    ),
    Case("mask of a table", lambda t, x: t[x[:7].sum(1) > 0], (T, Fixed((9, 4)))),
    Case(
        "mask of a table by rows",
        backward(lambda t, i: t[torch.zeros(7, dtype=BOOL).index_fill(0, i, True)]),
        (T, TO_TABLE),
    ),
    Case("2-d mask", backward(lambda x: x[x > 0]), (Rows("n", (4,)),)),
    Case("2-d mask over columns", lambda x: x.t()[x.t() > 0], (Rows("n", (4,)),)),
    Case("mask of columns", backward(lambda x, m: x[:, m]), (Rows("n", (7,)), Fixed((7,), BOOL))),
    Case("mask of dynamic columns", backward(lambda x, m: x.t()[:, m]), (Rows("n", (4,)), Rows("n", (), BOOL))),
    Case("mask of a mask", lambda x, m: x[m][x[m] > 0], (Rows("n"), Rows("n", (), BOOL))),
    Case("nonzero", lambda m: m.nonzero(), (Rows("n", (), BOOL),)),
    Case("nonzero of integers", lambda i: i.nonzero(as_tuple=True)[0], (Rows("n", (), LONG),)),
    Case("nonzero of a matrix", lambda x: (x > 0).nonzero(), (Rows("n", (4,)),)),
    Case("nonzero of columns", lambda x: (x.t() > 0).nonzero(), (Rows("n", (4,)),)),
    Case("where of a condition", lambda x: torch.where(x > 0)[0], (Rows("n"),)),
    Case(
        "nonzero as an index", backward(lambda x, m: x[m.nonzero().squeeze(1)]), (Rows("n", (4,)), Rows("n", (), BOOL))
    ),
    Case("nonzero of a table", lambda t, x: t.nonzero() * x.sum().long(), (Fixed((7,), LONG), Rows("n"))),
    Case("masked_select", lambda x, m: x.masked_select(m), (Rows("n"), Rows("n", (), BOOL))),
    Case("masked_select of rows", lambda x, m: x.masked_select(m.unsqueeze(1)), (Rows("n", (4,)), Rows("n", (), BOOL))),
    Case("masked_select by a static mask", lambda x, m: x.masked_select(m), (Rows("n", (4,)), Fixed((4,), BOOL))),
    Case("mask of a table twice", lambda t, m: (t[m], t[m].sum(0)), (T, Fixed((7,), BOOL))),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
