"""What users pass to the pipeline: arguments checked, example inputs turned into one batch, stale objects refused."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.capture.hf import default_seq_len, example_batch, is_transformers_model
from autopar.capture.hf_adapters import core
from autopar.capture.hf_generate import decodes, decoding_batch
from autopar.capture.trace import refuse_empty
from autopar.cluster import Cluster
from autopar.errors import (
    AutoparError,
    ClusterError,
    HintError,
    InputError,
    OptimizerError,
    PlanError,
    WeightsError,
    WorkloadError,
)
from autopar.hints import Hints
from autopar.plan import Plan
from autopar.refusals import refuse_changed
from autopar.schedule import SCHEDULES, SIMULATED_SCHEDULES
from autopar.solver.search import structure_hash
from autopar.workload import Workload

ExampleInputs = Mapping[str, Any] | tuple[Any, ...] | Tensor

#: Sequences a rank when neither workload nor example inputs say: enough to split, small enough to fit.
DEFAULT_SEQUENCES = 1

#: What the arguments of the pipeline may be (besides None), and the error for anything else.
_KINDS: dict[str, tuple[tuple[type, ...], type[AutoparError], str]] = {
    "cluster": ((Cluster, str), ClusterError, 'pass for instance cluster="h100-sxm:16x8"'),
    "workload": ((Workload,), WorkloadError, "pass for instance Workload(global_batch=64, seq_len=2048)"),
    "hints": ((Hints,), HintError, "pass for instance Hints(tp=2)"),
    "plan": ((Plan,), PlanError, "pass what autopar.plan returned, or Plan.load(file)"),
    "plan_or_cluster": ((Plan, Cluster, str), PlanError, "pass a plan (Plan.load reads a file) or a cluster"),
}


def check_arguments(model: nn.Module, **arguments: object) -> None:
    """Arguments of the wrong type, and a model that something else has changed, each by its own error."""
    for name, value in arguments.items():
        kinds, error, change = _KINDS[name]
        if value is not None and not isinstance(value, kinds):
            raise error(
                f"{name} is not of a kind that is understood",
                expected=" or ".join(kind.__name__ for kind in kinds),
                found=f"{type(value).__name__}: {value!r}"[:200],
                change=change,
            )
    refuse_changed(model)


def check_inputs(inputs: object) -> None:
    """InputError unless ``inputs`` says whose the batches are."""
    if inputs not in ("global", "local"):
        raise InputError(
            "inputs is not understood",
            expected='"global" (every rank passes the whole batch) or "local" (every rank passes its part)',
            found=repr(inputs),
            change='pass inputs="global" or inputs="local"',
        )


def check_weights(model: nn.Module, weights: object) -> None:
    """WeightsError if ``weights`` are given for a model that has weights, or are no path."""
    if weights is None:
        return
    if not isinstance(weights, str | os.PathLike):
        raise WeightsError(
            "weights is not of a kind that is understood",
            expected="the path of a directory that save_pretrained wrote",
            found=f"{type(weights).__name__}: {weights!r}"[:200],
            change='pass for instance weights="models/llama"',
        )
    if not all(p.is_meta for p in model.parameters()):
        raise WeightsError(
            f"{type(model).__name__} has weights already",
            expected="a model on the meta device to fill",
            found=f"weights={os.fspath(weights)!r}, and parameters with values",
            change="leave weights out, or build the model inside `with torch.device('meta'):`",
        )


def one_batch(
    model: nn.Module, workload: Workload, example_inputs: ExampleInputs | None, world_size: int
) -> tuple[Workload, tuple[Any, ...], dict[str, Any]]:
    """One global batch, and the workload with its sizes filled in. Without example inputs it is as long as the largest
    bucket of ``pad_to``; of a decoder that is to infer it has one token a sample, and a cache of all others.
    WorkloadError for ``pad_to`` with a model whose inputs have no known names."""
    model = core(model)
    if workload.pad_to is not None and not is_transformers_model(model):
        raise WorkloadError(
            f"pad_to cannot pad the inputs of {type(model).__name__}",
            expected="a transformers model, whose inputs have known names",
            found="another module",
            change="leave pad_to out, and pad batches in the collate function",
        )
    if example_inputs is None:
        if not is_transformers_model(model):
            raise WorkloadError(
                f"{type(model).__name__} needs example inputs",
                expected="example_inputs=: one batch",
                found="none, and the model is not a transformers model whose inputs are known",
                change="pass example_inputs=(tensor, ...) or dict(name=tensor, ...); meta tensors are enough",
            )
        batch = workload.global_batch or DEFAULT_SEQUENCES * world_size
        seq_len = workload.seq_len or max(workload.pad_to or (default_seq_len(model),))
        workload = replace(workload, global_batch=batch, seq_len=seq_len)
        if workload.mode == "infer" and decodes(model):
            return workload, (), decoding_batch(model, batch, seq_len, workload.precision)
        found = dict(example_batch(model, batch, seq_len))
        if workload.mode == "infer":
            del found["labels"]
        return workload, (), found
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
    return replace(workload, global_batch=given["global_batch"], seq_len=given["seq_len"]), args, kwargs


def check_sizes(hints: Hints, workload: Workload) -> None:
    """HintError for a hinted dp that leaves ranks without a sample, a hinted cp that does not divide the sequence."""
    batch, length = workload.global_batch, workload.seq_len
    if None not in (hints.dp, batch) and hints.dp > batch:  # type: ignore[operator]  # neither is None
        raise HintError(
            f"The hint dp={hints.dp} leaves ranks without a sample.",
            expected=f"dp of at most {batch}, one sample a rank",
            found=f"global_batch={batch}",
            change=f"give dp of at most {batch}, or a larger global_batch",
        )
    if None not in (hints.cp, length) and length % hints.cp:  # type: ignore[operator]  # neither is None
        raise HintError(
            f"The hint cp={hints.cp} does not divide the sequence.",
            expected=f"a sequence length that {hints.cp} divides",
            found=f"seq_len={length}",
            change=f"give a cp that divides {length}, or pad sequences: Workload(pad_to=[...])",
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


def is_for(plan: Plan, model: nn.Module) -> bool:
    """Whether the plan was made for this model: same parameters, same shapes."""
    return structure_hash((name, tuple(p.shape)) for name, p in model.named_parameters()) == plan.structure


def check_plan(plan: Plan, model: nn.Module) -> None:
    """PlanError unless the plan is for this model, naming what differs, and its schedule can be run."""
    if plan.schedule in SIMULATED_SCHEDULES:
        raise PlanError(
            f"the schedule {plan.schedule} can be planned with, but not run",
            expected=f"one of {', '.join(SCHEDULES)}",
            found=plan.schedule,
            change="plan with another schedule: torch.distributed.pipelining does not have this one",
        )
    if is_for(plan, model):
        return
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
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


def refuse_optimizers(model: nn.Module) -> None:
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
