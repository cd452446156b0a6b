"""For tests of code that zgcompile compiles."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from zgcompile.errors import BadInput
from zgcompile.ir.draws import DrawStream, KeyedDraws
from zgcompile.keyed_numbers import step_key

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def injected_draws(
    seed: int | None = None, offset: int | None = None, device: torch.device | str | None = None
) -> Iterator[KeyedDraws]:
    """Gives every random op inside the numbers that a compiled step draws: the oracle for all that is random.

    An untouched eager function that runs inside gets, for its k-th random ATen call, the numbers keyed (seed, offset,
    k, logical index), so its result is what the compiled step of that (seed, offset) must return. They differ from the
    numbers of stock eager PyTorch, with the same distributions.

    Without `seed`, (seed, offset) are the next of the default generator of `device`, which moves on exactly as for one
    compiled step; with it, `offset` is 0 unless given and no generator is touched. `device` is that of the compiled
    step (None: PyTorch's default device). Yields the active mode. BadInput: an offset without a seed. CaptureRefused,
    on the way: a random op that compiled steps refuse too.
    """
    where = torch.device(torch.get_default_device() if device is None else device)
    if seed is None:
        if offset is not None:
            raise BadInput("injected_draws was given an offset without a seed", advice="give both, or neither")
        seed, offset = DrawStream().take(where)
    key = torch.tensor(step_key(seed, offset or 0), dtype=torch.int64, device=where)
    with KeyedDraws(key) as draws:
        yield draws
