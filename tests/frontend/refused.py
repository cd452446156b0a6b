"""A table of steps that are refused, and the test of one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from zgcompile.errors import ZgError

Case = Callable[[Any], Any]


class Refused(dict[str, tuple[Case, type[ZgError]]]):
    """Name -> (what builds the step in a world, the error). `@refused(kind)` on a case puts it in."""

    def __call__(self, kind: type[ZgError]) -> Callable[[Case], Case]:
        def register(case: Case) -> Case:
            self[case.__name__] = case, kind
            return case

        return register


def check_case(cases: Refused, name: str, new_world: Any, check_refused: Any, batches_of: Any) -> ZgError:
    """Refused at the first call, by the line marked HERE, the world and all that the step closes over as before."""
    case, kind = cases[name]
    world = new_world()
    step = case(world)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    roots = [world, *(c.cell_contents for c in step.__closure__ or ())]
    return check_refused(step, *batches_of(8), kind=kind, source=getattr(step, "source", None), roots=roots)
