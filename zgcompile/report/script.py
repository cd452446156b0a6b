"""Runs a user's script as `python script.py` would, with a decorator added to one of its functions."""

from __future__ import annotations

import ast
import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from zgcompile.errors import BadInput, SourceLine

DECORATOR = "__zgcompile_step__"  # a global of the script's own module, and of no other


def instrumented(path: Path, step: str) -> CodeType:
    """The script's code, every `def step` of it decorated and on its own line; `step` may be dotted.

    Raises:
        BadInput: there is no such file or function; SyntaxError: as Python does.
    """
    if not path.is_file():
        raise BadInput(f"there is no script {path}", advice="pass the path of a Python file")
    tree = ast.parse(path.read_bytes(), str(path))
    functions = list(_functions(tree, ""))
    chosen = [node for name, node in functions if f".{name}".endswith(f".{step}")]
    if not chosen:
        there = ", ".join(f"{name} (line {node.lineno})" for name, node in functions) or "none"
        raise BadInput(
            f"{path.name} defines no function {step}; its functions are: {there}",
            where=SourceLine(str(path), 1),
            advice="name one of these with --step, or make the body of the training loop a function; put "
            "@zgcompile.compile on a step that lives in an imported module",
        )
    for node in chosen:
        # Outermost, so that it sees what the user's own decorators make, on the line where the definition starts.
        first = node.decorator_list[0] if node.decorator_list else node
        node.decorator_list.insert(0, ast.copy_location(ast.Name(DECORATOR, ast.Load()), first))
    return compile(tree, str(path), "exec", dont_inherit=True)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}" if prefix else child.name
        if isinstance(child, ast.FunctionDef):
            yield name, child
        yield from _functions(child, name)


@contextlib.contextmanager
def as_main(path: Path, args: Sequence[str]) -> Iterator[ModuleType]:
    """A fresh `__main__` for the script at `path`, with sys.argv, sys.path[0] and `__file__` as Python sets them."""
    module = ModuleType("__main__")
    module.__file__ = str(path)
    module.__dict__.update(__builtins__=__builtins__, __cached__=None)
    argv, search, main = sys.argv, list(sys.path), sys.modules.get("__main__")
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.parent))
    sys.modules["__main__"] = module
    try:
        yield module
    finally:
        sys.argv, sys.path[:] = argv, search
        if main is not None:
            sys.modules["__main__"] = main


def execute(code: CodeType, module: ModuleType, decorator: Callable[[Any], Any]) -> int:
    """Run the script; the status that it exits with. Its exceptions pass."""
    module.__dict__[DECORATOR] = decorator
    try:
        exec(code, module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0


def own_traceback(error: BaseException, script: Path) -> str:
    """The traceback of what a script raised, from the script's own first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
