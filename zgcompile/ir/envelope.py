"""The envelope: a capacity for every dynamic dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from zgcompile.errors import BadInput, SourceLine

ROWS_PER_TILE = 64


@dataclass(frozen=True)
class Envelope:
    """How capacities are chosen: the largest count seen times `headroom`, rounded up to 64 and never above what is provable.

    `caps` overrides single sizes by the user's line: `Envelope(caps={"train.py:31": 4096})`; the key is the end of "file:line".

    Raises:
        BadInput: a headroom below 1 or a capacity below 1.
    """

    headroom: float = 1.1
    caps: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.headroom >= 1.0:
            raise BadInput(f"Envelope(headroom={self.headroom}) is below 1", advice="use a factor such as 1.1")
        for line, cap in self.caps.items():
            if not isinstance(cap, int) or cap < 1:
                raise BadInput(f"Envelope(caps={{{line!r}: {cap}}}) is not a positive whole number", advice='write caps={"file.py:31": 4096}')

    def fitted(self, seen: int, provable: int | None) -> int:
        """The capacity for a size whose largest observed count is `seen` and which never exceeds `provable`."""
        grown = math.ceil(seen * self.headroom)
        cap = max(ROWS_PER_TILE, -(-grown // ROWS_PER_TILE) * ROWS_PER_TILE)
        return max(cap if provable is None else min(cap, provable), 1)

    def override(self, where: SourceLine | None) -> int | None:
        """The user's capacity for sizes born at that line, if any."""
        if where is None:
            return None
        return next((cap for line, cap in self.caps.items() if str(where).endswith(line)), None)
