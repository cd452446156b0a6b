"""The Python state that a step can reach: from its closure, defaults, globals and bound object through modules,
optimizers, containers and the user's own objects, following only the methods whose names the step's code uses."""

from __future__ import annotations

import argparse
import dis
import functools
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Generic

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from zgcompile.frontend.held_state import (
    ABSENT,
    ATTRIBUTES,
    CLASS,
    LONG,
    MAPPING,
    METHODS,
    SEQUENCE,
    SET,
    SLOTS,
    WHOLE,
    CellForm,
    Form,
    NamesForm,
    Node,
    SlotsForm,
    contents_of,
    is_plain,
)
from zgcompile.ir.source import cached_by_files, is_user_file

ENTRY_LIMIT = 50_000
LONG_NUMBERS = 1_000
SMALL_ARRAY_BYTES = 1 << 16

_LIBRARY_OBJECTS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    LRScheduler,
    torch.amp.GradScaler,
    SimpleNamespace,
    argparse.Namespace,
)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_GLOBAL_OPS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"}
_BUILDERS = {"__init__", "__new__", "__post_init__"}
_NEVER_CALLED = {
    "__repr__",
    "__str__",
    "__del__",
    "__init_subclass__",
    "__class_getitem__",
    "__reduce__",
    "__deepcopy__",
}
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
MODULE_BOOKKEEPING = frozenset(vars(torch.nn.Module())) - {"training", *MODULE_TABLES}
# Hooks that run inside a step; the other bookkeeping concerns state dicts.
_MODULE_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}


@functools.lru_cache(maxsize=4096)
def _names_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """(global names, all names that may be attributes), with those of nested functions. Identifier-like string
    constants count as attribute names, for the sake of `getattr(x, "name")`."""
    used = {i.argval for i in dis.get_instructions(code) if i.opname in _GLOBAL_OPS}
    names = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            inner_used, inner_names = _names_of(inner)
            used |= inner_used
            names |= inner_names
    return frozenset(used), frozenset(names)


@cached_by_files
def is_user_class(kind: type) -> bool:
    """True for a class whose body stands in a user file."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if file is not None:
        return is_user_file(file)
    return any(is_user_file(f.__code__.co_filename) for f in vars(kind).values() if isinstance(f, FunctionType))


def _functions_in(member: object) -> Iterator[object]:
    if isinstance(member, property):
        yield from (f for f in (member.fget, member.fset, member.fdel) if f is not None)
    elif isinstance(member, (staticmethod, classmethod)):
        yield member.__func__
    elif isinstance(member, functools.cached_property):
        yield member.func
    elif isinstance(member, FunctionType) or hasattr(member, "__wrapped__"):
        yield member


def _opens(value: object) -> bool:
    """Whether the attributes of an object are the user's state rather than a library's internals."""
    kind = type(value)
    if isinstance(value, _LIBRARY_OBJECTS) or any(map(is_user_class, kind.__mro__)):
        return True
    home = kind.__module__
    if home.startswith("torch_geometric."):
        return not home.startswith("torch_geometric.inspector")
    return is_dataclass(value) and not home.startswith("torch.")


def _long_numbers(value: Any) -> bool:
    if len(value) <= LONG_NUMBERS:
        return False
    kinds = set(map(type, value.values() if isinstance(value, dict) else value))
    return kinds <= {int, float, bool}


# Code that reads attributes by names that do not stand in it.
_DYNAMIC_READS = {"vars", "__dict__", "asdict", "astuple", "getattr", "attrgetter", "eval", "exec", "locals"}
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


@cached_by_files
def _only_user_code_reads(kind: type) -> bool:
    """A class of which no library code reads an attribute of the user's: only the user's own and nn.Module are above
    it."""
    known = (object, torch.nn.Module, Generic)
    return is_user_class(kind) and not is_dataclass(kind) and all(is_user_class(k) or k in known for k in kind.__mro__)


@dataclass
class Reached:
    """What a walk found: containers (`nodes`), the user's `functions`, `modules`, `optimizers`, user-class `objects`,
    and Python `iterators` as (path, iterator), whose position cannot be put back. `cut` is the path at which the walk
    gave up, or None."""

    nodes: list[Node] = field(default_factory=list)
    functions: list[FunctionType] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    objects: list[object] = field(default_factory=list)
    iterators: list[tuple[str, object]] = field(default_factory=list)
    cut: str | None = None
    names: set[str] = field(default_factory=set)

    def reads(self, owner: object, key: object) -> bool:
        """Whether the step can read the attribute `key` of `owner`: for the user's own objects, that some code names
        it."""
        kind: type = type(owner)
        if not isinstance(key, str) or not _only_user_code_reads(kind) or self.names & _DYNAMIC_READS:
            return True
        return key in self.names or (isinstance(owner, torch.nn.Module) and key in _MODULE_ATTRIBUTES)


class _Walk:
    def __init__(self) -> None:
        self.reached = Reached()
        self.entries = 0
        self.seen: dict[int, object] = {}  # holds each object: an id must not be used twice
        self.globals_seen: set[tuple[int, str]] = set()
        self.names = self.reached.names
        self.names.add("forward")
        self.waiting: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self.queue: deque[tuple[Any, str, str, str]] = deque()

    def run(self) -> Reached:
        while self.queue and self.reached.cut is None:
            value, path, origin, leaf = self.queue.popleft()
            if id(value) not in self.seen:
                self.seen[id(value)] = value
                self.visit(value, path, origin, leaf)
        return self.reached

    def push(self, value: Any, path: str, origin: str = "", leaf: str = "") -> None:
        if isinstance(value, torch.Tensor) or is_plain(value) or value is ABSENT or id(value) in self.seen:
            return
        self.queue.append((value, path, origin, leaf or path))

    def hold(self, node: Node) -> Node:
        node.saved = node.form.read(node.owner)
        self.entries += len(node.saved)
        if self.entries > ENTRY_LIMIT:
            self.reached.cut = node.path or next(iter(node.saved), "")
        self.reached.nodes.append(node)
        if node.form.keyed:
            kind: type = type(node.owner)
            own = node.form in (ATTRIBUTES, SLOTS) and _only_user_code_reads(kind)
            for key, value in node.saved.items():
                if node.form is CLASS and isinstance(value, METHODS):
                    continue  # followed when its name is used
                found = functools.partial(
                    self.push, value, node.entry(key), node.origin * (not node.path), node.entry_leaf(key)
                )
                if own and not self.reached.reads(node.owner, key):
                    for name in (key, *_DYNAMIC_READS):
                        self.when_used(name, found)
                else:
                    found()
        elif node.form is SET:
            for value in node.saved:
                self.push(value, node.path, "", node.leaf)
        return node

    def use(self, names: Iterable[str]) -> None:
        for name in frozenset(names) - self.names:
            self.names.add(name)
            for found in self.waiting.pop(name, ()):
                found()

    def when_used(self, name: str, found: Callable[[], None]) -> None:
        if name in self.names:
            found()
        else:
            self.waiting[name].append(found)

    def visit(self, value: Any, path: str, origin: str, leaf: str) -> None:
        if isinstance(value, FunctionType):
            self.function(value, path)
        elif isinstance(value, MethodType):
            code = getattr(value.__func__, "__code__", None)
            name = code.co_varnames[0] if code is not None and code.co_argcount else path
            self.push(value.__self__, name if not path or path == value.__func__.__name__ else path)
            self.push(value.__func__, path)
        elif isinstance(value, functools.partial):
            self.partial(value, path)
        elif isinstance(value, type):
            if any(map(is_user_class, value.__mro__)):
                self.class_(value, built=True)
        elif isinstance(value, ModuleType):
            if is_user_file(getattr(value, "__file__", None) or ""):
                for name in vars(value):
                    self.when_used(name, functools.partial(self.module_name, value, name, path))
        elif isinstance(value, _GENERATORS):
            self.hold(Node(WHOLE, value, path, origin, leaf))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= SMALL_ARRAY_BYTES and not value.dtype.hasobject and value.flags.writeable:
                self.hold(Node(WHOLE, value, path, origin, leaf))
        else:
            self.container(value, path, origin, leaf)

    def container(self, value: Any, path: str, origin: str, leaf: str) -> None:
        form: Form | None = None
        if isinstance(value, (dict, list, deque, set)) and _long_numbers(value):
            form = LONG
        elif isinstance(value, dict):
            form = MAPPING
        elif isinstance(value, (list, deque, tuple)):
            form = SEQUENCE
        elif isinstance(value, (set, frozenset)):
            form = SET
        elif isinstance(value, Mapping) and type(value).__name__ == "mappingproxy":
            form = Form()
        if form is not None:
            self.hold(Node(form, value, path, origin, leaf))
        elif isinstance(value, Iterator):
            self.reached.iterators.append((origin + path, value))
        if _opens(value):
            self.object_(value, path, leaf)
        elif form is None and "__wrapped__" in getattr(value, "__dict__", ()):
            self.push(value.__wrapped__, path)

    def object_(self, value: Any, path: str, leaf: str) -> None:
        kind = type(value)
        module, optimizer = isinstance(value, torch.nn.Module), isinstance(value, torch.optim.Optimizer)
        if module:
            self.reached.modules.append(value)
        if optimizer:
            self.reached.optimizers.append(value)
        if any(map(is_user_class, kind.__mro__)):
            self.reached.objects.append(value)
        if hasattr(value, "__dict__"):
            if module:
                # A submodule, parameter or buffer is an attribute to the user.
                for table in MODULE_TABLES:
                    self.inner_table(vars(value).get(table), path, leaf)
                for table in MODULE_BOOKKEEPING & vars(value).keys():
                    self.inner_table(vars(value)[table], f"{path}.{table}", table, quiet=table not in _MODULE_HOOKS)
            elif kind.__module__.startswith("torch_geometric.data"):
                for table in ("_store", "_mapping"):
                    inner = vars(value).get(table)
                    if table == "_mapping":
                        self.inner_table(inner, path, leaf)
                    else:
                        self.push(inner, path, "", leaf)
            self.hold(Node(ATTRIBUTES, value, path, "", leaf, dotted=True))
        if SlotsForm.names(kind):
            self.hold(Node(SLOTS, value, path, "", leaf, dotted=True))
        self.class_(kind, built=False)

    def inner_table(self, table: Any, path: str, leaf: str, quiet: bool = False) -> None:
        if type(table) in (dict, OrderedDict) and id(table) not in self.seen:
            self.seen[id(table)] = table
            self.hold(Node(MAPPING, table, path, "", leaf, dotted=True, quiet=quiet))

    def class_(self, kind: type, built: bool) -> None:
        """`built`: the code names the class itself and may make instances of it."""
        library_calls = any(not is_user_class(k) and k is not object for k in kind.__mro__)
        for klass in kind.__mro__:
            if not is_user_class(klass):
                continue
            first = (id(klass), "class") not in self.globals_seen
            if first:
                self.globals_seen.add((id(klass), "class"))
                self.seen[id(klass)] = klass
                self.hold(Node(CLASS, klass, klass.__name__, "", klass.__name__, dotted=True))
            elif not built:
                continue
            for name, member in list(vars(klass).items()):
                for function in _functions_in(member):
                    found = functools.partial(self.push, function, f"{klass.__name__}.{name}")
                    dunder = name.startswith("__") and name.endswith("__")
                    if (name in _BUILDERS and built) or (dunder and name not in _BUILDERS | _NEVER_CALLED):
                        found()
                    elif not dunder:
                        # A base class of a library may call any of them back, as PyG does `message`.
                        if library_calls and name not in ("reset_parameters", "extra_repr"):
                            found()
                        else:
                            self.when_used(name, found)

    def function(self, fn: FunctionType, path: str) -> None:
        user = is_user_file(fn.__code__.co_filename)
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self.push(wrapped, path)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if user and id(cell) not in self.seen:
                self.seen[id(cell)] = cell
                self.hold(Node(CellForm(name), cell, origin="closure "))
            elif isinstance(content := contents_of(cell), (FunctionType, MethodType, functools.partial)):
                self.push(content, path)
        if not user:
            return
        self.reached.functions.append(fn)
        code = fn.__code__
        defaults = dict(zip(code.co_varnames[: code.co_argcount][::-1], (fn.__defaults__ or ())[::-1], strict=False))
        for name, value in {**defaults, **(fn.__kwdefaults__ or {})}.items():
            self.push(value, name, "default ")
        if vars(fn) and set(vars(fn)) != {"__wrapped__"}:
            self.hold(Node(ATTRIBUTES, fn, fn.__name__, "", fn.__name__, dotted=True))
        used, names = _names_of(code)
        space = fn.__globals__
        fresh = tuple(sorted(name for name in used if (id(space), name) not in self.globals_seen))
        self.globals_seen.update((id(space), name) for name in fresh)
        if fresh:
            builtin = fn.__builtins__
            self.hold(
                Node(NamesForm(tuple(n for n in fresh if n in space or n not in builtin)), space, origin="global ")
            )
        self.use(names)

    def module_name(self, module: ModuleType, name: str, path: str) -> None:
        space = vars(module)
        if (id(space), name) not in self.globals_seen:
            self.globals_seen.add((id(space), name))
            self.hold(Node(NamesForm((name,)), space, path, "", path, dotted=True))

    def partial(self, value: functools.partial[Any], path: str) -> None:
        code = getattr(value.func, "__code__", None)
        names = code.co_varnames if code is not None else ()
        for index, argument in enumerate(value.args):
            self.push(argument, names[index] if index < len(names) else f"argument{index}", "argument ")
        for name, argument in value.keywords.items():
            self.push(argument, name, "argument ")
        self.push(value.func, path)


def reachable(fn: Callable[..., Any], extra_roots: Iterable[object] | Mapping[str, object] = ()) -> Reached:
    """Everything that `fn` can read or change in Python, walked breadth first so that the shortest path names each
    thing.

    `extra_roots` (objects, or name -> object) are walked last: what the step names itself keeps the step's name for it.
    Classes, modules and objects of libraries are closed, except nn.Module, Optimizer, LRScheduler, GradScaler, PyG's
    data, dataclasses and namespaces. Inside plain user classes only methods whose name some reached code uses are
    followed.
    """
    walk = _Walk()
    walk.push(fn, getattr(fn, "__name__", "step"))
    named = (
        extra_roots.items()
        if isinstance(extra_roots, Mapping)
        else ((type(r).__name__.lower(), r) for r in extra_roots)
    )
    for name, root in named:
        walk.push(root, name)
    return walk.run()
