"""Factories, permutations, broadcasts and copies of dynamic sizes."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept

LONG, INT = torch.int64, torch.int32
N, N4, M = Rows("n"), Rows("n", (4,)), Rows("m")

CASES = [
    Case("zeros", lambda x: torch.zeros(x.shape[0], 3), (N,)),
    Case("new_zeros", lambda x: x.new_zeros(x.shape[0] + 2, 3).sum(), (N,)),
    Case("ones", lambda x: torch.ones(x.shape[0], dtype=LONG).sum(), (N,)),
    Case("ones_like", lambda x: torch.ones_like(x).sum(0), (N4,)),
    Case("zeros_like", lambda x: torch.zeros_like(x) + x, (N4,)),
    Case("new_ones", lambda x: x.new_ones(x.shape[0]).sum(), (N,)),
    Case("full", lambda x: torch.full((x.shape[0],), 2.5).sum(), (N,)),
    Case("full of a count", lambda x: torch.full((x.shape[0],), x.shape[0]), (N,)),
    Case("full_like", lambda x: torch.full_like(x, 7).sum(0), (N4,)),
    Case("full_like of a count", lambda x: torch.full_like(x, x.shape[0]), (N4,)),
    Case("new_full", lambda x: x.new_full((x.shape[0], 2), 3.0), (N,)),
    Case("new_full of an item", lambda x, k: x.new_full((x.shape[0],), k.item()), (N, Fixed(()))),
    Case("static full of a count", lambda x: torch.full((3,), x.shape[0]), (N,)),
    Case("empty filled", lambda x: torch.empty(x.shape[0]).fill_(3.0).sum(), (N,)),
    Case("new_empty filled", lambda x: x.new_empty(x.shape[0]).fill_(3.0), (N,)),
    Case("empty_like filled", lambda x: torch.empty_like(x).fill_(3.0), (N4,)),
    Case("new_empty_strided filled", lambda x: x.new_empty_strided((x.shape[0], 2), (2, 1)).fill_(1.0), (N,)),
    Case("empty_strided filled", lambda x: torch.empty_strided((x.shape[0], 2), (2, 1)).fill_(1.0), (N,)),
    Case("arange", lambda x: (torch.arange(x.shape[0]), torch.arange(x.shape[0]).sum()), (N,)),
    Case("arange from a start", lambda x: torch.arange(3, x.shape[0] + 3), (N,)),
    Case("arange from a count", lambda x, y: torch.arange(y.shape[0], x.shape[0] + y.shape[0]), (N, M)),
    Case("arange with a step", lambda x: torch.arange(1, 2 * x.shape[0] + 1, 2), (N,)),
    Case("arange backwards", lambda x: torch.arange(x.shape[0] - 1, -1, -1), (N,)),
    Case("arange of floats", lambda x: torch.arange(x.shape[0], dtype=torch.float32) * 0.1, (N,)),
    Case("arange of int32", lambda x: torch.arange(x.shape[0], dtype=INT), (N,)),
    Case("arange to an item", lambda k: torch.arange(k.item()).sum(), (Fixed((), LONG, 5, 6),)),
    Case("expand a row", backward(lambda w, x: w.unsqueeze(0).expand(x.shape[0], -1)), (Fixed((4,)), N)),
    Case("expand a column", backward(lambda x: x.unsqueeze(1).expand(-1, 4)), (N,)),
    Case("expand as", backward(lambda w, x: w.expand_as(x)), (Fixed((4,)), N4)),
    Case("broadcast_to", lambda w, x: torch.broadcast_to(w, (x.shape[0], 4)), (Fixed((4,)), N)),
    Case("transpose", backward(lambda x: x.t()), (N4,)),
    Case("transpose twice", lambda x: x.transpose(0, 1).transpose(0, 1), (N4,)),
    Case("permute", backward(lambda x: x.permute(2, 0, 1)), (Rows("n", (2, 3)),)),
    Case("movedim", lambda x: x.movedim(0, -1).contiguous(), (Rows("n", (2, 3)),)),
    Case("unsqueeze", lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x[None, :, None]), (N,)),
    Case("repeat columns", backward(lambda x: x.repeat(1, 2)), (N4,)),
    Case("repeat rows", backward(lambda x: x.repeat(3, 1)), (N4,)),
    Case("repeat in a new dimension", lambda x: x.repeat(2, 1, 1), (N4,)),
    Case("repeat a row by a count", lambda w, x: w.repeat(x.shape[0], 1), (Fixed((4,)), N)),
    Case("repeat rows by a count", lambda x, y: x.repeat(y.shape[0]), (N, M)),
    Case("tile", lambda x: x.tile(2), (N,)),
    Case("repeat_interleave by a number", backward(lambda x: x.repeat_interleave(3, 0)), (N4,)),
    Case("lower triangle", lambda x, y: (x.unsqueeze(1) * y.unsqueeze(0)).tril(), (N, M)),
    Case("upper triangle", backward(lambda x: x.triu(1)), (N4,)),
    Case("diagonal", lambda x: (x.unsqueeze(1) * x.unsqueeze(0)).diagonal(), (N,)),
    Case("eye", lambda x: (torch.arange(x.shape[0]).unsqueeze(1) == torch.arange(x.shape[0])).float().sum(0), (N,)),
    Case("clone and detach", lambda x: x.clone().detach(), (N4,)),
    Case("copy_", lambda x, y: torch.empty_like(x).copy_(y), (N4, Rows("n", (4,)))),
    Case("copy_ of a row", lambda x, w: torch.empty_like(x).copy_(w), (N4, Fixed((4,))), new=True),
    Case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), (N, M)),
    Case("sizes come back", lambda x, y: (x.shape[0], x.shape[0] * 2 + y.shape[0], x.numel()), (N4, M)),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
