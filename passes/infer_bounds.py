"""Capacities of all size symbols and value ranges of all integer tensors, in one walk: each needs the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves
from zgcompile.passes.rules.spans import SizeBounds, transfer

from zgcompile.ir.bounded import as_size
from zgcompile.ir.bounds import Bounds, Observed
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.program import RoundTrip, StepProgram
from zgcompile.ir.source import user_line_from_stack_trace
from zgcompile.ir.spans import INT64_HIGH, Span, span_of

aten = torch.ops.aten
# What stands in the compiled step for an op that makes the host wait in eager.
REPLACEMENTS: dict[Any, tuple[str, str]] = {
    aten._local_scalar_dense.default: ("item", "a count in the metadata buffer"),
    aten.nonzero.default: ("nonzero", "zgcompile::compact"),
    aten.index.Tensor: ("mask index", "zgcompile::compact"),
    aten.masked_select.default: ("masked_select", "zgcompile::compact"),
    aten._unique2.default: ("unique", "zgcompile::unique"),
    aten.unique_dim.default: ("unique", "sorted unique at cap"),
    aten.unique_consecutive.default: ("unique_consecutive", "sorted unique at cap"),
    aten.repeat_interleave.Tensor: ("repeat_interleave", "zgcompile::repeat_interleave"),
    aten.bincount.default: ("bincount", "scatter into a static bound"),
}
LARGEST_BITMAP = 2**31  # ids: a bitmap of 256 MiB


def infer_bounds(program: StepProgram, observed: Observed, envelope: Envelope, tables: Mapping[int, Span]) -> Bounds:
    """Notes `meta["span"]` on every node; `tables` gives the value range of the integer lifted inputs that the step
    never writes."""
    sizes = used_as_size(program)
    caps: dict[sympy.Symbol, int] = {}
    names = size_names(program)
    ids: dict[str, int] = {}
    bounds = SizeBounds(program.shape_env, caps)
    placeholders = program.placeholders
    for index, span in tables.items():
        placeholders[program.first_lifted() + index].meta["span"] = span
    floors: dict[sympy.Symbol, int] = {}
    while True:
        program.round_trips = []
        caps.clear()
        ids.clear()
        for node in program.fx_graph.graph.nodes:
            if node.op == "call_function":
                for symbol in node.meta.get("unbacked_bindings") or {}:
                    _record_round_trip(program, node, symbol)
                    if symbol in sizes:
                        caps[symbol] = max(
                            _capacity(node, symbol, names[symbol], bounds, observed, envelope), floors.get(symbol, 0)
                        )
                transfer(node, bounds)
                if node.target is aten._unique2.default:
                    bound = _id_bound(node, program, observed)
                    if bound is not None:
                        ids[node.name] = bound
        raised = _raised(program, caps)
        if not raised:
            break
        floors |= raised  # value ranges follow from capacities, so walk again
    return Bounds(caps, ids, names)


def _raised(program: StepProgram, caps: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """Larger capacities for symbols that the trace took as equal: their buffers meet in one op."""
    pairs = [*program.equalities, *((s, program.shape_env.replace(s)) for s in caps)]
    larger: dict[sympy.Symbol, int] = {}
    for a, b in pairs:
        if a in caps and b in caps and caps[a] != caps[b]:
            small, cap = (a, caps[b]) if caps[a] < caps[b] else (b, caps[a])
            larger[small] = max(cap, larger.get(small, 0))
    return larger


def size_names(program: StepProgram) -> dict[sympy.Symbol, str]:
    """What each size symbol is called: the user's line, numbered where it makes several (a sampler called for each
    hop); "argument ..." for the length of one."""
    names: dict[sympy.Symbol, str] = {}
    for node in program.fx_graph.graph.nodes:
        for symbol in (node.meta.get("unbacked_bindings") or {}) if node.op == "call_function" else ():
            where = user_line_from_stack_trace(node.meta.get("stack_trace") or "")
            names[symbol] = _unused_name(_argument_of(program, node) or f"{where or node.name}", names)
    return names


def _argument_of(program: StepProgram, node: Node) -> str | None:
    """What a length of an argument is called: it is born at no line of the step."""
    if node.target is not torch.ops.zgcompile.dynamic_rows.default:
        return None
    position = program.placeholders.index(node.args[0]) - 1 - program.lengths  # type: ignore[arg-type]
    return f"argument {program.arguments[position].name}"


def _unused_name(name: str, names: Mapping[sympy.Symbol, str]) -> str:
    taken = sum(other == name or other.startswith(f"{name} #") for other in names.values())
    return f"{name} #{taken + 1}" if taken else name


def used_as_size(program: StepProgram) -> set[sympy.Symbol]:
    """Symbols that occur in the shape of some tensor."""
    found: set[sympy.Symbol] = set()
    for node in program.fx_graph.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                for size in value.shape:
                    expr = as_size(size)
                    if not isinstance(expr, int):
                        found |= expr.free_symbols | program.shape_env.replace(expr).free_symbols
    return found


def _capacity(
    node: Node, symbol: sympy.Symbol, name: str, bounds: SizeBounds, observed: Observed, envelope: Envelope
) -> int:
    override = envelope.override(name)
    if override is not None:
        return override
    seen = observed.counts.get(symbol, 0)
    if "dynamic_rows" in str(node.target):
        return max(seen, 1)  # the length of an argument is the user's own choice: it needs no headroom
    return envelope.capacity(symbol, seen, provable(node, bounds))


def provable(node: Node, bounds: SizeBounds) -> int | None:
    """An upper bound of the size born at `node` that holds for every batch, or None."""
    target = node.target
    if target is aten.nonzero.default:
        return bounds.numel(node.args[0])  # type: ignore[arg-type]
    if target is aten.masked_select.default:
        shapes = [[bounds.cap(s) for s in a.meta["val"].shape] for a in node.args]  # type: ignore[union-attr]
        return math.prod(torch.broadcast_shapes(*shapes))
    if target is aten.index.Tensor:
        masks = [i for i in node.args[1] if isinstance(i, Node)]  # type: ignore[union-attr]
        return bounds.numel(masks[0]) if len(masks) == 1 else None
    if target in (aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default):
        span = span_of(node.args[0])
        limit = bounds.numel(node.args[0])  # type: ignore[arg-type]
        return min(limit, span.high) if span.low >= 0 and span.high < INT64_HIGH else limit
    if target is aten.repeat_interleave.Tensor:
        span = span_of(node.args[0])
        return bounds.numel(node.args[0]) * max(span.high - 1, 0) if span.high < 2**40 else None  # type: ignore[arg-type]
    if target is aten._local_scalar_dense.default:
        span = span_of(node.args[0])
        return max(span.high - 1, 0) if span.high < 2**40 else None
    if target is aten.bincount.default:
        span, shortest = span_of(node.args[0]), node.args[2] if len(node.args) > 2 else node.kwargs.get("minlength", 0)
        return max(span.high, shortest) if span.high < 2**40 and isinstance(shortest, int) else None
    if target is aten.slice.Tensor:
        dim = node.args[1] if len(node.args) > 1 else 0
        return bounds.cap(node.args[0].meta["val"].shape[dim])  # type: ignore[union-attr]
    return None


def _id_bound(node: Node, program: StepProgram, observed: Observed) -> int | None:
    """Provable, or the smallest length of a table that covers every id seen (the number of nodes, as a rule)."""
    span = span_of(node.args[0])
    if span.low >= 0 and span.high <= LARGEST_BITMAP:
        return span.high
    low, high = observed.ids.get(node.name, (-1, -1))
    if low < 0:
        return None
    lifted = program.placeholders[program.first_lifted() :]
    lengths = sorted(int(p.meta["val"].shape[0]) for p in lifted if p.meta["val"].dim())
    bound = next((n for n in lengths if n > high), None)
    bound = bound if bound is not None else 2 ** (high + 1).bit_length()
    return bound if bound <= LARGEST_BITMAP else None


def _record_round_trip(program: StepProgram, node: Node, symbol: sympy.Symbol) -> None:
    found = REPLACEMENTS.get(node.target)
    if found is not None and not (
        node.target is aten.repeat_interleave.Tensor and node.kwargs.get("output_size") is not None
    ):
        if reads_step_counter(program, node):
            return
        where = user_line_from_stack_trace(node.meta.get("stack_trace") or "")
        program.round_trips.append(RoundTrip(where, found[0], str(symbol), found[1]))


def reads_step_counter(program: StepProgram, node: Node) -> bool:
    """Whether `node` depends on nothing but 0-d optimizer state: eager keeps Adam's `step` on the host, so reading it
    waits for no device."""
    lifted = zip(program.placeholders[program.first_lifted() :], program.lifted, strict=True)
    counters = {p for p, entry in lifted if entry.kind == "state" and p.meta["val"].dim() == 0}
    seen: set[Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source.op == "placeholder" and source not in counters:
            return False
        if source not in seen:
            seen.add(source)
            stack += source.all_input_nodes
    return not seen.isdisjoint(counters)
