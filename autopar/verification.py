"""`autopar.verify`: a plan and a batch to programs, and those beside the model in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from autopar.arguments import ExampleInputs, is_for, one_batch
from autopar.capture.hf import default_seq_len
from autopar.cluster import Cluster
from autopar.errors import InputError
from autopar.hints import Hints
from autopar.plan import Plan
from autopar.runtime.initialize import materialize
from autopar.runtime.parameters import is_meta
from autopar.runtime.program import Specialization
from autopar.runtime.verify import VerifyReport, compare, real_batch
from autopar.runtime.verify_generation import TOKENS, PromptBatch, compare_generation, random_prompts
from autopar.solver.search import search
from autopar.specialize import capture_batch, specialize, specialize_cached, specialize_step
from autopar.workload import Workload


def verify_training(
    model: nn.Module,
    found: Plan | Cluster,
    workload: Workload,
    hints: Hints,
    example_inputs: ExampleInputs | None,
    steps: int,
) -> VerifyReport:
    """``steps`` training steps under a plan, or one that is searched for on a cluster."""
    where = found if isinstance(found, Cluster) else Cluster.from_dict(found.cluster)
    workload, args, kwargs = one_batch(model, workload, example_inputs, where.size)
    whole = materialize(model) if is_meta(model) else model
    args, kwargs = real_batch(whole, args, kwargs)
    if isinstance(found, Plan):
        workload, activations = Workload.from_dict(found.workload), found.hints.get("activations")
    else:
        activations = hints.activations
    captured = capture_batch(whole, args, kwargs, precision=workload.precision, activations=activations)
    plan = found if isinstance(found, Plan) else search(model, captured, where, workload, hints)
    make = specialize if plan.num_micro_batches == 1 and plan.schedule is None else specialize_step
    special = make(whole, plan, args, kwargs, captured=captured)
    optimizer = Workload.from_dict(plan.workload).optimizer
    return compare(whole, special, args, kwargs, steps=steps, optimizer=optimizer, notes=_notes(plan, model))


def verify_inference(
    model: nn.Module, plan: Plan, workload: Workload, example_inputs: ExampleInputs | None, steps: int
) -> VerifyReport:
    """A generation under a plan for one, of ``steps`` tokens but at least `TOKENS`; a forward under any other."""
    whole = materialize(model) if is_meta(model) else model
    workload, own = replace(workload, mode="infer"), Workload.from_dict(plan.workload)
    if "cache" not in plan.memory:
        _, args, kwargs = one_batch(model, workload, example_inputs, plan.world_size)
        args, kwargs = real_batch(whole, args, kwargs)
        captured = capture_batch(
            whole, args, kwargs, False, own.precision, gradients=False, activations=plan.hints.get("activations")
        )
        special = specialize(whole, plan, args, kwargs, captured=captured)
        return compare(copy.deepcopy(whole).eval(), special, args, kwargs, notes=_notes(plan, model))
    tokens = max(steps, TOKENS)
    if example_inputs is None:
        length = max(1, (workload.seq_len or default_seq_len(model)) - tokens)
        prompts = random_prompts(whole, workload.global_batch or plan.world_size, length, tokens)
    else:
        prompts = PromptBatch(_prompt_inputs(example_inputs), tokens)

    def make(shapes: dict[str, Any]) -> Specialization:
        return specialize_cached(whole, plan, (), shapes, training=False)

    dtype = None if own.precision is None else own.precision.param_dtype
    return compare_generation(whole, prompts, make, plan.mesh, dtype, _notes(plan, model))


def _prompt_inputs(example_inputs: ExampleInputs) -> dict[str, Tensor]:
    """Prompts as ``generate`` takes them. InputError for anything but token ids, by name or alone."""
    given = {"input_ids": example_inputs} if isinstance(example_inputs, Tensor) else example_inputs
    if not isinstance(given, Mapping) or not isinstance(given.get("input_ids"), Tensor):
        raise InputError(
            "a generation starts from prompts",
            expected="example_inputs=dict(input_ids=..., attention_mask=...), or the token ids alone",
            found=", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__,
            change="pass what model.generate takes",
        )
    return dict(given)


def _notes(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """What a reader should know of how the plan came to the model."""
    if is_for(plan, model):
        return ()
    return (f"the plan was made for another model ({plan.model}) and carried by name",)
