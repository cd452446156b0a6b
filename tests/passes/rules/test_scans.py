"""Running sums: pads come last and change nothing in front."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Rows, backward, check_case, swept

LONG, BOOL = torch.int64, torch.bool
N, N4, L, B = Rows("n"), Rows("n", (4,)), Rows("n", (), LONG), Rows("n", (), BOOL)
INTS = Rows("n", (4,), LONG, -2, 3)  # full of ties

CASES = [
    Case("cumsum", backward(lambda x: x.cumsum(0)), (N4,), tolerance=1e-5),
    Case("cumsum of integers", lambda x: (x.cumsum(0), x.cumsum(0) - x), (L,)),
    Case("cumsum of flags", lambda m: m.cumsum(0), (B,)),
    Case("cumsum of columns", lambda x: x.cumsum(1), (N4,)),
    Case("cumprod", lambda x: x.cumprod(0), (N4,), tolerance=1e-5),
    Case("cummax", lambda x: (*x.cummax(0), *x.cummin(0)), (INTS,)),
    Case("logcumsumexp", lambda x: x.logcumsumexp(0), (N4,), tolerance=1e-5),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
