"""Sums, means and norms: what a pad holds counts for nothing."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept

LONG, BOOL = torch.int64, torch.bool
N, N4, L, B = Rows("n"), Rows("n", (4,)), Rows("n", (), LONG), Rows("n", (), BOOL)
INTS = Rows("n", (4,), LONG, -2, 3)  # full of ties


def clipped(w, b, x):
    w, b = w.detach().requires_grad_(), b.detach().requires_grad_()
    with torch.enable_grad():
        (x @ w + b).pow(2).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_([w, b], 0.1)
    return w.grad, b.grad, norm


CASES = [
    Case("sum", backward(lambda x: x.sum()), (N4,)),
    Case("sum of rows", backward(lambda x: x.sum(0)), (N4,)),
    Case("sum of columns", backward(lambda x: x.sum(1)), (N4,)),
    Case("sum over both", lambda x: x.sum((0, 1), keepdim=True), (N4,)),
    Case("sum kept", backward(lambda x: x.sum(0, keepdim=True)), (N4,)),
    Case("sum in another type", lambda x: x.sum(0, dtype=torch.float64), (N4,)),
    Case("sum of integers", lambda x: x.sum(), (L,)),
    Case("sum of flags", lambda m: (m.sum(), m.sum(0), (~m).sum()), (B,)),
    Case("sum of float16", lambda x: x.sum(0), (Rows("n", (4,), torch.float16),), tolerance=1e-2),
    Case("sum of bfloat16", lambda x: x.sum(0), (Rows("n", (4,), torch.bfloat16),), tolerance=5e-2),
    Case("sum over number", lambda x: x.sum() / x.numel(), (N4,)),
    Case("sum times size", lambda x: x.sum().item() * x.size(0), (N4,)),
    Case("nansum", lambda x: torch.where(x > 0, x, torch.nan).nansum(0), (N4,)),
    Case("any", lambda x: ((x > 2).any(), (x > 2).any(0), (x > 2).any(1)), (N4,)),
    Case("any of dims", lambda x: (x > 2).any((0, 1)), (N4,)),
    Case("all", lambda x: ((x > -2).all(), (x > -2).all(0), (x > -2).all(1)), (N4,)),
    Case("all of dims", lambda x: (x > -2).all((0, 1)), (N4,)),
    Case("count_nonzero", lambda x: (x.count_nonzero(), x.count_nonzero(0), x.count_nonzero((0, 1))), (INTS,)),
    Case("prod", backward(lambda x: (x.prod(), x.prod(0), x.prod(1))), (Rows("n", (2,)),), tolerance=1e-4),
    Case("mean", backward(lambda x: x.mean()), (N4,)),
    Case("mean of rows", backward(lambda x: x.mean(0)), (N4,)),
    Case("mean of columns", backward(lambda x: x.mean(-1)), (N4,)),
    Case("mean kept", lambda x: (x.mean((0, 1), keepdim=True), x.mean(dtype=torch.float64)), (N4,)),
    Case("mean of bfloat16", backward(lambda x: x.mean(0)), (Rows("n", (4,), torch.bfloat16),), tolerance=5e-2),
    Case("mean of comparisons", lambda x: (x > 0).float().mean(), (N4,)),
    Case("norm", backward(lambda x: x.norm()), (N4,), tolerance=1e-5),
    Case("norm of rows", backward(lambda x: x.norm(dim=0)), (N4,), tolerance=1e-5),
    Case("norm of columns", backward(lambda x: x.norm(dim=1)), (N4,), tolerance=1e-5),
    Case("norm of order one", lambda x: (x.norm(1), x.norm(1, dim=0)), (N4,), tolerance=1e-5),
    Case("norm of order infinity", lambda x: (x.norm(torch.inf), torch.linalg.vector_norm(x, torch.inf, 0)), (N4,)),
    Case("linalg.norm", lambda x: torch.linalg.norm(x, dim=0), (N4,), tolerance=1e-5),
    Case("Frobenius norm", lambda x: torch.linalg.matrix_norm(x), (N4,), tolerance=1e-5),
    Case("normalize rows", backward(lambda x: torch.nn.functional.normalize(x, dim=1)), (N4,), tolerance=1e-5),
    Case("normalize over rows", backward(lambda x: torch.nn.functional.normalize(x, dim=0)), (N4,), tolerance=1e-5),
    Case("logsumexp", backward(lambda x: (x.logsumexp(0), x.logsumexp(1))), (N4,), tolerance=1e-5),
    Case("mean over a transposed dimension", backward(lambda x: x.t().mean(1)), (N4,)),
    Case("smallest by sorting", lambda x: x.sort(0).values[0], (N4,)),
    Case("distance", lambda x, y: (x - y).pow(2).sum(-1).sqrt().mean(), (N4, N4), tolerance=1e-5),
    Case("mean of nothing", lambda x, m: x[m & ~m].mean(), (N, B)),
    Case("sum of nothing", lambda x, m: (x[m & ~m].sum(), x[m & ~m].prod()), (N, B)),
    Case("weights over their sum", backward(lambda x, w: (x * w).sum() / w.abs().sum().clamp(min=1)), (N, N)),
    Case("two masks of a table", lambda t, i: (t[i].mean(0), t.sum()), (Fixed((7, 4)), Rows("n", (), LONG, 0, 7))),
    Case("all of what holds", lambda x: ((x > -99).all(), (x > -99).all(0), (x > -99).all((0, 1))), (N4,)),
    Case("legacy norm", lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]), (N4,), tolerance=1e-5),
    Case("clipped gradients", clipped, (Fixed((4, 3)), Fixed((3,)), N4), tolerance=1e-5),
    Case(
        "foreach over sums",
        lambda w, x: torch._foreach_add([x.sum(0), (x * 2).sum(0)], [w, w]),
        (Fixed((4,)), N4),
        tolerance=1e-5,
    ),
    Case("norm of a negative order over nothing", lambda x: x.norm(-1, dim=0), (N4,), status_clear=False),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
