"""What a pass is: over a captured step a class with a name, over a lowered FX graph a function of the file's name that
returns `finished(fx_graph, changed)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch.fx import GraphModule

from zgcompile.ir.program import StepProgram


class Pass(ABC):
    """One pass over a `StepProgram`. `name` is the file's name with dashes; `apply` returns True when it changed
    something."""

    name: ClassVar[str]

    @abstractmethod
    def apply(self, program: StepProgram) -> bool: ...


def finished(fx_graph: GraphModule, changed: bool) -> bool:
    """How a pass over a lowered FX graph ends: checked and recompiled where it changed something, which it returns."""
    if changed:
        fx_graph.graph.lint()
        fx_graph.recompile()
    return changed
