"""Numbers that a replayed step returns before their value is on the host: they wait only when read."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any

import torch

# A pickle of a deferred number calls one of these, which `torch.load` refuses where nobody has said that they are safe.
torch.serialization.add_safe_globals([float, int])


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, DeferredNumber) else value


def _binary(op: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[[DeferredNumber, Any], Any]:
    def method(self: DeferredNumber, other: Any) -> Any:
        left, right = (_plain(other), self.value) if swapped else (self.value, _plain(other))
        return op(left, right)

    return method


class DeferredNumber(numbers.Real):
    """What `float(loss)` or `x.item()` returned from a compiled step becomes: reads its 0-d tensor at first use, and
    only then.

    Works in arithmetic, comparison, `float`, `int`, `format`, `round`, as an index (integers), with numpy and
    `json`-style encoders that accept `float(x)`. `read` is called at the first read (statistics).
    """

    __slots__ = ("_is_int", "_on_read", "_tensor", "_value")

    def __init__(self, tensor: torch.Tensor, is_int: bool = False, on_read: Callable[[], None] | None = None) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._is_int, self._on_read = is_int, on_read
        self._value: int | float = 0

    @property
    def value(self) -> int | float:
        if self._tensor is not None:
            self._value = int(self._tensor.item()) if self._is_int else float(self._tensor.item())
            self._tensor = None
            if self._on_read is not None:
                self._on_read()
        return self._value

    def peek(self) -> int | float:
        """The value, read without counting as the user's read."""
        tensor = self._tensor
        return self._value if tensor is None else int(tensor.item()) if self._is_int else float(tensor.item())

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        if not self._is_int:
            raise TypeError("a deferred float cannot be used as an index")
        return int(self.value)

    def __trunc__(self) -> int:
        return int(self.value)

    def __floor__(self) -> int:
        return int(self.value // 1)

    def __ceil__(self) -> int:
        return -int(-self.value // 1)

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.value, ndigits) if ndigits is not None else round(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    # The stubs of `numbers` call complex numbers unhashable; a float is not.
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles (`torch.save`) are of the plain number."""
        return type(self.value), (self.value,)

    def is_integer(self) -> bool:
        return self.value == self.value // 1

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy as np

        del copy
        return np.asarray(self.value, dtype=dtype)

    def __neg__(self) -> Any:
        return -self.value

    def __pos__(self) -> Any:
        return self.value

    def __abs__(self) -> Any:
        return abs(self.value)

    __add__, __radd__ = _binary(operator.add), _binary(operator.add, swapped=True)
    __sub__, __rsub__ = _binary(operator.sub), _binary(operator.sub, swapped=True)
    __mul__, __rmul__ = _binary(operator.mul), _binary(operator.mul, swapped=True)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _binary(operator.truediv, swapped=True)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _binary(operator.floordiv, swapped=True)
    __mod__, __rmod__ = _binary(operator.mod), _binary(operator.mod, swapped=True)
    __pow__, __rpow__ = _binary(operator.pow), _binary(operator.pow, swapped=True)
    __eq__ = _binary(operator.eq)
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
