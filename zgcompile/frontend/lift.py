"""Every outside tensor that a step touches becomes an input of its FX graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode


class LiftMode(TorchFunctionMode):
    """Replaces each real tensor in a torch call by its fake twin; `order` lists the real ones as they were first met.

    It works at the level of the Python API, where arguments are the very objects that the user's modules, optimizers and
    closures hold: so identity is the key, dictionaries such as `optimizer.state` keep their real keys, and nothing is ever
    written to a real tensor. `p.grad` of a lifted leaf lives on its twin.
    """

    def __init__(self, fake_mode: FakeTensorMode, twins: dict[int, FakeTensor] | None = None, *, closed: bool = False) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.twins: dict[int, FakeTensor] = {} if twins is None else twins
        self.order: list[torch.Tensor] = []
        self.closed = closed

    def lift(self, tensor: torch.Tensor) -> FakeTensor:
        twin = self.twins.get(id(tensor))
        if twin is None:
            twin = fake_twin(self.fake_mode, tensor)
            self.twins[id(tensor)] = twin
            self.order.append(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                twin.grad = self.lift(tensor.grad)
        return twin

    def swap(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, FakeTensor) else self.lift(value)
        if type(value) in (list, tuple):
            return type(value)([self.swap(item) for item in value])
        if type(value) is dict:
            return {key: self.swap(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.swap(value.start), self.swap(value.stop), self.swap(value.step))
        return value

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self.swap(args), **self.swap(kwargs or {}))


def fake_twin(fake_mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A fake tensor like `tensor`, every size static, a leaf that requires grad where the original does, and without `.grad`."""
    with torch._C.DisableTorchFunction():  # an active LiftMode would lift what the making of a twin handles
        twin = fake_mode.from_tensor(tensor.detach(), static_shapes=True)
        if isinstance(tensor, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            twin.requires_grad_(True)
    return twin  # type: ignore[return-value]


@contextlib.contextmanager
def lifted_autograd_functions(mode: LiftMode) -> Iterator[None]:
    """`torch.autograd.Function.apply` goes past `__torch_function__`, so its arguments are swapped here."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return original.__func__(cls, *mode.swap(args), **mode.swap(kwargs))

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
