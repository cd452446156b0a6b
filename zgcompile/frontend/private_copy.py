"""Private copies of the user's functions that see other builtins (`int`, `len`, `range`, ...), for the time of a trace.

Nothing shared changes: neither the builtins module, nor a module's globals, nor a class. What stays as it is, by
design: properties, dunder methods, methods of classes that the step itself instantiates or calls as
`Class.method(...)`, and code that is not the user's.
"""

from __future__ import annotations

import builtins
import functools
import sys
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from zgcompile.errors import CaptureRefused
from zgcompile.frontend.held_state import ABSENT, contents_of
from zgcompile.ir.source import is_user_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_SEARCHED_ENTRIES = 1_000


class PrivateCopies:
    """One consistent set of copies: a function, a module's globals or a closure cell is copied once, whoever names it.

    `overrides`: builtin name -> replacement. `is_user`: which files' functions are copied. A wrapper from elsewhere (a
    decorator) is copied only to hold the copy of what it wraps; a `functools.cache` is dropped from the copy, so that
    no cache sees a traced value.
    """

    def __init__(self, overrides: Mapping[str, object], is_user: Callable[[str], bool] = is_user_file) -> None:
        self._is_user = is_user
        self._builtins = {**vars(builtins), "super": self._super(), "__import__": self._import, **overrides}
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> (original, kept alive; copy)
        self._spaces: dict[int, tuple[dict[str, Any], ModuleType]] = {}
        self.bound: list[
            tuple[dict[str, Any], str, object, object]
        ] = []  # by `private_modules`: (space, name, before, method)
        self._baseline: dict[int, dict[str, Any]] = {}
        self._contents: dict[
            int, tuple[Any, Any, Any]
        ] = {}  # id of a copied container -> (original, it, its first contents)

    def value(self, value: Any) -> Any:
        """The private counterpart of a function, method, partial, user module, or list, tuple or dict that holds such;
        else itself."""
        return self._copy(value) if self._holds_code(value, set()) else value

    def global_writes(self) -> dict[tuple[str, str], tuple[object, object]]:
        """{(module, global): (before, after)} for each global that a copy rebound since the last `refresh` (ABSENT: was
        or is not there), and for each copied global container whose entries changed, then with (contents before,
        container after)."""
        writes: dict[tuple[str, str], tuple[object, object]] = {}
        for original, private in self._spaces.values():
            now, then = vars(private), self._baseline[id(original)]
            for name in dict.fromkeys((*then, *now)):
                before, after = then.get(name, ABSENT), now.get(name, ABSENT)
                if before is not after:
                    shared = original.get(name, ABSENT)
                    writes[private.__name__, name] = (shared if self._counterpart(shared) is before else before, after)
                elif id(after) in self._contents and not _same_entries(self._contents[id(after)][2], after):
                    writes[private.__name__, name] = (self._contents[id(after)][2], after)
        return writes

    def refresh(self) -> None:
        """Start again from what the shared globals and containers hold now, forgetting what the copies wrote."""
        for original, made, _ in list(self._contents.values()):
            made.clear()
            self._fill_container(original, made)
        for original, private in list(self._spaces.values()):
            self._fill(original, private)

    def _counterpart(self, value: Any) -> Any:
        return self._made[id(value)][1] if id(value) in self._made else value

    def _holds_code(self, value: Any, seen: set[int]) -> bool:
        if id(value) in self._made:
            return True
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, FunctionType):
            return self._is_user(value.__code__.co_filename) or any(self._holds_code(c, seen) for c in _contents(value))
        if isinstance(value, MethodType):
            return self._holds_code(value.__func__, seen)
        if isinstance(value, ModuleType):
            return self._is_user(getattr(value, "__file__", None) or "")
        if type(value) is functools.partial:
            return any(self._holds_code(v, seen) for v in (value.func, *value.args, *value.keywords.values()))
        if isinstance(value, functools._lru_cache_wrapper):
            return self._holds_code(value.__wrapped__, seen)
        if type(value) in (list, tuple, dict) and len(value) <= _SEARCHED_ENTRIES:
            return any(self._holds_code(v, seen) for v in (value.values() if isinstance(value, dict) else value))
        return False

    def _copy(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, ModuleType):
            return self._space(vars(value), value)
        if isinstance(value, MethodType):
            made: Any = MethodType(self.value(value.__func__), value.__self__)
        elif isinstance(value, functools.partial):
            keywords = {k: self.value(v) for k, v in value.keywords.items()}
            made = functools.partial(self.value(value.func), *map(self.value, value.args), **keywords)
        elif isinstance(value, functools._lru_cache_wrapper):
            made = self.value(value.__wrapped__)
        elif isinstance(value, tuple):
            made = tuple(map(self.value, value))
        else:
            # Known before it is filled: a container may hold a function that names the container.
            made = type(value)()
            self._made[id(value)] = (value, made)
            self._fill_container(value, made)
        self._made[id(value)] = (value, made)
        return made

    def _fill_container(self, original: Any, made: Any) -> None:
        if isinstance(made, dict):
            made.update({k: self.value(v) for k, v in original.items()})
        else:
            made.extend(map(self.value, original))
        self._contents[id(made)] = (original, made, made.copy())

    def _import(self, *args: Any, **kwargs: Any) -> Any:
        """`import` inside a copied function: the private module, with the names that the real one has gained since."""
        module = builtins.__import__(*args, **kwargs)
        private = self.value(module)
        if private is not module:
            for name in vars(module).keys() - self._baseline[id(vars(module))].keys():
                self._baseline[id(vars(module))][name] = vars(private)[name] = self.value(vars(module)[name])
        return private

    def _function(self, fn: FunctionType) -> FunctionType:
        user = self._is_user(fn.__code__.co_filename)
        cells = tuple(map(self._cell, fn.__closure__ or ()))
        if fn.__code__.co_filename == functools.__file__:  # `singledispatch` would keep what it found in one trace
            named = zip(fn.__code__.co_freevars, cells, strict=True)
            cells = tuple(CellType(WeakKeyDictionary()) if n == "dispatch_cache" else c for n, c in named)
        space = vars(self._space(fn.__globals__, None)) if user else fn.__globals__
        if id(fn) in self._made:  # made on the way, while the globals were filled
            return self._made[id(fn)][1]
        made = FunctionType(fn.__code__, space, fn.__name__, fn.__defaults__, cells or None)
        self._made[id(fn)] = (fn, made)
        made.__kwdefaults__ = fn.__kwdefaults__
        made.__qualname__, made.__module__, made.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
        made.__annotations__ = fn.__annotations__
        made.__dict__ = fn.__dict__  # one and the same: `step.calls += 1` through the copy is seen on the original
        for old, new in zip(fn.__closure__ or (), cells, strict=True):
            if old is not new and contents_of(new) is ABSENT:
                new.cell_contents = self.value(old.cell_contents)
        if fn.__defaults__:
            made.__defaults__ = self.value(fn.__defaults__)
        if fn.__kwdefaults__:
            made.__kwdefaults__ = self.value(fn.__kwdefaults__)
        return made

    def _cell(self, cell: CellType) -> CellType:
        """A new, still empty cell for one that holds code; any other is shared, so that `nonlocal` writes are seen."""
        if id(cell) not in self._made:
            held = contents_of(cell) is not ABSENT and self._holds_code(cell.cell_contents, set())
            self._made[id(cell)] = (cell, CellType() if held else cell)
        return self._made[id(cell)][1]

    def _space(self, original: dict[str, Any], module: ModuleType | None) -> ModuleType:
        """The private module over the globals `original`; it stands in for the module object too."""
        if id(original) not in self._spaces:
            private = ModuleType(original.get("__name__", "<private>"))
            self._spaces[id(original)] = (original, private)
            vars(private)["__builtins__"] = self._builtins
            self._fill(original, private)
        private = self._spaces[id(original)][1]
        if module is not None:
            self._made[id(module)] = (module, private)
        return private

    def _fill(self, original: dict[str, Any], private: ModuleType) -> None:
        space = vars(private)
        for name in space.keys() - original.keys() - {"__builtins__"}:
            del space[name]
        for name, value in list(original.items()):
            if name != "__builtins__":
                space[name] = self.value(value)
        self._baseline[id(original)] = dict(space)

    def _super(self) -> Callable[..., Any]:
        copies = self

        class PrivateSuper:
            """`super()` whose methods are the private copies of those of the base classes."""

            def __init__(self, *args: Any) -> None:
                if not args:
                    frame = sys._getframe(1)
                    own = frame.f_locals
                    args = own["__class__"], own[frame.f_code.co_varnames[0]]
                object.__setattr__(self, "bound", super_(*args))

            def __getattribute__(self, name: str) -> Any:
                found = getattr(object.__getattribute__(self, "bound"), name)
                return copies.value(found) if isinstance(found, (FunctionType, MethodType)) else found

        super_ = builtins.super
        return PrivateSuper


def _contents(fn: FunctionType) -> Iterator[Any]:
    return map(contents_of, fn.__closure__ or ())


def _same_entries(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(b[k] is v for k, v in a.items())
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


class PrivateCopy:
    """The callable that `private_copy` returns; `__wrapped__` is the original, `function` the copy, `copies` the set it
    belongs to."""

    def __init__(self, original: Callable[..., Any], copies: PrivateCopies) -> None:
        self.__wrapped__ = original
        self.copies = copies
        self.function = copies.value(original)
        self._depth = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the copy, its globals as the originals are now; a nested call (recursion through this object) leaves them
        alone."""
        if self._depth == 0:
            self.copies.refresh()
        self._depth += 1
        try:
            return self.function(*args, **kwargs)
        finally:
            self._depth -= 1

    def global_writes(self) -> dict[tuple[str, str], tuple[object, object]]:
        """What the last call wrote to globals, as `PrivateCopies.global_writes`."""
        return self.copies.global_writes()


def private_copy(
    fn: Callable[..., Any], overrides: Mapping[str, object], copies: PrivateCopies | None = None
) -> PrivateCopy:
    """A copy of `fn`, and of every user function that it can name, whose builtins are updated by `overrides`.

    Followed: globals, closure cells, defaults, partials, bound methods, decorators, user modules, and lists, tuples and
    dicts that hold functions (copied, so writes to such a container do not reach the original; `global_writes` tells of
    them). A name that the user's module defines itself wins over an override. File names and line numbers are those of
    the original. Pass `copies` to share one set of globals with `private_modules`; `overrides` is then ignored.

    Raises:
        CaptureRefused: there is no Python function behind `fn` (a builtin, a class). A library's function is returned
        as it is.
    """
    copies = PrivateCopies(overrides) if copies is None else copies
    if isinstance(fn, FunctionType) or copies.value(fn) is not fn:
        return PrivateCopy(fn, copies)
    method = getattr(type(fn), "forward", None) or vars(type(fn)).get("__call__")
    if isinstance(method, FunctionType) and copies.value(method) is not method:
        # For a Module, `forward` is bound by `private_modules`, and its hooks still run.
        return PrivateCopy(fn if hasattr(type(fn), "forward") else MethodType(method, fn), copies)
    raise CaptureRefused(f"{fn!r} is not a Python function of yours", advice="compile a function that calls it")


@contextmanager
def private_modules(
    modules: Iterable[object], overrides: Mapping[str, object], copies: PrivateCopies | None = None
) -> Iterator[PrivateCopies]:
    """Within the context each object's own methods that are user functions are private copies, as instance attributes.

    For nn.Modules, and for any other object with a `__dict__`. Plain, static and class methods, and functions held as
    attributes, are covered; properties and dunders stay (Python looks those up on the class), and so do functions in
    lists or dicts of the object. Attributes that the step itself sets in the meantime are kept. At exit, also by an
    exception, each `__dict__` is as before, order included.
    """
    copies = PrivateCopies(overrides) if copies is None else copies
    bound: list[tuple[dict[str, Any], str, object, object]] = []
    outer, copies.bound = copies.bound, bound
    try:
        for module in {id(m): m for m in modules if hasattr(m, "__dict__")}.values():
            space = vars(module)
            for name, method in _methods(module, copies):
                bound.append((space, name, space.get(name, ABSENT), method))
                space[name] = method
        yield copies
    finally:
        copies.bound = outer
        _unbind(bound)


@contextmanager
def without_private_methods(copies: PrivateCopies) -> Iterator[None]:
    """Within `private_modules`: every object as the user knows it, for a look at its state."""
    taken_off = _unbind(copies.bound)
    try:
        yield
    finally:
        for space, name, _, method in taken_off:
            space[name] = method


def _unbind(
    bound: list[tuple[dict[str, Any], str, object, object]],
) -> list[tuple[dict[str, Any], str, object, object]]:
    """Put back what the step has not replaced in the meantime; returns those, in the order of binding."""
    found = [entry for entry in bound if entry[0].get(entry[1], ABSENT) is entry[3]]
    for space, name, before, _ in reversed(found):
        if before is ABSENT:
            del space[name]
        else:
            space[name] = before
    return found


def _methods(owner: object, copies: PrivateCopies) -> list[tuple[str, object]]:
    found: dict[str, object] = {}
    for kind in type(owner).__mro__:
        for name, member in vars(kind).items():
            if name in found or (name.startswith("__") and name.endswith("__")):
                continue
            function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            made = copies.value(function) if isinstance(function, FunctionType) else function
            if made is function:
                found[name] = None  # hides what later classes define
            elif isinstance(member, staticmethod):
                found[name] = made
            else:
                found[name] = MethodType(made, type(owner) if isinstance(member, classmethod) else owner)
    for name, value in vars(owner).items():
        made = copies.value(value) if isinstance(value, (FunctionType, MethodType, functools.partial)) else value
        found[name] = made if made is not value else None
    return [(name, method) for name, method in found.items() if method is not None]
