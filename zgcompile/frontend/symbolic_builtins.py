"""Stand-ins for Python's builtins in the private copies of the user's functions, for tracing only.

`int(symbolic size)` must return a real `int` in Python, so the builtin itself cannot work on a traced value; these can.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from zgcompile.errors import CaptureRefused
from zgcompile.ir.sizes import SYMBOLIC
from zgcompile.ir.source import SourceLine, current_user_line, is_user_file


class _StandIn(type):
    """A builtin type's stand-in: calls go to `convert`, everything else (isinstance, class methods) to the builtin
    itself."""

    builtin: type
    convert: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.convert(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.builtin)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.builtin)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.builtin, name)


def _stand_in(builtin: type, convert: Any) -> type:
    return _StandIn(builtin.__name__, (), {"builtin": builtin, "convert": staticmethod(convert)})


def symbolic_int(value: Any = 0, *args: Any, **kwargs: Any) -> Any:
    if isinstance(value, torch.Tensor) and not args and not kwargs:
        value = value.item()
    if isinstance(value, SYMBOLIC):
        return torch.sym_int(value)
    return builtins.int(value, *args, **kwargs)


def symbolic_float(value: Any = 0.0) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    return torch.sym_float(value) if isinstance(value, SYMBOLIC) else builtins.float(value)


def symbolic_len(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            raise TypeError("len() of a 0-d tensor")
        return value.shape[0]
    return builtins.len(value)


def _extreme(builtin: Any, symbolic: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = list(args[0]) if len(args) == 1 and not kwargs and not isinstance(args[0], torch.Tensor) else list(args)
    if (
        not kwargs
        and any(isinstance(v, SYMBOLIC) for v in values)
        and all(isinstance(v, (*SYMBOLIC, int, float)) for v in values)
    ):
        result = values[0]
        for value in values[1:]:
            result = symbolic(result, value)
        return result
    return builtin(*args, **kwargs)


def symbolic_min(*args: Any, **kwargs: Any) -> Any:
    return _extreme(builtins.min, torch.sym_min, args, kwargs)


def symbolic_max(*args: Any, **kwargs: Any) -> Any:
    return _extreme(builtins.max, torch.sym_max, args, kwargs)


def refused_range(*args: Any) -> Any:
    if any(isinstance(a, (*SYMBOLIC, torch.Tensor)) for a in args):
        raise CaptureRefused(
            "a Python loop whose number of rounds is a device value",
            where=current_user_line(),
            advice="write the loop as tensor operations over all rows, or give it a static number of rounds",
        )
    return builtins.range(*args)


def refused_print(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
    raise CaptureRefused(
        "print() inside the step would run only while it is captured, not at each replay",
        where=current_user_line(),
        advice="return the value and print it outside the step",
    )


DEVICE_NUMBER = "<a number that only the device knows>"
_text_made: list[SourceLine | None] = []


@contextlib.contextmanager
def marked_formatting() -> Iterator[None]:
    """Within it, text that the user's own line makes of a traced number holds a mark in its place: the name of a symbol
    says nothing. A profiler's label or a log line may have it; what a step returns may not (`refuse_marked_text`).

    f-strings and `str` reach only the class, hence for the time of a trace its methods are others.
    """
    names = ("__format__", "__repr__", "__str__")
    kept = [(kind, name, vars(kind).get(name), getattr(kind, name)) for kind in SYMBOLIC for name in names]
    _text_made.clear()

    def guarded(original: Any) -> Any:
        def method(self: Any, *args: Any) -> str:
            if is_user_file(sys._getframe(1).f_code.co_filename):
                _text_made.append(current_user_line())
                return DEVICE_NUMBER
            return original(self, *args)

        return method

    for kind, name, _, original in kept:
        setattr(kind, name, guarded(original))
    try:
        yield
    finally:
        for kind, name, own, _ in kept:
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


OVERRIDES: dict[str, Any] = {
    "int": _stand_in(int, symbolic_int),
    "float": _stand_in(float, symbolic_float),
    "len": symbolic_len,
    "min": symbolic_min,
    "max": symbolic_max,
    "range": _stand_in(range, refused_range),
    "print": refused_print,
}


def refuse_marked_text(returned: Any) -> None:
    """Refuse text made of a device number among the leaves or keys of what a step returned."""
    leaves, spec = tree_flatten(returned)
    if _text_made and any(DEVICE_NUMBER in text for text in (str(spec), *[v for v in leaves if isinstance(v, str)])):
        raise CaptureRefused(
            "a number that only the device knows is made text and returned",
            where=_text_made[-1],
            advice="return the number and format it outside the step",
        )
