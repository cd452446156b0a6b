"""What a walk over Python state opens: whose a class, a module or an object is, and which names and modules code
uses."""

from __future__ import annotations

import argparse
import collections
import dis
import functools
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Generic

import torch
from torch.optim.lr_scheduler import LRScheduler

from zgcompile.ir.source import cached_by_files, is_user_file

_LIBRARY_OBJECTS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    LRScheduler,
    torch.amp.GradScaler,
    SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
)
_GLOBAL_OPS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"}
# Code that reads attributes by names that do not stand in it.
DYNAMIC_READS = {
    *("vars", "__dict__", "asdict", "astuple", "getattr", "attrgetter", "eval", "exec", "locals", "__getattribute__"),
}
MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


@dataclass(frozen=True)
class UsedNames:
    """What code names, with the functions within it. `any`: every name that may be an attribute, identifier-like
    string constants among them, for the sake of `getattr(x, "name")`. `imports`: (level, module, names)."""

    globals: frozenset[str]
    any: frozenset[str]
    imports: frozenset[tuple[int, str, tuple[str, ...]]]


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> UsedNames:
    instructions = list(dis.get_instructions(code))
    used = {i.argval for i in instructions if i.opname in _GLOBAL_OPS}
    names = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())}
    if any(i.opname == "MATCH_CLASS" for i in instructions):  # `case Point(x=0)`: names in a tuple
        names |= {n for c in code.co_consts if isinstance(c, tuple) for n in c if isinstance(n, str)}
    imports = set()
    for at, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            level, listed = (i.argval for i in instructions[at - 2 : at])
            imports.add((level if isinstance(level, int) else 0, instruction.argval, tuple(listed or ())))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = names_of(inner)
            used |= found.globals
            names |= found.any
            imports |= found.imports
    return UsedNames(frozenset(used), frozenset(names), frozenset(imports))


def imported(fn: FunctionType) -> Iterator[ModuleType]:
    """The modules that the `import` lines in a function name, as far as they are loaded."""
    for level, name, listed in names_of(fn.__code__).imports:
        package = fn.__globals__.get("__package__") or ""
        try:
            full = importlib.util.resolve_name("." * level + name, package) if level else name
        except ImportError:
            continue
        parts = full.split(".")
        wanted = [".".join(parts[:n]) for n in range(1, len(parts) + 1)] + [f"{full}.{part}" for part in listed]
        yield from (sys.modules[w] for w in wanted if isinstance(sys.modules.get(w), ModuleType))


def _nowhere(name: str) -> bool:
    """Whether a module of that name would be the user's own making: of a notebook, of `python -c`, of `exec`."""
    top = sys.modules.get(name.partition(".")[0])
    return top is None or (top is sys.modules.get("__main__") and getattr(top, "__file__", None) is None)


@cached_by_files
def is_user_class(kind: type) -> bool:
    """True for a class whose body stands in a user file, or in no file at all."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if file is not None:
        return is_user_file(file)
    functions = [f for f in vars(kind).values() if isinstance(f, FunctionType)]
    return any(is_user_file(f.__code__.co_filename) for f in functions) or _nowhere(kind.__module__)


def is_user_module(module: ModuleType) -> bool:
    """True for a module in a user file, a package of such without an `__init__.py`, or a module of no file at all."""
    file = getattr(module, "__file__", None)
    if file is not None:
        return is_user_file(file)
    folders = getattr(module, "__path__", None)
    if folders is not None:
        return any(is_user_file(f"{folder}/__init__.py") for folder in folders)
    return getattr(module, "__spec__", None) is None and _nowhere(module.__name__)


@cached_by_files
def only_user_code_reads(kind: type) -> bool:
    """A class of which no library code reads an attribute of the user's: only the user's own and nn.Module are above
    it."""
    known = (object, torch.nn.Module, Generic)
    return is_user_class(kind) and not is_dataclass(kind) and all(is_user_class(k) or k in known for k in kind.__mro__)


def functions_in(member: object) -> Iterator[object]:
    """The functions that a method of any kind runs."""
    if isinstance(member, property):
        yield from (f for f in (member.fget, member.fset, member.fdel) if f is not None)
    elif isinstance(member, (staticmethod, classmethod)):
        yield member.__func__
    elif isinstance(member, (functools.cached_property, functools.partialmethod)):
        yield member.func
        yield from getattr(member, "args", ())
        yield from getattr(member, "keywords", {}).values()
    elif isinstance(member, functools.singledispatchmethod):
        yield member.dispatcher
    elif isinstance(member, FunctionType) or hasattr(member, "__wrapped__"):
        yield member


def opens(value: object) -> bool:
    """Whether the attributes of an object are the user's state rather than a library's internals."""
    kind = type(value)
    if isinstance(value, _LIBRARY_OBJECTS) or any(map(is_user_class, kind.__mro__)):
        return True
    home = kind.__module__
    if isinstance(value, torch.utils.data.Dataset) and home.startswith("torch.utils.data."):
        return True
    if home.startswith("torch_geometric."):
        return not home.startswith("torch_geometric.inspector")
    return is_dataclass(value) and not home.startswith("torch.")


def is_compiled_step(value: object) -> bool:
    return getattr(type(value), "already_compiled", False) is True


def behind(value: Any) -> object:
    """What a weak reference refers to, or None."""
    return value() if isinstance(value, weakref.ref) else None


@functools.lru_cache(maxsize=256)
def _stored_by(code: CodeType) -> frozenset[str]:
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def attributes_set_by(kind: type) -> frozenset[str]:
    """The attributes of `self` that the methods of a class set, and those of `functools.update_wrapper`."""
    methods = [member for member in vars(kind).values() if isinstance(member, FunctionType)]
    return frozenset({*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"}.union(*(_stored_by(m.__code__) for m in methods)))
