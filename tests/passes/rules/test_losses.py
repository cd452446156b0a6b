"""Losses in every reduction, with their gradients: pads have no loss and no gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept
from zgcompile.ir.status import Failure

LONG = torch.int64
N, N4, CLASS, W = Rows("n"), Rows("n", (4,)), Rows("n", (), LONG, 0, 4), Fixed((4,))
REDUCTIONS = ("mean", "sum", "none")

CASES = [
    *[
        Case(f"cross_entropy {r}", backward(lambda x, y, r=r: F.cross_entropy(x, y, reduction=r)), (N4, CLASS))
        for r in REDUCTIONS
    ],
    *[
        Case(
            f"weighted nll_loss {r}",
            backward(lambda x, y, w, r=r: F.nll_loss(x, y, w.detach().abs(), reduction=r)),
            (N4, CLASS, W),
        )
        for r in REDUCTIONS
    ],
    Case("ignore_index", backward(lambda x, y: F.cross_entropy(x, y, ignore_index=2)), (N4, CLASS)),
    Case("ignore_index -1", backward(lambda x, y: F.cross_entropy(x, y - 1, ignore_index=-1)), (N4, CLASS)),
    Case("label smoothing", backward(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)), (N4, CLASS)),
    Case(
        "a class that is none",
        lambda x, y: F.cross_entropy(x, y + 4),
        (N4, CLASS),
        fails=lambda c: Failure.USER_ERROR if c["n"] else None,
    ),
    Case(
        "classes of a table",
        backward(lambda t, y, i: F.cross_entropy(t[i], y[i])),
        (Fixed((7, 4)), Fixed((7,), LONG, 0, 4, proven=True), Rows("n", (), LONG, 0, 7)),
    ),
    Case(
        "classes read behind the rows",
        lambda x, y, i: F.nll_loss(x, (y % 4)[i + 6]),
        (N4, Rows("m", (), LONG, 0, 40), Rows("n", (), LONG, 0, 1)),
        fails=lambda c: Failure.USER_ERROR if c["n"] and c["m"] < 7 else None,
    ),
    Case(
        "probabilities as targets", backward(lambda x, y: F.cross_entropy(x, y.detach().softmax(1))), (N4, N4), new=True
    ),
    Case("masked rows", backward(lambda x, y, m: F.cross_entropy(x[m], y[m])), (N4, CLASS, Rows("n", (), torch.bool))),
    Case(
        "the first rows",
        backward(lambda x, y, k: F.cross_entropy(x[: k.shape[0]], y[: k.shape[0]])),
        (N4, CLASS, Rows("m")),
        batches=({"n": 9, "m": 6}, {"n": 7, "m": 2}, {"n": 4, "m": 4}),
        new=True,
    ),
    *[Case(f"mse {r}", backward(lambda x, y, r=r: F.mse_loss(x, y, reduction=r)), (N4, N4)) for r in REDUCTIONS],
    *[Case(f"l1 {r}", backward(lambda x, y, r=r: F.l1_loss(x, y, reduction=r)), (N4, N4)) for r in REDUCTIONS],
    *[
        Case(f"smooth_l1 {r}", backward(lambda x, y, r=r: F.smooth_l1_loss(x, y, reduction=r)), (N4, N4))
        for r in REDUCTIONS
    ],
    Case("huber", backward(lambda x, y: F.huber_loss(x, y)), (N4, N4)),
    *[
        Case(
            f"bce with logits {r}",
            backward(lambda x, y, r=r: F.binary_cross_entropy_with_logits(x, (y.detach() > 0).float(), reduction=r)),
            (N, N),
        )
        for r in REDUCTIONS
    ],
    *[
        Case(
            f"bce {r}",
            backward(lambda x, y, r=r: F.binary_cross_entropy(x.sigmoid(), (y.detach() > 0).float(), reduction=r)),
            (N4, N4),
            tolerance=1e-5,
        )
        for r in REDUCTIONS
    ],
    Case(
        "weighted bce with logits",
        backward(
            lambda x, y, w: F.binary_cross_entropy_with_logits(x, (y.detach() > 0).float(), pos_weight=w.detach().abs())
        ),
        (N4, N4, W),
    ),
    Case(
        "kl_div",
        backward(lambda x, y: F.kl_div(x.log_softmax(1), y.detach().softmax(1), reduction="batchmean")),
        (N4, N4),
    ),
    Case("margin ranking", backward(lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x))), (N, N)),
    Case("triplet", backward(lambda x, y, z: F.triplet_margin_loss(x, y, z)), (N4, N4, N4), tolerance=1e-5),
    Case("softplus of negatives", backward(lambda x, y: F.softplus(-x).mean() + F.softplus(y).mean()), (N, Rows("m"))),
    Case("logsigmoid", backward(lambda x: -F.logsigmoid(x).mean()), (N,)),
    Case(
        "node weights",
        backward(lambda x, y, w, m: (F.cross_entropy(x, y, reduction="none") * w)[m].sum()),
        (N4, CLASS, N, Rows("n", (), torch.bool)),
    ),
    Case("loss by hand", backward(lambda x, y: -x.log_softmax(1).gather(1, y.unsqueeze(1)).mean()), (N4, CLASS)),
    Case("loss times size", lambda x, y: F.cross_entropy(x, y) * x.shape[0], (N4, CLASS)),
    Case(
        "half precision",
        backward(lambda x, y: F.cross_entropy(x.float(), y)),
        (Rows("n", (4,), torch.bfloat16), CLASS),
        tolerance=2e-2,
    ),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
