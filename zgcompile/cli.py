"""The command line: parses, calls, prints."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zgcompile import __version__
from zgcompile.errors import ZgError
from zgcompile.report.run_script import run_script
from zgcompile.report.script import own_traceback

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compiles a sampled GNN training step, counts and all, into one CUDA Graph."""


@app.command()
def run(
    script: Annotated[Path, typer.Argument(help="A Python script; it need not know zgcompile.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, after --.")] = None,
    step: Annotated[
        str, typer.Option(help="The function of the script that is one training step; Class.method for a method.")
    ] = "train_step",
    warmup: Annotated[int, typer.Option(help="Calls that train at exact sizes before the capture.")] = 3,
    headroom: Annotated[
        float | None,
        typer.Option(help="Capacity: the largest count seen times this.", show_default="what costs least"),
    ] = None,
    with_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of zgcompile's own errors.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Run a script with its training step compiled, and show what that changed."""
    path = Path(os.path.abspath(script))
    try:
        report = run_script(path, args or (), step=step, warmup=warmup, headroom=headroom)
    except ZgError as error:
        typer.echo(traceback.format_exc() if with_traceback else str(error), err=True)
        raise typer.Exit(1) from None
    except Exception as error:
        typer.echo(own_traceback(error, path), err=True, nl=False)
        raise typer.Exit(1) from None
    console = Console()
    for table in report.tables():
        console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    for failure in report.failures:
        typer.echo(str(failure), err=True)
    raise typer.Exit(report.exit_code or bool(report.failures))


if __name__ == "__main__":
    app()
