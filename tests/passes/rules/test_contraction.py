"""Matrix products with dynamic rows, columns and contracted dimensions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.passes.rules.harness import Case, Fixed, Hyper, Rows, backward, check_case, swept

N, N4, M4, W, B = Rows("n"), Rows("n", (4,)), Rows("m", (4,)), Fixed((4, 3)), Fixed((3,))
LOOSE = {"tolerance": 1e-5}

CASES = [
    Case("rows by weights", backward(lambda x, w: x @ w), (N4, W), **LOOSE),
    Case("linear", backward(lambda x, w, b: F.linear(x, w.t(), b)), (N4, W, B), **LOOSE),
    Case("gram matrix", backward(lambda x: x.t() @ x), (N4,), **LOOSE),
    Case("transpose and mm over edges", backward(lambda x, y: x.t() @ y), (N4, Rows("n", (3,))), **LOOSE),
    Case("pairs", backward(lambda x, y: x @ y.t()), (N4, M4), **LOOSE),
    Case("pairs and back", backward(lambda x, y: (x @ y.t()) @ y), (N4, M4), **LOOSE),
    Case("addmm", backward(lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0)), (B, N4, W), **LOOSE),
    Case(
        "addmm over rows",
        backward(lambda b, x, y: torch.addmm(b, x.t(), y)),
        (Fixed((4, 3)), N4, Rows("n", (3,))),
        **LOOSE,
    ),
    Case(
        "addmm by a device factor",
        lambda b, x, y, h: torch.addmm(b, x.t(), y, beta=h, alpha=h * 2),
        (Fixed((4, 3)), N4, Rows("n", (3,)), Hyper()),
        **LOOSE,
    ),
    Case("batched", backward(lambda x, w: x @ w), (Rows("n", (2, 4)), W), **LOOSE),
    Case("bmm of rows", backward(lambda x, y: torch.bmm(x, y)), (Rows("n", (2, 3)), Rows("n", (3, 2))), **LOOSE),
    Case(
        "bmm over rows",
        backward(lambda x, y: torch.bmm(x.permute(1, 2, 0), y.permute(1, 0, 2))),
        (Rows("n", (2, 3)), Rows("n", (2, 4))),
        **LOOSE,
    ),
    Case(
        "baddbmm",
        backward(lambda b, x, y: torch.baddbmm(b, x, y)),
        (Fixed((2, 2)), Rows("n", (2, 3)), Rows("n", (3, 2))),
        **LOOSE,
    ),
    Case(
        "addbmm", lambda b, x, y: torch.addbmm(b, x, y), (Fixed((2, 2)), Rows("n", (2, 3)), Rows("n", (3, 2))), **LOOSE
    ),
    Case("mv", backward(lambda x, w: x @ w), (N4, Fixed((4,))), **LOOSE),
    Case("mv over rows", backward(lambda x, y: x.t() @ y), (N4, N), **LOOSE),
    Case("addmv", backward(lambda b, x, y: torch.addmv(b, x.t(), y)), (Fixed((4,)), N4, N), **LOOSE),
    Case("dot", backward(lambda x, y: x.dot(y)), (N, N), **LOOSE),
    Case("vdot", lambda x, y: torch.vdot(x, y), (N, N), **LOOSE),
    Case("outer", backward(lambda x, y: torch.outer(x, y)), (N, Rows("m")), **LOOSE),
    Case("einsum over rows", backward(lambda x, y: torch.einsum("ni,nj->ij", x, y)), (N4, Rows("n", (3,))), **LOOSE),
    Case(
        "einsum of heads",
        backward(lambda x, w: torch.einsum("nhi,hi->nh", x, w)),
        (Rows("n", (2, 3)), Fixed((2, 3))),
        **LOOSE,
    ),
    Case("einsum of pairs", lambda x, y: torch.einsum("ni,mi->nm", x, y), (N4, M4), **LOOSE),
    Case("half precision over rows", lambda x: x.t() @ x, (Rows("n", (4,), torch.bfloat16),), tolerance=5e-2),
    Case(
        "baddbmm over rows",
        lambda b, x, y: torch.baddbmm(b, x.permute(1, 2, 0), y.permute(1, 0, 2)),
        (Fixed((2, 3, 4)), Rows("n", (2, 3)), Rows("n", (2, 4))),
        **LOOSE,
    ),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
