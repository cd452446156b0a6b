"""One call of a compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zgcompile.frontend.arguments import Arguments


class Call:
    """One call of the step: its key and arguments; `leaves` are flattened only where the arguments are nested."""

    __slots__ = ("args", "key", "kwargs", "leaves")

    def __init__(self, key: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.key, self.args, self.kwargs = key, args, kwargs
        flat = not kwargs and not any(isinstance(a, (list, tuple, dict)) for a in args)
        self.leaves: Sequence[Any] = args if flat else Arguments.of(args, kwargs).leaves
