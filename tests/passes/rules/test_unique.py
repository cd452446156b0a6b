"""unique: sorted values, inverse and counts, over ids with and without a known bound."""

from __future__ import annotations

import torch

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept

LONG, INT = torch.int64, torch.int32
IDS, SOME = Rows("n", (), LONG, 0, 7), Rows("n", (), LONG, -3, 3)


def relabel(t, ids, more):
    nodes, inverse = torch.unique(torch.cat([ids, more]), return_inverse=True)
    x = t[nodes]
    return x[inverse[: ids.shape[0]]], torch.zeros(nodes.shape[0], 4).index_add(0, inverse, t[torch.cat([ids, more])])


CASES = [
    Case("values", lambda i: torch.unique(i), (SOME,)),
    Case("inverse", lambda i: torch.unique(i, return_inverse=True), (SOME,)),
    Case("counts", lambda i: torch.unique(i, return_counts=True), (SOME,)),
    Case("all", lambda i: torch.unique(i, return_inverse=True, return_counts=True), (SOME,)),
    Case("unsorted", lambda i: torch.unique(i, sorted=False).sort().values, (SOME,)),
    Case(
        "ids of a table",
        lambda t, i: torch.unique(t[i], return_inverse=True, return_counts=True),
        (Fixed((7,), LONG, 0, 5, proven=True), IDS),
    ),
    Case("int32", lambda i: torch.unique(i, return_inverse=True), (Rows("n", (), INT, 0, 5),), new=True),
    Case("floats", lambda x: torch.unique(x.round(), return_inverse=True, return_counts=True), (Rows("n"),), new=True),
    Case(
        "infinite floats",
        lambda x: torch.unique(torch.where(x > 0, torch.inf, x.round()), return_counts=True),
        (Rows("n"),),
        new=True,
    ),
    Case(
        "NaN",
        lambda x: torch.unique(torch.where(x > 0, torch.nan, x.round()), return_counts=True),
        (Rows("n"),),
        new=True,
    ),
    Case(
        "flags",
        lambda m: torch.unique(m, return_inverse=True, return_counts=True),
        (Rows("n", (), torch.bool),),
        new=True,
    ),
    Case("the largest integers", lambda i: torch.unique(i + (2**63 - 4), return_counts=True), (SOME,)),
    Case("of a matrix", lambda i: torch.unique(i, return_inverse=True), (Rows("n", (2,), LONG, 0, 5),)),
    Case(
        "of rows",
        lambda i: torch.unique(i, dim=0, return_inverse=True, return_counts=True),
        (Rows("n", (2,), LONG, 0, 2),),
    ),
    Case("of edges", lambda i: torch.unique(i.t(), dim=1), (Rows("n", (2,), LONG, 0, 2),)),
    Case("of float rows", lambda x: torch.unique(x.round(), dim=0, return_counts=True), (Rows("n", (2,)),), new=True),
    Case(
        "consecutive",
        lambda i: torch.unique_consecutive(i, return_inverse=True, return_counts=True),
        (Rows("n", (), LONG, 0, 2),),
    ),
    Case("consecutive of sorted", lambda i: torch.unique_consecutive(i.sort().values, return_counts=True), (SOME,)),
    Case("consecutive of floats", lambda x: torch.unique_consecutive(x.round()), (Rows("n"),)),
    Case("of a static tensor", lambda t, x: (torch.unique(t), x.sum()), (Fixed((7,), LONG), Rows("n"))),
    Case("relabel", backward(relabel), (Fixed((7, 4)), IDS, Rows("m", (), LONG, 0, 7)), tolerance=1e-5),
    Case("size of unique", lambda i: torch.unique(i).numel(), (SOME,)),
    Case("pairs as one id", lambda i, j: torch.unique(i * 7 + j), (IDS, IDS)),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
