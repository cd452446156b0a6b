"""What eager demands of values: a batch for which it raises fails the status, whatever the pads hold."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Rows, check_case, swept
from zgcompile.ir.status import Failure

N4 = Rows("n", (4,))


def demanded(holds, x):
    torch._assert_async(holds)
    return x * 2


def demanded_with_words(holds, x):
    torch._assert_async(holds, "words")
    return x * 2


def fails_on_any_row(counts):
    return Failure.USER_ERROR if counts["n"] else None


CASES = [
    Case("assertion", lambda x: demanded((x < 1e9).all(), x), (N4,)),
    Case("assertion that fails", lambda x: demanded((x > 1e9).all(), x), (N4,), fails=fails_on_any_row),
    Case("assertion with words", lambda x: demanded_with_words((x < 1e9).all(), x), (N4,)),
    Case(
        "assertion with words that fails",
        lambda x: demanded_with_words((x > 1e9).all(), x),
        (N4,),
        fails=fails_on_any_row,
    ),
    Case("inverse", lambda x: torch.linalg.inv(x.t() @ x + 9 * torch.eye(4)), (N4,)),
    Case(
        "singular matrix",
        lambda x: torch.linalg.inv(x.t() @ x * 0),
        (N4,),
        fails=lambda counts: Failure.USER_ERROR,
    ),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
