"""The commands that make plans of a model and prove them: ``plan``, ``estimate`` and ``verify``."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import autopar
from autopar.arguments import check_sizes
from autopar.cli.models import Model, make_model
from autopar.cli.output import Json, note, reporting, show
from autopar.cli.reading import Html, PlanFile, load_plan
from autopar.cluster import Cluster
from autopar.errors import CommandError
from autopar.hints import Hints, check_hints
from autopar.hints_file import load_hints
from autopar.plan import Alternative, Plan
from autopar.report.tables import rendered
from autopar.report.text import plans_table
from autopar.report.units import bytes_text
from autopar.runtime.verify import VerifyReport
from autopar.solver.carry import shrink
from autopar.workload import Workload

ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="A preset with its size, such as h100-sxm:16x8 (16 hosts of 8 devices; autopar clusters lists them), or a "
        "cluster.toml.",
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", help="Sequences of a step, over all ranks; default: one a rank.")]
Seq = Annotated[int | None, typer.Option("--seq", help="Tokens a sequence; default: what the model was made for.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Mixed precision: bfloat16 or float16 computation and communication, float32 parameters and optimizer. "
        "Default: everything in the model's own dtype.",
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer",
        help="Whose state is counted: adamw, sgd, sgd_momentum, adafactor, muon, adamw_8bit, none, or '6 bytes' an "
        "element.",
    ),
]
Compile = Annotated[bool, typer.Option("--compile", help="Price a run with parallelize(compile=True).")]
Infer = Annotated[
    bool,
    typer.Option(
        "--infer",
        help="Plan to generate: one token of every sample a step, with --seq tokens of context. A forward, of a model "
        "that is no decoder.",
    ),
]
SearchSeconds = Annotated[
    float | None, typer.Option("--search-seconds", min=0.0, help="Take the best plan after so many seconds of solving.")
]
HintsFile = Annotated[Path | None, typer.Option("--hints", help="A YAML file with the fields of autopar.Hints.")]

#: Columns that a plan has at most, so that each is one line.
LINE = 240
#: Sequences that `verify` takes where nothing is said are as many as two micro-batches; they are at most so long.
VERIFY_TOKENS = 64
#: Prompts that `verify` takes a rank of the data where nothing is said.
VERIFY_PROMPTS = 4
#: Bytes of parameters that `verify` holds, for each that the model has, on every simulated rank and in the model in one
#: process: a parameter, its gradient and two states of an optimizer.
VERIFY_COPIES = 4


@reporting
def plan(
    model: Model,
    cluster: ClusterName,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    optimizer: Optimizer = "adamw",
    compile: Compile = False,
    infer: Infer = False,
    search_seconds: SearchSeconds = None,
    hints: HintsFile = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan as JSON.")] = None,
    html: Html = None,
    what_if: Annotated[
        bool | None,
        typer.Option(
            "--what-if/--no-what-if",
            help="Search again with links half as fast, twice the batch, twice the sequence, and a fifth more memory: "
            "takes as long as the search each time. Default: with --html.",
        ),
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a simulated step, for ui.perfetto.dev.")] = None,
    as_json: Json = False,
) -> None:
    """Decide how to split a model over a cluster; needs no GPU and no weights.

    Prints the report, with --json the plan as -o writes it. What -o and --html
    write is there before --what-if searches again, and then written once more.

    \b
    autopar plan llama-3-8b/ --cluster h100-sxm:8x8 --batch 1024 --seq 8192 --dtype bfloat16 -o plan.json
    autopar plan my_models:tiny --cluster cluster.toml --hints hints.yaml --html report.html
    """
    mode = "infer" if infer else "train"
    workload = Workload(global_batch=batch, seq_len=seq, optimizer=optimizer, param_dtype=dtype, mode=mode)
    module, found = _find(model, cluster, workload, hints, search_seconds, compile)
    _keep(found, output, html)
    if what_if or (what_if is None and html is not None):
        found = found.what_if()
        _keep(found, output, html)
    del module  # which had to live until here, to be searched again
    if output is not None:
        note(f"the plan is in {output}")
    if html is not None:
        note(f"the report is in {html}")
    if timeline is not None:
        found.timeline(timeline)
        note(f"a step is in {timeline}, for ui.perfetto.dev")
    show(as_json, found.report(), found.to_dict())


@reporting
def estimate(
    model: Model,
    cluster: ClusterName,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    optimizer: Optimizer = "adamw",
    compile: Compile = False,
    infer: Infer = False,
    search_seconds: SearchSeconds = None,
    hints: HintsFile = None,
    as_json: Json = False,
) -> None:
    """Step time and peak memory a device of the best plan and of those that lost, one line each.

    \b
    autopar estimate llama-3-8b/ --cluster h100-sxm:8x8 --batch 1024 --seq 8192 --dtype bfloat16
    """
    mode = "infer" if infer else "train"
    workload = Workload(global_batch=batch, seq_len=seq, optimizer=optimizer, param_dtype=dtype, mode=mode)
    _, found = _find(model, cluster, workload, hints, search_seconds, compile)
    chosen = Alternative(
        found.degrees,
        found.zero,
        found.zero_group_size,
        found.num_micro_batches,
        found.schedule,
        found.recompute,
        found.step_time,
        found.needed_memory,
        "chosen",
    )
    plans, where = (chosen, *found.alternatives), str(Cluster.from_dict(found.cluster))
    title = f"Plans of {found.model} on {where}, memory a device"
    text = rendered([(title, plans_table(plans))], LINE)
    show(as_json, text, {"model": found.model, "cluster": where, "plans": plans})


@reporting
def verify(
    model: Model,
    plan: PlanFile,
    batch: Annotated[int | None, typer.Option(help="Sequences; default: those of two micro-batches.")] = None,
    seq: Annotated[int | None, typer.Option(help=f"Tokens a sequence; default: at most {VERIFY_TOKENS}.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights of a model that has none.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer; tokens to generate, 5 at least.")] = 1,
    as_json: Json = False,
) -> None:
    """Simulate every rank of a plan in this process and compare with the model in eager PyTorch.

    The plan's degrees are shrunk to at most 2 and its decisions carried to
    MODEL, which may be a small one of the same architecture. Weights beside
    its config are loaded; without them it is initialised. A plan to generate
    (plan --infer) is compared on prompts and the tokens after them. Ends with
    1 if numbers differ.

    \b
    autopar verify llama-small/ plan.json
    """
    found = load_plan(plan)
    masters = Workload.from_dict(found.workload).param_dtype is not None
    small = shrink(found)
    module, inputs = make_model(model, masters, weights=True)
    _check_fits(module, model, small.world_size)
    workload = Workload(global_batch=batch, seq_len=seq) if inputs is not None else _small_workload(small, batch, seq)
    torch.manual_seed(seed)
    result = autopar.verify(module, found, workload=workload, example_inputs=inputs, steps=steps)
    show(as_json, str(result), _facts(result))
    if not result.ok:
        raise typer.Exit(1)


def _find(
    name: str, cluster: str, workload: Workload, hints: Path | None, search_seconds: float | None, compile: bool
) -> tuple[nn.Module, Plan]:
    """The model called ``name``, and its plan."""
    where = Cluster.load(cluster) if cluster.endswith(".toml") or Path(cluster).is_file() else Cluster.parse(cluster)
    if hints is not None:
        load_hints(hints)  # says what is wrong in the file before the model, which may take long, is made
    model, inputs = make_model(name, masters=workload.param_dtype is not None)
    asked = Hints() if hints is None else _hints_for(hints, model, where, workload)
    found = autopar.plan(
        model,
        where,
        workload=workload,
        hints=asked,
        example_inputs=inputs,
        search_seconds=search_seconds,
        compile=compile,
    )
    return model, found


def _keep(plan: Plan, output: Path | None, html: Path | None) -> None:
    """Write what is asked for."""
    if output is not None:
        plan.save(output)
    if html is not None:
        plan.save_html(html)


def _hints_for(path: Path, model: nn.Module, cluster: Cluster, workload: Workload) -> Hints:
    """The hints of a file. HintError with its line for one that does not suit model, cluster or workload either."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}

    def check(hints: Hints) -> None:
        check_hints(hints, cluster.size, shapes)
        check_sizes(hints, workload)

    return load_hints(path, check)


def _small_workload(plan: Plan, batch: int | None, seq: int | None) -> Workload:
    """A batch to verify ``plan`` with: of two of its micro-batches, if it has so many, and short; of a plan to generate
    some prompts a rank of the data."""
    own = Workload.from_dict(plan.workload)
    size = plan.micro_batch_size * min(2, plan.num_micro_batches)
    some = plan.degrees["dp"] * (min(size, VERIFY_PROMPTS) if own.mode == "infer" else size)
    few = min(some, own.global_batch or some)
    return Workload(global_batch=batch or few, seq_len=seq or min(VERIFY_TOKENS, own.seq_len or VERIFY_TOKENS))


def _check_fits(model: nn.Module, name: str, ranks: int) -> None:
    """CommandError unless all simulated ranks and the model in one process fit into this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = memory // (VERIFY_COPIES * (ranks + 1))
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    if needed > most:
        raise CommandError(
            f"{name} is too large to be simulated here.",
            expected=f"at most {bytes_text(most)} of parameters: {ranks} ranks and the model in one process hold "
            f"{VERIFY_COPIES} times as much each, in {bytes_text(memory)}",
            found=f"{bytes_text(needed)} of parameters",
            change="pass a smaller model of the same architecture, for instance with fewer layers in its config",
        )


def _facts(result: VerifyReport) -> dict[str, Any]:
    """A report without the gradients themselves, its collectives as a list."""
    names = [field.name for field in fields(result) if field.name not in ("gradients", "traffic")]
    collectives = [
        {"kind": kind, "axis": axis, "count": count, "bytes": result.traffic.bytes[kind, axis]}
        for (kind, axis), count in result.traffic.count.items()
    ]
    return {**{name: getattr(result, name) for name in names}, "collectives": collectives}
