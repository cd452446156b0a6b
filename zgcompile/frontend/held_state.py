"""How each kind of Python container is read, put back exactly, and looked at quickly. No tensor data is ever copied or
written."""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Absent:
    def __repr__(self) -> str:
        return "<absent>"


ABSENT = _Absent()
_PLAIN = (
    *(int, float, complex, str, bytes, type(None), range, Enum, np.generic),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def is_plain(value: object) -> bool:
    """True for a value that is compared by type and content: a scalar, or a tuple or frozenset of nothing but such."""
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, frozenset)) and all(map(is_plain, value)))


def same(a: Any, b: Any) -> bool:
    """Identity for objects, type and content for plain values (True is not 1, 0.0 is not -0.0, nan is nan),
    element by element in tuples."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    if isinstance(a, (float, np.floating)):
        return math.isnan(b) if math.isnan(a) else bool(a == b) and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return is_plain(a) and bool(a == b)


def brief(value: object) -> str:
    """A short repr that reads no tensor data."""
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__}({str(value.dtype).removeprefix('torch.')}{list(value.shape)})"
    if isinstance(value, (list, dict, set, deque)):
        return f"{type(value).__name__} of {len(value)}"
    if is_plain(value) or value is ABSENT:
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    return type(value).__name__


def contents_of(cell: CellType) -> Any:
    """What a closure cell holds; ABSENT for a variable that is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class _Maybe:
    """Looks a key up without creating it (defaultdict) and without raising."""

    __slots__ = ("get",)

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self.get = dict.get.__get__(mapping) if isinstance(mapping, dict) else mapping.get

    def __getitem__(self, key: object) -> Any:
        return self.get(key, ABSENT)


class _Attribute:
    """Looks at the slots of one owner."""

    __slots__ = ("owner",)

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, key: str) -> Any:
        return getattr(self.owner, key, ABSENT)


class Form:
    """A kind of container: `read` gives its entries in order, `write` makes them so again, `view(owner)[key]` is one
    present entry."""

    sized = False  # entries can come and go: the number of them is part of the state
    keyed = True  # an entry has a path of its own

    def read(self, owner: Any) -> dict[Any, Any]:
        return dict(owner)

    def write(self, owner: Any, saved: dict[Any, Any]) -> None:
        raise TypeError(f"{type(owner).__name__} cannot be changed")

    def view(self, owner: Any) -> Any:
        return owner


class MappingForm(Form):
    sized = True

    @staticmethod
    def _base(owner: Any) -> Any:
        return OrderedDict if isinstance(owner, OrderedDict) else dict

    def read(self, owner: Any) -> dict[Any, Any]:
        return dict(self._base(owner).items(owner))

    def write(self, owner: Any, saved: dict[Any, Any]) -> None:
        base = self._base(owner)
        base.clear(owner)
        for key, value in saved.items():
            base.__setitem__(owner, key, value)

    def view(self, owner: Any) -> Any:
        return owner if type(owner) in (dict, OrderedDict) else _Maybe(owner)


class AttributesForm(MappingForm):
    """The instance `__dict__`, written as a dict: no `__setattr__` of the class runs."""

    def read(self, owner: Any) -> dict[Any, Any]:
        return dict(vars(owner))

    def write(self, owner: Any, saved: dict[Any, Any]) -> None:
        super().write(vars(owner), saved)

    def view(self, owner: Any) -> Any:
        return vars(owner)


class OwnAttributesForm(AttributesForm):
    """The attributes of an object but those that its class sets itself."""

    def __init__(self, kind: frozenset[str]) -> None:
        self.kind = kind

    def read(self, owner: Any) -> dict[Any, Any]:
        return {name: value for name, value in vars(owner).items() if name not in self.kind}

    def write(self, owner: Any, saved: dict[Any, Any]) -> None:
        for name in self.read(owner):
            del vars(owner)[name]
        vars(owner).update(saved)


class SlotsForm(Form):
    @staticmethod
    def names(kind: type) -> list[str]:
        """The data slots of a class and its bases, as stored (private names are mangled)."""
        return [
            name
            for klass in kind.__mro__
            if "__slots__" in vars(klass)
            for name, member in vars(klass).items()
            if type(member).__name__ == "member_descriptor"
        ]

    def read(self, owner: Any) -> dict[Any, Any]:
        return {name: getattr(owner, name, ABSENT) for name in self.names(type(owner))}

    def write(self, owner: Any, saved: dict[Any, Any]) -> None:
        for name, value in saved.items():
            if value is not ABSENT:
                object.__setattr__(owner, name, value)
            elif getattr(owner, name, ABSENT) is not ABSENT:
                object.__delattr__(owner, name)

    def view(self, owner: Any) -> Any:
        return _Attribute(owner)


class SequenceForm(Form):
    sized = True

    def read(self, owner: Any) -> dict[Any, Any]:
        return dict(enumerate(owner))

    def write(self, owner: Any, saved: dict[Any, Any]) -> None:
        if isinstance(owner, deque):
            deque.clear(owner)
            deque.extend(owner, saved.values())
        elif isinstance(owner, list):
            list.__setitem__(owner, slice(None), saved.values())
        else:
            super().write(owner, saved)


class SetForm(Form):
    """A set comes back with the same members; the order in which it iterates is the interpreter's own."""

    sized = True
    keyed = False

    def read(self, owner: Any) -> dict[Any, Any]:
        return dict.fromkeys(owner)

    def write(self, owner: Any, saved: dict[Any, Any]) -> None:
        set.intersection_update(owner, saved)
        set.update(owner, saved)

    def view(self, owner: Any) -> Any:
        return {member: member for member in owner}


class CellForm(Form):
    """A closure cell, its one entry named by `name`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, owner: CellType) -> dict[Any, Any]:
        return {self.name: contents_of(owner)}

    def write(self, owner: CellType, saved: dict[Any, Any]) -> None:
        value = saved[self.name]
        if value is not ABSENT:
            owner.cell_contents = value
        elif contents_of(owner) is not ABSENT:
            del owner.cell_contents

    def view(self, owner: CellType) -> Any:
        return _Cell(owner)


class _Cell(_Attribute):
    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        return contents_of(self.owner)


class NamesForm(Form):
    """The globals of a module that the step names, and no others."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def read(self, owner: Any) -> dict[Any, Any]:
        return {name: owner.get(name, ABSENT) for name in self.names}

    def write(self, owner: Any, saved: dict[Any, Any]) -> None:
        for name, value in saved.items():
            if value is not ABSENT:
                owner[name] = value
            else:
                owner.pop(name, None)

    def view(self, owner: Any) -> Any:
        return _Maybe(owner)


class FunctionForm(Form):
    """What a function itself is: its code (which a reloaded notebook module replaces) and its defaults."""

    def read(self, owner: FunctionType) -> dict[Any, Any]:
        return {name: getattr(owner, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}

    def write(self, owner: FunctionType, saved: dict[Any, Any]) -> None:
        for name, value in saved.items():
            setattr(owner, name, value)

    def view(self, owner: FunctionType) -> Any:
        return _Attribute(owner)


METHODS = (FunctionType, staticmethod, classmethod, property)
NEVER_CALLED = {
    "__repr__",
    "__str__",
    "__del__",
    "__init_subclass__",
    "__class_getitem__",
    "__reduce__",
    "__deepcopy__",
}
# What the interpreter keeps in a class itself.
_OF_THE_INTERPRETER = {"__dict__", "__weakref__", "__annotate__", "__annotate_func__", "__abstractmethods__"}
_SLOT_TYPES = tuple({type(vars(FunctionType)[name]) for name in ("__globals__", "__code__")})


def is_dunder(name: object) -> bool:
    return isinstance(name, str) and name.startswith("__") and name.endswith("__")


class ClassForm(Form):
    """All that a user class holds itself but its slots; of the dunders only methods that an operation may run."""

    @staticmethod
    def holds(name: str, value: object) -> bool:
        if isinstance(value, _SLOT_TYPES):
            return False
        if not is_dunder(name):
            return True
        return name not in NEVER_CALLED | _OF_THE_INTERPRETER and (callable(value) or isinstance(value, METHODS))

    def read(self, owner: type) -> dict[Any, Any]:
        return {name: value for name, value in vars(owner).items() if self.holds(name, value)}

    def write(self, owner: type, saved: dict[Any, Any]) -> None:
        now = self.read(owner)
        for name in now.keys() - saved.keys():
            type.__delattr__(owner, name)
        for name, value in saved.items():
            if now.get(name, ABSENT) is not value:
                type.__setattr__(owner, name, value)

    def view(self, owner: type) -> Any:
        return _Maybe(vars(owner))


class WholeForm(Form):
    """State that is compared and put back as one value: a random generator, a small numpy array, a long container of
    numbers."""

    keyed = False

    def read(self, owner: Any) -> dict[Any, Any]:
        if isinstance(owner, np.ndarray):
            return {"contents": owner.tobytes()}
        if isinstance(owner, np.random.Generator):
            return {"state": repr(owner.bit_generator.state), "restore": owner.bit_generator.state}
        if isinstance(owner, np.random.RandomState):
            return {"state": repr(owner.get_state(legacy=False)), "restore": owner.get_state()}
        if isinstance(owner, random.Random):
            return {"state": owner.getstate()}
        with _disable_current_modes():  # a FakeTensorMode refuses the real state tensor
            state = owner.get_state()
            return {"state": bytes(state.numpy()), "restore": state}

    def write(self, owner: Any, saved: dict[Any, Any]) -> None:
        if isinstance(owner, np.ndarray):
            owner[...] = np.frombuffer(saved["contents"], owner.dtype).reshape(owner.shape)
        elif isinstance(owner, np.random.Generator):
            owner.bit_generator.state = saved["restore"]
        elif isinstance(owner, random.Random):
            owner.setstate(saved["state"])
        else:
            with _disable_current_modes():
                owner.set_state(saved["restore"])


LONG_CHECKED = 10_000


class LongForm(WholeForm):
    """More than 1,000 plain numbers: kept by one shallow copy, compared between calls up to `LONG_CHECKED` of them."""

    sized = True

    def read(self, owner: Any) -> dict[Any, Any]:
        return {"contents": tuple(owner.items() if isinstance(owner, dict) else owner)}

    def write(self, owner: Any, saved: dict[Any, Any]) -> None:
        contents = saved["contents"]
        if isinstance(owner, dict):
            MAPPING.write(owner, dict(contents))
        elif isinstance(owner, set):
            SET.write(owner, dict.fromkeys(contents))
        else:
            SEQUENCE.write(owner, dict(enumerate(contents)))


MAPPING, ATTRIBUTES, SLOTS, SEQUENCE, SET = MappingForm(), AttributesForm(), SlotsForm(), SequenceForm(), SetForm()
CLASS, WHOLE, LONG, FUNCTION = ClassForm(), WholeForm(), LongForm(), FunctionForm()


@dataclass(eq=False, slots=True)
class Node:
    """One container that the step reaches. `path` is how a user would write it ("model.conv", empty for a function's
    names); `leaf` the last name in it; `origin` ("closure ", "global ", ...) goes before a path that is a bare name."""

    form: Form
    owner: Any
    path: str = ""
    origin: str = ""
    leaf: str = ""
    dotted: bool = False
    quiet: bool = False  # bookkeeping of a library: put back, but neither guarded nor reported
    saved: dict[Any, Any] = field(default_factory=dict)

    def entry(self, key: Any) -> str:
        if not self.form.keyed:
            return self.path
        if not self.path:
            return str(key)
        return f"{self.path}.{key}" if self.dotted else f"{self.path}[{brief(key)}]"

    def entry_leaf(self, key: Any) -> str:
        return str(key) if self.dotted or not self.path else self.leaf
