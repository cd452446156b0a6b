"""What eager demands of values and raises for: the nodes of a step's FX graph that carry such a demand.

They have no result, so nothing but this list keeps them alive. The lowering makes each a check of the status
(`passes/rules/demands.py`); a run at exact sizes asks on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from zgcompile.errors import BadInput

aten = torch.ops.aten
ASSERTIONS = frozenset({aten._assert_async.default, aten._assert_async.msg})
LINALG_ERRORS = aten._linalg_check_errors.default  # behind linalg.inv, cholesky, solve: nonzero where these failed
DEFAULT_MESSAGE = "an assertion of the step (torch._assert_async)"


def is_demand(node: Node) -> bool:
    """Whether `node` is there for what it raises."""
    return node.target in ASSERTIONS or node.target is LINALG_ERRORS


def message_of(node: Node) -> str:
    """What an assertion says when it does not hold."""
    return str(node.args[1]) if len(node.args) > 1 else DEFAULT_MESSAGE


def demand(holds: Tensor, message: str) -> None:
    """`holds` (0-d bool) has to be true where ATen would assert the same in a kernel or on the host. In a trace it is
    carried to the lowering.

    Raises:
        BadInput: `holds` is a real tensor, and false.
    """
    if isinstance(holds, FakeTensor):
        aten._assert_async.msg(holds, message)
    elif not bool(holds):
        raise BadInput(message)
