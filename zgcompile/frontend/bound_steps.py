"""The compiled methods of one instance, kept with it."""

from __future__ import annotations

from typing import Any

NAME = "_zgcompile_steps"  # in the instance's dictionary


class BoundSteps:
    """By descriptor, as a subclass may override a compiled method and call it. Copies of the instance get their own:
    a deep copy or a pickle is empty, and a shallow copy's, which is this one, belongs to another instance."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.by_descriptor: dict[Any, Any] = {}

    @staticmethod
    def of(instance: Any) -> BoundSteps:
        steps: BoundSteps | None = instance.__dict__.get(NAME)
        if steps is None or steps.instance is not instance:
            steps = instance.__dict__[NAME] = BoundSteps(instance)
        return steps

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundSteps, (None,)
