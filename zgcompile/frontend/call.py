"""One call of a compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zgcompile.frontend.arguments import Arguments


class Call:
    """One call of the step: its key and arguments; `leaves` are flattened only where the arguments are nested.
    `happened`: the state is written, so whatever is raised afterwards (an interrupt), the numbers of this call are
    spent.
    """

    __slots__ = ("args", "happened", "key", "kwargs", "leaves")

    def __init__(self, key: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.key, self.args, self.kwargs = key, args, kwargs
        self.happened = False
        flat = not kwargs and not any(isinstance(a, (list, tuple, dict)) for a in args)
        self.leaves: Sequence[Any] = args if flat else Arguments.of(args, kwargs).leaves
