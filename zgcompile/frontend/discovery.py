"""The first look at a step: run once on fake tensors to find its modules, optimizers, outside tensors and created
state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from zgcompile.errors import CaptureRefused
from zgcompile.frontend.lift import LiftMode, lifted_autograd_functions
from zgcompile.frontend.shape_env import EnvelopeShapeEnv
from zgcompile.frontend.symbolic_builtins import refuse_marked_text
from zgcompile.ir.draws import KeyedDraws
from zgcompile.ir.source import current_user_line


@dataclass(frozen=True)
class CreatedState:
    """An entry of `optimizer.state[parameter]` that the first step creates."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    key: str
    like: FakeTensor


@dataclass
class Discovery:
    """What one step of the user's function touches. `live_grads` maps id(parameter) to whether `.grad` is set
    afterwards."""

    modules: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    created: list[CreatedState] = field(default_factory=list)
    grads_before: dict[int, bool] = field(default_factory=dict)
    grads_after: dict[int, bool] = field(default_factory=dict)

    @property
    def first_step_differs(self) -> bool:
        """True where the first step does not have the structure of the later ones: it creates state or gradients."""
        return bool(self.created) or self.grads_before != self.grads_after


class StepHooks:
    """Collects the modules and optimizers that run; `meet` hears of each just before its first forward or step."""

    def __init__(self, found: Discovery, meet: Callable[[Any], None]) -> None:
        self.modules, self.optimizers, self.meet = found.modules, found.optimizers, meet

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        def on_module(module: torch.nn.Module, _inputs: Any) -> None:
            if not any(module is m for m in self.modules):
                self.meet(module)
                self.modules.append(module)

        def on_optimizer(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            refuse_optimizer(optimizer)
            if not any(optimizer is o for o in self.optimizers):
                self.meet(optimizer)
                self.optimizers.append(optimizer)

        handles = [register_module_forward_pre_hook(on_module), register_optimizer_step_pre_hook(on_optimizer)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


# Their steps decide in Python on device values.
REFUSED = {
    torch.optim.RAdam: "use Adam, AdamW or NAdam",
    torch.optim.ASGD: "use SGD, and average the weights outside the step",
    torch.optim.Rprop: "use RMSprop",
    torch.optim.SparseAdam: "make the embedding dense (sparse=False) and use Adam",
    torch.optim.LBFGS: "use a first-order optimizer, or keep this one outside the compiled step",
}


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for kind, advice in REFUSED.items():
        if isinstance(optimizer, kind):
            raise CaptureRefused(f"{kind.__name__} cannot be captured", where=current_user_line(), advice=advice)


def has_hooks(tensor: torch.Tensor) -> bool:
    """`register_hook` or `register_post_accumulate_grad_hook` was called on this tensor itself."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def discover(
    run: Callable[[], Any], fake_mode: FakeTensorMode, found: Discovery, meet: Callable[[Any], None]
) -> Discovery:
    """Run `run()` on fake tensors under `fake_mode`; the caller restores the Python state afterwards. What it returns
    may be outside tensors that no op touched: they are lifted too."""
    lift = LiftMode(fake_mode)
    key = fake_mode.from_tensor(torch.zeros((), dtype=torch.int64, device="cpu"))
    shape_env = fake_mode.shape_env
    assert isinstance(shape_env, EnvelopeShapeEnv)
    hooks = StepHooks(found, meet)
    with (
        hooks.installed(),
        fake_mode,
        enable_python_dispatcher(),
        KeyedDraws(key),
        lifted_autograd_functions(lift),
        lift,
    ):
        returned = run()
        refuse_marked_text(returned)
        for leaf in tree_leaves(returned):
            lift.swap(leaf)
    found.tensors = list(lift.order)
    for tensor in found.tensors:
        if has_hooks(tensor):
            raise CaptureRefused(
                "a tensor of the step has a gradient hook (register_hook): a replay would not run it",
                advice="change the gradient inside the step, between backward and the optimizer",
            )
    for tensor in found.tensors:
        if tensor.is_leaf and (tensor.requires_grad or tensor.grad is not None):
            found.grads_before[id(tensor)] = tensor.grad is not None
            found.grads_after[id(tensor)] = lift.twins[id(tensor)].grad is not None
    for optimizer in found.optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, FakeTensor) and isinstance(parameter, torch.Tensor):
                    found.created.append(CreatedState(optimizer, parameter, name, value))
    return found
