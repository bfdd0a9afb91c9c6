"""The commands that read plans: ``report``, ``explain``, ``diff`` and ``simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.output import Json, note, reporting, show
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.report.simulated import simulated_step

Html = Annotated[Path | None, typer.Option(help="Write the report as one HTML page, which needs no network.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that autopar plan -o wrote.")]


def load_plan(path: Path) -> Plan:
    """The plan of a file. PlanError, naming the file, if there is none in it."""
    try:
        return Plan.load(path)
    except PlanError as error:
        what = error.what if str(path) in error.what else f"{path}: {error.what}"
        raise PlanError(what, expected=error.expected, found=error.found, change=error.change) from error


@reporting
def report(plan: PlanFile, html: Html = None, as_json: Json = False) -> None:
    """What a plan chose, why, what it costs and what came second; with --json the plan itself.

    \b
    autopar report plan.json --html report.html
    """
    found = load_plan(plan)
    if html is not None:
        found.save_html(html)
        note(f"the report is in {html}")
    show(as_json, found.report(), found.to_dict())


@reporting
def explain(
    plan: PlanFile,
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="PATTERN", help="A module or parameter, * standing for any part of its name.", show_default=False
        ),
    ],
    as_json: Json = False,
) -> None:
    """Why modules and parameters are split as they are: the options there were, and what each costs.

    \b
    autopar explain plan.json 'model.layers.*.mlp'
    """
    found = load_plan(plan).explain(pattern)
    show(as_json, str(found), found)


@reporting
def diff(
    plan: PlanFile,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Another plan of the same model.")],
    as_json: Json = False,
) -> None:
    """What differs between two plans of one model.

    \b
    autopar diff plan.json other.json
    """
    found = load_plan(plan).diff(load_plan(other))
    show(as_json, str(found), found)


@reporting
def simulate(
    plan: PlanFile,
    timeline: Annotated[Path | None, typer.Option(help="Write the step, for ui.perfetto.dev.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate one step: what every rank of the pipeline computes, waits for and communicates, and every stage takes.

    \b
    autopar simulate plan.json --timeline step.json
    """
    found = load_plan(plan)
    step = simulated_step(found)
    if timeline is not None:
        found.timeline(timeline)
        note(f"the step is in {timeline}, for ui.perfetto.dev")
    show(as_json, str(step), step)
