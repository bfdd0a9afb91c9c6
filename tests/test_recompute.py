"""Recomputation: the same numbers with fewer bytes kept, at the price of the operators that are made again."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from models import BERT, GPT2, LLAMA, PERCEPTRON, Case, llama, seeded

import autopar
from autopar import Hints, Workload
from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.errors import HintError, PlanError
from autopar.plan import Plan
from autopar.runtime.program import Specialization
from autopar.runtime.reference import exact_float64
from autopar.runtime.verify import compare
from autopar.solver.search import search
from autopar.specialize import capture_batch, specialize

MODES = ("none", "selective", "full", "full:1")
QUICK = [(LLAMA, "full"), (GPT2, "selective"), (GPT2, "full:1"), (BERT, "full")]
BATCH, SEQ, HIDDEN, FFN, KV = 4, 8, 32, 64, 16  # of `deep`


def deep(layers: int) -> torch.nn.Module:
    """A Llama of ``layers`` blocks in float32."""
    return seeded(lambda: llama(hidden=HIDDEN, ffn=FFN, layers=layers))()


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % 61
    return {"input_ids": ids, "labels": ids}


@functools.cache
def captured(layers: int) -> Captured:
    return capture_batch(deep(layers), (), tokens())


@functools.cache
def planned(layers: int, mode: str, **degrees: int) -> Plan:
    """A plan of `deep`, on one rank if no degrees are given."""
    cluster = Cluster.parse(f"cpu:{degrees.get('dp', 1) * degrees.get('tp', 1)}")
    hints = Hints(recompute=mode, **degrees)
    return search(deep(layers), captured(layers), cluster, Workload(global_batch=BATCH, seq_len=SEQ), hints)


def emitted(layers: int, mode: str, **degrees: int) -> Specialization:
    """The program of that plan."""
    plan = planned(layers, mode, **degrees)
    return specialize(deep(layers), plan, (), tokens(), captured=captured(layers))


# ---- the same numbers ----


@pytest.mark.parametrize(("case", "mode"), [
    pytest.param(case, mode, id=f"{case.name}-{mode}", marks=[pytest.mark.slow] * ((case, mode) not in QUICK))
    for case in (LLAMA, GPT2, BERT) for mode in MODES
])  # fmt: skip
def test_same_numbers(case: Case, mode: str) -> None:
    """Grouped-query attention, dropout everywhere (drawn again, the same), and norms after the sum; on dp 2 x tp 2 with
    ZeRO-3. What runs is what was priced."""
    with exact_float64():
        model, batch = case.make(torch.float64)
        hints = Hints(dp=2, tp=2, zero=3, recompute=mode)
        plan = autopar.plan(model, "cpu:4", hints=hints, example_inputs=batch)
        report = autopar.verify(model, plan, example_inputs=batch)
    assert plan.recompute == mode
    assert report.ok, report
    priced: dict[tuple[str, str], int] = {}
    for c in plan.collectives:
        priced[c.kind, c.axis] = priced.get((c.kind, c.axis), 0) + c.count
    assert dict(report.traffic.count) == priced


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"tp": 4}, {"dp": 4, "zero": 3}, {"dp": 4, "zero": 0}, {}], ids=str)
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("case", [LLAMA, GPT2, BERT], ids=lambda case: case.name)
def test_same_numbers_on_other_meshes(case: Case, mode: str, degrees: dict[str, int]) -> None:
    with exact_float64():
        model, batch = case.make(torch.float64)
        hints = Hints(recompute=mode, **degrees)
        plan = autopar.plan(model, "cpu:4", hints=hints, example_inputs=batch)
        report = compare(model, specialize(model, plan, (), batch), (), batch)
    assert report.ok and report.bound == 1e-10, report
    assert plan.recompute == mode and report.world_size == 4


# ---- what is kept ----


def saved_bytes(layers: int, mode: str) -> int:
    return planned(layers, mode).memory["activations"]


@pytest.mark.parametrize(("mode", "elements"), [
    ("full", HIDDEN),  # what enters the block: 2sbh in 16 bits (Korthikanti et al.), 4sbh in these 32
    ("selective", HIDDEN + (HIDDEN + 2 * KV) + HIDDEN + 2 * FFN),  # and q, k, v, attention's projection, gate, up
])  # fmt: skip
def test_bytes_kept_of_a_layer(mode: str, elements: int) -> None:
    """One layer more keeps exactly this much more."""
    assert saved_bytes(3, mode) - saved_bytes(2, mode) == BATCH * SEQ * elements * 4


@pytest.mark.parametrize(("length", "attention"), [(64, 0), (256, HIDDEN + 8)])
def test_attention_over_long_sequences_is_kept(length: int, attention: int) -> None:
    """Of 256 tokens a byte of its result takes 4 x 256 / 2 FLOPs for 4 bytes and a little, where the widest product,
    that of the perceptron, takes 2 x 64 for 4: then it is kept with its log-sum-exp of 8 heads, as products are, and
    not made again. Of 64 tokens it takes as many as that, but for the log-sum-exp, and is not."""

    def kept_of(layers: int) -> Plan:
        ids = torch.arange(length).view(1, length) % 61
        batch = {"input_ids": ids, "labels": ids}
        model = seeded(lambda: llama(hidden=HIDDEN, ffn=FFN, layers=layers))()
        model.config.max_position_embeddings = length
        graph, workload = capture_batch(model, (), batch), Workload(global_batch=1, seq_len=length)
        return search(model, graph, Cluster.parse("cpu:1"), workload, Hints(recompute="selective"))

    found = kept_of(3).memory["activations"] - kept_of(2).memory["activations"]
    products = HIDDEN + (HIDDEN + 2 * KV) + HIDDEN + 2 * FFN
    assert found == length * (products + attention) * 4


@pytest.mark.slow
@pytest.mark.parametrize("hints", [
    Hints(cp=2, dp=1, tp=1, attention="ring", recompute="selective"),
    Hints(dp=1, cp=1, tp=2, recompute="selective"),
], ids=["ring", "tp"])  # fmt: skip
def test_same_numbers_where_attention_is_kept(hints: Hints) -> None:
    ids = torch.arange(2 * 256).view(2, 256) % 61
    model = seeded(lambda: llama(hidden=HIDDEN, ffn=FFN, layers=2))().double()
    with exact_float64():
        report = autopar.verify(model, "cpu:2", hints=hints, example_inputs={"input_ids": ids, "labels": ids})
    assert report.ok and report.bound == 1e-10, report


def test_fewer_bytes_are_kept() -> None:
    """The first block in full is as much less as full is for one of three blocks; selective lies in between."""
    none, selective, full, first, two = (saved_bytes(3, mode) for mode in (*MODES, "full:2"))
    layer = saved_bytes(3, "none") - saved_bytes(2, "none")
    assert full < selective < none
    assert none - full == pytest.approx(3 * (layer - BATCH * SEQ * HIDDEN * 4), rel=0.05)
    assert first - two == layer - BATCH * SEQ * HIDDEN * 4


@pytest.mark.parametrize("mode", MODES)
def test_no_gathered_weight_is_kept(mode: str) -> None:
    """Under ZeRO-3 nothing that the forward hands on was made of parameters alone; and every weight is gathered once in
    each direction, since the backward shares one gather between what it makes again and its own use."""
    special = emitted(3, mode, dp=4, zero=3)
    graph = special.sharded.module.graph
    of_parameters = {special.sharded.inputs[p.placeholder] for p in special.captured.parameters}
    known = {*of_parameters, special.sharded.coordinates}
    for node in graph.nodes:
        if of_parameters.intersection(node.all_input_nodes) and known.issuperset(node.all_input_nodes):
            of_parameters.add(node)
            known.add(node)
    saved = {node for node in graph.nodes if node.name in special.program.saved}
    assert saved and not saved & of_parameters
    nbytes = {
        m: sum(c.bytes for c in planned(3, m, dp=4, zero=3).collectives if c.purpose == "parameters")
        for m in ("none", mode)
    }
    assert nbytes[mode] == nbytes["none"]


# ---- what is made again ----


def blocks_forward(attention: bool = True) -> int:
    """FLOPs of what one block makes again: q, k and v; attention; its projection; gate and up. The down projection's
    result is only part of what leaves the block, which is kept."""
    products = HIDDEN * (HIDDEN + 2 * KV) + HIDDEN * HIDDEN + 2 * HIDDEN * FFN
    return 2 * BATCH * SEQ * products * attention + 2 * 2 * BATCH * SEQ * SEQ * HIDDEN


@pytest.mark.parametrize(("mode", "extra"), [
    ("full", 3 * blocks_forward()),
    ("full:1", blocks_forward()),
    ("selective", 3 * blocks_forward(False)),
])  # fmt: skip
def test_flops_at_run_time(mode: str, extra: int) -> None:
    """Exactly what is made again is counted as it runs: one forward of the blocks, or their attention."""
    special = emitted(3, mode)
    report = compare(deep(3), special, (), tokens())
    assert report.traffic.flops - sum(op.flops for op in special.operators) == extra


def test_time_is_priced() -> None:
    """More made again, more seconds of compute; the blocks' forward is about a third of their work."""
    seconds = {mode: planned(3, mode).breakdown["compute"] for mode in MODES}
    assert seconds["none"] < seconds["full:1"] < seconds["full"]
    assert seconds["none"] < seconds["selective"]
    assert seconds["full"] < 1.5 * seconds["none"]


def test_collectives_are_issued_again() -> None:
    """Under tp each block's forward reduces twice, once for attention and once for the MLP; the MLP's is part of what
    leaves the block. So full adds one a block, selective none."""

    def reductions(mode: str) -> int:
        return sum(c.count for c in planned(3, mode, tp=2).collectives if c.axis == "tp" and c.kind != "all_gather")

    assert [reductions(mode) - reductions("none") for mode in MODES] == [0, 0, 3, 1]


def test_blocks_are_made_again_when_they_are_needed() -> None:
    """In the backward, the forward of a block comes after all that the block behind it made again, and right before
    its own backward begins: never the whole forward first."""
    backward = emitted(3, "full").program.backward
    assert backward is not None
    again: dict[str, list[int]] = {}
    own: dict[str, list[int]] = {}
    for i, node in enumerate(backward.graph.nodes):
        if node.op == "call_function" and node.meta["block"] is not None:
            (own if node.meta["backward"] else again).setdefault(node.meta["block"], []).append(i)
    blocks = [f"model.layers.{i}" for i in (2, 1, 0)]
    assert list(again) == blocks
    for behind, block in itertools.pairwise(blocks):
        assert max(again[behind]) < min(again[block])
        assert max(own[behind]) <= max(own[block]) and min(own[behind]) < min(again[block])


# ---- words ----


@pytest.mark.parametrize("mode", ["everything", "full:0", "full:", "full:1.5", 1, True])
def test_unknown_modes(mode: Any) -> None:
    with pytest.raises(HintError, match=r"is not available[\s\S]*full:N") as caught:
        Hints(recompute=mode)
    assert repr(mode) in str(caught.value)


def test_blocks_that_there_are_not() -> None:
    """More blocks than the model has, and a model without any."""
    with pytest.raises(HintError, match=r"at most 2 blocks"):
        autopar.plan(deep(2), "cpu:1", hints=Hints(recompute="full:3"), example_inputs=tokens())
    model, batch = PERCEPTRON.make()
    with pytest.raises(HintError, match=r"selective, for a model without repeated blocks"):
        autopar.plan(model, "cpu:1", hints=Hints(recompute="full"), example_inputs=batch)
    assert autopar.plan(model, "cpu:1", hints=Hints(recompute="selective"), example_inputs=batch).memory["activations"]


def test_plans_keep_it() -> None:
    """Saved, read, reported and refused if it is no mode."""
    plan = planned(3, "full:1")
    assert Plan.from_dict(plan.to_dict()) == plan and "full:1" in plan.report()
    with pytest.raises(PlanError, match=r"plan\.recompute"):
        Plan.from_dict({**plan.to_dict(), "recompute": "some"})


def test_less_memory_makes_room() -> None:
    """Under a limit in which nothing fits as a whole without recomputation the search finds a plan with it, unasked."""
    limit, size = (planned(3, "none").peak_memory + planned(3, "full").peak_memory) // 2, BATCH
    kept = Hints(memory_limit=limit, recompute="none", micro_batch_size=size)
    with pytest.raises(autopar.errors.InfeasibleError):
        autopar.plan(deep(3), "cpu:1", hints=kept, example_inputs=tokens())
    free = Hints(memory_limit=limit, micro_batch_size=size)
    plan = autopar.plan(deep(3), "cpu:1", hints=free, example_inputs=tokens())
    assert plan.recompute != "none" and plan.peak_memory <= limit
