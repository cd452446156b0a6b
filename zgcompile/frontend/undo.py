"""Everything a step may change, and putting it back: tensor data, `p.grad`, Python state, random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zgcompile.errors import VerificationFailed
from zgcompile.frontend.host_random import HostRandom
from zgcompile.frontend.python_state import PythonSnapshot
from zgcompile.ir.source import code_line

if TYPE_CHECKING:
    from zgcompile.frontend.specialisation import Specialisation

LARGE = 2**26  # bytes: a larger tensor that the step is not known to write is watched through its version, not copied


@dataclass(frozen=True)
class _Saved:
    tensor: torch.Tensor
    value: torch.Tensor | None  # None: watched only
    version: int | None  # None: an inference tensor has none
    always: bool  # a replay writes without bumping the version


class Undo:
    """The state around `fn` now; `restore` puts it back bit for bit, identities and version counters included.

    `roots` and `tensors` are what the step touches beyond what is reachable from `fn`; `written` are the tensors that
    it is known to write. Restore any number of times.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        roots: Iterable[object],
        tensors: Iterable[torch.Tensor],
        written: Iterable[torch.Tensor],
    ) -> None:
        self.fn = fn
        self.snapshot = PythonSnapshot.take(fn, [*roots])
        self.random = HostRandom.take()
        sure = {id(t): t for t in written}
        reached = sure | {id(t): t for t in (*tensors, *(site.tensor for site in self.snapshot.tensors))}
        self.grads = [(t, t.grad) for t in reached.values() if t.is_leaf and t.requires_grad]
        held = {id(grad): grad for _, grad in self.grads if grad is not None}
        sure |= held
        self.saved = [_save(t, always=key in sure) for key, t in (reached | held).items()]

    def restore(self) -> None:
        """Put everything back.

        Raises:
            VerificationFailed: a large tensor was written that no FX graph of the step writes; all else is back.
        """
        lost = []
        with torch.no_grad():
            for tensor, grad in self.grads:
                if tensor.grad is not grad:
                    tensor.grad = grad
            for saved in self.saved:
                moved = saved.version is not None and saved.tensor._version != saved.version
                if saved.value is None:
                    lost += [saved.tensor] if moved else []
                elif moved or saved.always:
                    saved.tensor.copy_(saved.value)
                    if saved.version is not None:
                        # The data is what it was, so a pending backward that saved this tensor is still right.
                        torch._C._autograd._unsafe_set_version_counter((saved.tensor,), (saved.version,))  # pyright: ignore
        self.snapshot.restore()
        self.random.restore()
        if lost:
            names = {id(site.tensor): site.path for site in self.snapshot.tensors}
            name = names.get(id(lost[0]), f"a tensor of shape {tuple(lost[0].shape)}")
            raise VerificationFailed(
                f"the step writes {name}, the captured step does not",
                where=code_line(self.fn),
                advice="report this: the capture misses a write",
            )

    def changed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor, its saved value) of each copied tensor whose bits differ now."""
        return [(s.tensor, s.value) for s in self.saved if s.value is not None and not same_bits(s.tensor, s.value)]


def undo_around(specialisation: Specialisation, arguments: Sequence[Any]) -> Undo:
    """An Undo of all that one call of a captured step touches, by the function itself or by a replay."""
    program, captured = specialisation.program, specialisation.captured
    held, written = [], []
    writes = {w.lifted for w in program.state_writes} | {g.lifted for g in program.gradient_writes}
    for i, entry in enumerate(program.lifted):
        try:
            tensor = entry.resolve()
        except (KeyError, AssertionError):
            continue  # not created yet
        if isinstance(tensor, torch.Tensor):
            held.append(tensor)
            written += [tensor] if i in writes else []
    if specialisation.replay is not None:
        written += specialisation.replay.gradients
    passed = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
    return Undo(specialisation.fn, captured.roots, [*captured.found.tensors, *held, *passed], written)


def _save(tensor: torch.Tensor, always: bool) -> _Saved:
    version = None if tensor.is_inference() else tensor._version
    copied = always or version is None or tensor.numel() * tensor.element_size() <= LARGE
    return _Saved(tensor, tensor.detach().clone() if copied else None, version, always)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, a NaN being equal to a NaN."""
    a, b = a.detach(), b.detach()
    return torch.equal(a, b) or (
        a.dtype.is_floating_point and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    )
