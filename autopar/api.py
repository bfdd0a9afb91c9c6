"""The pipeline, top to bottom: capture, plan, run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Literal

import torch.distributed as dist
from torch import nn

from autopar.arguments import (
    ExampleInputs,
    check_arguments,
    check_inputs,
    check_plan,
    check_sizes,
    check_weights,
    one_batch,
    refuse_optimizers,
)
from autopar.capture.graph import Captured
from autopar.capture.hf import recomputes
from autopar.capture.hf_adapters import core
from autopar.cluster import Cluster
from autopar.errors import HintError, InfeasibleError, InputError
from autopar.hints import Hints, check_hints
from autopar.integrations.answers import answering
from autopar.plan import Plan
from autopar.prefill import Prompts
from autopar.replan import Question, on_meta, remember
from autopar.runtime.compiled import check_compiler
from autopar.runtime.failure import check_ranks, guard
from autopar.runtime.initialize import initialize
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import is_meta
from autopar.runtime.process import agree, device_type, ensure_process_group
from autopar.runtime.verify import VerifyReport
from autopar.runtime.weights import load_from
from autopar.seen import look
from autopar.solver.carry import shrink
from autopar.solver.conflict import searched
from autopar.solver.frame import Known
from autopar.solver.options import with_decisions
from autopar.solver.search import has_plan, search
from autopar.specialize import makers
from autopar.verification import verify_inference, verify_training
from autopar.workload import Workload


def plan(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    workload: Workload | None = None,
    hints: Hints | None = None,
    example_inputs: ExampleInputs | None = None,
    search_seconds: float | None = None,
    compile: bool = False,
) -> Plan:
    """Decide how to split ``model`` over ``cluster``; needs neither devices nor weights.

    ``cluster`` is a `Cluster` or text such as ``"h100-sxm:16x8"``. transformers language models need no
    ``example_inputs``: batch and sequence come from ``workload``, else from the model's config. Other modules need one
    batch, as a dict of keyword arguments, a tuple of positional ones, or a tensor; meta tensors are enough. With
    ``compile`` chains of elementwise operators are priced as Inductor's kernels, for a run with ``compile=True``. After
    ``search_seconds`` of solving, the best plan so far is taken; its ``gap`` says how far from the best it can be. A
    transformers model that is set to gradient checkpointing asks for ``Hints(recompute="full")``.
    Raises ClusterError, WorkloadError, HintError, CaptureError, InfeasibleError.
    """
    return _plan(model, cluster, workload, hints, example_inputs, search_seconds, compile)


def _plan(
    model: nn.Module,
    cluster: Cluster | str,
    workload: Workload | None,
    hints: Hints | None,
    example_inputs: ExampleInputs | None,
    search_seconds: float | None,
    compile: bool,
    again: bool = False,
) -> Plan:
    """`plan`; ``again`` for a model that nobody has changed since it was planned last."""
    check_arguments(model, cluster=cluster, workload=workload, hints=hints)
    cluster, hints = _cluster(cluster), hints or Hints()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    check_hints(hints, cluster.size, shapes)
    workload, args, kwargs = one_batch(model, workload or Workload(), example_inputs, cluster.size)
    check_sizes(hints, workload)
    if workload.mode == "train" and hints.recompute is None and recomputes(core(model)):
        hints = replace(hints, recompute="full")

    graphs: dict[str, tuple[Captured, Known, Prompts | None]] = {}

    def seen(hints: Hints) -> tuple[Captured, Known, Prompts | None]:
        key = repr(hints.activations)
        if key not in graphs:
            captured, known = look(model, args, kwargs, workload, cluster, compile, hints.activations, again)
            prompts = Prompts(model, workload, hints.activations) if captured.caches else None
            graphs[key] = captured, known, prompts
        return graphs[key]

    def find(hints: Hints) -> Plan:
        captured, known, prompts = seen(hints)
        return search(model, captured, cluster, workload, hints, compile, search_seconds, known, prompts)

    def feasible(hints: Hints) -> bool:
        captured, known, prompts = seen(hints)
        return has_plan(captured, cluster, workload, hints, compile, known, prompts)

    found = searched(find, hints, feasible)
    found = with_decisions(found, seen(hints)[0], compile)
    question = Question(cluster, workload, hints, on_meta(example_inputs), search_seconds, compile)
    return remember(found, model, question, _answer)


def parallelize(
    model: nn.Module,
    *,
    plan: Plan | None = None,
    cluster: Cluster | str | None = None,
    workload: Workload | None = None,
    hints: Hints | None = None,
    example_inputs: ExampleInputs | None = None,
    inputs: Literal["global", "local"] = "global",
    weights: str | os.PathLike[str] | None = None,
    search_seconds: float | None = None,
    compile: bool = False,
) -> ParallelModule:
    """Split ``model`` over all ranks of this run and return the module to train with.

    Under torchrun the process group is made if there is none, and ``cluster`` is detected. Without ``plan`` rank 0
    plans (for ``search_seconds`` at most, as `plan`) and all ranks take its plan: one without a pipeline, which an
    ordinary loop can run, unless hints ask for a pipeline or nothing else fits. The model itself is not changed. A
    model on the meta device is filled from
    ``weights``, a directory that ``save_pretrained`` wrote, of which every rank reads its own pieces, or without it
    initialised as it initialises itself, bit for bit as in one process. Every rank passes the same global batch to the
    module; with ``inputs="local"`` its own part along dim 0, as a sampler over ``data_rank`` of ``data_world_size``
    gives it (``workload`` and ``example_inputs`` are of the global batch all the same). With ``compile`` Inductor
    compiles the emitted graphs between their collectives when they first run, once for all blocks of a class. Raises
    CompilerError if it cannot, PlanError if the plan is
    for another model or number of ranks, OptimizerError if an optimizer already holds the model's parameters,
    InputError for other ``inputs``, WeightsError if ``weights`` are not the model's or the model has its own already,
    and what `plan` raises.
    """
    check_arguments(model, cluster=cluster, workload=workload, hints=hints, plan=plan)
    check_inputs(inputs)
    check_weights(model, weights)
    ensure_process_group()
    with guard("parallelize"):
        if compile:
            check_compiler(device_type())
        refuse_optimizers(model)
        if plan is None:
            plan = _plan_together(
                model, cluster, workload, hints or Hints(), example_inputs, search_seconds, compile
            )
        check_ranks(plan, model)
        check_plan(plan, model)
        fill = None
        if is_meta(model):
            fill = initialize if weights is None else load_from(weights)
        return answering(ParallelModule(model, plan, makers(compile), inputs, fill, compile), model, inputs)


def verify(
    model: nn.Module,
    plan_or_cluster: Plan | Cluster | str,
    *,
    workload: Workload | None = None,
    hints: Hints | None = None,
    example_inputs: ExampleInputs | None = None,
    steps: int = 1,
) -> VerifyReport:
    """Simulate every rank in this process and compare loss, gradients and trained parameters with the eager model.

    With a plan, its decisions are carried to ``model`` by parameter and block, every degree shrunk to at most 2 (with
    hybrid ZeRO dp to 4, two groups of two); with a cluster, the model is planned for it and all its ranks are
    simulated. ``example_inputs`` is a real batch; without it a random one is made for transformers language models.
    Of a decoder that is to infer greedy tokens after prompts are compared, and their logits, in evaluation mode:
    ``steps`` tokens, or 5 if that is more, after ``example_inputs`` (of `generate`) or random prompts; of any other
    model a forward. Raises what `plan` raises.
    """
    check_arguments(model, plan_or_cluster=plan_or_cluster, workload=workload, hints=hints)
    if steps < 1:
        raise InputError("nothing to verify", expected="steps of at least 1", found=str(steps), change="pass steps=1")
    asked = workload or Workload()
    if isinstance(plan_or_cluster, Plan):
        found: Plan | Cluster = shrink(plan_or_cluster)
        mode = Workload.from_dict(plan_or_cluster.workload).mode
    else:
        found, mode = _cluster(plan_or_cluster), asked.mode
    if mode == "infer":
        if isinstance(found, Cluster):
            found = plan(model, found, workload=asked, hints=hints, example_inputs=example_inputs)
        return verify_inference(model, found, asked, example_inputs, steps)
    return verify_training(model, found, asked, hints or Hints(), example_inputs, steps)


def _cluster(cluster: Cluster | str) -> Cluster:
    return Cluster.parse(cluster) if isinstance(cluster, str) else cluster


def _answer(model: nn.Module, question: Question) -> Plan:
    """`plan` for what is asked, by what is known of the model."""
    return _plan(model, **{field.name: getattr(question, field.name) for field in fields(question)}, again=True)


def _plan_together(
    model: nn.Module,
    cluster: Cluster | str | None,
    workload: Workload | None,
    hints: Hints,
    example_inputs: ExampleInputs | None,
    search_seconds: float | None,
    compile: bool,
) -> Plan:
    """Rank 0 plans, everybody takes its plan; if it fails, everybody raises its error."""

    def find(some: Hints) -> Plan:
        where = cluster if cluster is not None else Cluster.detect()
        return plan(
            model, where, workload=workload, hints=some, example_inputs=example_inputs, search_seconds=search_seconds,
            compile=compile,
        )  # fmt: skip

    found: Plan | Exception | None = None
    if dist.get_rank() == 0:
        try:
            found = _ordinary(find, hints)
        except Exception as error:
            found = error
    found = agree(found)
    if isinstance(found, Exception):
        raise found
    assert found is not None
    return found


def _ordinary(find: Callable[[Hints], Plan], hints: Hints) -> Plan:
    """A plan that an ordinary training loop, which cannot run a pipeline, runs, unless hints ask for one or nothing
    else fits."""
    if hints.pp is None:
        with contextlib.suppress(InfeasibleError, HintError):
            return find(replace(hints, pp=1))
    return find(hints)
