"""Largest and smallest elements, with ties and with nothing to choose from."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Rows, backward, check_case, swept

LONG, BOOL = torch.int64, torch.bool
N, N4, L, B = Rows("n"), Rows("n", (4,)), Rows("n", (), LONG), Rows("n", (), BOOL)
INTS = Rows("n", (4,), LONG, -2, 3)  # full of ties

CASES = [
    Case("amax", backward(lambda x: (x.amax(0), x.amax(1), x.amax())), (N4,)),
    Case("amin", backward(lambda x: (x.amin(0), x.amin(1), x.amin())), (N4,)),
    Case("amax of integers", lambda x: (x.amax(0), x.amin(0), x.amax((0, 1))), (INTS,)),
    Case("max", backward(lambda x: x.max()), (N4,)),
    Case("min", backward(lambda x: x.min()), (N4,)),
    Case("max of integers", lambda x: (x.max(), x.min()), (INTS,)),
    Case("max of flags", lambda m: (m.max(), m.min()), (B,)),
    Case("max of rows", backward(lambda x: x.max(0)), (N4,)),
    Case("max with ties", lambda x: (*x.max(0), *x.min(0), *x.max(1)), (INTS,)),
    Case("max with infinite values", lambda x: torch.where(x > 0, x, -torch.inf).max(0), (N4,)),
    Case("max of the least integers", lambda x: (x.clamp(max=0) - 2**63).max(0), (L,)),
    Case("max with NaN", lambda x: torch.where(x > 0, x, torch.nan).max(0), (N4,)),
    Case("argmax", lambda x: (x.argmax(0), x.argmax(1), x.argmax()), (N4,)),
    Case("argmin", lambda x: (x.argmin(0), x.argmin(1), x.argmin()), (N4,)),
    Case("argmax with ties", lambda x: (x.argmax(0), x.argmin(0), x.argmax(), x.argmin(0, keepdim=True)), (INTS,)),
    Case("argmax of columns with ties", lambda x: x.argmax(1), (INTS,)),
    Case("flat argmax across columns", lambda x: x.t().argmax(), (N4,)),
    Case(
        "accuracy",
        lambda x, y: ((x.argmax(1) == y).sum(), (x.argmax(1) == y).float().mean()),
        (N4, Rows("n", (), LONG, 0, 4)),
    ),
    Case("aminmax", lambda x: (*torch.aminmax(x), *torch.aminmax(x, dim=0)), (N4,)),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
