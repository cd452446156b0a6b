"""Names and text of size expressions: `n0`, `n0 + 64`, `max(n0, 1)`, the same whatever torch calls its symbols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves
from torch.utils._sympy import functions as sf

from zgcompile.ir.sizes import SYMBOLIC

RELATIONS: dict[type, str] = {
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.Lt: "<",
    sympy.Le: "<=",
    sympy.Gt: ">",
    sympy.Ge: ">=",
}
INFIX: dict[type, str] = {
    sf.FloorDiv: "//",
    sf.CleanDiv: "//",
    sf.Mod: "%",
    sf.PythonMod: "%",
    sf.IntTrueDiv: "/",
    sf.FloatTrueDiv: "/",
}
# How tightly a text binds: comparison 3, sum 4, product 5, sign 6, power 7, atom 9.
Bound = tuple[str, int]


class SizeNames:
    """`names` of the symbols of an FX graph: sizes n0, n1, ... and device floats f0, f1, ... in order of birth.

    Inputs keep their own name. Symbols that the ShapeEnv knows to be equal go by the name of the one born first, and
    share its cap.
    """

    def __init__(self, graph: Graph, inputs: Mapping[Node, str], caps: Mapping[sympy.Symbol, int]) -> None:
        self.names: dict[sympy.Symbol, str] = {}
        self.shape_env: Any = None
        counts = {"n": 0, "f": 0}
        for node in graph.nodes:
            self._find_shape_env(node.meta.get("val"))
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, (torch.SymInt, torch.SymFloat)):
                self.names[value.node.expr] = inputs[node]
            for symbol in node.meta.get("unbacked_bindings") or {}:
                if symbol not in self.names:
                    letter = "n" if symbol.is_integer else "f"
                    self.names[symbol] = f"{letter}{counts[letter]}"
                    counts[letter] += 1
        self.order = {symbol: i for i, symbol in enumerate(self.names)}
        self.first: dict[sympy.Basic, sympy.Symbol] = {}
        for symbol in self.names:
            self.first.setdefault(self._replaced(symbol), symbol)
        self.caps: dict[sympy.Symbol, int] = {}
        for symbol, cap in caps.items():
            root = self.root(symbol)
            if root.is_Symbol:
                self.caps[root] = max(cap, self.caps.get(root, 0))

    def _find_shape_env(self, value: Any) -> None:
        if self.shape_env is not None:
            return
        for leaf in tree_leaves(value):
            sizes = leaf.shape if isinstance(leaf, torch.Tensor) else [leaf]
            for size in sizes:
                if isinstance(size, SYMBOLIC):
                    self.shape_env = size.node.shape_env

    def _replaced(self, expr: sympy.Basic) -> sympy.Basic:
        return expr if self.shape_env is None else self.shape_env.replace(expr)

    def root(self, expr: Any) -> Any:
        """`expr` in the symbols that stand for their equals."""
        replaced = self._replaced(expr)
        return replaced.xreplace({s: self.first[s] for s in replaced.free_symbols if s in self.first})

    def cap(self, symbol: sympy.Symbol) -> int | None:
        return self.caps.get(self.root(symbol))

    def text(self, expr: sympy.Basic, *, own: bool = False) -> str:
        """The text of an expression; with `own` each symbol goes by its own name, not that of its equals."""
        return self._text(expr if own else self.root(expr))[0]

    def bound(self, expr: sympy.Basic) -> Bound:
        """The text of an expression and how tightly it binds."""
        return self._text(self.root(expr))

    def _text(self, expr: Any) -> Bound:
        arguments = expr.args
        if isinstance(expr, sympy.Symbol):
            return self.names.get(expr, str(expr)), 9
        if isinstance(expr, sympy.Integer):
            return str(expr), 9 if expr >= 0 else 6
        if isinstance(expr, (sympy.Float, sympy.Rational)):
            return repr(float(expr)), 9
        if isinstance(expr, sympy.Add):
            return self._sum(expr), 4
        if isinstance(expr, sympy.Mul):
            return self._product(expr)
        if isinstance(expr, (sympy.Max, sf.Max, sympy.Min, sf.Min)):
            name = "max" if isinstance(expr, (sympy.Max, sf.Max)) else "min"
            return f"{name}({', '.join(self._text(a)[0] for a in self._sorted(expr.args))})", 9
        for kind, sign in RELATIONS.items():
            if isinstance(expr, kind):
                return f"{self._text(arguments[0])[0]} {sign} {self._text(arguments[1])[0]}", 3
        for kind, sign in INFIX.items():
            if isinstance(expr, kind):
                return f"{_inside(self._text(arguments[0]), 5)} {sign} {_inside(self._text(arguments[1]), 6)}", 5
        if isinstance(expr, (sympy.Pow, sf.PowByNatural, sf.FloatPow)):
            return f"{_inside(self._text(arguments[0]), 8)} ** {_inside(self._text(arguments[1]), 7)}", 7
        return f"{type(expr).__name__}({', '.join(self._text(a)[0] for a in expr.args)})", 9

    def _sum(self, expr: sympy.Add) -> str:
        text = ""
        for term in self._sorted(expr.args):
            negative = term.could_extract_minus_sign()
            shown = _inside(self._text(-term if negative else term), 5)
            text += f"{' - ' if negative else ' + '}{shown}" if text else f"{'-' if negative else ''}{shown}"
        return text

    def _product(self, expr: sympy.Mul) -> Bound:
        coefficient, rest = expr.as_coeff_Mul()
        if coefficient == -1:
            return f"-{_inside(self._text(rest), 6)}", 6
        factors = [coefficient] if coefficient != 1 else []
        factors += self._sorted(sympy.Mul.make_args(rest))
        return "*".join(_inside(self._text(f), 6) for f in factors), 5

    def _sorted(self, terms: Any) -> list[Any]:
        """By the births of the symbols inside, plain numbers last: sympy's own order goes by names."""

        def key(term: sympy.Basic) -> Any:
            born = sorted(self.order.get(s, len(self.order)) for s in term.free_symbols)
            return (not born, born, self._text(term)[0])

        return sorted(terms, key=key)


def _inside(operand: Bound, tightness: int) -> str:
    text, own = operand
    return f"({text})" if own < tightness else text
