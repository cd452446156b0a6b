"""A compiled step that measures itself against the function it was made from, while a script trains with it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from zgcompile.errors import VerificationFailed
from zgcompile.frontend.arguments import Arguments
from zgcompile.frontend.comparison import Report
from zgcompile.frontend.compiled_step import CompiledStep, compile
from zgcompile.frontend.eager_time import eager_seconds, synchronize
from zgcompile.frontend.verify import verify
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.source import code_line

REPETITIONS = 5  # of the eager function, each before a replay of the same batch


class MeasuredStep:
    """Call it as the step. A call trains once, through zgcompile; eager runs and checks between calls change nothing.

    `made` hears of each step: the one of a method is made anew for each instance.
    """

    already_compiled = True  # for a script that compiles its step itself

    def __init__(
        self, fn: Callable[..., Any], warmup: int, headroom: float | None, made: Callable[[MeasuredStep], None]
    ) -> None:
        self.options = (warmup, headroom, made)
        envelope = Envelope(headroom=headroom)
        self.step = fn if isinstance(fn, CompiledStep) else compile(fn, warmup=warmup, envelope=envelope)
        self.where = code_line(self.step.fn)
        self.eager: list[float] = []  # seconds
        self.compiled: list[float] = []  # seconds, replays alone
        self.parity: Report | None = None
        self.parity_note = "no call reached a replay"
        self.failure: VerificationFailed | None = None
        self._last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._bound: dict[int, tuple[Any, MeasuredStep]] = {}
        functools.update_wrapper(self, self.step.fn)
        made(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self.step.stats
        if before.replays and len(self.eager) < REPETITIONS:
            self._measure_eager(args, kwargs)
        device = self.step.specialisations[0].captured.device if self.step.specialisations else None
        if device is not None:
            synchronize(device)
        start = time.perf_counter()
        result = self.step(*args, **kwargs)
        if device is not None:
            synchronize(device)
        seconds = time.perf_counter() - start
        after = self.step.stats
        if after.replays > before.replays and after.captures == before.captures:
            self.compiled.append(seconds)
        self._last = (args, kwargs)
        if after.replays and self.parity is None:
            self._check()
        return result

    def __repr__(self) -> str:
        return f"<{self.step.fn.__name__}, already compiled by zgcompile run>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        if id(instance) not in self._bound:
            self._bound[id(instance)] = (instance, MeasuredStep(self.step.fn.__get__(instance, owner), *self.options))
        return self._bound[id(instance)][1]

    def finish(self) -> None:
        """Check the last batch, unless the script has left the state that the step trains in (`model.eval()`)."""
        if self._last is not None:
            arguments = Arguments.of(*self._last)
            if self.parity is None or any(s.guards.hold(arguments) for s in self.step.specialisations):
                self._check()

    def _measure_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        specialisation = self.step.specialisations[0]
        if not self.eager:
            eager_seconds(specialisation, args, kwargs)  # the first run loads libraries and fills caches
        self.eager.append(eager_seconds(specialisation, args, kwargs))

    def _check(self) -> None:
        assert self._last is not None
        args, kwargs = self._last
        try:
            self.parity, self.parity_note = verify(self.step, *args, **kwargs), ""
        except VerificationFailed as failure:
            self.failure, self.parity_note = failure, failure.what
            self.parity = failure.report or Report(getattr(self, "__name__", "step"))
        except Exception as error:  # a script may have torn down what its step needs
            if self.parity is None:
                self.parity_note = f"not checked: {error}"
