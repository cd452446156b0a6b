"""`zgcompile run`: a script that knows nothing of zgcompile, its step compiled, measured and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zgcompile.errors import BadInput
from zgcompile.report.measured_step import MeasuredStep
from zgcompile.report.run_report import RunReport, StepReport
from zgcompile.report.script import as_main, execute, instrumented


def run_script(
    path: Path, args: Sequence[str] = (), *, step: str = "train_step", warmup: int = 3, headroom: float | None = None
) -> RunReport:
    """Run the script as `__main__` with its function `step` under zgcompile. `path` must be absolute.

    Raises:
        BadInput: no such script or function, or the function is never called. Any other ZgError: a step that cannot be
        compiled. What the script raises, but for SystemExit.
    """
    code = instrumented(path, step)
    steps: list[MeasuredStep] = []

    def decorator(fn: Callable[..., Any]) -> MeasuredStep:
        return MeasuredStep(fn, warmup, headroom, steps.append)

    with as_main(path, args) as module:
        report = RunReport(str(path), execute(code, module, decorator))
        called = [measured for measured in steps if measured.step.stats.calls]
        if not called and report.exit_code == 0:
            raise BadInput(
                f"{path.name} ended without a call of {step}",
                advice="name the function that trains with --step, and pass the script's arguments after --",
            )
        for measured in called:
            measured.finish()
            report.steps.append(StepReport.of(measured))
            if measured.failure is not None:
                report.failures.append(measured.failure)
    return report
