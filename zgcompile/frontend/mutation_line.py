"""The best guess at the user's line that changed a name, attribute or entry, from the source of the functions the step
can call."""

from __future__ import annotations

import ast
import functools
import linecache
from typing import TYPE_CHECKING

from zgcompile.ir.source import source_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FunctionType

    from zgcompile.errors import SourceLine

_MUTATORS = {
    *(
        "append",
        "extend",
        "insert",
        "add",
        "update",
        "setdefault",
        "pop",
        "popleft",
        "appendleft",
        "extendleft",
        "clear",
        "remove",
    ),
    *("discard", "popitem", "sort", "reverse", "rotate", "move_to_end", "fill", "random", "shuffle"),
    *("difference_update", "intersection_update", "symmetric_difference_update"),
}


@functools.lru_cache(maxsize=64)
def _definitions(filename: str, text: str) -> dict[int, list[ast.AST]]:
    """First line (a decorator's counts) -> the functions and lambdas that start there."""
    found: dict[int, list[ast.AST]] = {}
    for node in ast.walk(ast.parse(text, filename)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            found.setdefault(first, []).append(node)
    return found


def _bodies(fn: FunctionType) -> list[ast.AST]:
    code = fn.__code__
    text = "".join(linecache.getlines(code.co_filename))
    try:
        starts = _definitions(code.co_filename, text).get(code.co_firstlineno, [])
    except SyntaxError:
        return []
    return [n for n in starts if getattr(n, "name", "<lambda>") == code.co_name]


def _last_name(node: ast.AST) -> str:
    while isinstance(node, (ast.Subscript, ast.Starred)):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign):
        stack = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.For)):
        stack = [node.target]
    elif isinstance(node, ast.Delete):
        stack = list(node.targets)
    elif isinstance(node, ast.With):
        stack = [item.optional_vars for item in node.items if item.optional_vars is not None]
    else:
        return
    while stack:
        target = stack.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            stack = [*target.elts, *stack]
        else:
            yield target


def _score(node: ast.AST, owner: str, key: object, whole: bool) -> int:
    """How well a statement explains a change of `key` in the thing called `owner` (or of `owner` itself when `whole`);
    0: not at all."""
    for target in _targets(node):
        if isinstance(target, ast.Subscript):
            if _last_name(target) == owner:
                exact = isinstance(target.slice, ast.Constant) and target.slice.value == key
                return 5 if exact else 3
        elif not whole and isinstance(key, str) and _last_name(target) == key:
            return 5
        elif whole and isinstance(node, ast.AugAssign) and _last_name(target) == owner:
            return 4
    if not isinstance(node, ast.Call):
        return 0
    called = node.func
    if isinstance(called, ast.Name) and called.id in ("setattr", "delattr") and len(node.args) > 1:
        name = node.args[1]
        return 5 if isinstance(name, ast.Constant) and name.value == key and not whole else 0
    if isinstance(called, ast.Attribute):
        if _last_name(called.value) == owner:
            # A mutating method first; else any method of the owner, as in `conv.set_aggr("max")`.
            return 4 if called.attr in _MUTATORS else 1
        if key == "training" and called.attr in ("train", "eval"):
            return 2
    return 0


def mutation_line(functions: Iterable[FunctionType], owner: str, key: object, whole: bool) -> SourceLine | None:
    """The first best match among `functions`, or None.

    `owner`: last name of the container's path. `key`: attribute, global, closure name or item. `whole`: the container
    itself grew, shrank or was reordered, rather than one named entry of it.
    """
    best: tuple[int, SourceLine] | None = None
    for fn in functions:
        for body in _bodies(fn):
            for node in ast.walk(body):
                if not isinstance(node, (ast.stmt, ast.expr)):
                    continue
                score = _score(node, owner, key, whole)
                if score and (best is None or score > best[0]):
                    best = (score, source_line(fn.__code__.co_filename, node.lineno, fn.__code__.co_name))
    return None if best is None else best[1]
