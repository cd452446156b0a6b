"""var and std with the true number of rows."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Rows, backward, check_case, swept

LONG, BOOL = torch.int64, torch.bool
N, N4, L, B = Rows("n"), Rows("n", (4,)), Rows("n", (), LONG), Rows("n", (), BOOL)
INTS = Rows("n", (4,), LONG, -2, 3)  # full of ties

CASES = [
    Case("var", backward(lambda x: x.var(0)), (N4,), tolerance=1e-5),
    Case("var of all", backward(lambda x: x.var()), (N4,), tolerance=1e-5),
    Case("var without correction", lambda x: x.var(0, correction=0), (N4,), tolerance=1e-5),
    Case("std", backward(lambda x: x.std(0)), (N4,), tolerance=1e-4),
    Case("std kept", lambda x: x.std(0, keepdim=True), (N4,), tolerance=1e-5),
    Case("std of columns", lambda x: x.std(1), (N4,), tolerance=1e-5),
    Case("var_mean", lambda x: torch.var_mean(x, 0), (N4,), tolerance=1e-5),
    Case("std_mean", lambda x: torch.std_mean(x, 0, keepdim=True), (N4,), tolerance=1e-5),
    Case(
        "spread of infinity",
        lambda x: ((x / x.round().abs()).var(0), (x / x.round().abs()).std(0, correction=0)),
        (N4,),
        tolerance=1e-5,
    ),
    Case("var of bfloat16", lambda x: x.var(0), (Rows("n", (4,), torch.bfloat16),), tolerance=5e-2),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
