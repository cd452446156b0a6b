"""Batches for the dry runs from the user's `Envelope(batches=)`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch

from zgcompile.errors import BadInput
from zgcompile.frontend.arguments import Arguments
from zgcompile.ir.program import ArgumentInput


def given_batches(
    make: Callable[[], Iterable[Any]], entries: Sequence[ArgumentInput], device: torch.device
) -> Generator[list[torch.Tensor], None, None]:
    """The tensor arguments of batch after batch, without end: `make` is called again when its batches are over. The
    generators of a DataLoader and its samplers are put back when this iterator is closed.

    Raises:
        BadInput: `make` gives what are no batches of this step, no batch at all, or a loader with persistent workers.
    """
    generators: dict[torch.Generator, torch.Tensor] = {}
    try:
        while True:
            none = True
            loader = make()
            if getattr(loader, "persistent_workers", False):
                # All its iterations share one iterator, and the training loop may be in the midst of it.
                raise BadInput(
                    "Envelope(batches=...) gave a loader with persistent workers, whose epoch would start anew",
                    advice="give it a loader of its own: batches=lambda: DataLoader(dataset, ...)",
                )
            for generator in _generators(loader):
                generators.setdefault(generator, generator.get_state())
            for batch in loader:
                none = False
                yield _arguments(batch, entries, device)
            if none:
                raise BadInput(
                    "Envelope(batches=...) gave no batch",
                    advice="return an iterable anew at each call: batches=lambda: loader",
                )
    finally:
        for generator, state in generators.items():
            generator.set_state(state)


def _arguments(batch: Any, entries: Sequence[ArgumentInput], device: torch.device) -> list[torch.Tensor]:
    leaves = Arguments.of(batch if isinstance(batch, (tuple, list)) else (batch,), {}).leaves
    arguments = []
    for entry in entries:
        tensor = leaves[entry.position] if entry.position < len(leaves) else None
        if not isinstance(tensor, torch.Tensor) or not _suits(tensor, entry):
            raise BadInput(
                f"Envelope(batches=...) gave {_described(tensor)} for argument {entry.name}",
                advice="yield what the step is called with: a tensor, or a tuple of its arguments",
            )
        arguments.append(tensor.detach().to(device if entry.device.type != "cpu" else entry.device))
    return arguments


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Those of a DataLoader and of its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for holder in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


def _suits(tensor: torch.Tensor, entry: ArgumentInput) -> bool:
    if tensor.dtype != entry.dtype:
        return False
    if entry.length is None:
        return tensor.dim() == 0
    return tensor.dim() > 0 and tensor.shape[0] > 0 and tuple(tensor.shape[1:]) == entry.trailing


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return type(value).__name__
