"""Code for everything dense and pointwise of a lowered step comes from Inductor; own ops stay opaque in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from zgcompile.keyed_numbers import keyed_bits_reference

# Random draws are ours and the capture is ours; everything else is Inductor's default.
OPTIONS: dict[str, Any] = {"triton.cudagraphs": False, "fallback_random": True}


def compile_with_inductor(fx_graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """The lowered FX graph as Inductor code. Keyed draws are inlined as integer arithmetic, so that they fuse into
    their consumers."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    decompositions = dict(select_decomp_table())
    decompositions[torch.ops.zgcompile.keyed_bits.default] = keyed_bits_reference
    known = {name: value for name, value in OPTIONS.items() if _has_option(config, name)}
    with torch.no_grad(), config.patch(known):
        compiled = compile_fx(fx_graph, list(inputs), decompositions=decompositions)
    return compiled  # type: ignore[return-value]


def _has_option(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True
