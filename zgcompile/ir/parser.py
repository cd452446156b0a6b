"""Builds an FX graph from the text that `zgcompile.ir.printer` prints: for golden tests and bug reports.

Every op runs once on fake tensors, so shapes, dtypes and size symbols are those a trace would give, and every type and
declaration in the text is checked against them.
"""

from __future__ import annotations

import contextlib
import operator
import re
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, compute_unbacked_bindings
from torch.utils._pytree import tree_map

from zgcompile.errors import SourceLine, ZgError
from zgcompile.ir.printer import DTYPES, MEMORY_FORMATS, OPERATORS, birth, default_overload, type_texts
from zgcompile.ir.reader import Reader, read
from zgcompile.ir.spans import INT64_HIGH, INT64_LOW, Span
from zgcompile.ir.syntax import (
    Assignment,
    Call,
    Constant,
    Declaration,
    Expression,
    FxGraphText,
    Items,
    Literal,
    Name,
    Operation,
    Part,
    Place,
    Requirement,
    Result,
    TypeText,
    Write,
)

aten = torch.ops.aten
_OP = re.compile(r"(?:(\w+)\.(?=\w+))?(\w+)(?:\.(\w+))?")
_DTYPES = {short: dtype for dtype, short in DTYPES.items()}
_FORMATS = {short: memory_format for memory_format, short in MEMORY_FORMATS.items()}
_LAYOUTS = {"strided": torch.strided, "sparse_coo": torch.sparse_coo, "sparse_csr": torch.sparse_csr}
_SIGNS: dict[str, Any] = {sign: op for op, (sign, _) in reversed(OPERATORS.items())}
_FUNCTIONS: dict[str, Any] = {
    "max": torch.sym_max,
    "min": torch.sym_min,
    "float": torch.sym_float,
    "sqrt": torch._sym_sqrt,  # type: ignore[attr-defined]
}
HYPERPARAMETER = 0.5  # the present value of a float input: only its symbol counts


def parse_fx_graph(
    text: str, shape_env: ShapeEnv | None = None, *, file: str = "<text>", first_line: int = 1
) -> tuple[GraphModule, ShapeEnv]:
    """The FX graph of a text, with fake tensors in `meta["val"]`, and the ShapeEnv of its size symbols.

    What the text says beyond the ops is in `GraphModule.meta`: `caps` (symbol -> capacity), `ids` (node name -> id
    bound), `writes` (target, output position or None) and `requires` (comparison, value). `file` and `first_line` place
    the text for errors.

    Raises:
        ZgError: with line and column, where the text cannot be read, names what does not exist, or states a type that
            an op does not give.
    """
    tree, reader = read(text, file, first_line)
    builder = _Builder(reader, shape_env or ShapeEnv())
    with builder.modes():
        builder.build(tree)
    module = GraphModule(builder.root, builder.graph)
    module.meta |= {"caps": builder.caps, "ids": builder.ids, "writes": builder.writes, "requires": builder.requires}
    builder.check_types(module, tree)
    return module, builder.shape_env


class _Builder:
    def __init__(self, reader: Reader, shape_env: ShapeEnv) -> None:
        self.reader, self.shape_env = reader, shape_env
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
        self.root, self.graph = torch.nn.Module(), Graph()
        self.nodes: dict[str, Node] = {}
        # Name of a size -> the node that is it, or a dimension that has it.
        self.sizes: dict[str, Node | tuple[Node, int]] = {}
        self.symbols: dict[str, sympy.Symbol] = {}
        self.declared: list[Declaration] = []
        self.memo: dict[str, Node] = {}
        self.caps: dict[sympy.Symbol, int] = {}
        self.ids: dict[str, int] = {}
        self.writes: list[tuple[str, int | None]] = []
        self.requires: list[tuple[sympy.Basic, bool]] = []
        self.outputs: list[Any] = []

    @contextlib.contextmanager
    def modes(self) -> Any:
        with self.fake_mode, enable_python_dispatcher(), torch.no_grad():
            yield

    def build(self, tree: FxGraphText) -> None:
        for entry in tree.inputs:
            self.input(entry)
        late: list[Write] = []
        for statement in tree.statements:
            if isinstance(statement, Declaration):
                self.declare(statement)
            elif isinstance(statement, Assignment):
                self.assign(statement)
            elif isinstance(statement, Requirement):
                self.requires.append((self.comparison(statement.expr), statement.value))
            elif statement.good is not None:
                self.gated(statement, statement.good)
            else:
                late.append(statement)
        if self.declared:
            raise self.error(f"no op gives birth to {self.declared[0].name}", self.declared[0].at)
        self.outputs = [self.value(v) for v in tree.returns]
        for write in late:
            self.write(write)
        self.graph.output(self.outputs)

    # -- inputs

    def input(self, entry: Result) -> None:
        if entry.name in self.nodes or entry.type is None:
            raise self.error(
                f"the input {entry.name} has no type" if entry.type is None else f"two inputs are called {entry.name}",
                entry.at,
            )
        node = self.graph.placeholder("".join(c if c.isalnum() else "_" for c in entry.name))
        node.meta |= {"input_name": entry.name, "val": self.input_value(entry, entry.type)}
        self.nodes[entry.name] = node
        self.facts(node, entry)

    def input_value(self, entry: Result, kind: TypeText) -> Any:
        if kind.kind == "float":
            return self.float_input(entry.name)
        dtype = _DTYPES.get(kind.kind)
        if dtype is None:
            raise self.error(f"{kind.text} is not the type of an input", kind.at)
        shape = [self.static(expr) for expr, _ in kind.dims]
        if entry.strides is None:
            return torch.empty(shape, dtype=dtype, device=kind.device or "cpu")
        return torch.empty_strided(shape, entry.strides, dtype=dtype, device=kind.device or "cpu")

    def float_input(self, name: str) -> Any:
        from torch._dynamo.source import ConstantSource

        source = ConstantSource(name)
        symbol = self.shape_env.create_unspecified_symbol(HYPERPARAMETER, source, DimDynamic.DYNAMIC)
        return self.shape_env.create_symfloatnode(symbol, hint=HYPERPARAMETER, source=source)

    def static(self, expr: Expression) -> int:
        if isinstance(expr, Literal) and isinstance(expr.value, int):
            return expr.value
        raise self.error("an input has static sizes: its rows become dynamic through zgcompile.dynamic_rows", expr.at)

    # -- statements

    def declare(self, statement: Declaration) -> None:
        if statement.name in self.symbols or any(d.name == statement.name for d in self.declared):
            raise self.error(f"{statement.name} is declared twice", statement.at)
        self.declared.append(statement)
        if statement.kind == "item":
            node = self.run(
                aten._local_scalar_dense.default, (self.node(statement.operand),), {}, statement.at, statement.source
            )
            self.born(node, [node], statement.at)

    def assign(self, statement: Assignment) -> None:
        right = statement.right
        if isinstance(right, Part):
            node = self.run(operator.getitem, (self.node(right.of), right.index), {}, right.at, statement.source)
        elif isinstance(right, Constant):
            node = self.constant(right, statement.results)
        else:
            target = self.op(right)
            args, kwargs = self.bind(target, right)
            node = self.run(target, args, kwargs, right.at, statement.source)
        results, value = statement.results, node.meta["val"]
        found = [node]
        if len(results) > 1:
            if not isinstance(value, (tuple, list)) or len(value) != len(results):
                given = len(value) if isinstance(value, (tuple, list)) else 1
                raise self.error(f"{given} results are given {len(results)} names", results[0].at)
            found = [
                self.run(operator.getitem, (node, i), {}, r.at, statement.source) if r.name != "_" else None  # type: ignore[misc]
                for i, r in enumerate(results)
            ]
        for result, part in zip(results, found, strict=False):
            if part is not None:
                self.name_value(result, part)
        self.born(node, [part for part in found if part is not None], right.at)
        for result, part in zip(results, found, strict=False):
            if part is not None:
                self.facts(part, result)

    def name_value(self, result: Result, node: Node) -> None:
        if result.name in self.nodes:
            raise self.error(f"{result.name} is given twice", result.at)
        self.nodes[result.name] = node

    def constant(self, right: Constant, results: tuple[Result, ...]) -> Node:
        kind = results[0].type if results else None
        if kind is None or kind.kind not in _DTYPES:
            raise self.error("a constant needs a dtype: `%0: f32[2] = constant([0.5, 1.5])`", right.at)
        name = f"_constant{sum(1 for n in self.graph.nodes if n.op == 'get_attr')}"
        # The data of a constant is real: an op may read it.
        with torch._C._DisableTorchDispatch():
            data = torch.tensor(self.value(right.value), dtype=_DTYPES[kind.kind]).reshape(
                [self.static(d) for d, _ in kind.dims]
            )
        self.root.register_buffer(name, data)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.fake_mode.from_tensor(data, static_shapes=True)
        return node

    def gated(self, statement: Write, good: Name) -> None:
        target = self.node(statement.target)
        chosen = self.run(
            aten.where.self, (self.node(good), self.value(statement.new), target), {}, statement.at, statement.source
        )
        self.run(aten.copy_.default, (target, chosen), {}, statement.at, statement.source)

    def write(self, statement: Write) -> None:
        name = statement.target.text
        self.node(statement.target)
        value = self.value(statement.new)
        self.writes.append((f"grad({name})" if statement.grad else name, None if value is None else len(self.outputs)))
        if value is not None:
            self.outputs.append(value)

    # -- ops

    def op(self, call: Call) -> Any:
        space, name, overload = _OP.fullmatch(call.op).groups()  # type: ignore[union-attr]
        packet = getattr(getattr(torch.ops, space or "aten"), name, None)
        if packet is None:
            raise self.error(f"there is no op {space or 'aten'}.{name}", call.at)
        overload = overload or default_overload(packet)
        if overload not in packet.overloads():
            raise self.error(
                f"{call.op} is not an overload: {name} has {', '.join(sorted(packet.overloads()))}", call.at
            )
        return getattr(packet, overload)

    def bind(self, target: Any, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as a trace records them: by position up to the last one given, keyword-only ones by name."""
        schema = target._schema.arguments
        positional = [a for a in schema if not a.kwarg_only]
        if len(call.arguments) > len(positional):
            raise self.error(
                f"{call.op} takes {len(positional)} arguments by position, not {len(call.arguments)}", call.at
            )
        given = {a.name: self.value(v) for a, v in zip(positional, call.arguments, strict=False)}
        for name, expr in call.keywords.items():
            argument = next((a for a in schema if a.name == name), None)
            if argument is None or name in given:
                raise self.error(
                    f"{call.op} has no argument {name}" if argument is None else f"{name} is given twice", expr.at
                )
            given[name] = self.value(expr)
        missing = next((a.name for a in schema if a.name not in given and not a.has_default_value()), None)
        if missing is not None:
            raise self.error(f"{call.op} needs the argument {missing}", call.at)
        last = max((i for i, a in enumerate(positional) if a.name in given), default=-1)
        args = tuple(
            given.get(a.name, a.default_value if a.has_default_value() else None) for a in positional[: last + 1]
        )
        return args, {a.name: given[a.name] for a in schema if a.kwarg_only and a.name in given}

    def run(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: Place, source: SourceLine | None
    ) -> Node:
        """Appends a call and runs it on fake tensors."""
        node = self.graph.call_function(target, args, kwargs)
        values = tree_map(
            lambda v: v.meta["val"] if isinstance(v, Node) else v, (args, kwargs), is_leaf=lambda v: isinstance(v, Node)
        )
        try:
            value = target(*values[0], **values[1])
        except ZgError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise self.error(f"{target} fails: {reason}", at) from error
        node.meta["val"] = value
        if source is not None:
            node.meta["stack_trace"] = f'File "{source.file}", line {source.line}, in step\n'
        bindings = compute_unbacked_bindings(self.shape_env, value)
        if bindings:
            node.meta["unbacked_bindings"] = bindings
        return node

    def born(self, node: Node, results: list[Node], at: Place) -> None:
        """Matches the declarations in front of `node` with the sizes it gives birth to."""
        symbols = list(node.meta.get("unbacked_bindings") or {})
        for symbol in symbols:
            if not self.declared:
                raise self.error(f"{node.target} makes a size that is not declared in front of it", at)
            declaration = self.declared.pop(0)
            name = declaration.name
            found = birth(node, self.spelling)
            if found != f"{declaration.kind}({declaration.operand.text})":
                raise self.error(
                    f"{name} is born by {found}, not {declaration.kind}({declaration.operand.text})", declaration.at
                )
            self.symbols[name] = symbol
            self.sizes[name] = self.holder(symbol, results)
            if declaration.cap is not None:
                self.caps[symbol] = declaration.cap
            if declaration.below is not None:
                self.ids[node.name] = declaration.below
        if self.declared:
            raise self.error(f"no size is born here for {self.declared[0].name}", self.declared[0].at)

    def holder(self, symbol: sympy.Symbol, results: list[Node]) -> Node | tuple[Node, int]:
        for result in results:
            value = result.meta["val"]
            if isinstance(value, (torch.SymInt, torch.SymFloat)):
                return result
            if isinstance(value, torch.Tensor):
                for d, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                        return result, d
        return results[0]

    def spelling(self, operand: Any) -> str:
        return next((name for name, node in self.nodes.items() if node is operand), str(operand))

    # -- values

    def node(self, name: Name) -> Node:
        found = self.nodes.get(name.text)
        if found is None:
            raise self.error(f"{name.text} is not defined", name.at)
        return found

    def value(self, expr: Expression) -> Any:
        """What an argument stands for: a node, a list, or a plain value."""
        if isinstance(expr, Literal):
            return expr.value
        if isinstance(expr, Items):
            return [self.value(item) for item in expr.items]
        if isinstance(expr, Operation):
            return self.operation(expr)
        if expr.text in self.nodes:
            return self.nodes[expr.text]
        if expr.text in self.sizes:
            return self.size(expr.text)
        for words in (_DTYPES, _FORMATS, _LAYOUTS):
            if expr.text in words:
                return words[expr.text]
        raise self.error(f"{expr.text} is not defined", expr.at)

    def size(self, name: str) -> Node:
        place = self.sizes[name]
        if isinstance(place, Node):
            return place
        if name not in self.memo:
            tensor, dim = place
            self.memo[name] = self.run(aten.sym_size.int, (tensor, dim), {}, Place(1, 1), None)
        return self.memo[name]

    def operation(self, expr: Operation) -> Any:
        """Arithmetic on sizes and floats: one node for each distinct expression."""
        operands = [self.value(v) for v in expr.operands]
        op = (
            operator.neg
            if expr.sign == "-" and len(operands) == 1
            else _SIGNS.get(expr.sign) or _FUNCTIONS.get(expr.sign)
        )
        if op is None:
            raise self.error(f"{expr.sign} is not defined", expr.at)
        if not any(isinstance(v, Node) for v in operands):
            return op(*operands)
        key = f"{expr.sign}({', '.join(v.name if isinstance(v, Node) else repr(v) for v in operands)})"
        if key not in self.memo:
            self.memo[key] = self.run(op, tuple(operands), {}, expr.at, None)
        return self.memo[key]

    def size_expression(self, expr: Expression) -> sympy.Basic:
        """The sympy form of a size, from the SymInt that it evaluates to."""
        value = self.symbolic_value(expr)
        return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else sympy.sympify(value)

    def symbolic_value(self, expr: Expression) -> Any:
        if isinstance(expr, Literal):
            return expr.value
        if isinstance(expr, Name) and expr.text in self.sizes:
            place = self.sizes[expr.text]
            return place.meta["val"] if isinstance(place, Node) else place[0].meta["val"].shape[place[1]]
        if isinstance(expr, Operation):
            operands = [self.symbolic_value(v) for v in expr.operands]
            op = (
                operator.neg
                if expr.sign == "-" and len(operands) == 1
                else _SIGNS.get(expr.sign) or _FUNCTIONS.get(expr.sign)
            )
            if op is not None:
                return op(*operands)
        raise self.error("expected a size", expr.at)

    def comparison(self, expr: Expression) -> sympy.Basic:
        relations = {"==": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge}
        if not isinstance(expr, Operation) or expr.sign not in relations:
            raise self.error("expected a comparison of sizes", expr.at)
        left, right = (self.symbol_form(v) for v in expr.operands)
        return relations[expr.sign](left, right, evaluate=False)

    def symbol_form(self, expr: Expression) -> sympy.Basic:
        """As `size_expression`, with each symbol itself and not its equal."""
        return (
            self.symbols[expr.text]
            if isinstance(expr, Name) and expr.text in self.symbols
            else self.size_expression(expr)
        )

    # -- facts and checks

    def facts(self, node: Node, result: Result) -> None:
        if result.pad is not None:
            node.meta["pad"] = result.pad
        if result.span is not None:
            low = INT64_LOW if result.span.low is None else result.span.low
            high = INT64_HIGH if result.span.high is None else result.span.high
            below = None if result.span.below is None else self.size_expression(result.span.below)
            node.meta["span"] = Span(low, high, below)

    def check_types(self, module: GraphModule, tree: FxGraphText) -> None:
        """Compares each stated type with that of the finished FX graph, when all that makes sizes equal is known."""
        actual = type_texts(module)
        results = [r for s in tree.statements if isinstance(s, Assignment) for r in s.results]
        for result in [*tree.inputs, *results]:
            node = self.nodes.get(result.name)
            if node is not None and result.type is not None and result.type.text != actual[node].replace(" ", ""):
                raise self.error(f"{result.name} is {actual[node]}", result.type.at)

    def error(self, what: str, at: Place) -> ZgError:
        return self.reader.error(what, at)
