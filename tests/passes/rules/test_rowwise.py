"""Softmax and norms: over rows of static length, and over the dynamic dimension itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept

LONG = torch.int64
N, N4, W = Rows("n"), Rows("n", (4,)), Fixed((4,))


def edge_softmax(score, dst, x):
    top = torch.full((x.shape[0],), -torch.inf).scatter_reduce(0, dst, score.detach(), "amax", include_self=False)
    weight = (score - top[dst]).exp()
    total = torch.zeros(x.shape[0]).index_add(0, dst, weight)
    return weight / (total[dst] + 1e-16)


def batch_norm(training):
    def run(x, w, b):
        mean, var = torch.zeros(4), torch.ones(4)
        out = F.batch_norm(x, mean, var, w, b, training, 0.1)
        return out, mean, var

    return run


CASES = [
    Case("softmax of rows", backward(lambda x: x.softmax(1)), (N4,)),
    Case("log_softmax of rows", backward(lambda x: x.log_softmax(-1)), (N4,)),
    Case("softmax over rows", backward(lambda x: x.softmax(0)), (N4,)),
    Case("log_softmax over rows", backward(lambda x: x.log_softmax(0)), (N4,)),
    Case("softmax of a vector", backward(lambda x: x.softmax(0)), (N,)),
    Case("softmax over edges", backward(edge_softmax), (N, Rows("n", (), LONG, 0, "m"), Rows("m")), tolerance=1e-5),
    Case("softmax of pairs", backward(lambda x, y: (x @ y.t()).softmax(1)), (N4, Rows("m", (4,))), tolerance=1e-5),
    Case("attention", backward(lambda x, y: (x @ y.t()).softmax(-1) @ y), (N4, Rows("m", (4,))), tolerance=1e-5),
    Case("layer_norm", backward(lambda x, w, b: F.layer_norm(x, (4,), w, b)), (N4, W, W), tolerance=1e-4),
    Case("layer_norm without weights", backward(lambda x: F.layer_norm(x, (4,))), (N4,), tolerance=1e-4),
    Case(
        "layer_norm of heads",
        backward(lambda x, w: F.layer_norm(x, (2, 2), w.view(2, 2))),
        (Rows("n", (2, 2)), W),
        tolerance=1e-4,
    ),
    Case("rms_norm", backward(lambda x, w: F.rms_norm(x, (4,), w)), (N4, W), tolerance=1e-4),
    Case("batch_norm in training", backward(batch_norm(True)), (N4, W, W), tolerance=1e-4),
    Case("batch_norm in evaluation", backward(batch_norm(False)), (N4, W, W), tolerance=1e-5),
    Case(
        "batch_norm without statistics",
        backward(lambda x: F.batch_norm(x, None, None, training=True)),
        (N4,),
        tolerance=1e-4,
    ),
    Case(
        "instance statistics by hand",
        backward(lambda x: (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()),
        (N4,),
        tolerance=1e-4,
    ),
    Case(
        "pair_norm by hand",
        backward(lambda x: (x - x.mean(0)) / (1e-5 + (x - x.mean(0)).pow(2).sum(1).mean()).sqrt()),
        (N4,),
        tolerance=1e-4,
    ),
    Case("cosine_similarity", backward(lambda x, y: F.cosine_similarity(x, y)), (N4, N4), tolerance=1e-4),
    Case("group_norm", backward(lambda x, w: F.group_norm(x, 2, w, w)), (N4, W), tolerance=1e-4),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
