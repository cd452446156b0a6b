"""The text of an FX graph: what users read, golden tests compare and bug reports quote; the parser reads it back.

    fx_graph(length0: i64[], arg0: f32[8, 4], w: f32[4, 2]):
      n0 <= 8: rows(arg0) %0: f32[n0<=8, 4] = zgcompile.dynamic_rows(arg0, length0) %1: f32[n0<=8, 2] pad=any =
      aten.mm(%0, w) w <- %2 return (%1)

Values are numbered in order of printing, sizes (`n0`) and device floats (`f0`) in order of birth, each declared once.
Arithmetic on sizes and floats is folded into the arguments that use it. Required arguments come by position, the others
by name and only when they differ from the default. Left out because they say nothing: the device of the FX graph,
strided layout, unpinned memory, and a `key` or a vector `hypers` that nothing uses.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from zgcompile.ir.bounded import as_size
from zgcompile.ir.program import StepProgram
from zgcompile.ir.size_text import SizeNames
from zgcompile.ir.sizes import SYMBOLIC, upper_bound
from zgcompile.ir.source import user_line_from_stack_trace
from zgcompile.ir.spans import INT64_HIGH, INT64_LOW, UNKNOWN, Span

aten = torch.ops.aten
DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
MEMORY_FORMATS = {
    torch.contiguous_format: "contiguous",
    torch.preserve_format: "preserve",
    torch.channels_last: "channels_last",
}
# How the birth of a size is called where its op has another name.
BIRTHS = {
    "zgcompile.dynamic_rows": "rows",
    "aten._local_scalar_dense": "item",
    "aten.index": "mask",
    "aten._unique2": "unique",
    "aten.unique_dim": "unique",
}
DEFAULT_OVERLOADS = ("default", "Tensor", "self", "int")
SILENT_INPUTS = ("key", "hypers")  # not printed when nothing uses them
LARGEST_CONSTANT = 16  # elements of a tensor constant that is printed
WIDEST_HEADER = 120  # characters; a longer header has one input a line
OPERATORS = {
    operator.add: ("+", 4),
    operator.sub: ("-", 4),
    operator.mul: ("*", 5),
    operator.truediv: ("/", 5),
    operator.floordiv: ("//", 5),
    operator.mod: ("%", 5),
    operator.pow: ("**", 7),
    pow: ("**", 7),
    operator.eq: ("==", 3),
    operator.ne: ("!=", 3),
    operator.lt: ("<", 3),
    operator.le: ("<=", 3),
    operator.gt: (">", 3),
    operator.ge: (">=", 3),
}


def print_fx_graph(
    fx_graph: GraphModule | StepProgram,
    *,
    caps: Mapping[sympy.Symbol, int] | None = None,
    ids: Mapping[str, int] | None = None,
    names: Sequence[str] | None = None,
    lines: bool = False,
    pads: bool = True,
    spans: bool = False,
) -> str:
    """The text of a dynamic or lowered FX graph, ending in a newline.

    `caps` are the capacities of size symbols and `ids` the id bound of each `unique` node, as infer-bounds finds them;
    None: what a parsed text said. `names` are those of the inputs, in order. `lines` adds the user's line as a comment,
    `pads` and `spans` what `node.meta` has of pad states and value ranges.
    """
    program = fx_graph if isinstance(fx_graph, StepProgram) else None
    module = fx_graph if isinstance(fx_graph, GraphModule) else fx_graph.fx_graph
    printer = _Printer(module, program, names, caps, ids)
    printer.lines, printer.pads, printer.spans = lines, pads, spans
    return printer.text()


def type_texts(module: GraphModule) -> dict[Node, str]:
    """The type of every value, as `print_fx_graph` prints it."""
    printer = _Printer(module, None, None, None, None)
    return {node: printer._type(node.meta.get("val")) for node in printer.nodes}


def default_overload(packet: Any) -> str:
    """The overload that a name without one stands for."""
    overloads = packet.overloads()
    # The default of aten.add is one of plain numbers.
    known = (o for o in DEFAULT_OVERLOADS if o in overloads and "Tensor" in str(getattr(packet, o)._schema))
    return next(known, overloads[0])


def op_name(target: Any) -> str:
    """`aten.mm`, `aten.gt.Scalar`, `zgcompile.unique`."""
    if not isinstance(target, torch._ops.OpOverload):
        return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"
    name = f"{target.namespace}.{target._opname}"
    return name if target._overloadname == default_overload(target.overloadpacket) else f"{name}.{target._overloadname}"


def input_names(program: StepProgram) -> list[str]:
    """A readable, unique name for each placeholder, in order."""
    names = ["key", *[f"length{i}" for i in range(program.lengths)], *[a.name for a in program.arguments]]
    names += [*program.hyperparameters, *[entry.name for entry in program.lifted]]
    return _unique([_clean(name) for name in names])


def birth(node: Node, refer: Any) -> str:
    """What a size is declared as, e.g. `unique(%1)`; `refer` names the operand."""
    packet = op_name(node.target).split(".")
    operand: Any = next((a for a in reversed(tree_leaves(node.args)) if isinstance(a, Node)), None)
    if node.target in (aten.slice.Tensor, aten._unique2.default) or "dynamic_rows" in packet:
        operand = node.args[0]
    return f"{BIRTHS.get('.'.join(packet[:2]), packet[1])}({refer(operand)})"


def symbolic(node: Any) -> bool:
    """A size or float that is folded into the arguments that use it."""
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and isinstance(node.meta.get("val"), SYMBOLIC)
        and not node.meta.get("unbacked_bindings")
    )


def _clean(name: str) -> str:
    name = re.sub(r"\W*\[['\"]?(\w+)['\"]?\]", r".\1", name)
    name = re.sub(r"[^\w.]+", "_", name).strip("._") or "input"
    return name if name[0].isalpha() or name[0] == "_" else f"_{name}"


def _unique(names: list[str]) -> list[str]:
    taken: dict[str, int] = {}
    result = []
    for name in names:
        taken[name] = taken.get(name, 0) + 1
        result.append(name if taken[name] == 1 else f"{name}_{taken[name]}")
    return result


class _Printer:
    lines = pads = spans = False

    def __init__(
        self,
        module: GraphModule,
        program: StepProgram | None,
        names: Sequence[str] | None,
        caps: Mapping[sympy.Symbol, int] | None,
        ids: Mapping[str, int] | None,
    ) -> None:
        self.module, self.program = module, program
        self.nodes = list(module.graph.nodes)
        self.inputs = [n for n in self.nodes if n.op == "placeholder"]
        self.caps = module.meta.get("caps", {}) if caps is None else caps
        self.ids = module.meta.get("ids", {}) if ids is None else ids
        self.device = main_device(self.inputs)
        given = names or (
            input_names(program) if program else [n.meta.get("input_name", str(n.target)) for n in self.inputs]
        )
        self.values: dict[Node, str] = dict(zip(self.inputs, given, strict=True))
        self.sizes = SizeNames(module.graph, self.values, self.caps)
        self.folded: set[Node] = set()
        self.count = 0

    def text(self) -> str:
        self._fold_gates()
        body: list[str] = []
        for node in self.nodes:
            if node.op in ("call_function", "get_attr") and node not in self.folded and not symbolic(node):
                body += self._statement(node)
        body += self._requirements()
        body += self._results()
        return "\n".join([self._header(), *[f"  {line}" for line in body]]) + "\n"

    def _header(self) -> str:
        shown = [n for n in self.inputs if n.users or self.values[n] not in SILENT_INPUTS]
        inputs = [f"{self.values[n]}: {self._typed(n)}" for n in shown]
        line = f"fx_graph({', '.join(inputs)}):"
        if len(line) <= WIDEST_HEADER:
            return line
        return "\n".join(["fx_graph(", *[f"  {text}," for text in inputs], "):"])

    # -- statements

    def _statement(self, node: Node) -> list[str]:
        declared = [self._declaration(node, symbol) for symbol in node.meta.get("unbacked_bindings") or {}]
        if isinstance(node.meta.get("val"), SYMBOLIC):
            return [f"{line}{self._source(node)}" for line in declared]
        gate = self.gates.get(node)
        if gate is not None:
            target, good, new = gate
            return [f"gated({self._refer(good)}) {self._refer(target)} <- {self._refer(new)}{self._source(node)}"]
        right = self._right(node)
        left = ", ".join(self._left(node))
        return [*declared, f"{left} = {right}{self._source(node)}" if left else f"{right}{self._source(node)}"]

    def _declaration(self, node: Node, symbol: sympy.Symbol) -> str:
        cap = self.sizes.cap(symbol)
        known = "" if cap is None else f" <= {cap}"
        bound = self.ids.get(node.name)
        below = "" if bound is None else f" below {bound}"
        return f"{self.sizes.names[symbol]}{known}: {birth(node, self._refer)}{below}"

    def _left(self, node: Node) -> list[str]:
        value = node.meta.get("val")
        if value is None and node.op == "call_function" and not node.users:
            return []
        if not node.users and node.op == "call_function" and any(self._writes(node)):
            return []
        parts = _parts(node)
        if parts is None:
            return [self._named(node)]
        self.folded |= set(parts.values())
        return [self._named(parts[i]) if i in parts else f"_: {self._type(v)}" for i, v in enumerate(value or ())]

    def _named(self, node: Node) -> str:
        self.values[node] = f"%{self.count}"
        self.count += 1
        return f"{self.values[node]}: {self._typed(node)}"

    def _right(self, node: Node) -> str:
        if node.op == "get_attr":
            return f"constant({_constant(operator.attrgetter(str(node.target))(self.module))})"
        if node.target is operator.getitem:
            return f"{self._refer(node.args[0])}[{node.args[1]}]"
        if not isinstance(node.target, torch._ops.OpOverload):
            arguments = [self._argument(a) for a in node.args] + [
                f"{k}={self._argument(v)}" for k, v in node.kwargs.items()
            ]
            return f"{op_name(node.target)}({', '.join(arguments)})"
        return f"{op_name(node.target)}({', '.join(self._arguments(node))})"

    def _arguments(self, node: Node) -> list[str]:
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        given = dict(zip([a.name for a in schema], node.args, strict=False)) | node.kwargs
        shown = []
        for argument, written in zip(schema, self._writes(node), strict=True):
            if argument.name not in given or (
                argument.has_default_value() and self._says_nothing(argument, given[argument.name])
            ):
                continue
            text = self._argument(given[argument.name]) + ("!" if written else "")
            shown.append(f"{argument.name}={text}" if argument.has_default_value() or argument.kwarg_only else text)
        return shown

    def _writes(self, node: Node) -> list[bool]:
        if not isinstance(node.target, torch._ops.OpOverload):
            return []
        return [a.alias_info is not None and a.alias_info.is_write for a in node.target._schema.arguments]

    def _says_nothing(self, argument: Any, value: Any) -> bool:
        if any(isinstance(v, (Node, *SYMBOLIC)) for v in tree_leaves(value)):
            return False
        silent = {
            "pin_memory": value in (None, False),
            "layout": value in (None, torch.strided),
            "device": value is None or torch.device(value) == self.device if argument.name == "device" else False,
            "memory_format": value in (None, torch.preserve_format),
            "start": value == 0,
            "end": value == INT64_HIGH - 1,
        }
        return silent.get(argument.name, False) or (
            type(value) is type(argument.default_value) and value == argument.default_value
        )

    def _source(self, node: Node) -> str:
        where = user_line_from_stack_trace(node.meta.get("stack_trace") or "") if self.lines else None
        return "" if where is None else f"  # {where}"

    # -- state writes and results

    def _fold_gates(self) -> None:
        """`copy_(x, where(good, new, x))` reads as `gated(good) x <- new`."""
        self.gates: dict[Node, tuple[Any, Any, Any]] = {}
        for node in self.nodes:
            if node.target is aten.copy_.default and not node.users and len(node.args) == 2:
                target, chosen = node.args
                if isinstance(chosen, Node) and chosen.target is aten.where.self and len(chosen.users) == 1:
                    good, new, old = chosen.args
                    if old is target:
                        self.gates[node] = (target, good, new)
                        self.folded.add(chosen)

    def _requirements(self) -> list[str]:
        if self.program is None:
            requirements = self.module.meta.get("requires", [])
        else:
            pairs = [(a, b) for a, b in self.program.equalities if a in self.sizes.names and b in self.sizes.names]
            requirements = [(sympy.Eq(a, b, evaluate=False), True) for a, b in pairs]
            requirements += [(c.expr, c.value) for c in self.program.conditions]
        return [f"require {'' if value else 'not '}{self.sizes.text(expr, own=True)}" for expr, value in requirements]

    def _results(self) -> list[str]:
        outputs = tree_leaves(self.nodes[-1].args[0], is_leaf=lambda v: v is None)
        if self.program is None:
            writes = self.module.meta.get("writes", [])
            returned = len(outputs) - sum(at is not None for _, at in writes)
        else:
            names = [self.values[n] for n in self.inputs[self.program.first_lifted() :]]
            writes = [(f"grad({names[w.lifted]})", w.output) for w in self.program.gradient_writes]
            writes += [(names[w.lifted], w.output) for w in self.program.state_writes]
            returned = self.program.user_outputs
        lines = [f"{target} <- {'None' if at is None else self._argument(outputs[at])}" for target, at in writes]
        return [*lines, f"return ({', '.join(self._argument(v) for v in outputs[:returned])})"]

    # -- values and types

    def _refer(self, value: Any) -> str:
        return self._argument(value)

    def _argument(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._number(value)[0] if isinstance(value.meta.get("val"), SYMBOLIC) else self.values[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(v) for v in value)}]"
        if isinstance(value, torch.dtype):
            return DTYPES[value]
        if isinstance(value, torch.memory_format):
            return MEMORY_FORMATS[value]
        if isinstance(value, torch.layout):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return repr(str(value))
        return repr(value)

    def _number(self, node: Node) -> tuple[str, int]:
        """The folded text of a size or float, and how tightly it binds."""
        if node.op == "placeholder":
            return self.values[node], 9
        value = node.meta["val"]
        if isinstance(value, torch.SymInt) or node.meta.get("unbacked_bindings"):
            return self.sizes.bound(value.node.expr)
        operand = [
            self._number(a) if isinstance(a, Node) else (repr(a), 9 if not isinstance(a, (int, float)) or a >= 0 else 6)
            for a in node.args
        ]
        if node.target is operator.neg:
            return f"-{_inside(operand[0], 6)}", 6
        if node.target in OPERATORS:
            sign, tightness = OPERATORS[node.target]
            left, right = (8, 7) if sign == "**" else (tightness, tightness + 1)
            return f"{_inside(operand[0], left)} {sign} {_inside(operand[1], right)}", tightness
        name = getattr(node.target, "__name__", str(node.target)).replace("_sym_", "").replace("sym_", "")
        return f"{name}({', '.join(text for text, _ in operand)})", 9

    def _typed(self, node: Node) -> str:
        """Type and facts."""
        value = node.meta.get("val")
        text = self._type(value)
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and not _is_packed(value):
            text += f" strides={list(value.stride())}"
        if self.pads and "pad" in node.meta:
            text += f" pad={node.meta['pad']}"
        span = node.meta.get("span", UNKNOWN)
        if (
            (self.spans or node.op == "placeholder")
            and span != UNKNOWN
            and not (isinstance(value, torch.Tensor) and value.dtype == torch.bool)
        ):
            text += f" span={self._span(span)}"
        return text

    def _type(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            device = "" if value.device == self.device else f"@{value.device}"
            return f"{DTYPES[value.dtype]}[{', '.join(self._dimension(s) for s in value.shape)}]{device}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(self._type(v) for v in value)})"
        kinds = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool", type(None): "none"}
        return kinds.get(type(value), "object")

    def _dimension(self, size: Any) -> str:
        expr = as_size(size)
        if isinstance(expr, int):
            return str(expr)
        expr = self.sizes.root(expr)
        text = self.sizes.text(expr)
        caps = {s: self.sizes.cap(s) for s in expr.free_symbols}
        if not caps or None in caps.values():
            return text
        bound = upper_bound(expr, caps)  # type: ignore[arg-type]
        return f"{text}<={bound}" if expr.is_Symbol else f"{text} <= {bound}"

    def _span(self, span: Span) -> str:
        low = "-inf" if span.low <= INT64_LOW else str(span.low)
        high = "inf" if span.high >= INT64_HIGH else str(span.high)
        return (
            f"[{low}, {high})"
            if span.below is None
            else f"[{low}, {self.sizes.text(self.sizes.root(span.below))} <= {high})"
        )


def main_device(inputs: Sequence[Node]) -> torch.device:
    """The accelerator of the inputs, where there is one."""
    devices = [n.meta["val"].device for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _parts(node: Node) -> dict[int, Node] | None:
    """The `getitem` of each result of an op with several, or None where the results are used in another way."""
    if not isinstance(node.meta.get("val"), (tuple, list)):
        return None
    parts: dict[int, Node] = {}
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] in parts:
            return None
        parts[user.args[1]] = user  # type: ignore[index]
    return parts


def _inside(operand: tuple[str, int], tightness: int) -> str:
    text, own = operand
    return f"({text})" if own < tightness else text


def _constant(tensor: torch.Tensor) -> str:
    return repr(tensor.tolist()) if tensor.numel() <= LARGEST_CONSTANT else "..."


def _is_packed(value: torch.Tensor) -> bool:
    stride = 1
    for size, own in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if isinstance(size, torch.SymInt) or size == 1:
            if isinstance(size, torch.SymInt):
                return True
            continue
        if own != stride:
            return False
        stride *= size
    return True
