"""The kinds of ZeRO: what each of them communicates in a step, keeps, and computes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from dist.small_models import llama, tokens

import autopar
from autopar import Cluster, Hints, Workload
from autopar.capture.graph import Captured
from autopar.passes.collectives import ALL_GATHER, KINDS, REDUCE_SCATTER, axis_of, group_argument
from autopar.plan import Plan
from autopar.runtime.reference import exact_float64
from autopar.sharding.zero import Keeping, keeping
from autopar.solver.search import search
from autopar.specialize import capture_batch, specialize, specialize_step

LAYERS, SAMPLES = 2, 8
#: Blocks, and the root with embedding (tied to the head) and last norm: what FSDP2 gathers at once. The gradients of
#: the root go with those of the first block.
UNITS, REDUCED = LAYERS + 1, LAYERS
KINDS_OF_ZERO = {
    "0": {"zero": 0},
    "1": {"zero": 1},
    "2": {"zero": 2},
    "SHARD_GRAD_OP": {"zero": 3, "reshard_after_forward": False},
    "3": {"zero": 3},
}


def model() -> Any:
    """A Llama of two layers with tied embeddings."""
    return llama(num_hidden_layers=LAYERS)


def hints(kind: str, micro_batches: int, **degrees: int) -> Hints:
    """The hints for a kind of ZeRO, dp=4 unless other degrees are given."""
    degrees = degrees or {"dp": 4}
    return Hints(**KINDS_OF_ZERO[kind], micro_batch_size=SAMPLES // degrees["dp"] // micro_batches, **degrees)


@functools.cache
def planned(kind: str, micro_batches: int) -> Plan:
    """The plan on four ranks of dp."""
    workload = Workload(global_batch=SAMPLES)
    return search(*captured(), Cluster.parse("cpu:4"), workload, hints(kind, micro_batches))


@functools.cache
def captured() -> tuple[Any, Captured]:
    """The model and its graph."""
    whole = model()
    return whole, capture_batch(whole, (), tokens(SAMPLES, 8))


def per_step(kind: str, m: int) -> dict[str, tuple[int, int]]:
    """Gathers and reductions of whole parameters in a step of ``m`` micro-batches: calls, and how many times all bytes
    (the table of DESIGN section 6 written out)."""
    return {
        "0": {"all_gather": (0, 0), "reduce_scatter": (0, 0), "all_reduce": (1, 1)},
        "1": {"all_gather": (UNITS, 1), "reduce_scatter": (REDUCED, 1), "all_reduce": (0, 0)},
        "2": {"all_gather": (UNITS, 1), "reduce_scatter": (m * REDUCED, m), "all_reduce": (0, 0)},
        "SHARD_GRAD_OP": {"all_gather": (m * UNITS, m), "reduce_scatter": (m * REDUCED, m), "all_reduce": (0, 0)},
        "3": {"all_gather": (2 * m * UNITS, 2 * m), "reduce_scatter": (m * REDUCED, m), "all_reduce": (0, 0)},
    }[kind]


@pytest.mark.parametrize(("kind", "m"), [
    ("1", 2), ("SHARD_GRAD_OP", 2),
    *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in ("0", "2", "3")),
    *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in KINDS_OF_ZERO),
])  # fmt: skip
def test_a_step_communicates_as_the_table_says(kind: str, m: int) -> None:
    """Every rank simulated, in float64 to 1e-10; what rank 0 sent is counted as it ran, and is what the plan says.
    Besides parameters and gradients, single numbers are all-reduced over dp."""
    with exact_float64():
        whole = model().double()
        nbytes = sum(p.nbytes for p in whole.parameters())
        plan = autopar.plan(whole, "cpu:4", hints=hints(kind, m), example_inputs=tokens(SAMPLES, 8))
        report = autopar.verify(whole, "cpu:4", hints=hints(kind, m), example_inputs=tokens(SAMPLES, 8), steps=2)
    assert report.ok and report.bound == 1e-10, str(report)
    assert (plan.zero, plan.num_micro_batches) == (KINDS_OF_ZERO[kind]["zero"], m)
    assert plan.reshard_after_forward == (kind != "SHARD_GRAD_OP")
    for collective, (count, times) in per_step(kind, m).items():
        ran = report.traffic.count[collective, "dp"], report.traffic.bytes[collective, "dp"]
        told = [c for c in plan.collectives if c.kind == collective and c.axis == "dp"]
        if collective == "all_reduce":
            assert times * nbytes <= ran[1] <= times * nbytes + 64 * m
        else:
            assert ran == (count, times * nbytes)
            assert (sum(c.count for c in told), sum(c.bytes for c in told)) == ran


def test_saved_values() -> None:
    """ZeRO-3 keeps no gathered parameter for the backward, neither in the plain loop nor in a step; SHARD_GRAD_OP keeps
    all of them, ZeRO-1 makes them once a step."""
    (whole, graph), batch = captured(), tokens(SAMPLES, 8)
    nbytes = sum(p.nbytes for p in whole.parameters())
    saved = {}
    for kind in ("SHARD_GRAD_OP", "3"):
        program = specialize(whole, planned(kind, 1), (), batch, captured=graph).program
        assert program.backward is not None
        gathers = [n for n in program.backward.graph.nodes if n.target is ALL_GATHER]
        assert len(gathers) == (UNITS if kind == "3" else 0)
        saved[kind] = planned(kind, 1).memory
    assert saved["3"].get("copies", 0) == 0 and saved["SHARD_GRAD_OP"]["copies"] == nbytes
    phases = specialize_step(whole, planned("1", 2), (), batch, captured=graph).phases
    assert phases.once is not None and phases.backward is not None
    made = [name for name in phases.once.outputs if name in phases.forward.inputs]
    assert len(made) >= len(list(whole.parameters()))
    for phase in (phases.forward, phases.backward):
        assert not [n for n in phase.module.graph.nodes if n.target is ALL_GATHER]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_OF_ZERO)
def test_memory_of_a_plan(kind: str) -> None:
    """Bytes written out: with B bytes of parameters on four ranks, AdamW, two micro-batches."""
    nbytes = sum(p.nbytes for p in model().parameters())
    memory = planned(kind, 2).memory
    rest = nbytes if kind == "0" else nbytes // 4
    assert memory["parameters"] == rest and memory["optimizer"] == 2 * rest
    assert memory["gradients"] == (nbytes if kind in ("0", "1") else rest)
    assert memory.get("copies", 0) == (0 if kind in ("0", "3") else nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1", "2", "SHARD_GRAD_OP"])
def test_beside_tensor_parallelism_and_masters(kind: str) -> None:
    """dp 2 x tp 2, bf16 copies of float32 masters, two micro-batches: as near to float64 as one process."""
    workload = Workload(param_dtype="bfloat16")
    batch, given = tokens(SAMPLES, 8), hints(kind, 2, dp=2, tp=2)
    report = autopar.verify(model(), "cpu:4", hints=given, workload=workload, example_inputs=batch)
    assert report.ok, str(report)
    plan = autopar.plan(model(), "cpu:4", hints=given, workload=workload, example_inputs=batch)
    once = specialize_step(model(), plan, (), batch).phases.once
    assert (once is not None and bool([n for n in once.module.graph.nodes if n.target is ALL_GATHER])) == (
        kind != "SHARD_GRAD_OP"
    )


@pytest.mark.slow
def test_where_gradients_are_reduced() -> None:
    """In the backward of every micro-batch, or at the end of a step."""
    for kind in ("1", "2"):
        whole, graph = captured()
        phases = specialize_step(whole, planned(kind, 2), (), tokens(SAMPLES, 8), captured=graph).phases
        assert phases.backward is not None
        found = [
            [n.target for n in phase.module.graph.nodes if n.target in KINDS and axis_of(group_argument(n)) == "dp"]
            for phase in (phases.backward, phases.finish)
            if phase is not None
        ]
        counts = [group.count(REDUCE_SCATTER) for group in found]
        assert counts == ([0, REDUCED] if kind == "1" else [REDUCED, 0])[: len(found)]


def test_the_table() -> None:
    """What is kept of a parameter, by kind of ZeRO; what rests whole is gathered by none."""
    assert [keeping(z, True, False) for z in (1, 2, 3)] == [
        Keeping("step", "step"),
        Keeping("step", "micro-batch"),
        Keeping("use", "micro-batch"),
    ]
    assert keeping(3, True, False, reshard_after_forward=False) == Keeping("micro-batch", "micro-batch")
    assert {keeping(z, False, False) for z in range(4)} == {Keeping("use", "step")}
    assert keeping(0, False, True) == Keeping("step", "step")


def test_a_plan_keeps_it_when_it_is_saved() -> None:
    """Copies and reductions of every parameter come back from the plan's table."""
    plan = planned("1", 2)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert {(p.copy, p.gradient) for p in plan.parameters.values()} == {("step", "step")}


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("kind", KINDS_OF_ZERO)
def test_what_is_priced_is_what_runs(kind: str, m: int) -> None:
    """Gathers of bf16 copies and reductions in float32 on dp 2 x tp 2, where tied embedding and head read the weight in
    two layouts: number and bytes as the plan has them."""
    given: dict[str, Any] = {
        "hints": hints(kind, m, dp=2, tp=2),
        "workload": Workload(param_dtype="bfloat16"),
        "example_inputs": tokens(SAMPLES, 8),
    }
    plan, report = autopar.plan(model(), "cpu:4", **given), autopar.verify(model(), "cpu:4", **given)
    assert report.ok, str(report)
    for collective in ("all_gather", "reduce_scatter"):
        told = [c for c in plan.collectives if c.kind == collective and c.axis == "dp"]
        ran = report.traffic.count[collective, "dp"], report.traffic.bytes[collective, "dp"]
        assert (sum(c.count for c in told), sum(c.bytes for c in told)) == ran
