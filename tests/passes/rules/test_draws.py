"""Random numbers: those of a logical index, whatever the capacity."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept

N, N4 = Rows("n"), Rows("n", (4,))

CASES = [
    Case("dropout", backward(lambda x: F.dropout(x, 0.5)), (N4,)),
    Case("dropout twice", lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5), (N4,)),
    Case("rand of a size", lambda x: torch.rand(x.shape[0], 3), (N,)),
    Case("rand_like", lambda x: torch.rand_like(x), (N4,)),
    Case("randn", lambda x: torch.randn(x.shape[0]), (N,), tolerance=1e-5),
    Case("rand of a mask", lambda x: torch.rand(x[x > 0].shape[0]), (N,)),
    Case("randint", lambda x: torch.randint(0, 7, (x.shape[0],)), (N,)),
    Case("bernoulli", lambda x: torch.bernoulli(x.sigmoid()), (N4,)),
    Case("negatives of a table", lambda t, x: t[torch.randint(0, 7, (x.shape[0],))], (Fixed((7, 4)), N)),
    Case("uniform_", lambda x: x.clone().uniform_(), (N4,)),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
