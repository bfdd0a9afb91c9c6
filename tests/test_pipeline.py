"""Pipelines: schedules, where modules go, the cut into stages, and every stage simulated against eager in float64."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import plain_models
import pytest
import torch
import zoo
from models import BERT, LLAMA, Batch, Case, causal_batch, seeded
from test_distributed import SCRIPTS, assert_all_ok, torchrun
from torch import Tensor, nn

import autopar
from autopar import Hints, Plan
from autopar.cost_model.bubble import simulate
from autopar.errors import HintError
from autopar.passes.pipeline import Stage
from autopar.runtime.program import StepProgram
from autopar.runtime.reference import exact_float64
from autopar.schedule import (
    SCHEDULES,
    Action,
    check_schedule,
    global_order,
    last_backward,
    order,
    runs,
    stage_ranks,
)
from autopar.solver.pipeline import balanced, hinted
from autopar.specialize import specialize_step

# -- schedules ---------------------------------------------------------------------------------------------------------

#: (schedule, stages a rank) -> bubble for (F, I, W) = (1, 1, 1), (1, 1.2, 0.7) and (1, 1.5, 0.5) on 8 ranks with 32
#: micro-batches: the table of field_notes, and for GPipe, 1F1B and ZB-H1 its closed forms.
BUBBLES = {
    ("gpipe", 1): (21.0, 20.3, 21.0),
    ("1f1b", 1): (21.0, 20.3, 21.0),
    ("interleaved", 2): (10.5, 10.15, 10.5),
    ("interleaved-zb", 1): (7.0, 10.5, 14.0),
    ("interleaved-zb", 2): (3.5, 5.25, 7.0),
    ("zbv", 2): (3.5, 4.2, 7.0),
    ("dualpipev", 2): (7.0, 8.95, 11.75),
}


@pytest.mark.parametrize(("schedule", "chunks"), BUBBLES)
def test_bubbles_are_those_of_the_notes(schedule: str, chunks: int) -> None:
    rows = order(schedule, 8, 8 * chunks, 32)
    for (f, i, w), expected in zip([(1, 1, 1), (1, 1.2, 0.7), (1, 1.5, 0.5)], BUBBLES[schedule, chunks], strict=True):
        seconds = {"F": f / chunks, "I": i / chunks, "W": w / chunks, "B": (i + w) / chunks}
        found = simulate(rows, 8 * chunks, lambda stage, kind: seconds[kind])  # noqa: B023
        assert found.bubble == pytest.approx(expected)
        assert found.busy == pytest.approx((32 * (f + i + w),) * 8)


def test_activations_in_flight_are_those_of_the_notes() -> None:
    def in_flight(schedule: str, chunks: int) -> list[float]:
        found = simulate(order(schedule, 8, 8 * chunks, 32), 8 * chunks, lambda stage, kind: 1.0)
        return [n / chunks for n in found.in_flight]

    assert in_flight("gpipe", 1) == [32.0] * 8
    assert in_flight("1f1b", 1) == [8.0 - r for r in range(8)]
    assert in_flight("interleaved", 2) == [(8 + 2 * (7 - r) + 1) / 2 for r in range(8)]
    assert in_flight("interleaved-zb", 2) == in_flight("zbv", 2) == [8.0] * 8
    assert in_flight("dualpipev", 2) == [8.5] * 8


def test_a_transfer_delays_the_next_stage() -> None:
    rows = order("gpipe", 2, 2, 1)
    assert simulate(rows, 2, lambda s, k: 1.0).makespan == 4.0
    assert simulate(rows, 2, lambda s, k: 1.0, transfer=0.5).makespan == 5.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_every_order_ends_and_does_everything_once(schedule: str, pp: int) -> None:
    """Also with numbers of micro-batches that the schedule cannot run, which a smaller batch may have."""
    stages = pp * (SCHEDULES[schedule] or 2)
    for count in range(1, 13):
        rows = order(schedule, pp, stages, count)
        actions = [action for step in global_order(rows, stages) for action in step]
        assert sorted(map(str, actions)) == sorted(str(a) for row in rows for step in row for a in step)
        assert max(Counter(actions).values()) == 1
        done = set(actions)
        for s, m in itertools.product(range(stages), range(count)):
            assert Action(s, "F", m) in done
            assert (Action(s, "B", m) in done) != ({Action(s, "I", m), Action(s, "W", m)} <= done)
        last = [a for a in actions if a.stage == stages - 1]
        back = max(i for i, a in enumerate(last) if a.kind in ("B", "I"))
        assert last[back].micro_batch == last_backward(rows, stages - 1)
        assert all(a.kind != "F" for a in last[back:])  # the loss is known by then
        ranks = stage_ranks(schedule, pp, stages)
        assert all(ranks[a.stage] == rank for rank, row in enumerate(rows) for step in row for a in step)


def test_an_order_that_waits_for_ever_is_an_error() -> None:
    rows = [[(Action(0, "B", 0),), (Action(0, "F", 0),)]]
    with pytest.raises(ValueError, match="does not end"):
        list(global_order(rows, 1))


CANNOT: dict[str, tuple[tuple[str, int, int, int], str]] = {
    "fewer micro-batches than stages": (("1f1b", 4, 4, 3), "1f1b cannot run 3 micro-batches on pp=4"),
    "three stages a rank": (("zbv", 2, 6, 8), "zbv cannot run 6 stages on 2 ranks"),
    "two stages a rank": (("1f1b", 2, 4, 8), "1f1b cannot run 4 stages on 2 ranks"),
    "rounds that do not divide": (("interleaved", 2, 4, 5), "interleaved cannot run 5 micro-batches on pp=2"),
    "rounds of zero bubble": (("interleaved-zb", 4, 8, 9), "interleaved-zb cannot run 9 micro-batches on pp=4"),
    "DualPipeV with few micro-batches": (("dualpipev", 2, 4, 3), "dualpipev cannot run 3 micro-batches on pp=2"),
}


@pytest.mark.parametrize(("arguments", "message"), CANNOT.values(), ids=CANNOT)
def test_what_a_schedule_cannot_run_is_said(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(HintError, match=message) as error:
        check_schedule(*arguments)
    assert error.value.expected and error.value.change
    assert not runs(*arguments)


# -- where modules go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_stages_are_balanced_as_well_as_can_be(count: int) -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0]
    costs = {f"layers.{i}": v for i, v in enumerate(values)}

    def worst(cuts: tuple[int, ...]) -> float:
        return max(sum(values[a:b]) for a, b in itertools.pairwise((0, *cuts, len(values))))

    found = balanced(costs, count)
    assert [name for names in found for name in names] == list(costs) and all(found) and len(found) == count
    best = min(worst(cuts) for cuts in itertools.combinations(range(1, len(values)), count - 1))
    assert max(sum(costs[name] for name in names) for names in found) == best


def test_more_stages_than_units_is_said() -> None:
    with pytest.raises(HintError, match="cannot be cut into 3 pipeline stages"):
        balanced({"a": 1.0, "b": 1.0}, 3)


ROW = ("embed", "layers.0", "layers.1", "layers.2", "norm", "head")


def test_hinted_stages() -> None:
    assert hinted(ROW, {"layers.1": 1, "norm": 2}) == (ROW[:2], ROW[2:4], ROW[4:])
    assert hinted(ROW, {"layers.*": 1, "head": 1}) == (ROW[:1], ROW[1:])


BAD_STAGES: dict[str, tuple[dict[str, int], str]] = {
    "no such module": ({"layer.1": 1}, r"matches no module[\s\S]*did you mean layers\.1"),
    "two stages for one": ({"layers.*": 1, "layers.2": 2}, r"give layers\.2 to different stages"),
    "going back": ({"layers.0": 1, "layers.1": 0}, r"layers\.1 to a stage before"),
    "a gap": ({"layers.1": 2}, "leaves stage 1 without a module"),
}


@pytest.mark.parametrize(("stages", "message"), BAD_STAGES.values(), ids=BAD_STAGES)
def test_bad_stages_are_said(stages: dict[str, int], message: str) -> None:
    with pytest.raises(HintError, match=message):
        hinted(ROW, stages)


BAD_HINTS: dict[str, tuple[Callable[[], Hints], str]] = {
    "no such schedule": (lambda: Hints(pp=2, schedule="1f2b"), r"1f2b[\s\S]*did you mean 1f1b"),
    "a schedule without a pipeline": (lambda: Hints(schedule="1f1b"), "schedule asks for a pipeline"),
    "stages without a pipeline": (lambda: Hints(pp=1, stages={"a": 1}), "stages asks for a pipeline"),
    "stages that are no mapping": (lambda: Hints(pp=2, stages=3), "stages is malformed"),  # type: ignore[arg-type]
    "a stage that is no number": (lambda: Hints(pp=2, stages={"a": -1}), "stages is malformed"),
}


@pytest.mark.parametrize(("make", "message"), BAD_HINTS.values(), ids=BAD_HINTS)
def test_bad_hints_are_said(make: Callable[[], Hints], message: str) -> None:
    with pytest.raises(HintError, match=message):
        make()


# -- models ------------------------------------------------------------------------------------------------------------


def _untied() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False, use_cache=False))


class Stack(nn.Module):
    """Blocks of two linear layers; a scale of the root module is used by all of them, a skip goes around them, and the
    loss is the mean of squares."""

    def __init__(self, n: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(n, 2 * n), nn.Tanh(), nn.Linear(2 * n, n)) for _ in "1234")
        self.scale = nn.Parameter(torch.ones(n))
        self.shared = nn.Linear(n, n, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[batch, n] twice -> the loss."""
        start = h = self.shared(x)
        for block in self.blocks:
            h = h + block(h * self.scale)
        return (self.shared(h + start) - y).square().mean()


def _stack_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(8, 16, generator=generator) for name in ("x", "y")}


def _without_labels() -> Batch:
    """A batch of which the second quarter has no label that counts."""
    batch = causal_batch()
    batch["labels"][2:4] = -100
    return batch


UNTIED = Case("untied", seeded(_untied), causal_batch)
STACK = Case("stack", seeded(Stack), _stack_batch)
EMPTY = Case("llama-without-labels", LLAMA.build, _without_labels)


def planned(case: Case, ranks: int, **hints: Any) -> tuple[Plan, nn.Module, Batch]:
    model, batch = case.make(torch.float64)
    plan = autopar.plan(model, f"h100-sxm:1x{ranks}", hints=Hints(**hints), example_inputs=batch)
    return plan, model, batch


def verified(case: Case, ranks: int, **hints: Any) -> autopar.VerifyReport:
    """All ranks simulated in float64 for two steps."""
    with exact_float64():
        model, batch = case.make(torch.float64)
        report = autopar.verify(model, f"h100-sxm:1x{ranks}", hints=Hints(**hints), example_inputs=batch, steps=2)
    assert report.ok and report.bound == 1e-10 and report.world_size == ranks, str(report)
    return report


# -- the cut -----------------------------------------------------------------------------------------------------------


def calls(stage: Stage, phase: str) -> Counter[str]:
    graph = getattr(stage, phase).module.graph
    return Counter(n.name for n in graph.nodes if n.op == "call_function")


def program(case: Case, ranks: int, **hints: Any) -> tuple[Plan, StepProgram]:
    plan, model, batch = planned(case, ranks, **hints)
    return plan, specialize_step(model, plan, (), batch)


def test_the_cut_of_a_llama() -> None:
    """One activation goes up and one gradient comes down; cosines, sines and masks are made by each stage; a stage
    reads its own parameters only; of the two parts of the backward, every node is in one."""
    plan, found = program(LLAMA, 2, pp=2, schedule="1f1b", micro_batch_size=2)
    first, last = found.stages
    assert plan.stages == (("model.embed_tokens", "model.layers.0"), ("model.layers.1", "model.norm", "lm_head"))
    assert len(first.sends) == len(last.receives) == len(last.sends_back) == len(first.receives_back) == 1
    assert first.receives == last.sends == first.sends_back == last.receives_back == ()
    cosines = [stage for stage in found.stages if "cos" in str(calls(stage, "forward"))]
    assert len(cosines) == 2
    names = {found.input_name(p.placeholder): p.name for p in found.captured.parameters}
    embedding = "model.embed_tokens.weight"
    for stage, block, other in ((first, "layers.0", "layers.1"), (last, "layers.1", "layers.0")):
        read = {names[name] for name in stage.inputs if name in names}
        assert embedding in read and any(block in n for n in read) and not any(other in n for n in read)
        whole, parts = calls(stage, "backward"), calls(stage, "input") + calls(stage, "weight")
        assert parts == whole and max(parts.values()) == 1
        assert calls(stage, "input") and calls(stage, "weight")
    trained = [p.name for p in found.captured.parameters if p.gradient is not None]
    tied = found.phases.gradients[trained.index(embedding)]
    assert tied in first.gradients and tied in last.gradients
    rest = [name for name in found.phases.gradients if name != tied]
    assert sorted(rest) == sorted(set(first.gradients) ^ set(last.gradients))
    assert last.results == found.phases.results and first.results == ()
    assert last.sends_last == first.receives_last == last.results and first.sends_last == last.receives_last == ()


def test_a_value_that_travels_further_goes_stage_by_stage() -> None:
    """The skip of a stack, and parameters that a stage reads and does not hold."""
    _, found = program(STACK, 4, pp=4, micro_batch_size=2, schedule="1f1b")
    sizes = [(len(stage.sends), len(stage.sends_back)) for stage in found.stages]
    assert all(up >= 2 for up, _ in sizes[:-1]) and sum(down for _, down in sizes) > len(sizes)
    for before, after in itertools.pairwise(found.stages):
        assert before.sends == after.receives and after.sends_back == before.receives_back


def test_stages_out_of_the_models_order_are_said() -> None:
    with pytest.raises(HintError, match="to a stage before that of the module before it"):
        planned(STACK, 2, pp=2, stages={"blocks.0": 1, "blocks.1": 0})


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_with_a_pipeline(tmp_path: Any) -> None:
    plan, _, _ = planned(STACK, 4, pp=2, tp=2, schedule="interleaved", micro_batch_size=1)
    assert plan.degrees == {"pp": 2, "dp": 1, "cp": 1, "tp": 2} and plan.world_size == 4 and plan.num_micro_batches == 8
    assert len(plan.stages) == 4 and plan.schedule == "interleaved"
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    text = " ".join(plan.report().split())
    assert "4 stages, 2 a rank of pp, by the schedule interleaved" in text
    assert "stage 3 pp rank 1" in text and "Pipeline stages" in text


def test_the_cost_of_a_pipeline() -> None:
    """A rank holds the parameters of its stages; 1F1B keeps the activations of as many micro-batches as there are
    stages, GPipe those of all; the bubble is a stage's seconds of one micro-batch for every stage but one."""
    with torch.device("meta"):
        model, batch = Stack(2048), {"x": torch.empty(8192, 2048), "y": torch.empty(8192, 2048)}
    alone = autopar.plan(model, "h100-sxm:1x1", example_inputs=batch)
    hints = [Hints(pp=2, schedule=schedule, micro_batch_size=1024) for schedule in ("1f1b", "gpipe")]
    plans = [autopar.plan(model, "h100-sxm:1x2", hints=given, example_inputs=batch) for given in hints]
    for plan in plans:
        assert 0.45 < plan.memory["parameters"] / alone.memory["parameters"] < 0.75
        assert plan.step_time == pytest.approx(sum(plan.breakdown.values()))
        assert 0.45 < plan.breakdown["compute"] / alone.breakdown["compute"] < 0.65
        assert 0.8 < plan.breakdown["bubble"] / (plan.breakdown["compute"] / 8) < 1.3
        assert [c.count % 8 for c in plan.collectives if (c.kind, c.axis) == ("p2p", "pp")] == [0]
    assert plans[0].memory["activations"] < 0.5 * plans[1].memory["activations"]


def test_what_a_schedule_cannot_run_is_said_at_planning() -> None:
    for hints in ({"schedule": "1f1b", "micro_batch_size": 8}, {"schedule": "dualpipev", "micro_batch_size": 4}):
        with pytest.raises(HintError, match="cannot run"):
            planned(STACK, 2, pp=2, **hints)


def test_a_hint_interleaves_stages_of_less_than_a_block() -> None:
    """Two layers on two ranks: the embedding and the last norm are stages with one of them, or by themselves."""
    plan, _, _ = planned(LLAMA, 2, pp=2, schedule="interleaved", micro_batch_size=2)
    assert plan.schedule == "interleaved" and len(plan.stages) == 4


def test_a_pipeline_is_filled_where_the_micro_batch_size_is_open() -> None:
    """A tiny model on fast devices waits for starts, not for a bubble: several micro-batches all the same."""
    plan, _, _ = planned(STACK, 2, pp=2, schedule="1f1b")
    assert plan.num_micro_batches >= 2 and plan.micro_batch_size * plan.num_micro_batches == 8


# -- simulation --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_llama_on_two_stages_of_two_ranks() -> None:
    """Tied embeddings on the first and the last stage, tensor parallelism inside, and half of the work a stage."""
    report = verified(LLAMA, 4, pp=2, tp=2, schedule="interleaved-zb", micro_batch_size=2,
                      stages={"model.layers.0": 0, "model.layers.1": 1})  # fmt: skip
    assert report.flops_share < 0.35


def test_a_stack_with_shared_parameters_on_four_stages() -> None:
    """A module used twice, a parameter of the root module, and a skip around everything."""
    verified(STACK, 4, pp=4, schedule="1f1b", micro_batch_size=2)


#: What tests/test_every_plan.py does not have: given stages, an encoder, a stack, micro-batches without any label.
FURTHER: list[tuple[Case, int, dict[str, Any]]] = [
    (UNTIED, 4, {"pp": 4, "schedule": "interleaved-zb", "micro_batch_size": 2, "stages": {
        "model.layers.0": 1, "model.layers.1": 2, "model.layers.2": 3}}),
    (BERT, 4, {"pp": 4, "schedule": "1f1b", "micro_batch_size": 2}),
    (BERT, 4, {"pp": 2, "dp": 2, "schedule": "interleaved-zb", "micro_batch_size": 1, "zero": 3}),
    (BERT, 4, {"pp": 2, "tp": 2, "schedule": "dualpipev", "micro_batch_size": 1}),
    (STACK, 8, {"pp": 2, "dp": 2, "tp": 2, "schedule": "interleaved", "micro_batch_size": 1, "zero": 3}),
    (EMPTY, 2, {"pp": 2, "schedule": "1f1b", "micro_batch_size": 2}),
    (EMPTY, 4, {"pp": 2, "dp": 2, "schedule": "zbv", "micro_batch_size": 1}),
]  # fmt: skip


#: Encoder and decoder, two towers, skips around all blocks, and statistics of the batch, which the forward updates.
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("t5", {"pp": 2, "schedule": "interleaved-zb", "micro_batch_size": 2}),
    ("clip", {"pp": 2, "schedule": "gpipe", "micro_batch_size": 8}),
    ("unet", {"pp": 4, "schedule": "gpipe", "micro_batch_size": 8}),
    ("resnet", {"pp": 2, "schedule": "zbv", "micro_batch_size": 8}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "hints"), OTHERS)
def test_other_architectures_equal_eager(name: str, hints: dict[str, Any]) -> None:
    case = next(c for c in (*zoo.ARCHITECTURES, *plain_models.CASES) if c.name == name)
    verified(case, hints["pp"], **hints)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "ranks", "hints"), FURTHER, ids=lambda v: v.name if isinstance(v, Case) else str(v))
def test_pipelines_equal_eager(case: Case, ranks: int, hints: dict[str, Any]) -> None:
    """As in tests/test_every_plan.py."""
    verified(case, ranks, **hints)


@pytest.mark.slow
def test_a_plan_is_carried_to_a_smaller_model() -> None:
    """Four stages of three layers become two of the two layers that there are."""
    plan, _, _ = planned(UNTIED, 8, pp=4, tp=2, schedule="1f1b", micro_batch_size=2)
    with exact_float64():
        model, batch = LLAMA.make(torch.float64)
        report = autopar.verify(model, plan, example_inputs=batch)
    assert report.ok and report.world_size == 4 and any("another model" in note for note in report.notes)


# -- real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize(("processes", "schedules"), [
    (2, ["1f1b"]),
    pytest.param(4, ["gpipe", "1f1b", "interleaved"], marks=pytest.mark.slow),
    pytest.param(4, ["interleaved-zb", "zbv", "dualpipev"], marks=pytest.mark.slow),
])  # fmt: skip
def test_real_pipelines_equal_eager(processes: int, schedules: list[str]) -> None:
    """Losses, the same on every rank without a broadcast, gradients and parameters of three steps, one with a
    micro-batch of which no label counts; parameters of its own stages on every rank; each graph once a micro-batch;
    evaluation (``tests/dist/pipeline.py``)."""
    assert_all_ok(torchrun(processes, SCRIPTS / "pipeline.py", *schedules), processes, schedules)
