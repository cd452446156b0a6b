"""The arguments of a compiled step: which are tensors with a dynamic dimension 0, which are guards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zgcompile.errors import BadInput
from zgcompile.ir.source import code_line


@dataclass(frozen=True)
class TensorArgument:
    """What must stay the same about a tensor argument: all but the length of dimension 0."""

    position: int
    dtype: torch.dtype
    device: torch.device
    trailing: tuple[int, ...] | None  # None for a 0-d tensor
    requires_grad: bool

    def matches(self, tensor: torch.Tensor) -> bool:
        trailing = tuple(tensor.shape[1:]) if tensor.dim() else None
        return (
            tensor.dtype == self.dtype
            and tensor.device == self.device
            and trailing == self.trailing
            and tensor.requires_grad == self.requires_grad
        )


@dataclass
class Arguments:
    """The flat leaves of one call's `(args, kwargs)`."""

    leaves: list[Any]
    spec: TreeSpec
    tensors: list[TensorArgument] = field(default_factory=list)

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        leaves, spec = tree_flatten((tuple(args), kwargs))
        tensors = [
            TensorArgument(i, t.dtype, t.device, tuple(t.shape[1:]) if t.dim() else None, t.requires_grad)
            for i, t in enumerate(leaves)
            if isinstance(t, torch.Tensor)
        ]
        return cls(leaves, spec, tensors)

    def rebuild(self, replacements: dict[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [replacements.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        return tree_unflatten(leaves, self.spec)

    def lengths(self) -> list[int | None]:
        """Dimension 0 of each tensor argument, None for 0-d tensors."""
        return [self.leaves[t.position].shape[0] if t.trailing is not None else None for t in self.tensors]

    def constants(self) -> list[Any]:
        return [leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor)]

    def guard_key(self) -> tuple[Any, ...]:
        """Equal for two calls that one capture may serve (lengths apart). Objects count by identity, scalars by type
        and value."""
        scalars = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
        return (
            str(self.spec),
            tuple(
                (type(leaf).__name__, leaf) if isinstance(leaf, scalars) else ("object", id(leaf))
                for leaf in self.constants()
            ),
        )


def check_arguments(fn: Callable[..., Any], arguments: Arguments, expected: Sequence[TensorArgument]) -> None:
    """Refuse, before anything is touched, an argument that the step was not captured for.

    Raises:
        BadInput: naming the argument, what it was and what it must be.
    """
    for now, was in zip(arguments.tensors, expected, strict=True):
        tensor = arguments.leaves[was.position]
        name = argument_name(fn, was.position)
        if now == was:
            continue
        where = code_line(fn)
        if now.device != was.device:
            raise BadInput(
                f"argument {name} is on {now.device}, the step was captured with it on {was.device}",
                where=where,
                advice=f"pass {name}.to({str(was.device)!r})",
            )
        if now.dtype != was.dtype:
            raise BadInput(
                f"argument {name} has dtype {now.dtype}, the step was captured with {was.dtype}",
                where=where,
                advice=f"pass {name}.to({was.dtype})",
            )
        if not was.matches(tensor):
            raise BadInput(
                f"argument {name} has shape {tuple(tensor.shape)}, the step was captured with {describe(was)}",
                where=where,
                advice="only dimension 0 of an argument may change between calls: pass it with the one that changes "
                "first, x.t() for an edge_index [2, E], and transpose it in the step",
            )
    check_not_empty(fn, arguments)


def check_not_empty(fn: Callable[..., Any], arguments: Arguments) -> None:
    for tensor in arguments.tensors:
        if tensor.trailing is not None and arguments.leaves[tensor.position].shape[0] == 0:
            name = argument_name(fn, tensor.position)
            raise BadInput(
                f"argument {name} is an empty batch (0 rows)",
                where=code_line(fn),
                advice="skip the call when the batch is empty",
            )


def describe(tensor: TensorArgument) -> str:
    shape = "()" if tensor.trailing is None else f"({', '.join(['n', *map(str, tensor.trailing)])})"
    return shape + (" and requires_grad" if tensor.requires_grad else "")


def argument_name(fn: Callable[..., Any], position: int) -> str:
    """The parameter's name where leaf `position` is a positional argument of its own, else its number."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return f"#{position}"
    names = code.co_varnames[: code.co_argcount]
    if getattr(fn, "__self__", None) is not None:
        names = names[1:]
    return repr(names[position]) if position < len(names) else f"#{position}"


def length_groups(lengths: Sequence[int | None], seen: Sequence[Sequence[int | None]]) -> list[int | None]:
    """Group number of each argument: those that were equal in dimension 0 at this and all `seen` calls share a
    symbol."""
    groups: list[int | None] = []
    keys: dict[tuple[Any, ...], int] = {}
    for i, length in enumerate(lengths):
        if length is None:
            groups.append(None)
            continue
        key = (length, *(past[i] for past in seen))
        groups.append(keys.setdefault(key, len(keys)))
    return groups
