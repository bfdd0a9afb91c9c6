"""The command line: what `autopar.api` does, for models that are named by a path or a function.

``plans.py`` has the commands that make plans, ``reading.py`` those that read them, ``machines.py`` clusters and
``launch.py`` starts a run; ``models.py`` turns what names a model into one, and ``output.py`` says how results and
errors are shown.
"""

from __future__ import annotations

from typing import Annotated

import typer

import autopar
from autopar.cli.launch import LaunchCommand, launch
from autopar.cli.machines import calibrate, clusters
from autopar.cli.plans import estimate, plan, verify
from autopar.cli.reading import diff, explain, report, simulate

__all__ = ["app", "main"]

#: An error that is not autopar's own is a bug, and then the whole traceback helps most.
app = typer.Typer(name="autopar", no_args_is_help=True, pretty_exceptions_enable=False)

for command in (plan, estimate, verify, report, explain, diff, simulate, clusters, calibrate):
    app.command()(command)
app.command(cls=LaunchCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(launch)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"autopar {autopar.__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


@app.callback()
def top(version: Version = False) -> None:
    """Decide how to split a PyTorch model over a cluster, and look at what was decided.

    \b
    Exit codes: 0 all is well
                1 an error, with what was expected, found and to change (verify: numbers differ)
                2 a command that cannot be read
    """


def main() -> None:
    """The entry point ``autopar``."""
    app()
