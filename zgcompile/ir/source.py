"""Which frames are the user's, and the user's line behind a frame, a traceback, a function or an FX node."""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import linecache
import re
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from zgcompile.errors import SourceLine

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType, TracebackType
    from typing import Any

_LIBRARIES = ("torch", "torch_geometric", "zgcompile", "zgcompile.passes")
# Steps of our own that are compiled like anyone's: they must be seen as user code.
_WORKLOADS = ("examples", "tests", "bench", "testing")
_INSTALLED = ("site-packages", "dist-packages")
_INTERACTIVE = ("<ipython-input", "<python-input", "<stdin>", "<doctest")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)(?:, in ([^\n]+))?(?:\n(?![ \t]*File ")[ \t]+([^\n]*))?')
_DEFINITION = re.compile(r"\s*(async\s+def|def|class)\b|.*\blambda\b")


@functools.cache
def _library_folders() -> tuple[str, ...]:
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    for name in _LIBRARIES:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is not None:
            folders += spec.submodule_search_locations or []
    return tuple(f"{Path(folder).resolve()}/" for folder in folders)


@functools.cache
def _workload_folders() -> tuple[str, ...]:
    spec = importlib.util.find_spec("zgcompile")
    roots = spec.submodule_search_locations or [] if spec is not None else []
    return tuple(f"{Path(root).resolve() / name}/" for root in roots for name in _WORKLOADS)


_adopted: set[str] = set()  # code without a file, and installed files and folders, that are the user's all the same
_caches: list[Callable[[], None]] = []


def cached_by_files(function: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """`functools.lru_cache` for what follows from which files are the user's: emptied when `adopt` finds more."""
    cached = functools.lru_cache(maxsize=4096)(function)
    _caches.append(cached.cache_clear)
    return cached


def adopt(fn: object) -> None:
    """From now on the code around `fn` is user code, wherever it is: a step that is installed with its package, one of
    `python -c`, or one that `exec` made."""
    code = code_of(fn)
    if code is None or is_user_file(code.co_filename):
        return
    found = code.co_filename
    if not found.startswith("<"):
        top = _installed_at(Path(found).resolve())
        if top is None or top.stem in _LIBRARIES:
            return  # the standard library, torch
        found = str(top)
    _adopted.add(found)
    for clear in _caches:
        clear()


def _installed_at(place: Path) -> Path | None:
    """The file or folder right under the site-packages that `place` lies in."""
    for folder in place.parents:
        if folder.name in _INSTALLED:
            return folder / place.relative_to(folder).parts[0]
    return None


@cached_by_files
def is_user_file(filename: str) -> bool:
    """True for a file of the user's own: not torch, PyG, zgcompile, the standard library, anything installed, or
    generated code, unless `adopt` was told so."""
    if filename in _adopted:
        return True
    if not filename or filename.startswith("<"):
        return filename.startswith(_INTERACTIVE)
    place = Path(filename).resolve()
    path = str(place)
    if path.startswith(_workload_folders()) or str(_installed_at(place)) in _adopted:
        return True
    if place.name.startswith("torch_geometric."):
        return False  # PyG writes a module for each kind of layer into the temporary folder
    return _installed_at(place) is None and not path.startswith(_library_folders())


def _shown(filename: str) -> str:
    if filename.startswith("<"):
        return filename
    path, here = Path(filename).absolute(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def source_line(filename: str, line: int, function: str = "") -> SourceLine:
    """The SourceLine of `filename`:`line` (1-based); its text is empty when the file cannot be read."""
    return SourceLine(_shown(filename), line, function, linecache.getline(filename, line).strip())


def user_line_from_traceback(tb: TracebackType | None) -> SourceLine | None:
    """The innermost frame of the traceback that lies in a user file, or None."""
    found = None
    while tb is not None:
        if is_user_file(tb.tb_frame.f_code.co_filename):
            found = tb
        tb = tb.tb_next
    if found is None:
        return None
    code = found.tb_frame.f_code
    return source_line(code.co_filename, found.tb_lineno, code.co_name)


def raised_by_user(error: BaseException) -> bool:
    """Whether a `raise` or `assert` of the user's raised it, rather than a library, or an op that his line called."""
    tb, last = error.__traceback__, None
    while tb is not None:
        last, tb = tb, tb.tb_next
    if last is None or not is_user_file(last.tb_frame.f_code.co_filename):
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def user_line_from_stack_trace(text: str | None) -> SourceLine | None:
    """The innermost user frame of a printed stack, as in `node.meta["stack_trace"]` (innermost last), or None."""
    for filename, line, function, code in reversed(_FRAME.findall(text or "")):
        if is_user_file(filename):
            return SourceLine(_shown(filename), int(line), function.strip(), code.strip())
    return None


def current_user_line() -> SourceLine | None:
    """The innermost user frame of the calling thread's stack, or None. The caller's own frame counts."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return source_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def code_of(fn: object) -> CodeType | None:
    """The code object behind a function, bound method, partial, decorated function or callable object; None for C
    code."""
    while not inspect.isfunction(fn) or hasattr(fn, "__wrapped__"):
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif inspect.ismethod(fn):
            fn = fn.__func__
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        elif isinstance(fn, type) or inspect.isbuiltin(fn):
            return None
        else:
            method = getattr(type(fn), "forward", None) or vars(type(fn)).get("__call__")
            if not inspect.isfunction(method):
                return None
            fn = method
    return fn.__code__


def code_line(fn: Callable[..., object]) -> SourceLine:
    """The `def` (or lambda) line of `fn`, past its decorators.

    Raises:
        TypeError: `fn` has no Python code.
    """
    code = code_of(fn)
    if code is None:
        raise TypeError(f"{fn!r} has no Python source")
    first = code.co_firstlineno
    line = first
    while (text := linecache.getline(code.co_filename, line)) and not _DEFINITION.match(text):
        line += 1
    return source_line(code.co_filename, line if text else first, code.co_name)
