"""The Python state that a step can reach: from its closure, defaults, globals and bound object through modules,
optimizers, containers and the user's own objects, following only the methods whose names the step's code uses."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from zgcompile.frontend.held_state import (
    ABSENT,
    ATTRIBUTES,
    CLASS,
    FUNCTION,
    LONG,
    MAPPING,
    METHODS,
    NEVER_CALLED,
    SEQUENCE,
    SET,
    SLOTS,
    WHOLE,
    AttributesForm,
    CellForm,
    Form,
    NamesForm,
    Node,
    OwnAttributesForm,
    SlotsForm,
    contents_of,
    is_dunder,
    is_plain,
)
from zgcompile.frontend.opened import (
    DYNAMIC_READS,
    MODULE_ATTRIBUTES,
    attributes_set_by,
    behind,
    functions_in,
    imported,
    is_compiled_step,
    is_user_class,
    is_user_module,
    names_of,
    only_user_code_reads,
    opens,
)
from zgcompile.ir.source import is_user_file

ENTRY_LIMIT = 50_000
LONG_NUMBERS = 1_000
SMALL_ARRAY_BYTES = 1 << 16

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_BUILDERS = {"__init__", "__new__", "__post_init__"}
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
MODULE_BOOKKEEPING = frozenset(vars(torch.nn.Module())) - {"training", *MODULE_TABLES}
# Hooks that run inside a step; the other bookkeeping concerns state dicts.
_MODULE_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}


def _long_numbers(value: Any) -> bool:
    if len(value) <= LONG_NUMBERS:
        return False
    kinds = set(map(type, value.values() if isinstance(value, dict) else value))
    return kinds <= {int, float, bool}


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
        if not isinstance(key, str) or key in self.names or self.names & DYNAMIC_READS:
            return True
        if isinstance(owner, FunctionType) or is_compiled_step(owner):
            return False
        kind: type = owner if isinstance(owner, type) else type(owner)
        if not only_user_code_reads(kind) or (owner is kind and is_dunder(key)):
            return True
        return issubclass(kind, torch.nn.Module) and (
            key in MODULE_ATTRIBUTES or (owner is kind and hasattr(torch.nn.Module, key))
        )

    def gains(self, owner: object, key: object) -> bool:
        """Whether an attribute `key` that is new in `owner` may be what the step reads."""
        if not isinstance(owner, type) or only_user_code_reads(owner):
            return self.reads(owner, key)
        # A library reads of the user's class what it has a name for itself.
        known = any(key in vars(kind) for kind in owner.__mro__ if not is_user_class(kind))
        return known or is_dunder(key) or key in self.names or bool(self.names & DYNAMIC_READS)


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
        self.modules: list[tuple[dict[str, Any], str]] = []

    def run(self) -> Reached:
        while self.queue and self.reached.cut is None:
            value, path, origin, leaf = self.queue.popleft()
            if id(value) not in self.seen:
                self.seen[id(value)] = value
                self.visit(value, path, origin, leaf)
        for space, path in self.modules:
            absent = sorted(n for n in self.names if n not in space and (id(space), n) not in self.globals_seen)
            self.reached.nodes.append(Node(NamesForm(tuple(absent)), space, path, "", path, dotted=True))
            self.reached.nodes[-1].saved = dict.fromkeys(absent, ABSENT)
        return self.reached

    def push(self, value: Any, path: str, origin: str = "", leaf: str = "") -> None:
        if isinstance(value, torch.Tensor) or is_plain(value) or value is ABSENT or id(value) in self.seen:
            return
        self.queue.append((value, path, origin, leaf or path))

    def hold(self, node: Node) -> Node:
        node.saved = node.form.read(node.owner)
        self.entries += len(node.saved)
        if self.entries > ENTRY_LIMIT and self.reached.cut is None:
            self.reached.cut = node.path or next(iter(map(str, node.saved)), "") or "the step"
        self.reached.nodes.append(node)
        if node.form.keyed:
            attributes = node.form in (SLOTS, CLASS) or isinstance(node.form, AttributesForm)
            for key, value in node.saved.items():
                if node.form is CLASS and isinstance(value, METHODS):
                    continue  # followed when its name is used
                found = functools.partial(
                    self.push, value, node.entry(key), node.origin * (not node.path), node.entry_leaf(key)
                )
                if attributes and not self.reached.reads(node.owner, key):
                    for name in (key, *DYNAMIC_READS):
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
        if is_compiled_step(value):
            form = OwnAttributesForm(attributes_set_by(type(value)))
            self.hold(Node(form, value, path, "", leaf, dotted=True))
            self.push(value.fn, path)
        elif isinstance(value, FunctionType):
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
            if is_user_module(value):
                self.modules.append((vars(value), path))
                for name in vars(value):
                    self.when_used(name, functools.partial(self.module_name, value, name, path))
        elif (referent := behind(value)) is not None:
            self.push(referent, path, origin, leaf)
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
        if opens(value):
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
        if is_user_class(type(kind)):
            self.class_(type(kind), built=False)
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
                for function in functions_in(member):
                    found = functools.partial(self.push, function, f"{klass.__name__}.{name}")
                    dunder = is_dunder(name)
                    if (name in _BUILDERS and built) or (dunder and name not in _BUILDERS | NEVER_CALLED):
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
            elif name == "registry" and fn.__module__ == "functools":
                self.push(content, path)  # of functools.singledispatch: type -> function
        if not user:
            return
        self.reached.functions.append(fn)
        code = fn.__code__
        defaults = dict(zip(code.co_varnames[: code.co_argcount][::-1], (fn.__defaults__ or ())[::-1], strict=False))
        for name, value in {**defaults, **(fn.__kwdefaults__ or {})}.items():
            self.push(value, name, "default ")
        for form in (FUNCTION, ATTRIBUTES):
            self.hold(Node(form, fn, fn.__name__, "", fn.__name__, dotted=True))
        names = names_of(code)
        space = fn.__globals__
        fresh = tuple(sorted(name for name in names.globals if (id(space), name) not in self.globals_seen))
        self.globals_seen.update((id(space), name) for name in fresh)
        if fresh:
            self.hold(Node(NamesForm(fresh), space, origin="global "))
        for module in imported(fn):
            self.push(module, module.__name__)
        self.use(names.any)

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
        self.hold(Node(MAPPING, value.keywords, "", "argument "))
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
