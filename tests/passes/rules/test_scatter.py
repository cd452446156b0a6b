"""Writes along a dimension by index: pads go nowhere, whatever they hold."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Hyper, Rows, backward, check_case, swept
from tests.passes.rules.writes import INT, LONG, M4, N4, NUMBERS, TO_ROWS, TO_TABLE, WIDE, T, V, always, reduced
from zgcompile.ir.status import Failure

CASES = [
    Case("index_add into a table", backward(lambda t, i, x: t.index_add(0, i, x)), (T, TO_TABLE, N4)),
    Case("index_add into rows", backward(lambda t, i, x: t.index_add(0, i, x)), (M4, TO_ROWS, N4)),
    Case(
        "index_add into zeros of rows",
        backward(lambda y, i, x: torch.zeros(y.shape[0], 4).index_add(0, i, x)),
        (Rows("m"), TO_ROWS, N4),
    ),
    Case("index_add of columns", lambda t, i, x: t.t().index_add(1, i, x.t()), (T, TO_TABLE, N4)),
    Case("index_add with alpha", lambda t, i, x: t.index_add(0, i, x, alpha=0.5), (T, TO_TABLE, N4)),
    Case(
        "index_add of integers with alpha",
        lambda t, i, x: t.index_add(0, i, x, alpha=2),
        (Fixed((7,), LONG), TO_TABLE, Rows("n", (), LONG)),
    ),
    Case(
        "index_add of static rows",
        lambda y, i, x: torch.zeros(y.shape[0], 4).index_add(0, i, x),
        (Rows("m"), Fixed((3,), LONG, 0, 1), Fixed((3, 4))),
        **WIDE,
    ),
    Case("index_add of int32 ids", lambda t, i, x: t.index_add(0, i, x), (T, Rows("n", (), INT, 0, 7), N4)),
    Case(
        "index_add of a bad id",
        lambda t, i, x: t.index_add(0, i + 7, x),
        (T, TO_TABLE, N4),
        fails=always(Failure.USER_ERROR),
    ),
    Case(
        "index_add of float16",
        lambda t, i, x: t.index_add(0, i, x),
        (Fixed((7,), torch.float16), TO_TABLE, Rows("n", (), torch.float16)),
        tolerance=1e-2,
    ),
    Case("index_copy", backward(lambda t, i, x: t.index_copy(0, i, x)), (T, Fixed((3,), LONG, 0, 1), Fixed((3, 4)))),
    Case("index_copy of rows", lambda t, x: t.index_copy(0, torch.arange(x.shape[0]), x), (Fixed((9, 4)), N4)),
    Case("index_fill", backward(lambda t, i: t.index_fill(0, i, 2.5)), (T, TO_TABLE)),
    Case("index_fill of rows", lambda t, i: t.index_fill(0, i, 2.5), (M4, TO_ROWS)),
    Case("index_fill from the end", lambda t, i: t.index_fill(0, i - 4, 2.5), (T, TO_TABLE)),
    Case("index_fill by a tensor", lambda t, i, v: t.index_fill(0, i, v), (T, TO_TABLE, Fixed(()))),
    Case("scatter_add", backward(lambda t, i, x: t.scatter_add(0, i.unsqueeze(1).expand(-1, 4), x)), (T, TO_TABLE, N4)),
    Case(
        "scatter_add into rows",
        backward(lambda t, i, x: t.scatter_add(0, i.unsqueeze(1).expand(-1, 4), x)),
        (M4, TO_ROWS, N4),
    ),
    Case(
        "scatter_add of columns",
        backward(lambda t, i, x: t.scatter_add(1, i, x)),
        (N4, Rows("n", (2,), LONG, 0, 4), Rows("n", (2,))),
    ),
    *[
        Case(f"scatter_reduce {r}{' without self' * (not s)}", backward(reduced(r, s)), (T, TO_TABLE, N4))
        for r in ("sum", "mean", "amax", "amin", "prod")
        for s in (True, False)
    ],
    *[Case(f"scatter_reduce {r} into rows", backward(reduced(r)), (M4, TO_ROWS, N4)) for r in ("mean", "amax", "sum")],
    Case(
        "scatter_reduce ties",
        backward(lambda t, i, x: t.scatter_reduce(0, i, x, "amax", include_self=False)),
        (V, TO_TABLE, Rows("n", (), torch.float32)),
    ),
    Case(
        "scatter_reduce equal values",
        backward(lambda t, i, x: t.scatter_reduce(0, i, x.round(), "amax")),
        (V, TO_TABLE, Rows("n")),
    ),
    Case(
        "scatter of distinct rows",
        lambda t, x: t.scatter(0, torch.arange(x.shape[0]).unsqueeze(1).expand(-1, 4), x),
        (Fixed((9, 4)), N4),
    ),
    Case("scatter of a value", backward(lambda t, i: t.scatter(0, i.unsqueeze(1).expand(-1, 4), 1.5)), (T, TO_TABLE)),
    Case("scatter into rows", lambda t, i: t.scatter(0, i, 1.5), (Rows("m"), TO_ROWS)),
    Case("one-hot by scatter", lambda i: torch.zeros(i.shape[0], 7).scatter(1, i.unsqueeze(1), 1.0), (TO_TABLE,)),
    Case("scatter with add", lambda t, i, x: t.scatter(0, i, x, reduce="add"), (V, TO_TABLE, Rows("n"))),
    Case("embedding backward", backward(lambda t, i: torch.nn.functional.embedding(i, t)), (T, TO_TABLE)),
    Case("index_reduce", lambda t, i, x: t.index_reduce(0, i, x, "amax"), (T, TO_TABLE, N4)),
    Case(
        "index_reduce of another number",
        lambda t, i, x: t.index_reduce(0, i, x, "amax"),
        (T, TO_TABLE, M4),
        batches=NUMBERS,
    ),
    Case(
        "index_reduce of rows of another length",
        lambda i, x, y: torch.zeros(7, x.shape[0]).index_reduce(0, i, y.expand(3, -1), "amax"),
        (Fixed((3,), LONG, 0, 7), Rows("n"), Rows("m")),
        batches=NUMBERS,
    ),
    *[
        Case(
            f"{name} of rows of another length",
            lambda i, x, y, name=name: getattr(torch.zeros(7, x.shape[0]), name)(0, i, y.expand(3, -1)),
            (Fixed((3,), LONG, 0, 7), Rows("n"), Rows("m")),
            batches=NUMBERS,
        )
        for name in ("index_add", "index_copy")
    ],
    Case("one_hot", lambda i: torch.nn.functional.one_hot(i, 7), (TO_TABLE,)),
    Case("hyper fill", lambda t, i, h: t.index_fill(0, i, 1.0) * h, (T, TO_TABLE, Hyper())),
    Case("scatter of a value with add", lambda t, i: t.scatter(0, i, 1.5, reduce="add"), (V, TO_TABLE)),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
