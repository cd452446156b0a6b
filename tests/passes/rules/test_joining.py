"""cat, stack, split and pad: no pads between pieces."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.passes.rules.harness import Case, Fixed, Rows, backward, check_case, swept

LONG = torch.int64
N, N4, M4, T = Rows("n"), Rows("n", (4,)), Rows("m", (4,)), Fixed((7, 4))

CASES = [
    Case("static and dynamic", backward(lambda t, x: torch.cat([t, x])), (T, N4)),
    Case("dynamic and static", backward(lambda t, x: torch.cat([x, t])), (T, N4)),
    Case("two dynamic", backward(lambda x, y: torch.cat([x, y])), (N4, M4)),
    Case("three", backward(lambda x, t, y: torch.cat([x, t, y])), (N4, T, M4)),
    Case("one twice", lambda x: torch.cat([x, x]).sum(0), (N4,)),
    Case("columns", backward(lambda x, y: torch.cat([x, y], 1)), (N4, Rows("n", (2,)))),
    Case("dynamic columns", backward(lambda x, y: torch.cat([x.t(), y.t()], 1)), (N4, M4)),
    Case("negative dimension", lambda x, y: torch.cat([x.t(), y.t()], -1), (N4, M4)),
    Case("edge lists", lambda e, f: torch.cat([e.t(), f.t()], 1), (Rows("n", (2,), LONG), Rows("m", (2,), LONG))),
    Case("self loops", lambda e: torch.cat([e.t(), torch.arange(5).repeat(2, 1)], 1), (Rows("n", (2,), LONG),)),
    Case("with an empty tensor", lambda x: torch.cat([torch.empty(0), x]), (N4,)),
    Case("of two types", lambda x, y: torch.cat([x, y]), (Rows("n", (), LONG), Rows("m"))),
    Case("of flags", lambda x, y: torch.cat([x > 0, y > 0]).sum(), (N, Rows("m"))),
    Case("selections", backward(lambda x, m, y: torch.cat([x[m], y])), (N4, Rows("n", (), torch.bool), M4)),
    Case("stack", backward(lambda x, y: torch.stack([x, y])), (N, N)),
    Case("stack in the last dimension", backward(lambda x, y: torch.stack([x, y], -1)), (N4, N4)),
    Case("unbind", backward(lambda x: x.unbind(1)), (N4,)),
    Case("split of columns", backward(lambda x: x.split(2, 1)), (N4,)),
    Case("split of columns by sizes", backward(lambda x: x.split([1, 3], 1)), (N4,)),
    Case("chunk of columns", backward(lambda x: x.chunk(2, -1)), (N4,)),
    Case("tensor_split of columns", lambda x: x.tensor_split(3, 1), (N4,)),
    Case("split of rows by counts", backward(lambda x, y: torch.cat([x, y]).split([x.shape[0], y.shape[0]])), (N4, M4)),
    Case("split back", lambda x, t: torch.cat([t, x]).split([7, x.shape[0]]), (N4, T)),
    Case("pad columns", backward(lambda x: F.pad(x, (1, 2))), (N4,)),
    Case("pad behind the rows", backward(lambda x: F.pad(x, (0, 0, 0, 2), value=1.5)), (N4,)),
    Case("pad in front of a row pointer", lambda x: F.pad(x.cumsum(0), (1, 0)), (Rows("n", (), LONG, 0, 4),)),
    Case("pad on both sides", lambda x: F.pad(x, (1, 1, 2, 2), value=-1.0), (N4,)),
    Case("hstack and vstack", lambda x, y: (torch.hstack([x, x]), torch.vstack([x, y])), (N4, M4)),
    Case("column_stack", lambda x, y: torch.column_stack([x, y]), (N, N)),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
