"""Every outside tensor that a step touches becomes an input of its FX graph."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zgcompile.errors import CaptureRefused, SourceLine
from zgcompile.frontend.symbolic_functions import REPLACED
from zgcompile.ir.sizes import SYMBOLIC
from zgcompile.ir.source import current_user_line, is_user_file

GRAD_GET, DATA_SET = vars(torch._C.TensorBase)["grad"].__get__, vars(torch._C.TensorBase)["data"].__set__


class LiftMode(TorchFunctionMode):
    """Replaces each real tensor in a torch call by its fake twin; `order` lists the real ones as they were first met.

    It works at the level of the Python API, where arguments are the very objects that the user's modules, optimizers
    and closures hold: so identity is the key, dictionaries such as `optimizer.state` keep their real keys, and nothing
    is ever written to a real tensor. `p.grad` of a lifted leaf lives on its twin.
    """

    def __init__(self, fake_mode: FakeTensorMode, twins: dict[int, FakeTensor] | None = None) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.twins: dict[int, FakeTensor] = {} if twins is None else twins
        self.order: list[torch.Tensor] = []
        self.first_met: SourceLine | None = None  # where the first of `order` was
        self.entering: dict[int, torch.Tensor | None] = {}  # id(twin) -> its gradient when the step began
        self.looked_at: set[int] = set()  # id(twin) of those whose entering gradient something but zero_grad asked for

    def lift(self, tensor: torch.Tensor) -> FakeTensor:
        twin = self.twins.get(id(tensor))
        if twin is None:
            twin = fake_twin(self.fake_mode, tensor)
            self.twins[id(tensor)] = twin
            if not self.order:
                self.first_met = current_user_line()
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
        first = args[0] if args else None
        args, kwargs = self.swap(args), self.swap(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and any(isinstance(v, SYMBOLIC) for v in tree_leaves(args[:1])):
            return _tensor_of_sizes(*args, **kwargs)
        if func == DATA_SET:
            return self.assign_data(*args)
        result = REPLACED.get(func, func)(*args, **kwargs)
        entering = func == GRAD_GET and result is not None and result is self.entering.get(id(args[0]))
        if entering and not _in_zero_grad(sys._getframe(1)):
            self.looked_at.add(id(args[0]))
        # An op that returns the tensor it was given gives the user's own back: `self.count += 1` binds it again.
        return first if args and isinstance(first, torch.Tensor) and result is args[0] else result

    def assign_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """`target.data = value` as a write of the values, since a replay runs on the memory that the state has.

        Eager gives the target other memory. The difference shows where the old memory or the value's is used again: in
        the backward pass of what computed the target, through a view or another tensor, which is refused, or in that of
        what a leaf went into, where autograd finds the write.
        """
        if (target.shape, target.dtype, target.device) != (value.shape, value.dtype, value.device):
            given, wanted = (f"{t.dtype}{list(t.shape)}" for t in (value, target))
            _refuse_data(f"gives a tensor of {wanted} one of {given}")
        outside = any(target is twin for twin in self.twins.values())
        if target._is_view() and not outside:
            _refuse_data("gives a view memory of its own")
        if target.grad_fn is not None:
            _refuse_data("replaces a value that the backward pass may need")
        storage = value.untyped_storage()._cdata
        if any(t is not target and t.untyped_storage()._cdata == storage for t in self.twins.values()):
            _refuse_data("lets two tensors share their memory")
        with torch.no_grad():
            target.copy_(value.detach())


def _refuse_data(what: str) -> NoReturn:
    raise CaptureRefused(
        f"`.data =` {what}",
        where=current_user_line(),
        advice="write the values under torch.no_grad(): x.copy_(y), or make the change outside the step",
    )


def _in_zero_grad(frame: FrameType) -> bool:
    """torch's own `zero_grad`: it treats a gradient that is there and one that is None to the same end."""
    code = frame.f_code
    return code.co_name == "zero_grad" and not is_user_file(code.co_filename)


def _tensor_of_sizes(
    data: Any, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False
) -> torch.Tensor:
    """`torch.tensor(data)` where some of the numbers are sizes or items of this step, which torch would want as plain
    numbers."""
    if isinstance(data, (list, tuple)):
        parts = [_tensor_of_sizes(item, None, device) for item in data]
        common = functools.reduce(torch.promote_types, (p.dtype for p in parts))
        result = torch.stack([p.to(common) for p in parts])
    elif isinstance(data, torch.Tensor):
        result = data.to(device) if device is not None else data
    else:
        kinds = ((torch.SymBool, torch.bool), (torch.SymInt, torch.int64), (torch.SymFloat, torch.get_default_dtype()))
        kind = next((d for s, d in kinds if isinstance(data, s)), None)
        result = torch.tensor(data, device=device) if kind is None else torch.full((), data, dtype=kind, device=device)
    result = result if dtype is None else result.to(dtype)
    return result.requires_grad_() if requires_grad else result


def fake_twin(fake_mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A fake tensor like `tensor`, every size static, a leaf that requires grad where the original does, and without
    `.grad`."""
    with torch._C.DisableTorchFunction():  # an active LiftMode would lift what the making of a twin handles
        twin = fake_mode.from_tensor(tensor.detach(), static_shapes=True)
        if isinstance(tensor, torch.nn.Parameter):
            # A Parameter made of a tensor subclass is of that subclass.
            twin = cast(FakeTensor, torch.nn.Parameter(twin, requires_grad=tensor.requires_grad))
        elif tensor.requires_grad:
            twin.requires_grad_(True)
    return twin


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
