"""Reshapes: the valid elements keep their logical order, wherever the pads are."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept

N, N4, N6, M4 = Rows("n"), Rows("n", (4,)), Rows("n", (6,)), Rows("m", (4,))
LONG = torch.int64

CASES = [
    Case("merge", backward(lambda x: x.reshape(-1)), (N4,)),
    Case("split", backward(lambda x: x.view(-1, 2, 3)), (N6,)),
    Case("heads and back", backward(lambda x: x.view(-1, 2, 3).mean(1).view(-1, 3)), (N6,)),
    Case("more rows", backward(lambda x: x.view(-1, 2)), (N4,)),
    Case("behind a static dimension", backward(lambda x: torch.stack([x, x + 1]).reshape(2, -1)), (N4,)),
    Case("a dimension of one", lambda x: (x.view(1, -1), x.view(-1, 1), x.view(-1, 1, 1)), (N,)),
    Case("columns first", backward(lambda x: x.t().reshape(-1)), (N4,)),
    Case("columns first to rows", lambda x: x.t().reshape(-1, 4), (N4,)),
    Case("edges flat", lambda e: e.t().contiguous().view(-1), (Rows("n", (2,), LONG),)),
    Case("pairs", backward(lambda x, y: (x.unsqueeze(1) * y.unsqueeze(0)).reshape(-1, 4)), (N4, M4)),
    Case(
        "pairs of ids",
        lambda x, y: (x.unsqueeze(1) * 10 + y.unsqueeze(0)).view(-1),
        (Rows("n", (), LONG), Rows("m", (), LONG)),
    ),
    Case(
        "pairs apart again",
        backward(lambda x, y: (x.unsqueeze(1) * y.unsqueeze(0)).reshape(-1).view(x.shape[0], y.shape[0])),
        (N, Rows("m")),
    ),
    Case("three axes", lambda x, y: (x.unsqueeze(1) + y.unsqueeze(0)).permute(2, 1, 0).reshape(-1), (N4, M4)),
    Case("flatten", backward(lambda x: x.flatten(1)), (Rows("n", (2, 3)),)),
    Case("flatten all", lambda x: x.flatten(), (Rows("n", (2, 3)),)),
    Case("unflatten", lambda x: x.unflatten(1, (2, 3)), (N6,)),
    Case("squeeze a static dimension", backward(lambda x: x.squeeze(-1)), (Rows("n", (1,)),)),
    Case("squeeze all", lambda x: x.squeeze(), (Rows("n", (1,)),)),
    Case("squeeze two", lambda x: x.squeeze((0, 1)), (Rows("n", (1,)),)),
    Case("view of a slice", lambda x: x[1:].reshape(-1), (N4,)),
    Case("scatter table of pairs", lambda x, i: x.view(-1)[i], (N4, Rows("m", (), LONG, 0, 4))),
    Case("fixed rows", lambda t, x: t.view(4, 7).sum() + x.sum(), (Fixed((7, 4)), N)),
    Case("rows flattened to what is left", lambda x: x.reshape(x.shape[0], -1), (Rows("n", (4, 2)),)),
    Case("what is left by rows", lambda x: x.view(-1, 1, x.shape[0]), (Rows("n", (4,)),)),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
