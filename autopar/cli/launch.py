"""The command ``launch``: a plan and a script to the torchrun command that runs it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from autopar.cli.output import Json, note, reporting, show
from autopar.cli.reading import PlanFile, load_plan
from autopar.errors import CommandError, PlanError
from autopar.plan import Plan

#: What torchrun is, for this very Python (its own documentation says that the two are the same).
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
#: torchrun's options and environment variables that say where hosts meet.
_MEETING, _MEETING_VARIABLES = ("--rdzv", "--master", "--standalone"), ("PET_RDZV_ENDPOINT", "PET_MASTER_ADDR")
#: torchrun's options with which what is run is no script.
_NO_SCRIPT = frozenset({"-m", "--module", "--no-python", "--no_python"})


class LaunchCommand(TyperCommand):
    """A command whose arguments after ``--`` are those of a script, and none of its own."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Take what comes after ``--`` away before the rest is read."""
        if "--" in args:
            place = args.index("--")
            args, ctx.meta[__name__] = args[:place], args[place + 1 :]
        return super().parse_args(ctx, args)


@reporting
def launch(
    ctx: typer.Context,
    plan: PlanFile,
    nnodes: Annotated[int | None, typer.Option(min=1, help="Hosts; default: those of the plan's cluster.")] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Processes a host; default: the devices of one in the plan's cluster.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
    as_json: Json = False,
) -> None:
    """Print the torchrun command that runs a script on the devices of a plan, and run it.

    Other options before -- are torchrun's, and so is the exit code. On several
    hosts run it on each. The script reads the plan itself:
    autopar.parallelize(model, plan=autopar.Plan.load("plan.json")).

    \b
    autopar launch plan.json -- train.py --lr 1e-4
    autopar launch plan.json --rdzv-backend c10d --rdzv-endpoint host0:29500 -- train.py
    """
    script: Sequence[str] = ctx.meta.get(__name__, ())
    if not script:
        raise typer.BadParameter("there is nothing to run: autopar launch plan.json -- train.py", ctx=ctx)
    found = load_plan(plan)
    hosts, devices = nnodes or found.cluster["hosts"], nproc_per_node or found.cluster["devices_per_host"]
    _check(found, hosts, devices, ctx.args, script)
    alone = ["--standalone"] if hosts == 1 and not _meets(ctx.args) else []
    sizes = ["--nnodes", str(hosts), "--nproc-per-node", str(devices)]
    command = [*TORCHRUN, *sizes, *alone, *ctx.args, *script]
    if dry_run:
        show(as_json, shlex.join(command), {"command": command})
        return
    note(shlex.join(command))
    os.execv(command[0], command)  # so that signals and the exit code are torchrun's


def _meets(options: Sequence[str]) -> bool:
    """Whether it is said where hosts meet."""
    return any(o.startswith(_MEETING) for o in options) or any(name in os.environ for name in _MEETING_VARIABLES)


def _check(plan: Plan, hosts: int, devices: int, options: Sequence[str], script: Sequence[str]) -> None:
    """What torchrun would only find out when all processes run, or by waiting for ever."""
    if hosts * devices != plan.world_size:
        raise PlanError(
            f"The plan is for {plan.world_size} ranks.",
            expected=f"hosts x processes = {plan.world_size}",
            found=f"{hosts} x {devices} = {hosts * devices}",
            change="change --nnodes or --nproc-per-node, or plan for that cluster",
        )
    if hosts > 1 and not _meets(options):
        raise CommandError(
            f"It is not said where the {hosts} hosts meet.",
            expected="torchrun's options of the rendezvous, the same on every host",
            found="none of --rdzv-endpoint and --master-addr",
            change="add for instance --rdzv-backend c10d --rdzv-endpoint HOST:29500 before --",
        )
    if not _NO_SCRIPT & set(options) and not Path(script[0]).is_file():
        raise CommandError(
            f"There is no script {script[0]}.",
            expected="the path of a Python script after --",
            found="no such file",
            change="check the path, or give torchrun's option -m before -- for a module",
        )
