"""`zgcompile::dynamic_rows`: the rows of an argument whose length is a symbol of the FX graph."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("zgcompile", "FRAGMENT")
LIBRARY.define("dynamic_rows(Tensor buffer, Tensor length) -> Tensor")
LIBRARY.define("dynamic_rows_like(Tensor buffer, Tensor rows) -> Tensor")


def dynamic_rows(buffer: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Rows `[0, length)` of `buffer` [L, ...], a fresh tensor; `length` is a 0-d int64 tensor. Traced, the result has a
    new size symbol. Run outside a trace the buffer has exactly `length` rows already (a caller's argument), so nothing
    is read back.
    """
    del length
    return buffer.clone()


def dynamic_rows_like(buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`buffer` [L, ...] with the size symbol of `rows`: arguments that agree in dimension 0 share one."""
    del rows
    return buffer.clone()


def _fake_dynamic_rows(buffer: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    del length
    size = torch.library.get_ctx().new_dynamic_size(min=2)
    return buffer.new_empty((size, *buffer.shape[1:]))


def _fake_dynamic_rows_like(buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return buffer.new_empty((rows.shape[0], *buffer.shape[1:]))


LIBRARY.impl("dynamic_rows", dynamic_rows, "CompositeExplicitAutograd")
LIBRARY.impl("dynamic_rows_like", dynamic_rows_like, "CompositeExplicitAutograd")
torch.library.register_fake("zgcompile::dynamic_rows", _fake_dynamic_rows, lib=LIBRARY)
torch.library.register_fake("zgcompile::dynamic_rows_like", _fake_dynamic_rows_like, lib=LIBRARY)
