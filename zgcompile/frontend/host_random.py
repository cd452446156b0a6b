"""The host's random generators: `random`, `numpy.random`, torch's CPU generator and, once CUDA is in use, its
generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Generator states are real tensors, in the midst of a trace too."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": np.random.get_state()}
    with _plain_torch():
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states |= {f"torch.cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class HostRandom:
    """The state of every host generator at one moment. A CUDA generator first used later is not part of it."""

    states: dict[str, Any]

    @staticmethod
    def take() -> HostRandom:
        return HostRandom(_states())

    def restore(self) -> None:
        random.setstate(self.states["random"])
        np.random.set_state(self.states["numpy.random"])
        with _plain_torch():
            torch.set_rng_state(self.states["torch"])
            for name, state in self.states.items():
                if name.startswith("torch.cuda:"):
                    torch.cuda.set_rng_state(state, name.removeprefix("torch."))

    def changed(self) -> list[str]:
        """Names of the generators that have moved since, in the order "random", "numpy.random", "torch",
        "torch.cuda:0", ..."""
        now = _states()
        with _plain_torch():
            return [name for name, state in self.states.items() if not _equal(state, now[name])]
