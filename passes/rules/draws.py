"""Keyed draws: a number depends on its logical index alone, so drawing at cap changes no valid number."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import rule


@rule("zgcompile::keyed_bits")
def keyed_bits(context: Context, node: Node, key: torch.Tensor, ordinal: int, size: Any) -> torch.Tensor:
    return torch.ops.zgcompile.keyed_bits(key, ordinal, context.caps_of(size))
