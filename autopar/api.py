"""The pipeline, top to bottom: capture, plan, run."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture import refuse_empty
from autopar.capture.hf import default_seq_len, example_batch, is_transformers_model
from autopar.cluster import Cluster
from autopar.errors import (
    AutoparError,
    ClusterError,
    HintError,
    InputError,
    OptimizerError,
    PlanError,
    WorkloadError,
)
from autopar.hints import Hints
from autopar.plan import Plan
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import is_meta, materialize
from autopar.runtime.process import agree, ensure_process_group
from autopar.runtime.specialize import capture_batch
from autopar.runtime.verify import VerifyReport, verify_plan
from autopar.solver.search import search, structure_hash
from autopar.workload import Workload

ExampleInputs = Mapping[str, Any] | tuple[Any, ...] | Tensor

#: Sequences a data-parallel rank when neither workload nor example inputs say: enough to split, small enough to fit.
DEFAULT_SEQUENCES = 1


def plan(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    workload: Workload | None = None,
    hints: Hints | None = None,
    example_inputs: ExampleInputs | None = None,
) -> Plan:
    """Decide how to split ``model`` over ``cluster``; needs neither devices nor weights.

    ``cluster`` is a `Cluster` or text such as ``"h100-sxm:16x8"``. transformers language models need no
    ``example_inputs``: batch and sequence come from ``workload``, else from the model's config. Other modules need one
    batch, as a dict of keyword arguments, a tuple of positional ones, or a tensor; meta tensors are enough.
    Raises ClusterError, WorkloadError, HintError, CaptureError, InfeasibleError.
    """
    _check_arguments(model, cluster=cluster, workload=workload, hints=hints)
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    workload, args, kwargs = _batch(model, workload or Workload(), example_inputs, cluster.size)
    captured = capture_batch(model, args, kwargs)
    return search(model, captured, cluster, workload, hints or Hints())


def parallelize(
    model: nn.Module,
    *,
    plan: Plan | None = None,
    cluster: Cluster | str | None = None,
    workload: Workload | None = None,
    hints: Hints | None = None,
    example_inputs: ExampleInputs | None = None,
) -> ParallelModule:
    """Split ``model`` over all ranks of this run and return the module to train with.

    Under torchrun the process group is made if there is none, and ``cluster`` is detected. Without ``plan`` rank 0
    plans and all ranks take its plan. The model itself is not changed; a model on the meta device is initialised as it
    initialises itself. Raises PlanError if the plan is for another model or number of ranks, OptimizerError if an
    optimizer already holds the model's parameters, and what `plan` raises.
    """
    _check_arguments(model, cluster=cluster, workload=workload, hints=hints, plan=plan)
    ensure_process_group()
    _refuse_optimizers(model)
    if plan is None:
        plan = _plan_together(model, cluster, workload, hints, example_inputs)
    _check_plan(plan, model)
    return ParallelModule(materialize(model) if is_meta(model) else model, plan)


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

    With a plan, its decisions are carried to ``model`` by parameter and block, every degree shrunk to at most 2; with a
    cluster, the model is planned for it and all its ranks are simulated. ``example_inputs`` is a real batch; without it
    a random one is made for transformers language models. Raises what `plan` raises.
    """
    _check_arguments(model, plan_or_cluster=plan_or_cluster, workload=workload, hints=hints)
    if isinstance(plan_or_cluster, Plan):
        small = shrink(plan_or_cluster)
        cluster = Cluster.from_dict(small.cluster)
    else:
        small = None
        cluster = Cluster.parse(plan_or_cluster) if isinstance(plan_or_cluster, str) else plan_or_cluster
    workload, args, kwargs = _batch(model, workload or Workload(), example_inputs, cluster.size)
    if small is None:
        small = search(model, capture_batch(model, args, kwargs), cluster, workload, hints or Hints())
    return verify_plan(model, small, args, kwargs, steps=steps)


#: What the arguments of the pipeline may be (besides None), and the error for anything else.
_KINDS: dict[str, tuple[tuple[type, ...], type[AutoparError], str]] = {
    "cluster": ((Cluster, str), ClusterError, 'pass for instance cluster="h100-sxm:16x8"'),
    "workload": ((Workload,), WorkloadError, "pass for instance Workload(global_batch=64, seq_len=2048)"),
    "hints": ((Hints,), HintError, "pass for instance Hints(tp=2)"),
    "plan": ((Plan,), PlanError, "pass what autopar.plan returned, or Plan.load(file)"),
    "plan_or_cluster": ((Plan, Cluster, str), PlanError, "pass a plan (Plan.load reads a file) or a cluster"),
}


def _check_arguments(model: nn.Module, **arguments: object) -> None:
    """Arguments of the wrong type, and a model that is parallel already, each by its own error."""
    for name, value in arguments.items():
        kinds, error, change = _KINDS[name]
        if value is not None and not isinstance(value, kinds):
            raise error(
                f"{name} is not of a kind that is understood",
                expected=" or ".join(kind.__name__ for kind in kinds),
                found=f"{type(value).__name__}: {value!r}"[:200],
                change=change,
            )
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise PlanError(
            f"{type(model).__name__} is parallel already",
            expected="a model with ordinary parameters",
            found="DTensor parameters",
            change="pass the original model",
        )


def _batch(
    model: nn.Module, workload: Workload, example_inputs: ExampleInputs | None, world_size: int
) -> tuple[Workload, tuple[Any, ...], dict[str, Any]]:
    """One global batch, and the workload with its sizes filled in."""
    if example_inputs is None:
        if not is_transformers_model(model):
            raise WorkloadError(
                f"{type(model).__name__} needs example inputs",
                expected="example_inputs=: one batch",
                found="none, and the model is not a transformers model whose inputs are known",
                change="pass example_inputs=(tensor, ...) or dict(name=tensor, ...); meta tensors are enough",
            )
        batch = workload.global_batch or DEFAULT_SEQUENCES * world_size
        seq_len = workload.seq_len or default_seq_len(model)
        workload = replace(workload, global_batch=batch, seq_len=seq_len)
        return workload, (), dict(example_batch(model, batch, seq_len))
    args, kwargs = _arguments(example_inputs)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim() > 0]
    if not tensors:
        raise InputError(
            "the example inputs hold no tensor",
            expected="at least one tensor with a batch dim",
            found=repr(example_inputs)[:100],
            change="pass one batch as the model's forward takes it",
        )
    refuse_empty(tensors)
    shape = tensors[0].shape
    asked = {"global_batch": workload.global_batch, "seq_len": workload.seq_len}
    given = {"global_batch": int(shape[0]), "seq_len": int(shape[1]) if is_transformers_model(model) else None}
    for name in asked:
        if None not in (asked[name], given[name]) and asked[name] != given[name]:
            raise WorkloadError(
                f"workload and example inputs disagree on {name}",
                expected=f"{name}={asked[name]}, as the workload says",
                found=f"example inputs of shape {tuple(tensors[0].shape)}",
                change=f"leave {name} out of the workload",
            )
    return (
        Workload(global_batch=given["global_batch"], seq_len=given["seq_len"], optimizer=workload.optimizer),
        args,
        kwargs,
    )


def _arguments(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    raise InputError(
        "example inputs of an unknown kind",
        expected="a dict, a tuple or a tensor",
        found=type(example_inputs).__name__,
        change="pass dict(name=tensor, ...) or a tuple of tensors",
    )


def _plan_together(
    model: nn.Module,
    cluster: Cluster | str | None,
    workload: Workload | None,
    hints: Hints | None,
    example_inputs: ExampleInputs | None,
) -> Plan:
    """Rank 0 plans, everybody takes its plan; if it fails, everybody raises its error."""
    found: Plan | Exception | None = None
    if dist.get_rank() == 0:
        try:
            where = cluster if cluster is not None else Cluster.detect()
            found = plan(model, where, workload=workload, hints=hints, example_inputs=example_inputs)
        except Exception as error:
            found = error
    found = agree(found)
    if isinstance(found, Exception):
        raise found
    assert found is not None
    return found


def _check_plan(plan: Plan, model: nn.Module) -> None:
    """The plan must be for this model: same parameters, same shapes."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if structure_hash(own.items()) == plan.structure:
        return
    theirs = {name: p.shape for name, p in plan.parameters.items()}
    extra, missing = sorted(set(own) - set(theirs)), sorted(set(theirs) - set(own))
    other = [f"{n}: {own[n]} here, {theirs[n]} in the plan" for n in own if n in theirs and own[n] != theirs[n]]
    found = (other or [f"{n} only in the model" for n in extra] or [f"{n} only in the plan" for n in missing])[:3]
    raise PlanError(
        f"the plan was made for another model ({plan.model})",
        expected="the parameters that the plan knows",
        found="; ".join(found),
        change="plan this model, or pass the model that the plan was made for",
    )


def _refuse_optimizers(model: nn.Module) -> None:
    """An optimizer that holds the model's parameters would train tensors that nobody uses any more."""
    own = {id(p) for p in model.parameters()}
    if _optimizer_of(own) is not None:
        gc.collect()  # one that was deleted may wait in a cycle, with its learning-rate scheduler for instance
    holder = _optimizer_of(own)
    if holder is not None:
        raise OptimizerError(
            f"an optimizer ({type(holder).__name__}) holds the parameters of the model before it is split",
            expected="the optimizer made after parallelize",
            found="an optimizer made before it",
            change="model = autopar.parallelize(model), then optimizer = ...(model.parameters())",
        )


def _optimizer_of(parameters: set[int]) -> torch.optim.Optimizer | None:
    """A living optimizer that holds one of the parameters, given by id."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.optim.Optimizer) and any(
            id(p) in parameters for group in candidate.param_groups for p in group["params"]
        ):
            return candidate
    return None


def shrink(plan: Plan) -> Plan:
    """A plan for at most 2 ranks an axis that takes the same decisions, for `verify` on one machine."""
    degrees = {axis: min(2, n) for axis, n in plan.degrees.items()}
    if degrees == plan.degrees:
        return plan
    device = Cluster.from_dict(plan.cluster).device
    return replace(plan, degrees=degrees, cluster=Cluster(device, 1, math.prod(degrees.values())).to_dict())
