"""What a plan says of itself: its decisions, what differs from another plan and from measurements, what limits it."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dist import small_models as models
from plan_samples import GIB, sample_plan

import autopar
from autopar import Hints, Workload
from autopar.capture.blocks import pattern
from autopar.errors import PlanError
from autopar.plan import Alternative, LayerSummary, ParameterPlan, Plan
from autopar.report.explain import Decision, Option, layout_text
from autopar.sharding.layout import Layout
from autopar.solver.carry import plan_pins
from autopar.solver.pins import Pins
from autopar.solver.program import evaluate, solve
from autopar.solver.setting import Setting
from autopar.solver.spmd import make_program, read
from autopar.specialize import capture_batch

DOWN = "model.layers.*.mlp.down_proj.weight"
HINTS = Hints(pp=1, dp=2, cp=1, tp=2, zero=0, shard={DOWN: {"tp": 0}})


@pytest.fixture(scope="module")
def made() -> tuple[torch.nn.Module, Plan]:
    """A small Llama and its plan on 2 x 2 ranks, with a hint that costs something."""
    model = models.llama()
    return model, autopar.plan(model, "cpu:4", hints=HINTS, example_inputs=models.tokens())


# ---- explain ----


def test_options_cost_what_the_program_says(made: tuple[torch.nn.Module, Plan]) -> None:
    """Each option of each parameter, put in place of the one that was taken, changes the value of the whole program by
    what it is said to be slower."""
    model, plan = made
    captured = capture_batch(model, (), models.tokens())
    operators = read(captured)
    setting = Setting(captured, operators, autopar.Cluster.parse("cpu:4"), "adamw")
    pins = plan_pins(captured, operators, plan)
    space, program = make_program(setting, plan.mesh, Pins(zero_dims=pins.zero_dims))
    _, pinned = make_program(setting, plan.mesh, pins)
    taken = solve(pinned)
    assert taken is not None
    base, _ = evaluate(program, taken.options)
    checked, seen = 0, set()
    for p in captured.parameters:
        d, layouts = space.of_source[p.placeholder]
        if d in seen:
            continue  # of another block
        seen.add(d)
        named = {layout_text(layout): k for k, layout in enumerate(layouts) if space.decisions[d].allowed[k]}
        verdicts = plan.explain(p.name).options
        verdicts = [v for v in verdicts if v.kind == "parameter"]
        assert {v.choice for v in verdicts} == set(named)
        for v in verdicts:
            options = taken.options.copy()
            options[d] = named[v.choice]
            value, _ = evaluate(program, options)
            assert v.chosen == (v.choice == layout_text(plan.layout(p.name)))
            assert v.slower == pytest.approx(value - base, rel=1e-3, abs=1e-5 * base)
            assert v.bytes == program.memory[d][named[v.choice]]
            checked += not v.chosen and np.isfinite(value)
    assert checked > 30


def test_words_of_options(made: tuple[torch.nn.Module, Plan]) -> None:
    """Megatron's words for a feed-forward layer: batch over dp, ffn over tp, of which the second product is summed."""
    _, plan = made
    found = plan.explain("model.layers.*.mlp")
    chosen = {(v.name, v.kind): v.choice for v in found.options if v.chosen}
    for name, summed in (("gate", ""), ("up", ""), ("down", ", summed")):
        where = f"model.layers.*.mlp.{name}_proj"
        assert chosen[where, "einsum forward"] == f"batch over dp; ffn over tp{summed}"
        assert chosen[where, "einsum backward, of the weight"] == "batch over dp, summed; ffn over tp"
        assert (where + ".weight", "parameter") in chosen
    assert all(d.count == models.LAYERS for d in found.decisions)
    attention = {v.choice for v in plan.explain("*.self_attn").options if v.kind == "attention forward"}
    assert {"batch over dp; heads over tp", "batch over dp; batch over tp"} <= attention
    assert found.options[0].chosen and sum(v.chosen for v in found.options) == len(found.decisions)


def test_what_a_hint_costs(made: tuple[torch.nn.Module, Plan]) -> None:
    """The layout that a hint rules out would be faster, and is named with by how much."""
    _, plan = made
    chosen, *rest = plan.explain(DOWN).options
    assert chosen.choice == "dim 0 over tp"
    faster = next(v for v in rest if v.choice == "dim 1 over tp")
    assert faster.slower is not None and faster.slower < 0
    assert faster.why.startswith("ruled out by hints, ") and faster.why.endswith(" faster")
    assert chosen.why.startswith("chosen: dim 1 over tp, ") and chosen.why.endswith("faster, is ruled out by hints")
    for v in rest:  # zero=0 and the hinted dim leave one layout open
        assert v.why.startswith("ruled out by hints")


def test_patterns(made: tuple[torch.nn.Module, Plan]) -> None:
    """A class of blocks, one of them, any part of a name, one parameter, the whole model; and what is misspelt."""
    _, plan = made
    whole = plan.explain("model.layers.*.mlp").decisions
    assert plan.explain("model.layers.1.mlp").decisions == whole == plan.explain("*.mlp").decisions
    assert {d.name for d in plan.explain("*.down_proj.weight").decisions} == {DOWN}
    assert {d.name for d in plan.explain("model.layers.2.mlp.down_proj.weight").decisions} == {DOWN}
    assert len(plan.explain("*").decisions) == len(plan.decisions)
    parameters = {d.name for d in plan.decisions if d.kind == "parameter"}
    assert parameters == {pattern(name) for name in plan.parameters}
    for wrong in ("model.layers.*.mpl", f"model.layers.{models.LAYERS}.mlp", "odel.layers.0.mlp"):
        with pytest.raises(PlanError, match=r"nothing to explain[\s\S]*did you mean model\.layers\.\*") as error:
            plan.explain(wrong)
        assert error.value.expected and error.value.found
    with pytest.raises(PlanError, match="plan the model again"):
        sample_plan().explain("*")


def test_a_loaded_plan_explains_itself(made: tuple[torch.nn.Module, Plan], tmp_path: Path) -> None:
    """Without the model, word by word as the plan that was saved."""
    _, plan = made
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    text = str(loaded.explain("*.mlp"))
    assert text == str(plan.explain("*.mlp"))
    assert text.isascii() and all(len(line) <= 100 for line in text.splitlines())
    assert f"{DOWN} (parameter x{models.LAYERS})" in text and "ruled out by hints" in text


def decided(*options: Option, chosen: int = 0) -> Plan:
    """A plan with one decision."""
    return sample_plan(decisions=(Decision("a.b", "a.b", "einsum forward", "", chosen, 0, options),))


def option(name: str, work: float, exchange: float | None, size: int = 0, ruled_out: str = "") -> Option:
    return Option(name, work, exchange, size, ruled_out)


def test_why_options_win_and_lose() -> None:
    """One plan a reason, its numbers by hand."""
    won = option("won", 1.0, 0.5, GIB)
    cases: list[tuple[Option, str, str]] = [
        (option("x", 1.5, 1.0), "chosen: the fastest by 1 s", "1 s slower: work +500 ms, exchange +500 ms"),
        (option("x", 0.5, 2.0), "chosen: the fastest by 1 s", "1 s slower: work -500 ms, exchange +1.5 s"),
        (option("x", 1.0, 0.5 + 1e-6), "chosen: as fast as any other", "as fast"),
        (option("x", 1.0, 0.5, 2 * GIB), "chosen: as fast as any other", "as fast, and keeps more"),
        (option("x", 1.0, 0.25, 3 * GIB), "chosen: x needs 2 GiB more memory", "250 ms faster, but keeps 2 GiB more"),
        (option("x", 1.0, 0.25, 0), "chosen, although x alone is faster: within the plan's gap",
         "250 ms faster, within the plan's gap"),
        (option("x", 1.0, 0.25, 0, "hints"), "chosen: x, 250 ms faster, is ruled out by hints",
         "ruled out by hints, 250 ms faster"),
        (option("x", 1.0, None), "chosen: no other is possible as long as its neighbours stay",
         "there is no way between it and its neighbours"),
    ]  # fmt: skip
    for other, why_won, why_lost in cases:
        found = decided(won, other).explain("a").options
        assert [v.why for v in found] == [why_won, why_lost]
        assert [v.why for v in decided(other, won, chosen=1).explain("a.b").options] == [why_won, why_lost]
    assert decided(won).explain("a").options[0].why == "chosen: the only option"


def test_a_malformed_decision_is_refused() -> None:
    data = json.loads(decided(option("x", 1.0, 0.0)).report("json"))
    for change in ({"chosen": 1}, {"chosen": -1}, {"blocks": "0-"}):
        data["decisions"][0] |= change
        with pytest.raises(PlanError, match=r"plan\.decisions of a\.b is malformed"):
            Plan.from_dict(data)
        data["decisions"][0] |= {"chosen": 0, "blocks": ""}


@pytest.mark.slow
def test_the_decisions_of_a_large_model_are_small() -> None:
    """Llama-3-8B on 64 devices: at most 100 KB, and every kind of product of a layer in them once."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
             "num_hidden_layers": 32, "vocab_size": 128256, "tie_word_embeddings": False}  # fmt: skip
    with torch.device("meta"):
        model = models.llama(**sizes).to(torch.bfloat16)
    plan = autopar.plan(model, "h100-sxm:8x8", workload=Workload(global_batch=128, seq_len=4096), hints=Hints(tp=8))
    assert len(json.dumps(plan.to_dict()["decisions"])) <= 100_000
    products = [d for d in plan.explain("model.layers.17.mlp").decisions if d.kind.startswith("einsum")]
    assert len(products) == 9 and all(d.count == 32 and d.blocks == "0-31" for d in products)


# ---- diff ----


def test_a_plan_does_not_differ_from_itself(made: tuple[torch.nn.Module, Plan]) -> None:
    _, plan = made
    found = plan.diff(plan)
    assert not found and found.differences == ()
    assert str(found) == "The plans of LlamaForCausalLM are the same."


def test_what_differs() -> None:
    """Each thing that is changed, and nothing else, with both values."""
    mine = sample_plan()
    norm = ParameterPlan((32,), Layout((("tp",),)))
    other = sample_plan(
        zero=1, schedule=None, recompute="full", step_time=0.824, breakdown={**mine.breakdown, "compute": 0.752},
        memory={**mine.memory, "activations": GIB}, peaks=({**mine.peak, "activations": GIB},),
        parameters={**mine.parameters, "model.norm.weight": norm}, hints={"tp": 2, "recompute": "full"},
        layers=(*mine.layers[:1], LayerSummary("model.layers.*.mlp", 30, (("batch", "dp"), ("hidden", "tp"))),
                mine.layers[2]),
    )  # fmt: skip
    found = mine.diff(other)
    assert found and {(d.group, d.what): (d.mine, d.other) for d in found.differences} == {
        ("given", "hints recompute"): ("", "full"),
        ("decided", "zero"): ("3", "1"),
        ("decided", "recompute"): ("selective", "full"),
        ("split", "model.layers.*.mlp"): ("batch over dp; ffn over tp", "batch over dp; hidden over tp"),
        ("storage", "model.norm.weight"): ("dim 0 over dp", "dim 0 over tp"),
        ("seconds", "a step"): (0.412, 0.824),
        ("seconds", "compute"): (mine.breakdown["compute"], 0.752),
        ("bytes", "at the peak"): (mine.peak_memory, other.peak_memory),
        ("bytes", "activations"): (mine.memory["activations"], GIB),
    }
    text = " ".join(str(found).split())
    assert "a step 412 ms 824 ms 2.00x" in text and "model.norm.weight dim 0 over dp dim 0 over tp" in text
    assert {(d.what, d.other, d.mine) for d in other.diff(mine).differences} == {
        (d.what, d.mine, d.other) for d in found.differences
    }


def test_plans_of_different_models_are_not_compared() -> None:
    mine = sample_plan()
    wider = {**mine.parameters, "model.norm.weight": ParameterPlan((64,), Layout((("dp",),)))}
    with pytest.raises(PlanError, match="of different models") as error:
        mine.diff(sample_plan(structure="other", parameters=wider))
    assert r"model.norm.weight of (32,) and (64,)" in error.value.found and error.value.change


# ---- compare ----


def test_a_measured_step() -> None:
    found = sample_plan().compare(0.515)
    assert found.ratio == pytest.approx(1.25) and found.memory_ratio is None
    assert sample_plan().compare([2.0, 0.51, 0.515, 0.52, 0.515]).ratio == pytest.approx(1.25)
    # 103 ms more: the 340 ms of compute would be 443, the 62 ms of communication 165, the 10 ms of the optimizer 113
    assert [line.partition(":")[0] for line in found.where] == [
        "if all of it lay in compute", "if all of it lay in exposed communication", "if all of it lay in optimizer"]
    assert "443 ms, 1.30 times" in found.where[0] and "165 ms, 2.66 times" in found.where[1]
    assert "step_time 412 ms 515 ms 1.25" in " ".join(str(found).split())


def test_measured_parts_and_bytes() -> None:
    found = sample_plan().compare({"compute": 0.34, "step_time": 0.442, "exposed communication": 0.092},
                                  peak_memory=41 * GIB)  # fmt: skip
    assert found.memory_ratio == pytest.approx(2)
    assert found.where[0] == "exposed communication: 30 ms more than predicted"
    assert found.where[-1] == "memory: 20.5 GiB more; most was predicted for activations"
    assert len(found.where) == 2, "the parts that were measured explain all of it"
    parts = {**sample_plan().breakdown, "bubble": 0.1}
    assert sample_plan().compare(parts).ratio == pytest.approx(0.512 / 0.412)
    assert sample_plan().compare(0.412).where == ()


@pytest.mark.parametrize(("measured", "message"), [
    (0.0, "is no number"), (-1.0, "is no number"), (float("nan"), "is no number"), ("fast", "is no number"),
    (True, "is no number"), ([], "no step"), ([0.1, None], "is no number"),
    ({"comput": 1.0, "step_time": 1.0}, r"no part 'comput'[\s\S]*did you mean compute"),
    ({"compute": 1.0}, "leave out exposed communication"), ({"step_time": 0.0}, "is no number"),
])  # fmt: skip
def test_what_is_no_measurement(measured: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as error:
        sample_plan().compare(measured)
    assert error.value.expected and error.value.found and error.value.change


# ---- what limits a plan ----


def test_what_limits_a_plan_by_its_parts() -> None:
    """The sample has nothing to simulate: half of compute and optimizer; the faster plan that does not fit; half of
    each collective's seconds that depend on its bytes, and of the others."""
    limits = {limit.resource: limit for limit in sample_plan().binding.limits}
    assert limits["compute"].saves == pytest.approx(0.175)
    assert limits["memory"].saves == pytest.approx(0.112) and limits["memory"].change == "12.9 GiB more"
    for axis, seconds in (("dp", 0.031), ("tp", 0.0045)):
        parts = [limits[f"{what} of {axis}"].saves for what in ("bandwidth", "latency")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(seconds / 2)
    assert sample_plan().binding.resource == "compute"
    slow = {"compute": 0.05, "exposed communication": 0.062, "bubble": 0.3, "optimizer": 0.0}
    assert sample_plan(breakdown=slow, alternatives=()).binding.resource == "bubble"


def test_memory_limits_only_where_something_faster_does_not_fit() -> None:
    fits = Alternative(**{**vars(sample_plan().alternatives[1]), "peak_memory": 2 * GIB})
    slower = Alternative(**{**vars(sample_plan().alternatives[1]), "step_time": 0.5})
    for others in ((), (fits,), (slower,)):
        assert "memory" not in {limit.resource for limit in sample_plan(alternatives=others).binding.limits}
    tight = sample_plan(alternatives=(replace(fits, peak_memory=30 * GIB),), hints={"memory_limit": "21GiB"})
    assert next(li for li in tight.binding.limits if li.resource == "memory").change == "9 GiB more"


def test_what_limits_a_plan_by_simulation(made: tuple[torch.nn.Module, Plan]) -> None:
    """Without a pipeline nothing hides behind anything else at the step's end here: twice the devices save half of
    compute and optimizer, and all axes together half of what is exposed at most. Small messages are latency."""
    _, plan = made
    saves = {limit.resource: limit.saves for limit in plan.binding.limits}
    work = plan.breakdown["compute"] + plan.breakdown["optimizer"]
    assert 0.8 * work / 2 <= saves["compute"] <= 1.2 * work / 2
    exposed = sum(t for what, t in saves.items() if what.startswith(("bandwidth", "latency")))
    assert 0.5 * plan.breakdown["exposed communication"] / 2 <= exposed
    assert exposed <= 1.2 * plan.breakdown["exposed communication"] / 2
    assert plan.binding.resource == "latency of tp" and saves["latency of tp"] > 10 * saves["bandwidth of tp"]
    assert all(limit.saves >= 0 for limit in plan.binding.limits)


# ---- the same model under other hints ----


def test_the_plan_under_other_hints() -> None:
    """As planned from the start with these hints and its own; the first plan stays as it is."""
    model, x = models.mlp(), torch.linspace(-1, 1, 64).view(4, 16)
    plan = autopar.plan(model, "cpu:2", hints=Hints(dp=2, zero=0), example_inputs=x)
    before = plan.to_dict()
    found = plan.with_hints(Hints(dp=1, tp=2))
    hints = Hints(dp=1, tp=2, zero=0)
    assert found.to_dict() == autopar.plan(model, "cpu:2", hints=hints, example_inputs=x).to_dict()
    assert found.hints == hints.to_dict() and plan.to_dict() == before
    assert {d.what for d in plan.diff(found).differences} >= {"dp", "tp", "a step"}


def test_a_plan_without_its_model_cannot_be_made_again() -> None:
    """Loaded from a file, changed, or its model gone: what to call is said."""
    model, x = models.mlp(), torch.linspace(-1, 1, 64).view(4, 16)
    plan = autopar.plan(model, "cpu:1", example_inputs=x)
    assert plan.with_hints(Hints(zero=0)).hints == {"zero": 0}
    for other in (Plan.from_dict(json.loads(plan.report("json"))), replace(plan)):
        with pytest.raises(PlanError, match="not known") as error:
            other.with_hints(Hints())
        assert "autopar.plan(model" in error.value.change and "loaded or changed" in error.value.found
    del model
    gc.collect()
    with pytest.raises(PlanError, match="a model that is gone"):
        plan.with_hints(Hints())
