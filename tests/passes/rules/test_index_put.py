"""Assignment and accumulation through index tensors and masks."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept
from tests.passes.rules.writes import BOOL, LONG, M4, N4, TO_ROWS, TO_TABLE, T, V, always, masked_add, set_at, written
from zgcompile.ir.status import Failure

# Another number of values than of places: equal, one (eager broadcasts), and one that eager refuses.
NUMBERS = {"batches": ({"n": 9, "m": 6}, {"n": 9, "m": 1}, {"n": 9, "m": 4}, {"n": 6, "m": 6})}


def first_six(rows):
    return torch.arange(rows.shape[0]) < 6


CASES = [
    Case(
        "index_put of distinct rows", backward(lambda t, x: set_at(t, torch.arange(x.shape[0]), x)), (Fixed((9, 4)), N4)
    ),
    Case("index_put of a scalar", backward(lambda t, i: set_at(t, i, 2.0)), (T, TO_TABLE)),
    Case("index_put of a tensor that broadcasts", lambda t, i, v: set_at(t, i, v), (T, TO_TABLE, Fixed((4,)))),
    Case("index_put into rows", backward(lambda t, i: set_at(t, i, 2.0)), (M4, TO_ROWS)),
    Case(
        "index_put of positions, a relabel table",
        lambda ids, i: set_at(ids, i, torch.ones_like(i)),
        (Fixed((7,), LONG), TO_TABLE),
    ),
    Case("index_put at pairs", lambda t, i, j: set_at(t, (i, j), 2.0), (T, TO_TABLE, Rows("n", (), LONG, 0, 4))),
    Case(
        "index_put at pairs of rows", lambda t, i, j: set_at(t, (i, j), 2.0), (M4, TO_ROWS, Rows("n", (), LONG, 0, 4))
    ),
    Case(
        "index_put behind a slice",
        backward(lambda t, j: set_at(t, (slice(None), j), 2.0)),
        (T, Rows("n", (), LONG, 0, 4)),
    ),
    Case("index_put of negative ids", lambda t, i: set_at(t, i, 2.0), (T, Rows("n", (), LONG, -7, 7))),
    Case("index_put of 2-d ids", lambda t, i: set_at(t, i, 2.0), (T, Rows("n", (2,), LONG, 0, 7))),
    Case("index_put of a bad id", lambda t, i: set_at(t, i + 7, 2.0), (T, TO_TABLE), fails=always(Failure.USER_ERROR)),
    Case("accumulate", backward(lambda t, i, x: t.index_put((i,), x, accumulate=True)), (T, TO_TABLE, N4)),
    Case("accumulate into rows", lambda t, i, x: t.index_put((i,), x, accumulate=True), (M4, TO_ROWS, N4)),
    Case(
        "accumulate at pairs",
        lambda t, i, j, x: t.index_put((i, j), x, accumulate=True),
        (T, TO_TABLE, Rows("n", (), LONG, 0, 4), Rows("n")),
    ),
    Case(
        "accumulate of 2-d ids",
        lambda t, i, x: t.index_put((i,), x, accumulate=True),
        (T, Rows("n", (2,), LONG, 0, 7), Rows("n", (2, 4))),
    ),
    Case("masked write of a scalar", backward(lambda h, m: written(h, m, 1.5)), (N4, Rows("n", (), BOOL))),
    Case("masked write of a row", backward(lambda h, m, v: written(h, m, v)), (N4, Rows("n", (), BOOL), Fixed((4,)))),
    Case(
        "masked write of selected rows",
        backward(lambda h, m, x: written(h, m, x[m] * 2)),
        (N4, Rows("n", (), BOOL), N4),
    ),
    Case("masked write of an element", backward(lambda h, x: written(h, h > 0.2, x)), (N4, Fixed(()))),
    Case("masked accumulation through a layer", backward(masked_add), (N4, N4, Rows("n", (), BOOL), Fixed((4, 4)))),
    Case(
        "masked write into a table",
        backward(lambda t, i: written(t, torch.zeros(7, dtype=BOOL).index_fill(0, i, True), 1.0)),
        (T, TO_TABLE),
    ),
    Case("masked write of too many rows", lambda h, m, v: written(h, m, v), (N4, Rows("n", (), BOOL), Fixed((11, 4)))),
    Case("masked write of another number", lambda h, v: written(h, first_six(h), v), (Rows("n"), Rows("m")), **NUMBERS),
    Case("masked write of another number of rows", lambda h, v: written(h, first_six(h), v), (N4, M4), **NUMBERS),
    Case(
        "masked accumulation of another number",
        lambda h, v: h.index_put((first_six(h),), v, accumulate=True),
        (N4, M4),
        **NUMBERS,
    ),
    Case(
        "masked columns of another number",
        lambda t, h, v: written(t, (slice(None), first_six(h)), v),
        (Fixed((3, 9)), Rows("n"), Rows("m")),
        batches=NUMBERS["batches"][:3],
    ),
    Case("mask of another length", lambda h, m: written(h, m, 2.0), (M4, Rows("n", (), BOOL)), **NUMBERS),
    Case(
        "masked write of rows of another length",
        lambda h, v: written(torch.zeros(9, h.shape[0]), torch.arange(9) < 5, v),
        (Rows("n"), Rows("m")),
        **NUMBERS,
    ),
    Case("index_put of another number", lambda t, i, v: set_at(t, i[:6], v), (V, TO_TABLE, Rows("m")), **NUMBERS),
    Case("index_put of another number of rows", lambda t, i, v: set_at(t, i[:6], v), (T, TO_TABLE, M4), **NUMBERS),
    Case(
        "accumulate another number",
        lambda t, i, v: t.index_put((i[:6],), v, accumulate=True),
        (V, TO_TABLE, Rows("m")),
        **NUMBERS,
    ),
    Case(
        "index_put at pairs of other numbers",
        lambda t, i, j: set_at(t, (i, j), 2.0),
        (T, TO_TABLE, Rows("m", (), LONG, 0, 4)),
        **NUMBERS,
    ),
    Case(
        "index_put of a row of another length",
        lambda h, v: set_at(torch.zeros(4, h.shape[0]), torch.tensor([0, 2]), v),
        (Rows("n"), Rows("m")),
        **NUMBERS,
    ),
    Case("put of another number", lambda t, i, v: t.put(i, v), (V, TO_TABLE, Rows("m")), **NUMBERS),
    Case("put of rows", lambda t, i, v: t.put(i, v), (V, Rows("n", (2,), LONG, 0, 7), Rows("n", (2,)))),
    Case("masked_fill", backward(lambda h, m: h.masked_fill(m.unsqueeze(1), -1.0)), (N4, Rows("n", (), BOOL))),
    Case(
        "masked_fill by a tensor",
        lambda h, m, v: h.masked_fill(m.unsqueeze(1), v),
        (N4, Rows("n", (), BOOL), Fixed(())),
    ),
    Case(
        "masked_scatter",
        backward(lambda h, m, v: h.masked_scatter(m, v)),
        (Rows("n"), Rows("n", (), BOOL), Fixed((20,))),
    ),
    Case(
        "masked_scatter of rows",
        lambda h, m, v: h.masked_scatter(m.unsqueeze(1), v),
        (N4, Rows("n", (), BOOL), Fixed((50,))),
    ),
    Case("put", lambda t, i: t.put(i, torch.ones_like(i, dtype=torch.float32)), (T, Rows("n", (), LONG, 0, 28))),
    Case(
        "masked_scatter of too few",
        lambda h, m, v: h.masked_scatter(m | ~m, v),
        (Rows("n"), Rows("n", (), BOOL), Fixed((5,))),
    ),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
