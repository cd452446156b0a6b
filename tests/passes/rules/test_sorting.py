"""sort, topk, searchsorted, isin: pads last, ties in their order."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept
from zgcompile.ir.status import Failure

LONG, INT = torch.int64, torch.int32
N, N4, M = Rows("n"), Rows("n", (4,)), Rows("m")
TIES = Rows("n", (), LONG, -2, 3)


def tied(fill, dtype, largest=True):
    """Whether the places that topk gives for equal values are two of the valid ones."""

    def run(x):
        place = torch.full_like(x, fill, dtype=dtype).topk(2, largest=largest).indices
        return (place < x.shape[0]).all(), place[0] != place[1]

    return run


TIED = (
    (-torch.inf, torch.float32, True),
    (torch.nan, torch.float32, False),
    (-(2**63), LONG, True),
    (2**63 - 1, LONG, False),
    (0, torch.uint8, True),
)


CASES = [
    *[Case(f"topk of {fill} alone", tied(fill, *kind), (Rows("n"),)) for fill, *kind in TIED],
    Case("sort", backward(lambda x: x.sort(0)), (N4,)),
    Case("sort of columns", lambda x: x.sort(1), (N4,)),
    Case("sort descending", lambda x: x.sort(0, descending=True), (N4,)),
    Case("stable sort with ties", lambda x: (*x.sort(stable=True), *x.sort(stable=True, descending=True)), (TIES,)),
    Case(
        "sort of flags",
        lambda m: (*m.sort(stable=True), *m.sort(stable=True, descending=True)),
        (Rows("n", (), torch.bool),),
    ),
    Case("sort of the largest integers", lambda x: (x + (2**63 - 3)).sort(stable=True), (Rows("n", (), LONG, 0, 3),)),
    Case(
        "sort of infinity and NaN",
        lambda x: (*torch.where(x > 0, torch.inf, torch.where(x < -1, torch.nan, x)).sort(stable=True),),
        (N,),
    ),
    Case(
        "descending sort of infinity and NaN",
        lambda x: (
            *torch.where(x > 0, -torch.inf, torch.where(x < -1, torch.nan, x)).sort(stable=True, descending=True),
        ),
        (N,),
    ),
    Case("argsort", lambda x: (x.argsort(), x.argsort(descending=True)), (N,)),
    Case("stable argsort", lambda x: torch.argsort(x, stable=True), (TIES,)),
    Case("order as an index", backward(lambda x, i: x[i.argsort(stable=True)]), (N4, TIES)),
    Case("inverse of an order", lambda i: i.argsort(stable=True).argsort(stable=True), (TIES,)),
    Case("topk", backward(lambda x: x.topk(2, 0)), (N4,)),
    Case("topk of the smallest", lambda x: x.topk(2, 0, largest=False), (N4,)),
    Case("topk of columns", lambda x: x.topk(3, 1), (N4,)),
    Case("topk of infinite values", lambda x: torch.where(x > 0, -torch.inf, x).topk(2).values, (N,)),
    Case("topk of too few", lambda x: x.topk(8), (N,), fails=lambda c: Failure.USER_ERROR if c["n"] < 8 else None),
    Case(
        "topk of masked scores in rows",
        lambda x, y: x.new_full((x.shape[0], y.shape[0]), -torch.inf).topk(2, 1).indices < y.shape[0],
        (N, M),
    ),
    Case("searchsorted in rows", lambda s, v: torch.searchsorted(s.sort().values, v), (N, M)),
    Case(
        "searchsorted from the right",
        lambda s, v: torch.searchsorted(s.sort().values, v, right=True),
        (TIES, Rows("m", (), LONG, -3, 4)),
    ),
    Case("searchsorted of large values", lambda s, v: torch.searchsorted(s.sort().values, v * 1e30), (N, M)),
    Case(
        "searchsorted of the largest",
        lambda s, v: (
            torch.searchsorted(s.sort().values, v + torch.inf, right=True),
            torch.searchsorted(s.sort().values, v + torch.nan),
        ),
        (N, M),
    ),
    Case("searchsorted in a table", lambda s, v: torch.searchsorted(s.sort().values, v), (Fixed((7,)), N)),
    Case(
        "searchsorted of a static tensor",
        lambda s, v: torch.searchsorted(s.cumsum(0), v),
        (Rows("n", (), LONG, 0, 3), Fixed((5,), LONG, 0, 9)),
    ),
    Case("searchsorted of a number", lambda s: torch.searchsorted(s.sort().values, 0.5), (N,)),
    Case("searchsorted as int32", lambda s, v: torch.searchsorted(s.sort().values, v, out_int32=True), (N, M)),
    Case("searchsorted with a sorter", lambda s, v: torch.searchsorted(s, v, sorter=s.argsort()), (N, M)),
    Case(
        "row of an edge",
        lambda d, m: torch.searchsorted(d.cumsum(0), torch.arange(m.shape[0]), right=True),
        (Rows("n", (), LONG, 1, 3), M),
    ),
    Case("bucketize", lambda v, s: torch.bucketize(v, s.sort().values), (N, M)),
    Case("bucketize by a table", lambda v, s: torch.bucketize(v, s.sort().values, right=True), (N, Fixed((4,)))),
    Case("isin rows", lambda x, y: torch.isin(x, y), (TIES, Rows("m", (), LONG, 0, 3))),
    Case("not isin", lambda x, y: torch.isin(x, y, invert=True), (TIES, Rows("m", (), LONG, 0, 3))),
    Case(
        "isin of the largest",
        lambda x, y: torch.isin(x + (2**63 - 4), y),
        (Rows("n", (), LONG, 0, 4), Rows("m", (), LONG, 0, 3)),
    ),
    Case("isin a table", lambda x, y: torch.isin(x, y), (TIES, Fixed((3,), LONG))),
    Case("mask of known nodes", lambda x, y: x[torch.isin(x, y)], (TIES, Rows("m", (), LONG, 0, 3))),
    Case("isin none", lambda x, y: torch.isin(x, y), (TIES, Rows("m", (), LONG, 5, 7))),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
