"""The balancing loss of a mixture of experts under micro-batches: a product of two means over the whole batch, the
shares of tokens that experts have and their mean probabilities, and not the sum of such products of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emitted_peaks import with_peak
from torch import nn
from zoo import MIXTURES

import autopar
from autopar.errors import HintError, MicroBatchError
from autopar.passes.phases import Phases
from autopar.runtime.reference import exact_float64
from autopar.runtime.verify import compare
from autopar.specialize import capture_batch, specialize_step

#: Plans in micro-batches, of tokens and experts over all axes, with ZeRO, recomputation and pipelines.
PLANS: dict[str, tuple[int, autopar.Hints]] = {
    "dp2-ep2": (2, autopar.Hints(dp=2, ep=2, pp=1, zero=1, micro_batch_size=1)),
    "dp4-ep2-zero3-full": (4, autopar.Hints(dp=4, ep=2, pp=1, zero=3, micro_batch_size=1, recompute="full")),
    "tp2": (2, autopar.Hints(tp=2, pp=1, micro_batch_size=2)),
    "cp2-ep2": (2, autopar.Hints(cp=2, ep=2, pp=1, micro_batch_size=2)),
    "pp2": (2, autopar.Hints(pp=2, micro_batch_size=1)),
    "pp2-dp2-ep2-zero3": (4, autopar.Hints(pp=2, dp=2, ep=2, zero=3, micro_batch_size=1)),
}
#: Those whose transformers model adds such a loss where it is asked for.
BALANCED = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granite-moe", "gpt-oss")


def balanced(name: str, padded: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """A model that adds its balancing loss, large enough to matter, and a batch, of sequences that end early if
    ``padded``."""
    model, batch = next(f for f in MIXTURES if f.name == name).make(torch.float64)
    model.config.output_router_logits = model.model.config.output_router_logits = True
    model.router_aux_loss_coef = 0.5
    if padded:
        length = torch.arange(batch["input_ids"].shape[1])
        ends = torch.arange(batch["input_ids"].shape[0])[:, None] % 4 + 5
        batch = {**batch, "attention_mask": (length < ends).long()}
    return model, batch


def checked(model: nn.Module, batch: dict[str, Any], plan: autopar.Plan) -> Phases:
    """The phases of a step, compared with eager over three steps, in float64."""
    with exact_float64():
        program = specialize_step(model, plan, (), batch)
        report = compare(model, program, (), batch, steps=3)
    assert program.count > 1 and report.ok and report.max_error < 1e-10, report
    return program.phases


@pytest.mark.slow
def test_every_backward_waits_for_the_shares_of_all_tokens() -> None:
    """They are summed up over the forwards, and what the backwards read of them is made once. A schedule that runs
    backwards before is refused."""
    model, batch = balanced("mixtral")
    with exact_float64():
        plan = autopar.plan(model, "cpu:2", hints=PLANS["dp2-ep2"][1], example_inputs=batch)
    assert plan.forwards_first and plan.num_micro_batches == 4
    phases = checked(model, batch, plan)
    assert phases.awaited and phases.between is not None and phases.backward is not None
    assert set(phases.awaited) <= {*phases.forward.outputs} & {*phases.between.inputs} & {*phases.sums}
    assert set(phases.between.outputs) <= set(phases.backward.inputs)
    with pytest.raises(HintError, match="backwards need a sum over the forwards"):
        autopar.plan(model, "cpu:2", hints=autopar.Hints(pp=2, schedule="1f1b", micro_batch_size=1),
                     example_inputs=batch)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCED)
@pytest.mark.parametrize("plan", ["dp4-ep2-zero3-full", "pp2"])
def test_families(name: str, plan: str) -> None:
    ranks, hints = PLANS[plan]
    model, batch = balanced(name)
    with exact_float64():
        found = autopar.plan(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
    assert checked(model, batch, found).awaited and found.schedule in (None, "gpipe")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_plans(plan: str, padded: bool) -> None:
    """Padding does not count, neither among the tokens that experts have nor among all."""
    ranks, hints = PLANS[plan]
    model, batch = balanced("mixtral", padded)
    with exact_float64():
        found = autopar.plan(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
    assert checked(model, batch, found).awaited


@pytest.mark.slow
def test_a_plan_for_the_model_without_it() -> None:
    """The plan of a model that adds no such loss is refused for one that does, where its schedule cannot run it."""
    model, batch = balanced("mixtral")
    model.config.output_router_logits = model.model.config.output_router_logits = False
    hints = autopar.Hints(pp=2, schedule="1f1b", micro_batch_size=1)
    plan = autopar.plan(model, "cpu:2", hints=hints, example_inputs=batch)
    assert not plan.forwards_first
    model.config.output_router_logits = model.model.config.output_router_logits = True
    with pytest.raises(MicroBatchError, match="the schedule 1f1b cannot run the model in micro-batches"):
        specialize_step(model, plan, (), batch)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp2-ep2", "pp2"])
def test_memory_of_all_forwards(plan: str) -> None:
    """What all micro-batches save is there at once: as the plan says, so the emitted graphs have it."""
    ranks, hints = PLANS[plan]
    model, batch = balanced("mixtral")
    found = autopar.plan(model.float(), f"cpu:{ranks}", hints=hints, example_inputs=batch)
    exact = with_peak(found, model, (), batch, capture_batch(model, (), batch))
    assert exact is not found and found.peak_memory == pytest.approx(exact.peak_memory, rel=0.02)
