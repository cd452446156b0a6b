"""How long the user's own function takes, measured on state that is put back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zgcompile.frontend.specialisation import Specialisation
from zgcompile.frontend.undo import undo_around


def eager_seconds(specialisation: Specialisation, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """Wall time of one call of the function itself with stock random numbers, device work included; then undone.

    Adam's step counters, which a compiled step keeps on the device, go back to the host for it unless the optimizer's
    options (capturable, fused) have them on the device: there eager would wait for each of them.
    """
    device = specialisation.captured.device
    undo = undo_around(specialisation, tree_leaves((args, kwargs)))
    try:
        _counters_to_host(specialisation.captured.found.optimizers)
        synchronize(device)
        start = time.perf_counter()
        specialisation.fn(*args, **kwargs)
        synchronize(device)
        return time.perf_counter() - start
    finally:
        undo.restore()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _counters_to_host(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("capturable") or group.get("fused"):
                continue
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for key, value in list(state.items()):
                    if isinstance(value, torch.Tensor) and value.dim() == 0:
                        state[key] = value.cpu()
