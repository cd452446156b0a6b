"""What a pass is: a named function from a captured step to itself, with a check before and after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from zgcompile.ir.program import StepProgram


class Pass(ABC):
    """One pass over a `StepProgram`. `name` is the file's name with dashes; `apply` returns True when it changed
    something."""

    name: ClassVar[str]

    @abstractmethod
    def apply(self, program: StepProgram) -> bool: ...
