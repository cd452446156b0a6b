"""Reads by index tensors."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept
from zgcompile.ir.status import Failure

LONG, INT, BOOL = torch.int64, torch.int32, torch.bool
X, T = Rows("m", (4,)), Fixed((7, 4))
TO_ROWS, TO_TABLE = Rows("n", (), LONG, 0, "m"), Rows("n", (), LONG, 0, 7)
ANY_SIGN = Rows("n", (), LONG, -7, 7)


def always(failure):
    return lambda counts: failure if counts["n"] else None


CASES = [
    Case("rows by rows", backward(lambda x, i: x[i]), (X, TO_ROWS)),
    Case("rows of a table", backward(lambda t, i: t[i]), (T, TO_TABLE)),
    Case("int32 ids", lambda t, i: t[i], (T, Rows("n", (), INT, 0, 7))),
    Case("negative ids of a table", lambda t, i: t[i], (T, ANY_SIGN)),
    Case("negative ids of rows", lambda x, i: x[-1 - i], (X, TO_ROWS)),
    Case("ids out of a table", lambda t, i: t[i + 7], (T, TO_TABLE), fails=always(Failure.USER_ERROR)),
    Case(
        "ids out of rows",
        lambda x, i, j: x[i.new_zeros(i.shape) + j.shape[0]],
        (X, TO_TABLE, Rows("m", (), LONG)),
        fails=always(Failure.USER_ERROR),
    ),
    Case(
        "lookup of a lookup out of range",
        lambda t, u, x, i: u[x.long()[i + 8].clamp(0, 6)[:, 0]],
        (T, Fixed((7,)), X, TO_ROWS),
        fails=always(Failure.USER_ERROR),
    ),
    Case("proven table as ids", lambda t, ids, i: t[ids[i]], (T, Fixed((7,), LONG, 0, 7, proven=True), TO_TABLE)),
    Case(
        "proven ids read behind the rows",
        lambda t, ids, i: t[(ids % 7)[i + 5]],
        (T, Rows("m", (), LONG, 0, 70), Rows("n", (), LONG, 0, 3)),
        fails=lambda c: Failure.USER_ERROR if c["n"] and c["m"] < 5 else None,
    ),
    Case("two indices", backward(lambda x, i, j: x[i, j]), (X, TO_ROWS, Rows("n", (), LONG, 0, 4))),
    Case("two indices of a table", backward(lambda t, i, j: t[i, j]), (T, TO_TABLE, Rows("n", (), LONG, -4, 4))),
    Case("index behind a slice", backward(lambda t, j: t[:, j]), (T, Rows("n", (), LONG, 0, 4))),
    Case("static index of dynamic columns", backward(lambda x, i: x.t()[i]), (X, Fixed((3,), LONG, 0, 4))),
    Case("2-d index", backward(lambda t, i: t[i]), (T, Rows("n", (3,), LONG, 0, 7))),
    Case(
        "index pairs that broadcast",
        lambda t, i, j: t[i.unsqueeze(1), j.unsqueeze(0)],
        (T, TO_TABLE, Rows("m", (), LONG, 0, 4)),
    ),
    Case("row by a static index", lambda x, i: x[i], (Rows("n", (4,)), Fixed((2,), LONG, 0, 2))),
    Case("index_select", backward(lambda x, i: x.index_select(0, i)), (X, TO_ROWS)),
    Case("index_select of columns", backward(lambda x, i: x.index_select(1, i)), (X, Rows("n", (), LONG, 0, 4))),
    Case("gather", backward(lambda x, i: x.gather(0, i.unsqueeze(1).expand(-1, 4))), (X, TO_ROWS)),
    Case("gather of columns", backward(lambda x, i: x.gather(1, i)), (Rows("n", (4,)), Rows("n", (2,), LONG, 0, 4))),
    Case("gather of the first rows", lambda x, i: x.gather(1, i), (X, Rows("m", (1,), LONG, 0, 4))),
    Case("gather from a larger table", lambda t, i: t.t().gather(1, i), (T, Fixed((3, 2), LONG, 0, 7))),
    Case("take", lambda t, i: t.take(i), (T, Rows("n", (), LONG, -28, 28))),
    Case("take from rows", lambda x, i: x.take(i), (X, TO_ROWS)),
    Case("embedding", backward(lambda t, i: torch.nn.functional.embedding(i, t)), (T, TO_TABLE)),
    Case(
        "embedding with padding_idx",
        backward(lambda t, i: torch.nn.functional.embedding(i, t, padding_idx=2)),
        (T, TO_TABLE),
    ),
    Case(
        "embedding of 2-d ids",
        backward(lambda t, i: torch.nn.functional.embedding(i, t)),
        (T, Rows("n", (3,), LONG, 0, 7)),
    ),
    Case(
        "embedding of int32 ids",
        backward(lambda t, i: torch.nn.functional.embedding(i, t)),
        (T, Rows("n", (), INT, 0, 7)),
    ),
    Case(
        "embedding of a bad id",
        lambda t, i: torch.nn.functional.embedding(i - 9, t),
        (T, TO_TABLE),
        fails=always(Failure.USER_ERROR),
    ),
    Case("scalar tensor index", backward(lambda x, k: x[k.view(1)]), (Rows("n", (4,)), Fixed((), LONG, 0, 1))),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
