"""The passes, in order: the one place that lists them."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch

from zgcompile.ir.bounds import Observed
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.lowered import LoweredStep
from zgcompile.ir.program import StepProgram
from zgcompile.ir.spans import Span
from zgcompile.passes.accumulate_products import accumulate_products
from zgcompile.passes.canonicalise import Canonicalise
from zgcompile.passes.chain_scatter import chain_scatter
from zgcompile.passes.clean_pads import clean_pads
from zgcompile.passes.infer_bounds import infer_bounds, size_names, used_as_size
from zgcompile.passes.keep_comparisons import keep_comparisons
from zgcompile.passes.lower import lower
from zgcompile.passes.mask_before_scatter import mask_before_scatter
from zgcompile.passes.pack_masks import pack_masks
from zgcompile.passes.schedule import publish_early
from zgcompile.passes.verify_capturable import verify_capturable


def canonical(program: StepProgram) -> StepProgram:
    """What is done once to a captured step, before any size is known."""
    Canonicalise().apply(program)
    return program


def size_symbols(program: StepProgram) -> set[sympy.Symbol]:
    """Symbols that need a capacity."""
    return used_as_size(program)


def names_of_sizes(program: StepProgram) -> dict[sympy.Symbol, str]:
    """What `Envelope(caps=)` and reports call each size symbol."""
    return size_names(program)


def lowered_step(
    program: StepProgram, observed: Observed, envelope: Envelope, tables: Mapping[int, Span], device: torch.device
) -> LoweredStep:
    """Capacities from what was observed, then the static FX graph, checked."""
    bounds = infer_bounds(program, observed, envelope, tables)
    lowered = lower(program, bounds, device, clean=clean_pads(program, bounds, device))
    chain_scatter(lowered.fx_graph)
    keep_comparisons(lowered.fx_graph)
    accumulate_products(lowered.fx_graph)
    mask_before_scatter(lowered.fx_graph)
    pack_masks(lowered.fx_graph)
    publish_early(lowered.fx_graph)
    verify_capturable(lowered, device)
    return lowered
