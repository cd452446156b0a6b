"""Where sizes enter: argument rows and items, and what happens when two sizes that the trace took as one differ."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Rows, check_case, swept
from zgcompile.ir.status import Failure

LONG, BOOL = torch.int64, torch.bool
N, N4, M = Rows("n"), Rows("n", (4,)), Rows("m")
UNEQUAL = ({"n": 6, "m": 6}, {"n": 6, "m": 5}, {"n": 2, "m": 4}, {"n": 2, "m": 2})


def apart(counts):
    return Failure.PRECONDITION if counts["n"] != counts["m"] else None


def two_masks(x, y, a, b):
    return x[a > 0] + y[b > 0]


CASES = [
    Case("an argument alone", lambda x: x, (N4,)),
    Case("arguments of one length", lambda x, y: x + y, (N, N)),
    Case("sizes that have to agree", lambda x, y: x + y, (N, M), batches=UNEQUAL, fails=apart),
    Case("sizes that have to agree in a sum", lambda x, y: (x * y).sum(), (N, M), batches=UNEQUAL, fails=apart),
    Case(
        "masks that have to agree",
        two_masks,
        (Rows("n", (), LONG), Rows("m", (), LONG), Rows("n", (), LONG, 1, 2), Rows("m", (), LONG, 1, 2)),
        batches=UNEQUAL,
        fails=apart,
    ),
    Case(
        "equal caps, other counts",
        lambda x, y, m: (x[m].sum(0), y[y > 0].sum(), x.sum(0)),
        (N4, Rows("n"), Rows("n", (), BOOL)),
    ),
    Case("an item as a size", lambda k: torch.ones(k.item()).sum(), (Fixed((), LONG, 4, 5),)),
    Case("a negative item as a size", lambda x, k: torch.ones(k.item()).sum() + x.sum(), (N, Fixed((), LONG, -4, -3))),
    Case("a float item", lambda x, s: x * s.item(), (N, Fixed(()))),
    Case("an integer item as data", lambda x, k: x * k.item(), (N, Fixed((), LONG, -4, -3))),
    Case("a sum as a size", lambda r: torch.zeros(r.sum().item(), 2), (Rows("n", (), LONG, 0, 3),)),
    Case(
        "a branch on emptiness",
        lambda x, m: x.sum() if x[m].numel() > 0 else x.sum() * 0 - 1,
        (N, Rows("n", (), BOOL)),
        status_clear=False,
    ),
    Case("a branch on a size", lambda x: x.sum() if x.shape[0] > 1 else x.sum() - 1, (N,)),
    Case(
        "a dead selection that decides",
        lambda x, m: x.sum() if x[m & ~m].shape[0] == 0 else x.sum() - 1,
        (N, Rows("n", (), BOOL)),
        status_clear=False,
    ),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
