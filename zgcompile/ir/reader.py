"""The grammar of printed FX graphs: text to statements. What the names mean is the parser's job."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zgcompile.errors import SourceLine, ZgError
from zgcompile.ir.syntax import (
    Assignment,
    Bounds,
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
    Statement,
    TypeText,
    Write,
)

_TOKEN = re.compile(
    r"(?P<space>[ \t]+)|(?P<comment>\#[^\n]*)|(?P<newline>\n)"
    r"|(?P<number>\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+|\d+)|(?P<value>%\d+)"
    r"|(?P<name>[A-Za-z_]\w*(?:\.\w+)*)|(?P<string>'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")"
    r"|(?P<sign><-|<=|>=|==|!=|//|\*\*|[()\[\]:,=<>+\-*/%@!])"
)
_WHERE = re.compile(r"#\s*(\S+):(\d+)\s*$")
_NUMBERS = {"inf": float("inf"), "nan": float("nan"), "True": True, "False": False, "None": None}
# Binary operators by how tightly they bind.
_LEVELS = [("==", "!=", "<", "<=", ">", ">="), ("+", "-"), ("*", "/", "//", "%")]


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: Place


class Reader:
    """Recursive descent over the tokens of one text. `file` and `first_line` place it for errors."""

    def __init__(self, text: str, file: str, first_line: int) -> None:
        self.file, self.first_line, self.rows = file, first_line, text.split("\n")
        self.tokens = list(self._tokens(text))
        self.next = 0

    def error(self, what: str, at: Place) -> ZgError:
        """`what`, with line, column and the line itself."""
        row = self.rows[at.line - 1] if at.line <= len(self.rows) else ""
        return ZgError(
            f"column {at.column}: {what}", where=SourceLine(self.file, self.first_line + at.line - 1, text=row.strip())
        )

    def _tokens(self, text: str) -> Any:
        line, start, position, depth = 1, 0, 0, 0
        while position < len(text):
            found = _TOKEN.match(text, position)
            at = Place(line, position - start + 1)
            if found is None:
                raise self.error(f"cannot read {text[position]!r}", at)
            kind, word = str(found.lastgroup), found.group()
            depth += (word in ("(", "[")) - (word in (")", "]"))
            if kind != "space" and not (kind in ("newline", "comment") and depth):
                yield _Token(kind, word, at)
            position = found.end()
            if kind == "newline":
                line, start = line + 1, position
        yield _Token("newline", "\n", Place(line, position - start + 1))
        yield _Token("end", "", Place(line, position - start + 1))

    # -- tokens

    @property
    def token(self) -> _Token:
        return self.tokens[self.next]

    def take(self) -> _Token:
        token = self.token
        self.next += 1
        return token

    def accept(self, text: str) -> bool:
        if self.token.text == text and self.token.kind != "string":
            self.next += 1
            return True
        return False

    def expect(self, text: str) -> Place:
        at = self.token.at
        if not self.accept(text):
            raise self.error(f"expected {text!r}, found {self._found()}", at)
        return at

    def expect_kind(self, kind: str, what: str) -> _Token:
        if self.token.kind != kind:
            raise self.error(f"expected {what}, found {self._found()}", self.token.at)
        return self.take()

    def _found(self) -> str:
        return {"newline": "the end of the line", "end": "the end of the text"}.get(
            self.token.kind, repr(self.token.text)
        )

    def listed(self, close: str, one: Callable[[], Any]) -> list[Any]:
        """Items up to `close`, a trailing comma allowed."""
        items: list[Any] = []
        while not self.accept(close):
            if items:
                self.expect(",")
                if self.accept(close):
                    break
            items.append(one())
        return items

    def skip_lines(self) -> None:
        while self.token.kind in ("newline", "comment"):
            self.next += 1

    def end_of_statement(self) -> SourceLine | None:
        found = _WHERE.match(self.take().text) if self.token.kind == "comment" else None
        if self.token.kind != "end":
            self.expect_kind("newline", "the end of the line")
        return None if found is None else SourceLine(found[1], int(found[2]))

    # -- the whole

    def fx_graph(self) -> FxGraphText:
        self.skip_lines()
        self.expect("fx_graph")
        self.expect("(")
        result = FxGraphText(self.listed(")", lambda: self.result(self.expect_kind("name", "an input"))))
        self.expect(":")
        self.end_of_statement()
        self.skip_lines()
        while not self.accept("return"):
            result.statements.append(self.statement())
            self.skip_lines()
        self.expect("(")
        result.returns = tuple(self.listed(")", self.expression))
        self.end_of_statement()
        self.skip_lines()
        if self.token.kind != "end":
            raise self.error("a statement after the return", self.token.at)
        return result

    def statement(self) -> Statement:
        first, at = self.token, self.token.at
        following = self.tokens[self.next + 1].text if first.kind != "end" else ""
        if first.kind == "end":
            raise self.error("the text ends without a return", at)
        if self.accept("require"):
            value = not self.accept("not")
            requirement = Requirement(self.expression(), value)
            self.end_of_statement()
            return requirement
        if re.fullmatch(r"[nf]\d+", first.text) and following in (":", "<="):
            return self.declaration()
        if first.text in ("gated", "grad") or following == "<-":
            return self.write()
        if first.kind == "value" or first.text == "_":
            results = [self.result(self.take())]
            while self.accept(","):
                results.append(self.result(self.take()))
            self.expect("=")
            right = self.right()
            return Assignment(tuple(results), right, self.end_of_statement())
        call = self.call(self.expect_kind("name", "a statement"))
        return Assignment((), call, self.end_of_statement())

    def declaration(self) -> Declaration:
        name = self.take()
        cap = self.integer() if self.accept("<=") else None
        self.expect(":")
        kind = self.expect_kind("name", "how the size is born")
        self.expect("(")
        operand = self.name()
        self.expect(")")
        below = self.integer() if self.accept("below") else None
        return Declaration(name.text, cap, kind.text, operand, below, name.at, self.end_of_statement())

    def write(self) -> Write:
        at, good, grad = self.token.at, None, False
        if self.accept("gated"):
            self.expect("(")
            good = self.name()
            self.expect(")")
        elif self.accept("grad"):
            grad = True
            self.expect("(")
        target = self.name()
        if grad:
            self.expect(")")
        self.expect("<-")
        new = self.expression()
        return Write(target, grad, good, new, at, self.end_of_statement())

    def right(self) -> Call | Part | Constant:
        token = self.take()
        if token.kind == "value":
            self.expect("[")
            index = self.integer()
            self.expect("]")
            return Part(Name(token.text, token.at), index, token.at)
        if token.text == "constant":
            self.expect("(")
            value = self.expression()
            self.expect(")")
            return Constant(value, token.at)
        if token.kind != "name":
            raise self.error(f"expected an op, found {token.text!r}", token.at)
        return self.call(token)

    def call(self, op: _Token) -> Call:
        arguments: list[Expression] = []
        keywords: dict[str, Expression] = {}

        def one() -> None:
            if self.token.kind == "name" and self.tokens[self.next + 1].text == "=":
                name = self.take()
                self.expect("=")
                keywords[name.text] = self.expression()
            elif keywords:
                raise self.error("a positional argument after a named one", self.token.at)
            else:
                arguments.append(self.expression())
            self.accept("!")

        self.expect("(")
        self.listed(")", one)
        return Call(op.text, op.at, tuple(arguments), keywords)

    # -- types

    def result(self, name: _Token) -> Result:
        facts: dict[str, Any] = {}
        kind = self.type() if self.accept(":") else None
        while self.token.text in ("pad", "span", "strides") and self.tokens[self.next + 1].text == "=":
            fact = self.take().text
            self.expect("=")
            if fact == "pad":
                facts["pad"] = self.expect_kind("name", "a pad state").text
            elif fact == "span":
                facts["span"] = self.span()
            else:
                self.expect("[")
                facts["strides"] = tuple(self.listed("]", self.integer))
        return Result(name.text, name.at, kind, **facts)

    def type(self) -> TypeText:
        first, at = self.next, self.token.at
        dims: list[tuple[Expression, int | None]] = []
        device = ""
        if self.accept("("):
            kind = "tuple"
            self.listed(")", self.type)
        else:
            kind = self.expect_kind("name", "a type").text
            if self.accept("["):
                dims = self.listed("]", self.dimension)
            if self.accept("@"):
                device = self.expect_kind("name", "a device").text
                device += f":{self.integer()}" if self.accept(":") else ""
        text = "".join(t.text for t in self.tokens[first : self.next])
        return TypeText(kind, tuple(dims), text, at, device)

    def dimension(self) -> tuple[Expression, int | None]:
        return self.expression(1), self.integer() if self.accept("<=") else None

    def span(self) -> Bounds:
        self.expect("[")
        low = self.limit()
        self.expect(",")
        start = self.next
        below: Expression | None = self.expression(1)
        if self.accept("<="):
            high = self.limit()
        else:
            self.next, below = start, None
            high = self.limit()
        self.expect(")")
        return Bounds(low, high, below)

    def limit(self) -> int | None:
        """A whole number, or None for infinity."""
        value = self.expression(1)
        if isinstance(value, Literal) and (isinstance(value.value, int) or abs(value.value) == float("inf")):
            return value.value if isinstance(value.value, int) else None
        raise self.error("expected a whole number or inf", value.at)

    # -- expressions

    def expression(self, level: int = 0) -> Expression:
        if level == len(_LEVELS):
            return self.unary()
        left = self.expression(level + 1)
        while self.token.text in _LEVELS[level] and self.token.kind == "sign":
            sign = self.take()
            left = Operation(sign.text, (left, self.expression(level + 1)), sign.at)
        return left

    def unary(self) -> Expression:
        if self.token.text == "-" and self.token.kind == "sign":
            sign = self.take()
            operand = self.unary()
            if isinstance(operand, Literal) and isinstance(operand.value, (int, float)):
                return Literal(-operand.value, sign.at)
            return Operation("-", (operand,), sign.at)
        base = self.atom()
        if self.token.text == "**":
            sign = self.take()
            return Operation("**", (base, self.unary()), sign.at)
        return base

    def atom(self) -> Expression:
        token = self.take()
        if token.text == "(" and token.kind == "sign":
            inner = self.expression()
            self.expect(")")
            return inner
        if token.text == "[" and token.kind == "sign":
            return Items(tuple(self.listed("]", self.expression)), token.at)
        if token.kind == "number":
            return Literal(int(token.text) if token.text.isdigit() else float(token.text), token.at)
        if token.kind == "string":
            return Literal(ast.literal_eval(token.text), token.at)
        if token.text in _NUMBERS:
            return Literal(_NUMBERS[token.text], token.at)
        if token.kind == "name" and self.accept("("):
            return Operation(token.text, tuple(self.listed(")", self.expression)), token.at)
        if token.kind in ("name", "value"):
            return Name(token.text, token.at)
        self.next -= 1
        raise self.error(f"expected a value, found {self._found()}", token.at)

    def name(self) -> Name:
        token = self.take()
        if token.kind not in ("name", "value"):
            self.next -= 1
            raise self.error(f"expected a name, found {self._found()}", token.at)
        return Name(token.text, token.at)

    def integer(self) -> int:
        token = self.expect_kind("number", "a whole number")
        if not token.text.isdigit():
            raise self.error("expected a whole number", token.at)
        return int(token.text)


def read(text: str, file: str = "<text>", first_line: int = 1) -> tuple[FxGraphText, Reader]:
    """The statements of a printed FX graph, and the reader that places errors in it.

    Raises:
        ZgError: the text does not follow the grammar; with line and column.
    """
    reader = Reader(text, file, first_line)
    return reader.fx_graph(), reader
