"""What decides about the ops of a step without being reachable from it: the modes around the call."""

from __future__ import annotations

from typing import Any

import torch

_MODULE_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_hooks = [found for name in _MODULE_HOOKS if (found := getattr(torch.nn.modules.module, name, None)) is not None]
_function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: 0)


def ambient(device: torch.device) -> tuple[Any, ...]:
    """Grad and inference mode, autocast on `device`, default dtype, deterministic algorithms, function modes, and hooks
    on every module: two equal ones let one capture serve both calls."""
    kind = device.type
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        _function_modes(),
        [*(hook for hooks in _hooks for hook in hooks.values())],
    )
