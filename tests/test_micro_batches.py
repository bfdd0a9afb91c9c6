"""Micro-batches: a step in parts has the loss and the gradients of the whole batch, on every rank simulated."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from dist.small_models import bert, gpt2, llama, tokens
from models import Case, plan_captured, planned_and_compared
from plain_models import CASES as PLAIN
from plain_models import MOBILENET, RESNET50
from torch import Tensor, nn
from zoo import ARCHITECTURES

import autopar
from autopar import Hints, Workload
from autopar.errors import HintError, InputError, MicroBatchError
from autopar.passes.phases import Phases
from autopar.runtime.reference import exact_float64
from autopar.runtime.verify import compare
from autopar.specialize import capture_batch, specialize_step

BOUND = 1e-10


def batch() -> dict[str, Tensor]:
    """Eight samples, of which one has no label at all and the others unequal numbers."""
    found = tokens(8, 8)
    found["labels"][0, :] = -100
    return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(num_hidden_layers=2),
    "gpt2 with dropout": lambda: gpt2(0.1, layers=2),
    "bert": bert,
}

#: Hints, and how many micro-batches they make of eight samples.
PLANS: dict[str, tuple[int, Hints, int]] = {
    "one rank, 8": (1, Hints(micro_batch_size=1), 8),
    "dp2-tp2, 2": (4, Hints(dp=2, tp=2, micro_batch_size=2), 2),
    "zero3-dp2-tp2, 4": (4, Hints(dp=2, tp=2, zero=3, micro_batch_size=1), 4),
    "zero3-dp4, 2": (4, Hints(dp=4, zero=3, micro_batch_size=1), 2),
    "tp2, 8": (2, Hints(tp=2, micro_batch_size=1), 8),
    "tp4, 2, recomputed": (4, Hints(tp=4, micro_batch_size=4, recompute="full"), 2),
}
#: What runs by default: every model, every degree, with and without ZeRO-3 and recomputation.
DEFAULT = {
    ("llama", "zero3-dp2-tp2, 4"),
    ("llama", "tp4, 2, recomputed"),
    ("gpt2 with dropout", "dp2-tp2, 2"),
    ("bert", "zero3-dp4, 2"),
}
EVERY = [(name, layout) for name in MODELS for layout in PLANS]


@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in DEFAULT)) for case in EVERY]
)
def test_a_step_in_micro_batches_is_a_step_of_the_whole_batch(name: str, layout: str) -> None:
    """Loss, every gradient and the trained parameters of two steps, in float64, with micro-batches that have unequal
    numbers of labels (one of a single sample has none at all) and the same dropout masks."""
    ranks, hints, count = PLANS[layout]
    with exact_float64():
        model = MODELS[name]().double()
        plan, report = planned_and_compared(model, batch(), f"cpu:{ranks}", hints, steps=2)
    assert plan.num_micro_batches == count
    assert plan.micro_batch_size * plan.num_micro_batches * plan.degrees["dp"] == 8
    assert report.bound == BOUND and report.ok, str(report)
    assert report.gradients.keys() == {n for n, _ in model.named_parameters()}


def phases(hints: Hints, ranks: int, name: str = "llama") -> Phases:
    """The phases of a plan."""
    model = MODELS[name]()
    captured = capture_batch(model, (), batch())
    plan = plan_captured(model, batch(), captured, f"cpu:{ranks}", hints, Workload())
    return specialize_step(model, plan, (), batch(), captured=captured).phases


def collectives(module: torch.fx.GraphModule) -> list[str]:
    """The axes of a graph's collectives."""
    return re.findall(r"'axis:(\w+)'", module.code)


def test_what_runs_when() -> None:
    """The number of tokens that count is summed before the first forward, over dp once a step; gradients of replicated
    parameters are reduced over dp once a step, those of sharded ones (ZeRO-3) in every micro-batch; nothing is left of
    the micro-batch axis, which has no process group."""
    whole = phases(Hints(dp=4, zero=0, micro_batch_size=1), 4)
    assert whole.prologue is not None and len(whole.prologue.outputs) <= 2  # for the forward, and for the backward
    assert whole.once is not None and set(collectives(whole.once.module)) == {"dp"}
    assert whole.backward is not None and whole.finish is not None
    assert not collectives(whole.prologue.module) + collectives(whole.forward.module)
    assert not collectives(whole.backward.module)
    assert set(collectives(whole.finish.module)) == {"dp"}

    sharded = phases(Hints(dp=4, zero=3, micro_batch_size=1), 4)
    assert sharded.backward is not None
    assert "reduce_scatter" in sharded.backward.module.code
    assert sharded.finish is None or "reduce_scatter" not in sharded.finish.module.code
    for phase in [*whole.all(), *sharded.all()]:
        assert "axis:mb" not in phase.module.code


def test_batch_norm_is_refused() -> None:
    """Its statistics are those of the whole batch: no order of micro-batches has them in time."""
    case = next(c for c in PLAIN if c.name == "resnet")
    model, given = case.make(torch.float32)
    with pytest.raises(MicroBatchError, match="cannot run in micro-batches: a sum over the batch depends on"):
        autopar.verify(model, "cpu:1", hints=Hints(micro_batch_size=1), example_inputs=given)


#: What every sample of a batch has a part in, and where: statistics of the batch, similarities of all pairs.
MIXING = {
    "resnet": "a sum over the batch depends on",
    "clip": "einsum in the model mixes its samples",
}
#: The models whose loss is their own; ResNet-50 is ResNet with more layers.
TRAINED = [case for case in (*ARCHITECTURES, *PLAIN) if case not in (MOBILENET, RESNET50)]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.name != "dlrm")) for c in TRAINED]
)
def test_every_model_runs_in_micro_batches(case: Case) -> None:
    """Two micro-batches on two ranks, in float64: what mixes no samples is refused nowhere, masks that index by sample,
    lookups of a position in each of them and gradients put into zeros included."""
    with exact_float64():
        model, given = case.make(torch.float64)
        hints = Hints(dp=2, micro_batch_size=2)
        if case.name in MIXING:
            with pytest.raises(MicroBatchError, match=MIXING[case.name]):
                autopar.verify(model, "cpu:2", hints=hints, example_inputs=given)
            return
        plan, report = planned_and_compared(model, given, "cpu:2", hints)
    assert plan.num_micro_batches == 2
    assert report.bound == BOUND and report.ok, str(report)


#: Models that index by sample or put gradients into zeros, and compare no samples.
INDEXING = ("bloom", "falcon", "falcon-alibi", "whisper", "unet", "dlrm")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "dlrm")) for n in INDEXING])
def test_no_batch_is_gathered_to_index_by_sample(name: str) -> None:
    """Data parallel, with a whole copy of the model on each rank: all that a step communicates are sums."""
    case = next(c for c in (*ARCHITECTURES, *PLAIN) if c.name == name)
    model, given = case.make(torch.float32)
    plan = autopar.plan(model, "cpu:2", hints=Hints(dp=2, zero=0), example_inputs=given)
    assert plan.degrees["dp"] == 2
    assert {c.kind for c in plan.collectives} == {"all_reduce"}, plan.collectives


def test_a_batch_of_another_size_runs_in_micro_batches_that_are_no_larger() -> None:
    """Two samples a rank at a time: 16 samples on two ranks take four times; 6 do not divide by that and run one at a
    time; 7 do not divide at all, and every rank has each of them."""
    model = llama(num_hidden_layers=1)
    plan = autopar.plan(model, "cpu:2", hints=Hints(dp=2, micro_batch_size=2), example_inputs=batch())
    assert plan.num_micro_batches == 2
    counts = {size: specialize_step(model, plan, (), tokens(size, 8)).count for size in (16, 6, 7)}
    assert counts == {16: 4, 6: 3, 7: 7}


class RootMeanSquare(nn.Module):
    """A loss that its own backward reads: the gradient of a root is made of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x [B, 8], y [B, 4]."""
        return {"loss": (self.layer(x) - y).square().mean().sqrt()}


def test_a_loss_that_the_backward_reads() -> None:
    """In one piece it is both a result and saved; in micro-batches every backward waits for all forwards."""
    torch.manual_seed(0)
    model, given = RootMeanSquare().double(), {"x": torch.randn(4, 8).double(), "y": torch.randn(4, 4).double()}
    plan = autopar.plan(model, "cpu:2", hints=Hints(dp=2), example_inputs=given)
    program = specialize_step(model, plan, (), given)
    report = compare(model, program, (), given, steps=2)
    assert program.count == 1 and report.ok and report.bound == BOUND, str(report)
    plan = autopar.plan(model, "cpu:2", hints=Hints(dp=2, micro_batch_size=1), example_inputs=given)
    program = specialize_step(model, plan, (), given)
    report = compare(model, program, (), given, steps=2)
    assert program.count == 2 and len(program.phases.awaited) == 1 and plan.forwards_first
    assert program.phases.between is not None and report.ok and report.bound == BOUND, str(report)
    assert autopar.Plan.from_dict(plan.to_dict()) == plan and "all forwards before" in plan.report()


@pytest.mark.parametrize(("hints", "found"), [
    (Hints(micro_batch_size=3), "a global batch of 8, and dp of 1, 2, 4"),
    (Hints(dp=4, micro_batch_size=4), "a global batch of 8, and dp of 4"),
])  # fmt: skip
def test_a_size_that_does_not_divide(hints: Hints, found: str) -> None:
    with pytest.raises(HintError, match="does not divide the batch") as caught:
        autopar.plan(MODELS["llama"](), "cpu:4", hints=hints, example_inputs=batch())
    assert caught.value.found.startswith(found)  # then which hints are in conflict, where they are several


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_bad_size(size: object) -> None:
    with pytest.raises(HintError, match=r"micro_batch_size=.* is no number of samples"):
        Hints(micro_batch_size=size)  # type: ignore[arg-type]


def test_a_model_without_a_loss() -> None:
    """One clear error that says what to do, when micro-batches are asked for and when a step is."""
    model, given = MODELS["llama"](), {"input_ids": batch()["input_ids"]}
    with pytest.raises(InputError, match="train_step needs a model that returns its loss"):
        autopar.plan(model, "cpu:1", hints=Hints(micro_batch_size=1), example_inputs=given)
    with pytest.raises(InputError, match="train_step needs a model that returns its loss"):
        specialize_step(model, autopar.plan(model, "cpu:1", example_inputs=given), (), given)
