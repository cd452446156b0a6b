"""Reads by index, and the slices and selections that read at a place the device knows."""

from __future__ import annotations

import pytest
import torch

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case
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
    Case("ids out of rows", lambda x, i, j: (x[i.new_zeros(i.shape) + j.shape[0]]), (X, TO_TABLE, Rows("m", (), LONG)), fails=always(Failure.USER_ERROR)),
    Case("lookup of a lookup out of range", lambda t, u, x, i: u[x.long()[i + 8].clamp(0, 6)[:, 0]], (T, Fixed((7,)), X, TO_ROWS), fails=always(Failure.USER_ERROR)),
    Case("proven table as ids", lambda t, ids, i: t[ids[i]], (T, Fixed((7,), LONG, 0, 7, proven=True), TO_TABLE)),
    Case("proven ids read behind the rows", lambda t, ids, i: t[(ids % 7)[i + 5]], (T, Rows("m", (), LONG, 0, 70), Rows("n", (), LONG, 0, 3)), fails=lambda c: Failure.USER_ERROR if c["n"] and c["m"] < 5 else None),
    Case("two indices", backward(lambda x, i, j: x[i, j]), (X, TO_ROWS, Rows("n", (), LONG, 0, 4))),
    Case("two indices of a table", backward(lambda t, i, j: t[i, j]), (T, TO_TABLE, Rows("n", (), LONG, -4, 4))),
    Case("index behind a slice", backward(lambda t, j: t[:, j]), (T, Rows("n", (), LONG, 0, 4))),
    Case("static index of dynamic columns", backward(lambda x, i: x.t()[i]), (X, Fixed((3,), LONG, 0, 4))),
    Case("2-d index", backward(lambda t, i: t[i]), (T, Rows("n", (3,), LONG, 0, 7))),
    Case("index pairs that broadcast", lambda t, i, j: t[i.unsqueeze(1), j.unsqueeze(0)], (T, TO_TABLE, Rows("m", (), LONG, 0, 4))),
    Case("row by a static index", lambda x, i: x[i], (Rows("n", (4,)), Fixed((2,), LONG, 0, 2))),
    Case("index_select", backward(lambda x, i: x.index_select(0, i)), (X, TO_ROWS)),
    Case("index_select of columns", backward(lambda x, i: x.index_select(1, i)), (X, Rows("n", (), LONG, 0, 4))),
    Case("gather", backward(lambda x, i: x.gather(0, i.unsqueeze(1).expand(-1, 4))), (X, TO_ROWS)),
    Case("gather of columns", backward(lambda x, i: x.gather(1, i)), (Rows("n", (4,)), Rows("n", (2,), LONG, 0, 4))),
    Case("gather of the first rows", lambda x, i: x.gather(1, i), (X, Rows("m", (1,), LONG, 0, 4))),
    Case("gather from a larger table", lambda t, i: t.t().gather(1, i), (T, Fixed((3, 2), LONG, 0, 7))),
    Case("take_along_dim", lambda x, i: torch.take_along_dim(x, i.unsqueeze(1), 1), (Rows("n", (4,)), Rows("n", (), LONG, 0, 4))),
    Case("take", lambda t, i: t.take(i), (T, Rows("n", (), LONG, -28, 28))),
    Case("take from rows", lambda x, i: x.take(i), (X, TO_ROWS)),
    Case("embedding", backward(lambda t, i: torch.nn.functional.embedding(i, t)), (T, TO_TABLE)),
    Case("embedding with padding_idx", backward(lambda t, i: torch.nn.functional.embedding(i, t, padding_idx=2)), (T, TO_TABLE)),
    Case("embedding of 2-d ids", backward(lambda t, i: torch.nn.functional.embedding(i, t)), (T, Rows("n", (3,), LONG, 0, 7))),
    Case("embedding of int32 ids", backward(lambda t, i: torch.nn.functional.embedding(i, t)), (T, Rows("n", (), INT, 0, 7))),
    Case("embedding of a bad id", lambda t, i: torch.nn.functional.embedding(i - 9, t), (T, TO_TABLE), fails=always(Failure.USER_ERROR)),
    Case("mask", backward(lambda x, m: x[m]), (Rows("n", (4,)), Rows("n", (), BOOL))),
    Case("one mask twice", backward(lambda x, y, m: (x[m] * y[m].unsqueeze(1))), (Rows("n", (4,)), Rows("n"), Rows("n", (), BOOL))),
    Case("mask of a table", lambda t, x: t[x[:7].sum(1) > 0], (T, Fixed((9, 4)))),
    Case("mask of a table by rows", backward(lambda t, i: t[torch.zeros(7, dtype=BOOL).index_fill(0, i, True)]), (T, TO_TABLE)),
    Case("2-d mask", backward(lambda x: x[x > 0]), (Rows("n", (4,)),)),
    Case("2-d mask over columns", lambda x: x.t()[x.t() > 0], (Rows("n", (4,)),)),
    Case("mask of columns", backward(lambda x, m: x[:, m]), (Rows("n", (7,)), Fixed((7,), BOOL))),
    Case("mask of dynamic columns", backward(lambda x, m: x.t()[:, m]), (Rows("n", (4,)), Rows("n", (), BOOL))),
    Case("mask of a mask", lambda x, m: x[m][x[m] > 0], (Rows("n"), Rows("n", (), BOOL))),
    Case("slice to a device size", backward(lambda x, y: x[: y.shape[0]]), (Rows("n", (4,)), Rows("m")), fails=lambda c: Failure.PRECONDITION if c["m"] > c["n"] else None),
    Case("slice to an item", lambda x, k: x[: k.item()], (Rows("n", (4,)), Fixed((), LONG, 3, 4))),
    Case("slice from an item", backward(lambda x, k: x[k.item() :]), (Rows("n", (4,)), Fixed((), LONG, 2, 3))),
    Case("slice between items", lambda x, a, b: x[a.sum().item() : b.item()], (Rows("n", (4,)), Fixed((2,), LONG, 1, 2), Fixed((), LONG, 5, 6))),
    Case("slice between swapped items", lambda x, a, b: x[b.item() : a.item()], (Rows("n", (4,)), Fixed((), LONG, 1, 2), Fixed((), LONG, 5, 6))),
    Case("slice by negative items", lambda x, a, b: x[a.item() : b.item()], (Rows("n", (4,)), Fixed((), LONG, -5, -4), Fixed((), LONG, -1, 0))),
    Case("slice of a table between items", backward(lambda t, a, b: t[a.item() : b.item()]), (T, Fixed((), LONG, 1, 2), Fixed((), LONG, 5, 6))),
    Case("slice from one", backward(lambda x: x[1:]), (Rows("n", (4,)),)),
    Case("slice but the last", backward(lambda x: x[:-1]), (Rows("n", (4,)),)),
    Case("the last two", backward(lambda x: x[-2:]), (Rows("n", (4,)),)),
    Case("the first two", backward(lambda x: x[:2]), (Rows("n", (4,)),)),
    Case("neighbours in a row", lambda x: x[1:] - x[:-1], (Rows("n", (4,)),)),
    Case("slice of columns", backward(lambda x: x[:, 1:3]), (Rows("n", (4,)),)),
    Case("every second", backward(lambda x: x[::2]), (Rows("n", (4,)),)),
    Case("every third from one", lambda x: x[1::3], (Rows("n", (4,)),)),
    Case("every second column", backward(lambda x: x[:, ::2]), (Rows("n", (4,)),)),
    Case("narrow by a count", lambda x, y: x.narrow(0, y.shape[0] - 1, 1), (Rows("n", (4,)), Rows("m")), fails=lambda c: Failure.USER_ERROR if c["m"] > c["n"] else None),
    Case("the last rows, as many as another", lambda x, y: x[-y.shape[0] :], (Rows("n", (4,)), Rows("m")), batches=({"n": 9, "m": 6}, {"n": 6, "m": 2}, {"n": 5, "m": 4})),
    Case("a row", backward(lambda x: x[1]), (Rows("n", (4,)),)),
    Case("the last row", backward(lambda x: x[-1]), (Rows("n", (4,)),)),
    Case("a column", backward(lambda x: x[:, 1]), (Rows("n", (4,)),)),
    Case("a row at a count", lambda x, y: x[y.shape[0] - 1], (Rows("n", (4,)), Rows("m")), batches=({"n": 9, "m": 6}, {"n": 6, "m": 2}, {"n": 5, "m": 5})),
    Case("a row that is not there", lambda x: x[5], (Rows("n", (4,)),)),
    Case("a row of an item", lambda t, k: t[k.item()], (T, Fixed((), LONG, 3, 4))),
    Case("flip", backward(lambda x: x.flip(0)), (Rows("n", (4,)),)),
    Case("flip both", lambda x: x.flip([0, 1]), (Rows("n", (4,)),)),
    Case("flip of columns", lambda x: x.flip(-1), (Rows("n", (4,)),)),
    Case("roll", lambda x: x.roll(2, 0), (Rows("n", (4,)),)),
    Case("roll of columns", lambda x: x.roll(1, 1), (Rows("n", (4,)),)),
    Case("roll of all", lambda x: x.roll(-3), (Rows("n"),)),
    Case("last of a running sum", lambda x: x.cumsum(0)[-1], (Rows("n", (), LONG),)),
    Case("index by n - 1", lambda x: x.cumsum(0)[x.shape[0] - 1], (Rows("n", (), LONG),)),
    Case("scalar tensor index", backward(lambda x, k: x[k]), (Rows("n", (4,)), Fixed((), LONG, 0, 1))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    check_case(case)
