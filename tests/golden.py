"""Golden cases of passes: text in, text out, and what must hold of every case whatever its text.

A case is an `.ir` file:

    # canonicalise: equal masks are one mask
    # passes: canonicalise
    # observed: n0=8, n1=37                 counts that exact runs have seen
    # envelope: headroom=1.5                or: train.py:31=4096
    # inputs: arg0=[0, 100)                 range of an input's random integers; [0, 8) unless told here or by a span
    --- before
    fx_graph(length0: i64[], arg0: f32[8, 4], weight: f32[4, 2]):
    ...
    --- after       or: --- error, with the message; a case with neither must stay as it is

Inputs in order, by name: `key` (which may be left out), `length0`..., `arg0`..., `hyper0`..., then the lifted tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten
from zgcompile.passes.canonicalise import Canonicalise
from zgcompile.passes.infer_bounds import infer_bounds
from zgcompile.passes.lower import lower

from zgcompile.errors import ZgError
from zgcompile.frontend.shape_env import EnvelopeShapeEnv
from zgcompile.ir.bounds import Bounds, Observed
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.lowered import LoweredStep
from zgcompile.ir.parser import parse_fx_graph
from zgcompile.ir.printer import input_names, print_fx_graph
from zgcompile.ir.program import ArgumentInput, Condition, GradientWrite, LiftedInput, StateWrite, StepProgram
from zgcompile.ir.spans import UNKNOWN, span_of

CPU = torch.device("cpu")
_SECTION = re.compile(r"^--- (before|after|error)$", re.MULTILINE)
_RANGE = re.compile(r"(\w[\w.]*)=\[(-?\d+), (-?\d+)\)")
_ROLES = ("key", "length", "arg", "hyper", "lifted")


@dataclass
class Case:
    """One `.ir` file. `line` is where `before` starts."""

    path: Path
    title: str
    passes: list[str]
    before: str
    line: int
    after: str | None
    error: str | None
    observed: dict[str, int] = field(default_factory=dict)
    envelope: Envelope = field(default_factory=Envelope)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        return self.before if self.after is None else self.after


def read_case(path: Path) -> Case:
    text = path.read_text()
    head, *rest = _SECTION.split(text)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    title, *settings = [line.removeprefix("# ") for line in head.strip().splitlines()]
    given = dict(s.split(": ", 1) for s in settings)
    observed = {k: int(v) for k, v in (p.split("=") for p in given.get("observed", "").split(", ") if p)}
    before_line = text[: text.index("--- before\n")].count("\n") + 2
    return Case(
        path,
        title,
        given["passes"].split(", "),
        sections["before"].lstrip("\n"),
        before_line,
        sections["after"].lstrip("\n") if "after" in sections else None,
        sections["error"].strip() if "error" in sections else None,
        observed,
        _envelope(given.get("envelope", "")),
        {name: (int(low), int(high)) for name, low, high in _RANGE.findall(given.get("inputs", ""))},
    )


def accept(case: Case, after: str) -> None:
    """Rewrites the `after` part, and no other. Text that cannot be read back is a fault, not an expectation."""
    assert round_trip(after) == after
    text = case.path.read_text()
    case.path.write_text(text[: text.index("--- after\n")] + "--- after\n" + after)


def _envelope(text: str) -> Envelope:
    pairs = dict(p.rsplit("=", 1) for p in text.split(", ") if p)
    headroom = {"headroom": float(pairs.pop("headroom"))} if "headroom" in pairs else {}
    return Envelope(**headroom, caps={line: int(cap) for line, cap in pairs.items()})


# -- programs


def parse_program(text: str, file: str = "<text>", first_line: int = 1) -> StepProgram:
    """A `StepProgram` from text; the roles of its inputs go by their names."""
    text = text if re.search(r"\bkey: ", text) else text.replace("fx_graph(", "fx_graph(key: i64[], ", 1)
    shape_env = EnvelopeShapeEnv()
    shape_env.recording = False
    module, _ = parse_fx_graph(text, shape_env, file=file, first_line=first_line)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    names = [n.meta["input_name"] for n in placeholders]
    roles = [_role(name) for name in names]
    if roles != sorted(roles):
        raise ZgError(f"{file}: inputs come in the order key, length0, arg0, hyper0, lifted, not {', '.join(names)}")
    of_role = [[n for n, r in zip(placeholders, roles, strict=True) if r == role] for role in range(len(_ROLES))]
    lengths, arguments, hypers, lifted = of_role[1:]
    groups = _length_groups(lengths, module.graph.nodes)
    lifted_names = [n.meta["input_name"] for n in lifted]
    writes = module.meta["writes"]
    equal = [(e.lhs, e.rhs) for e, value in module.meta["requires"] if value and _is_equality(e)]
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    returned = len(output.args[0]) - sum(at is not None for _, at in writes)
    return StepProgram(
        fx_graph=module,
        shape_env=shape_env,
        lengths=len(lengths),
        arguments=[_argument(n, i, groups.get(n)) for i, n in enumerate(arguments)],
        hyperparameters=[n.meta["input_name"] for n in hypers],
        lifted=[LiftedInput(name, _unresolved, "tensor") for name in lifted_names],
        user_outputs=returned,
        out_spec=tree_flatten((None,) * returned)[1],
        state_writes=[StateWrite(lifted_names.index(t), at) for t, at in writes if not t.startswith("grad(")],
        gradient_writes=[
            GradientWrite(lifted_names.index(t.removeprefix("grad(").removesuffix(")")), at)
            for t, at in writes
            if t.startswith("grad(")
        ],
        conditions=[
            Condition(e, value, None) for e, value in module.meta["requires"] if not (value and _is_equality(e))
        ],
        equalities=equal,
        hyper_symbols=[n.meta["val"].node.expr for n in hypers],
    )


def _role(name: str) -> int:
    found = re.fullmatch(r"(key|length|arg|hyper)\d*", name)
    return _ROLES.index(found[1]) if found else 4


def _is_equality(expr: sympy.Basic) -> bool:
    return isinstance(expr, sympy.Eq) and expr.lhs.is_Symbol and expr.rhs.is_Symbol


def _length_groups(lengths: list[Node], nodes: Any) -> dict[Node, int]:
    """Argument -> the length that its rows have; also rows -> length, for the arguments that share it."""
    groups: dict[Node, int] = {}
    for node in nodes:
        if node.target is torch.ops.zgcompile.dynamic_rows.default:
            groups[node.args[0]] = groups[node] = lengths.index(node.args[1])
        elif node.target is torch.ops.zgcompile.dynamic_rows_like.default:
            groups[node.args[0]] = groups[node.args[1]]
    return groups


def _argument(node: Node, position: int, length: int | None) -> ArgumentInput:
    value = node.meta["val"]
    trailing = tuple(value.shape if length is None else value.shape[1:])
    return ArgumentInput(node.meta["input_name"], position, length, value.dtype, value.device, trailing)


def _unresolved() -> torch.Tensor:
    raise AssertionError("a lifted input of a golden case has no tensor of its own")


# -- running the passes


@dataclass
class Outcome:
    """What the passes of a case made: the program, its bounds and lowered form where they got so far, the text."""

    program: StepProgram
    changed: bool
    bounds: Bounds | None
    lowered: LoweredStep | None
    text: str


def transform(case: Case, times: int = 1) -> Outcome:
    """Runs the passes of the case, each `times` times in a row. Raises what a pass raises."""
    program = parse_program(case.before, case.path.name, case.line)
    bounds: Bounds | None = None
    lowered: LoweredStep | None = None
    changed = False
    for name in case.passes:
        for _ in range(times):
            if name == "canonicalise":
                changed = Canonicalise().apply(program)
            elif name == "infer-bounds":
                bounds = bounds_of(case, program)
            elif name == "lower":
                bounds = bounds or bounds_of(case, program)
                lowered = lower(program, bounds, CPU)
            else:
                raise ZgError(f"{case.path}: there is no pass {name}")
    return Outcome(program, changed, bounds, lowered, outcome_text(case, program, bounds, lowered))


def outcome_text(case: Case, program: StepProgram, bounds: Bounds | None, lowered: LoweredStep | None) -> str:
    if lowered is not None:
        return print_fx_graph(lowered.fx_graph, names=lowered_names(program))
    lines = re.search(r"# \S+:\d+$", case.before, re.MULTILINE) is not None
    if bounds is not None:
        return print_fx_graph(program, caps=bounds.caps, ids=bounds.ids, spans=True, lines=lines)
    return print_fx_graph(program, lines=lines)


def lowered_names(program: StepProgram) -> list[str]:
    names, first, hypers = input_names(program), program.first_lifted(), len(program.hyperparameters)
    grads = [f"{program.lifted[w.lifted].name}.grad" for w in program.gradient_writes if w.output is not None]
    return ["launch", *names[: first - hypers], "hypers", *names[first:], *grads]


def bounds_of(case: Case, program: StepProgram) -> Bounds:
    symbols = dict(zip(case_sizes(program), _born(program), strict=True))
    observed = Observed({symbols[name]: count for name, count in case.observed.items()})
    lifted = program.placeholders[program.first_lifted() :]
    tables = {i: span_of(node) for i, node in enumerate(lifted) if span_of(node) != UNKNOWN}
    return infer_bounds(program, observed, case.envelope, tables)


def _born(program: StepProgram) -> list[sympy.Symbol]:
    born = [s for n in program.fx_graph.graph.nodes for s in n.meta.get("unbacked_bindings") or {}]
    return [s for s in born if s.is_integer]


def case_sizes(program: StepProgram) -> list[str]:
    return [f"n{i}" for i in range(len(_born(program)))]


def round_trip(text: str) -> str:
    """Printed, parsed and printed again, with what the text has of lines and spans."""
    module, _ = parse_fx_graph(text, _shape_env())
    return print_fx_graph(module, spans=True, lines=re.search(r"# \S+:\d+$", text, re.MULTILINE) is not None)


def _shape_env() -> EnvelopeShapeEnv:
    shape_env = EnvelopeShapeEnv()
    shape_env.recording = False
    return shape_env
