"""The simulation of a step: tasks on streams, schedules, programs of stages against the emitted graphs, the trace."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_samples import sample_plan
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Hints, Plan
from autopar.arguments import check_plan
from autopar.cost_model.bubble import PipelineTime, script, simulate
from autopar.cost_model.hardware import load_device
from autopar.cost_model.simulate import COMPUTE, Task, run
from autopar.cost_model.step import BEGIN, END, PARTS, Repeated, Timing, simulate_step, tasks_of
from autopar.errors import PlanError
from autopar.passes.collectives import KINDS, axis_of, group_argument
from autopar.passes.phases import Phase
from autopar.report.timeline import timeline
from autopar.schedule import SIMULATED_SCHEDULES, Action, global_order
from autopar.specialize import specialize_step

# -- tasks -------------------------------------------------------------------------------------------------------------


def test_a_collective_hides_as_long_as_the_compute_beside_it_lasts() -> None:
    """A gather of 3 s beside 2 s of compute, and 4 s of compute that need it: 1 s is exposed."""
    tasks = [Task("dp", 3.0), Task(COMPUTE, 2.0), Task(COMPUTE, 4.0, after=(2,))]
    assert run(tasks).ends == (3.0, 2.0, 7.0)
    assert run([Task("dp", 1.5), *tasks[1:]]).seconds == 6.0  # hidden whole


def test_compute_is_slowed_down_while_a_collective_runs() -> None:
    """At half the speed: 3 s beside the gather do 1.5 s of the 2 s of work, the rest takes 0.5 s; then 4 s alone. At
    rate 0 nothing is hidden."""
    tasks = [Task("dp", 3.0), Task(COMPUTE, 2.0), Task(COMPUTE, 4.0, after=(2,))]
    assert run(tasks, rate=0.5).ends == (3.0, 3.5, 7.5)
    assert run(tasks, rate=0.0).ends == (3.0, 5.0, 9.0)
    # one that starts in the middle: 1 s alone, 2 s at half speed beside it, 2 s alone
    late = [Task(COMPUTE, 1.0), Task("dp", 2.0, after=(1,)), Task(COMPUTE, 3.0)]
    assert run(late, rate=0.5).ends == (1.0, 3.0, 5.0)
    # two at once slow compute down as one does
    two = [Task("dp", 2.0), Task("tp", 2.0), Task(COMPUTE, 2.0)]
    assert run(two, rate=0.5).ends == (2.0, 2.0, 3.0)


def test_a_stream_runs_its_tasks_one_after_the_other_and_ranks_do_not_share_streams() -> None:
    first = [Task("dp", 1.0), Task("dp", 1.0), Task("tp", 1.0)]
    tasks = [*first, Task("dp", 1.0, rank=1), Task(COMPUTE, 1.0, (1,), rank=1)]
    found = run(tasks, rate=0.5)
    assert found.starts == (0.0, 1.0, 0.0, 0.0, 1.0) and found.ends == (1.0, 2.0, 1.0, 1.0, 2.0)
    with pytest.raises(IndexError, match="does not come before"):
        run([Task(COMPUTE, 1.0, after=(1,))])


def test_what_a_device_keeps_of_its_speed_beside_a_collective() -> None:
    """GPUs the published average; a process on a CPU nothing, because Gloo copies on its core: nothing is hidden."""
    assert load_device("h100-sxm").overlap_rate == pytest.approx(1 / 1.189)
    assert load_device("cpu").overlap_rate == 0.0


# -- schedules ---------------------------------------------------------------------------------------------------------


def span(found: PipelineTime) -> float:
    """The longest that a rank takes from its own first action to its own last: what a step takes where no rank waits
    for another at the end of one (the post-validation of Qi et al., 2023; this runtime waits)."""
    return max(ends[-1] - starts[0] for starts, ends in zip(found.starts, found.ends, strict=True))


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_zb_2p_leaves_no_rank_idle_and_holds_twice_as_much(pp: int) -> None:
    """Qi et al. 2023, ZB-H2: of equal passes every rank works without a pause from its first to its last; with F, I and
    W of other lengths it waits (p-1)(F + I - 2 W); 2p - 1 micro-batches are held."""
    steps = script("zb-2p", pp, pp, 4 * pp)
    equal = simulate(steps, pp, lambda stage, kind: 1.0)
    assert span(equal) == 12 * pp and max(equal.in_flight) == 2 * pp - 1
    uneven = {"F": 1.0, "I": 1.2, "W": 0.7}
    found = simulate(steps, pp, lambda stage, kind: uneven[kind])
    assert span(found) - 4 * pp * 2.9 == pytest.approx((pp - 1) * (1.0 + 1.2 - 1.4))


@pytest.mark.parametrize("pp", [3, 4, 7, 8])
def test_v_half_holds_half_as_much_as_1f1b_and_waits_less(pp: int) -> None:
    """Qi et al. 2024: half the activations of 1F1B (p micro-batches of a rank's layers) and a constant, and a bubble of
    about half of 1F1B's, (p-1)(F + B)."""
    steps = script("v-half", pp, 2 * pp, 4 * pp)
    found = simulate(steps, 2 * pp, lambda stage, kind: 0.5)  # F = I = W = 1 of a rank's two stages
    assert max(found.in_flight) / 2 <= pp / 2 + 1
    assert found.bubble <= 0.6 * 3 * (pp - 1)


@pytest.mark.parametrize("schedule", SIMULATED_SCHEDULES)
def test_schedules_that_are_only_simulated_end_and_do_everything_once(schedule: str) -> None:
    for pp, count in itertools.product((2, 3, 4, 5), (1, 2, 5, 12)):
        steps = script(schedule, pp, pp * (SIMULATED_SCHEDULES[schedule] or 1), count)
        done = [action for step in global_order(steps.rows, steps.stages) for action in step]
        assert sorted(done) == sorted(
            Action(s, kind, m) for s in range(steps.stages) for kind in "FIW" for m in range(count)
        )


def test_messages_of_one_link_travel_one_after_the_other() -> None:
    """Two ranks, three forwards of 1 s each and messages of 2 s: the second rank gets them at 3, 5 and 7."""
    steps = script("gpipe", 2, 2, 3)
    found = simulate(steps, 2, lambda stage, kind: 1.0, transfer=2.0)
    assert found.starts[1][:3] == (3.0, 5.0, 7.0) and found.departs[:3] == (1.0, 3.0, 5.0)
    # 1F1B sends its third forward after the first backward (5 to 7, 7 to 8): the last rank has it at 9, not 8, and ends
    # at 15, and the first rank two seconds later
    took = {"F": 1.0, "B": 2.0}
    other = simulate(script("1f1b", 2, 2, 4), 2, lambda s, k: took[k], lambda a, b: 1.0 if a < b else 0.0)
    assert other.starts[1][0] == 2.0 and other.starts[1][4] == 9.0 and other.makespan == 17.0


# -- steps -------------------------------------------------------------------------------------------------------------


def program(*tasks: Task) -> tuple[Repeated, ...]:
    return (Repeated(1, tasks),)


def timing(pp: int, forward: float, backward: float, gather: float = 0.0, **changes: Any) -> Timing:
    """Equal stages; every action begins with a collective of ``gather`` seconds that it waits for."""
    before = (Task("tp", gather),) if gather else ()
    after = (1,) if gather else ()
    parts = [(), (*before, Task(COMPUTE, forward, after)), (*before, Task(COMPUTE, backward, after))]
    entries: dict[str, Any] = {
        "programs": tuple(program(*tasks) if tasks else () for tasks in parts),
        "actions": {kind: (place,) * pp for kind, place in ((BEGIN, 0), ("F", 1), ("B", 2), (END, 0))},
        "up": (0.0,) * pp,
        "down": (0.0,) * pp,
        "shared": (0.0,) * pp,
        "optimizer": (0.0,) * pp,
        "overlap_rate": 1.0,
    }
    return Timing(**{**entries, **changes})


def test_the_step_of_equal_stages_is_the_closed_form() -> None:
    """1F1B: m (F + B) and a bubble of (p - 1)(F + B), where F and B are with what communication they expose; and the
    slowest rank's optimizer."""
    found = simulate_step(timing(4, 1.0, 2.0, gather=0.25, optimizer=(0.5,) * 4), script("1f1b", 4, 4, 8))
    assert found.breakdown == pytest.approx(
        {"compute": 8 * 3.0, "exposed communication": 8 * 0.5, "bubble": 3 * 3.5, "optimizer": 0.5}
    )
    assert found.seconds == pytest.approx(sum(found.breakdown.values())) and tuple(found.breakdown) == PARTS


def test_a_step_without_a_pipeline_is_its_parts() -> None:
    """What lives for the step first, then every micro-batch, then what is reduced once; nothing is beside anything."""
    parts = timing(1, 1.0, 2.0)
    around = (program(Task("dp", 0.5)), program(Task("dp", 0.75)))
    whole = Timing(
        (*parts.programs, *around), {**parts.actions, BEGIN: (3,), END: (4,)}, *[(0.0,)] * 3, (0.125,), 1.0
    )
    found = simulate_step(whole, script(None, 1, 1, 4))
    assert found.breakdown == pytest.approx(
        {"compute": 12.0, "exposed communication": 1.25, "bubble": 0.0, "optimizer": 0.125}
    )


def test_the_slowest_rank_is_the_one_whose_parts_are_told() -> None:
    """The second of two stages takes twice as long: the first one's waiting is not the step's bubble."""
    base = timing(2, 1.0, 2.0)
    slow = Timing(
        (*base.programs, program(Task(COMPUTE, 2.0)), program(Task(COMPUTE, 4.0))),
        {**base.actions, "F": (1, 3), "B": (2, 4)}, base.up, base.down, (0.5, 0.5), (0.25, 0.5), 1.0,
    )  # fmt: skip
    found = simulate_step(slow, script("1f1b", 2, 2, 8))
    assert found.rank == 1
    assert found.breakdown == pytest.approx(
        {"compute": 48.0, "exposed communication": 0.5, "bubble": 1.0 + 2.0, "optimizer": 0.5}
    )


# -- plans -------------------------------------------------------------------------------------------------------------


@functools.cache
def planned(*, layers: int = 3, **hints: Any) -> tuple[Plan, LlamaForCausalLM, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.arange(16 * 16).reshape(16, 16) % 64
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    return autopar.plan(model, "h100-sxm:8", example_inputs=batch, hints=Hints(**hints)), model, batch


def emitted(phase: Phase | None) -> list[tuple[str, str]]:
    """The collectives of a graph in the order in which it starts them."""
    nodes = phase.module.graph.nodes if phase is not None else ()
    return [(KINDS[n.target], axis_of(group_argument(n))) for n in nodes if n.target in KINDS]


def simulated(plan: Plan, kind: str, stage: int = 0) -> list[tuple[str, str]]:
    assert plan.timing is not None
    tasks = tasks_of(plan.timing.programs[plan.timing.actions[kind][stage]])
    return [(task.kind, task.stream) for task in tasks if task.stream != COMPUTE]


ORDERS: dict[str, dict[str, Any]] = {
    "ZeRO-3 and tp": {"layers": 6, "pp": 1, "dp": 4, "cp": 1, "tp": 2, "zero": 3, "micro_batch_size": 2},
}
MORE_ORDERS: dict[str, dict[str, Any]] = {
    "DDP and tp": {"pp": 1, "dp": 4, "cp": 1, "tp": 2, "zero": 0, "micro_batch_size": 4},
    "ZeRO-2": {"pp": 1, "dp": 8, "cp": 1, "tp": 1, "zero": 2, "micro_batch_size": 1},
    "ZeRO-3 and cp": {"pp": 1, "dp": 2, "cp": 2, "tp": 2, "zero": 3, "micro_batch_size": 4},
    "selective": {"pp": 1, "dp": 4, "cp": 1, "tp": 2, "zero": 3, "micro_batch_size": 2, "recompute": "selective"},
    "full": {"pp": 1, "dp": 4, "cp": 1, "tp": 2, "zero": 3, "recompute": "full"},
}


def assert_in_emitted_order(plan: Plan, model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> None:
    phases = specialize_step(model, plan, (), batch).phases
    assert simulated(plan, "F") == emitted(phases.forward)
    assert simulated(plan, "B") == emitted(phases.backward)
    assert simulated(plan, "F") + simulated(plan, "B")


@pytest.mark.parametrize("hints", ORDERS.values(), ids=ORDERS)
def test_collectives_are_simulated_in_the_order_in_which_graphs_issue_them(hints: dict[str, Any]) -> None:
    """The forward's and the backward's: gathers one block ahead, reductions as soon as a bucket is there."""
    assert_in_emitted_order(*planned(**hints))


@pytest.mark.slow
@pytest.mark.parametrize("hints", MORE_ORDERS.values(), ids=MORE_ORDERS)
def test_collectives_of_other_plans_are_in_emitted_order(hints: dict[str, Any]) -> None:
    assert_in_emitted_order(*planned(**hints))


@pytest.mark.slow
def test_stages_are_simulated_in_the_order_in_which_their_graphs_issue_collectives() -> None:
    """A split backward too: gradients are reduced in its second part."""
    plan, model, batch = planned(layers=4, pp=2, dp=2, cp=1, tp=2, zero=3, micro_batch_size=2, schedule="zbv")
    for s, stage in enumerate(specialize_step(model, plan, (), batch).stages):
        assert simulated(plan, "F", s) == emitted(stage.forward)
        if s > 0:  # what the first stage does not have to hand on the cut sorts by gradients
            assert sorted(simulated(plan, "I", s)) == sorted(emitted(stage.input))
            assert sorted(simulated(plan, "W", s)) == sorted(emitted(stage.weight))


def test_what_is_simulated_is_what_the_plan_says() -> None:
    """Every collective of the plan is a task, as often as it is issued; the parts of a step add up; equal blocks are
    kept once; and a plan read from its file gives the same step."""
    plan, _, _ = planned(**ORDERS["ZeRO-3 and tp"])
    assert plan.timing is not None and plan.num_micro_batches == 2
    times = {BEGIN: 1, "F": 2, "B": 2, END: 1}
    tasks = [
        (task.seconds * n, task.stream)
        for kind, n in times.items()
        for task in tasks_of(plan.timing.programs[plan.timing.actions[kind][0]])
    ]
    communication = sum(seconds for seconds, stream in tasks if stream != COMPUTE)
    assert communication == pytest.approx(sum(c.seconds for c in plan.collectives))
    compute = sum(seconds for seconds, stream in tasks if stream == COMPUTE)
    assert plan.breakdown["compute"] == pytest.approx(compute)
    assert 0 < plan.breakdown["exposed communication"] < communication  # some of it is hidden
    assert plan.step_time == pytest.approx(sum(plan.breakdown.values())) and plan.breakdown["optimizer"] > 0
    again = Plan.from_dict(json.loads(plan.report("json")))
    assert again == plan and again.timing is not None
    found = simulate_step(again.timing, script(None, 1, 1, 2))
    assert found.seconds == pytest.approx(plan.step_time)


def test_a_timing_that_cannot_be_is_refused() -> None:
    """Places that there are not, too few stages, tasks that wait for nothing, and a schedule whose actions it lacks."""
    parts = timing(1, 1.0, 2.0, gather=0.25)
    good = sample_plan(timing=parts)
    assert Plan.from_dict(good.to_dict()) == good
    late = Repeated(1, (Task(COMPUTE, 1.0, after=(1,)),))
    for bad in (
        replace(parts, actions={**parts.actions, "F": (3,)}),
        replace(parts, actions={**parts.actions, "F": (1, 1)}),
        replace(parts, optimizer=(0.1, 0.1)),
        replace(parts, programs=(*parts.programs, (late,))),
        replace(parts, up=(-1.0,)),
    ):
        with pytest.raises(PlanError, match=r"plan\.timing is malformed"):
            Plan.from_dict(sample_plan(timing=bad).to_dict())
    with pytest.raises(PlanError, match="does not say what its step consists of"):
        timeline(sample_plan())
    less = {kind: places for kind, places in parts.actions.items() if kind != "F"}
    with pytest.raises(PlanError, match=r"plan\.timing"):
        Plan.from_dict(sample_plan(timing=replace(parts, actions=less)).to_dict())


def test_equal_blocks_are_kept_once() -> None:
    """Of six blocks the first and the last ones have other neighbours; those between them are one part."""
    plan, _, _ = planned(**ORDERS["ZeRO-3 and tp"])
    assert plan.timing is not None
    for kind in "FB":
        parts = plan.timing.programs[plan.timing.actions[kind][0]]
        assert max(part.count for part in parts) >= 3


def test_the_trace_of_a_step(tmp_path: Path) -> None:
    """Perfetto's format: named processes and threads, and complete events that cover the step, one for every task."""
    plan, _, _ = planned(**ORDERS["ZeRO-3 and tp"])
    path = tmp_path / "step.json"
    plan.timeline(path)
    events = json.loads(path.read_text())["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(threads.values()) == ["compute", "dp", "tp"]
    whole = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in whole) * 1e-6 == pytest.approx(plan.step_time)
    assert {e["args"]["micro-batch"] for e in whole if "micro-batch" in e["args"]} == {0, 1}
    on_dp = [e for e in whole if threads[e["pid"], e["tid"]] == "dp"]
    assert len(on_dp) == sum(c.count for c in plan.collectives if c.axis == "dp")
    assert any(e["name"].startswith("optimizer") for e in whole)
    for thread in threads:  # a stream does one thing at a time
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in whole if (e["pid"], e["tid"]) == thread)
        assert all(b[0] >= a[1] - 1e-6 for a, b in itertools.pairwise(own))
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]
    with pytest.raises(PlanError, match="Cannot write the timeline"):
        plan.timeline(tmp_path / "missing" / "step.json")


@pytest.mark.slow
def test_the_trace_of_a_pipeline(tmp_path: Path) -> None:
    """A process for every rank; what travels is on the sender's pp thread, once a micro-batch and way."""
    plan, _, _ = planned(layers=4, pp=4, dp=2, cp=1, tp=1, zero=1, schedule="1f1b", micro_batch_size=1)
    plan.timeline(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2, 3}
    sends = [e for e in events if e["name"].startswith("send ")]
    assert len(sends) == 2 * 3 * plan.num_micro_batches
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") * 1e-6 == pytest.approx(plan.step_time)


@pytest.mark.slow
def test_schedules_that_cannot_be_run_can_be_planned_with() -> None:
    """ZB-2p waits for less than 1F1B and holds more; parallelize refuses it."""
    common: dict[str, Any] = {"layers": 6, "pp": 4, "dp": 2, "cp": 1, "tp": 1, "micro_batch_size": 1}
    plan, model, _ = planned(schedule="zb-2p", **common)
    other, _, _ = planned(schedule="1f1b", **common)
    assert plan.schedule == "zb-2p" and plan.breakdown["bubble"] < other.breakdown["bubble"]
    assert plan.memory["activations"] > other.memory["activations"]
    with pytest.raises(PlanError, match="zb-2p can be planned with, but not run"):
        check_plan(plan, model)
