"""Slices and single places, read and written: all that counts from the true end."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept
from tests.passes.rules.writes import N4, NUMBERS, WIDE, sliced

LONG, INT, BOOL = torch.int64, torch.int32, torch.bool
X, T = Rows("m", (4,)), Fixed((7, 4))
TO_ROWS, TO_TABLE = Rows("n", (), LONG, 0, "m"), Rows("n", (), LONG, 0, 7)
ANY_SIGN = Rows("n", (), LONG, -7, 7)


CASES = [
    Case("slice to a device size", backward(lambda x, y: x[: y.shape[0]]), (Rows("n", (4,)), Rows("m"))),
    Case("slice to an item", lambda x, k: x[: k.item()], (Rows("n", (4,)), Fixed((), LONG, 3, 4))),
    Case("slice from an item", backward(lambda x, k: x[k.item() :]), (Rows("n", (4,)), Fixed((), LONG, 2, 3))),
    Case(
        "slice between items",
        lambda x, a, b: x[a.sum().item() : b.item()],
        (Rows("n", (4,)), Fixed((2,), LONG, 1, 2), Fixed((), LONG, 5, 6)),
    ),
    Case(
        "slice between swapped items",
        lambda x, a, b: x[b.item() : a.item()],
        (Rows("n", (4,)), Fixed((), LONG, 1, 2), Fixed((), LONG, 5, 6)),
    ),
    Case(
        "slice by negative items",
        lambda x, a, b: x[a.item() : b.item()],
        (Rows("n", (4,)), Fixed((), LONG, -5, -4), Fixed((), LONG, -1, 0)),
    ),
    Case(
        "slice of a table between items",
        backward(lambda t, a, b: t[a.item() : b.item()]),
        (T, Fixed((), LONG, 1, 2), Fixed((), LONG, 5, 6)),
    ),
    Case("slice from one", backward(lambda x: x[1:]), (Rows("n", (4,)),)),
    Case("slice but the last", backward(lambda x: x[:-1]), (Rows("n", (4,)),)),
    Case("the last two", backward(lambda x: x[-2:]), (Rows("n", (4,)),)),
    Case("the first two", backward(lambda x: x[:2]), (Rows("n", (4,)),)),
    Case("neighbours in a row", lambda x: x[1:] - x[:-1], (Rows("n", (4,)),)),
    Case("slice of columns", backward(lambda x: x[:, 1:3]), (Rows("n", (4,)),)),
    Case("every second", backward(lambda x: x[::2]), (Rows("n", (4,)),)),
    Case("every third from one", lambda x: x[1::3], (Rows("n", (4,)),)),
    Case("every second column", backward(lambda x: x[:, ::2]), (Rows("n", (4,)),)),
    Case(
        "narrow by a count",
        lambda x, y: x.narrow(0, y.shape[0] - 1, 1),
        (Rows("n", (4,)), Rows("m")),
        batches=({"n": 9, "m": 6}, {"n": 6, "m": 2}, {"n": 5, "m": 5}),
    ),
    Case(
        "the last rows, as many as another",
        lambda x, y: x[-y.shape[0] :],
        (Rows("n", (4,)), Rows("m")),
        batches=({"n": 9, "m": 6}, {"n": 6, "m": 2}, {"n": 5, "m": 4}),
    ),
    Case("a row", backward(lambda x: x[1]), (Rows("n", (4,)),)),
    Case("the last row", backward(lambda x: x[-1]), (Rows("n", (4,)),)),
    Case("a column", backward(lambda x: x[:, 1]), (Rows("n", (4,)),)),
    Case(
        "a row at a count",
        lambda x, y: x.select(0, y.shape[0] - 1),
        (Rows("n", (4,)), Rows("m")),
        batches=({"n": 9, "m": 6}, {"n": 6, "m": 2}, {"n": 5, "m": 5}),
    ),
    Case("a row that is not there", lambda x: x[5], (Rows("n", (4,)),)),
    Case("a row of an item", lambda t, k: t.select(0, k.item()), (T, Fixed((), LONG, 3, 4))),
    Case("flip", backward(lambda x: x.flip(0)), (Rows("n", (4,)),)),
    Case("flip both", lambda x: x.flip([0, 1]), (Rows("n", (4,)),)),
    Case("flip of columns", lambda x: x.flip(-1), (Rows("n", (4,)),)),
    Case("roll", lambda x: x.roll(2, 0), (Rows("n", (4,)),)),
    Case("roll of columns", lambda x: x.roll(1, 1), (Rows("n", (4,)),)),
    Case("roll of all", lambda x: x.roll(-3), (Rows("n"),)),
    Case("last of a running sum", lambda x: x.cumsum(0)[-1], (Rows("n", (), LONG),)),
    Case("index by n - 1", lambda x: x.cumsum(0).select(0, x.shape[0] - 1), (Rows("n", (), LONG),)),
    Case("write a row", backward(lambda h, v: sliced(1)(h, v)), (N4, Fixed((4,)))),
    Case("write the last row", backward(lambda h, v: sliced(-1)(h, v)), (N4, Fixed((4,)))),
    Case("write a column", backward(lambda h, v: sliced((slice(None), 1))(h, v)), (N4, Rows("n"))),
    Case("write the first two", backward(lambda h, v: sliced(slice(0, 2))(h, v)), (N4, Fixed((2, 4))), **WIDE),
    Case("write from one", backward(lambda h, v: sliced(slice(1, None))(h, v)), (N4, Fixed((4,)))),
    Case("write all but the last", lambda h, v: sliced(slice(None, -1))(h, v), (N4, Fixed((4,)))),
    Case("write columns", backward(lambda h, v: sliced((slice(None), slice(1, 3)))(h, v)), (N4, Rows("n", (2,)))),
    Case(
        "write rows into a table",
        backward(lambda t, x: sliced(slice(0, x.shape[0]))(t, x)),
        (Fixed((9, 4)), N4),
        new=True,
    ),
    Case(
        "slice_scatter with a step of columns",
        lambda h, v: torch.slice_scatter(h, v, 1, 0, 4, 2),
        (N4, Rows("n", (2,))),
    ),
    Case(
        "write a range of items",
        lambda t, a, b: sliced(slice(a.item(), b.item()))(t, 3.0),
        (T, Fixed((), LONG, 1, 2), Fixed((), LONG, 5, 6)),
    ),
    Case(
        "column of another length",
        lambda x, y: sliced((slice(None), 0))(x, y),
        (Rows("n", (4,)), Rows("m")),
        batches=NUMBERS,
        new=True,
    ),
    Case(
        "select_scatter of another length",
        lambda x, y: torch.select_scatter(x, y, 1, 0),
        (Rows("n", (4,)), Rows("m")),
        batches=NUMBERS,
    ),
    Case(
        "slice_scatter of another length",
        lambda x, y: torch.slice_scatter(x, y[:, None], 1, 0, 1),
        (Rows("n", (4,)), Rows("m")),
        batches=NUMBERS,
    ),
    Case(
        "static slice of another length",
        lambda t, y: torch.slice_scatter(t, y, 0, 1, 7),
        (Fixed((9, 4)), Rows("m", (4,))),
        batches=NUMBERS,
    ),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
