"""repeat_interleave and bincount."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import BATCHES, Case, Fixed, Rows, backward, check_case, swept
from zgcompile.ir.status import Failure

LONG, INT = torch.int64, torch.int32
REPEATS = Rows("n", (), LONG, 0, 4)


def sampler(indptr, indices, seeds):
    start = indptr[seeds]
    num = indptr[seeds + 1] - start
    row = torch.repeat_interleave(torch.arange(seeds.numel()), num)
    offset = torch.arange(row.numel()) - (num.cumsum(0) - num)[row]
    return row, indices[start[row] + offset]


CASES = [
    Case("index of repeats", lambda r: torch.repeat_interleave(r), (REPEATS,)),
    Case("rows", backward(lambda x, r: torch.repeat_interleave(x, r, 0)), (Rows("n", (4,)), REPEATS)),
    Case(
        "rows of a table",
        backward(lambda t, r: torch.repeat_interleave(t, r, 0)),
        (Fixed((5, 4)), Fixed((5,), LONG, 0, 4)),
    ),
    Case("int32", lambda r: torch.repeat_interleave(r), (Rows("n", (), INT, 0, 4),)),
    Case(
        "output_size",
        lambda r: torch.repeat_interleave(torch.arange(r.shape[0]), r, output_size=r.sum().item()),
        (REPEATS,),
    ),
    Case(
        "output_size of an equal size",
        lambda r, x: torch.repeat_interleave(r.clamp(1, 1), output_size=x.shape[0]),
        (REPEATS, Rows("n")),
    ),
    Case(
        "static output_size",
        lambda r, x: torch.repeat_interleave(r, output_size=6) * x.sum().long(),
        (Fixed((3,), LONG, 2, 3), Rows("n")),
    ),
    Case(
        "wrong output_size",
        lambda r: torch.repeat_interleave(r, output_size=r.shape[0] * 2),
        (REPEATS,),
        fails=lambda c: Failure.PRECONDITION if c["n"] > 5 else None,
        batches=({"n": 9, "m": 1},),
    ),
    Case("negative repeats", lambda r: torch.repeat_interleave(r), (Rows("n", (), LONG, -2, 0),)),
    Case("sampled rows", sampler, (Fixed((8,), LONG, 0, 1), Fixed((30,), LONG, 0, 7), Rows("n", (), LONG, 0, 7))),
    Case("ranges", lambda r: torch.arange(r.sum().item()) - torch.repeat_interleave(r.cumsum(0) - r, r), (REPEATS,)),
    Case("bincount", lambda i: torch.bincount(i), (Rows("n", (), LONG, 0, 7),)),
    Case("bincount to a length", lambda i: torch.bincount(i, minlength=7), (Rows("n", (), LONG, 0, 5),)),
    Case(
        "bincount to a count",
        lambda i, x: torch.bincount(i, minlength=x.shape[0]),
        (Rows("n", (), LONG, 0, "m"), Rows("m")),
    ),
    Case(
        "weighted bincount",
        lambda i, w: torch.bincount(i, w),
        (Rows("n", (), LONG, 0, 7), Rows("n")),
        batches=BATCHES[:4],
        new=True,
    ),
    Case(
        "weighted bincount of nothing",
        lambda i, w: torch.bincount(i, w),
        (Rows("n", (), LONG, 0, 7), Rows("n")),
        batches=({"n": 9, "m": 6}, {"n": 0, "m": 0}),
        fails=lambda c: None if c["n"] else Failure.PRECONDITION,
        new=True,
    ),
    Case(
        "weighted bincount of another number",
        lambda i, w: torch.bincount(i, w),
        (Rows("n", (), LONG, 0, 7), Rows("m")),
        batches=({"n": 6, "m": 6}, {"n": 9, "m": 1}, {"n": 9, "m": 4}, {"n": 2, "m": 6}),
        new=True,
    ),
    Case("bincount of negative values", lambda i: torch.bincount(i - 7), (Rows("n", (), LONG, 0, 7),)),
    Case("bincount of a table", lambda t, x: torch.bincount(t) * x.sum().long(), (Fixed((9,), LONG, 0, 4), Rows("n"))),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
