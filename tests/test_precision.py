"""Mixed precision: masters at rest, 16 bits in use and on the wire, gradients added up in float32."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from dist.small_models import encoded, llama, tokens
from torch import Tensor, fx, nn

import autopar
from autopar import Cluster, Hints, Workload
from autopar.capture.graph import Captured
from autopar.errors import WorkloadError
from autopar.passes.collectives import ALL_GATHER, ALL_REDUCE, KINDS, REDUCE_SCATTER, axis_of, group_argument
from autopar.runtime.precision import mixed_call
from autopar.runtime.reference import exact_float64
from autopar.solver.search import search
from autopar.specialize import capture_batch, specialize, specialize_step

BF16, FP16 = Workload(param_dtype="bfloat16"), Workload(param_dtype="float16")
LAYERS = 2
PLANS = {
    "zero3-dp4": Hints(dp=4, zero=3),
    "zero3-dp2-tp2": Hints(dp=2, tp=2, zero=3),
    "dp4": Hints(dp=4, zero=0),
    "zero3-dp2-tp2, 2 micro-batches": Hints(dp=2, tp=2, zero=3, micro_batch_size=2),
}
Model = tuple[nn.Module, dict[str, Tensor]]


def small_llama() -> Model:
    """A Llama of two layers with a batch whose labels count unevenly."""
    return llama(num_hidden_layers=LAYERS), tokens(8, 8)


def small_encoder() -> Model:
    """Floating point inputs, biases and layer norms; no loss."""
    return encoded(), {"x": torch.linspace(-1, 1, 4 * 8 * 16).view(4, 8, 16)}


@functools.cache
def captured_llama(workload: Workload) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    """The Llama with its batch and its graph."""
    model, batch = small_llama()
    return model, batch, capture_batch(model, (), batch, precision=workload.precision)


@functools.cache
def graphs(hints: Hints, workload: Workload) -> tuple[nn.Module, autopar.Plan, fx.Graph, fx.Graph]:
    """The Llama with its plan, its forward and its backward."""
    model, batch, captured = captured_llama(workload)
    plan = search(model, captured, Cluster.parse("cpu:4"), replace(workload, global_batch=8), hints)
    special = specialize(model, plan, (), batch, captured=captured)
    assert special.program.backward is not None
    return model, plan, special.program.forward.graph, special.program.backward.graph


@pytest.mark.parametrize(("name", "workload"), [
    ("zero3-dp2-tp2", BF16),
    *(pytest.param(name, BF16, marks=pytest.mark.slow) for name in PLANS if name != "zero3-dp2-tp2"),
    pytest.param("zero3-dp2-tp2", FP16, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_mixed_step_is_as_near_to_the_truth_as_by_hand(name: str, workload: Workload) -> None:
    """Every rank simulated against one process that casts float32 masters itself: loss, gradients and parameters after
    a step of AdamW have at most 1.5 times its RMS error against float64. Gradients come in float32."""
    model, batch = small_llama()
    report = autopar.verify(model, "cpu:4", hints=PLANS[name], workload=workload, example_inputs=batch)
    assert report.ok, str(report)
    assert report.gradients.keys() == {n for n, _ in model.named_parameters()}
    assert {g.dtype for g in report.gradients.values()} == {torch.float32}
    assert report.flops_share <= 1.1 / 4


@pytest.mark.slow
def test_the_same_casts_in_exact_numbers() -> None:
    """float64 masters used in float32: every difference to the same by hand is float32's, so a wrong scale or a
    gradient left out cannot hide behind rounding."""
    model, batch = small_llama()
    with exact_float64():
        model = model.double()
    workload = Workload(param_dtype="float32", reduce_dtype="float64", optimizer="sgd")
    report = autopar.verify(model, "cpu:4", hints=PLANS["zero3-dp2-tp2"], workload=workload, example_inputs=batch)
    assert report.ok and report.max_error < 1e-5, str(report)
    assert {g.dtype for g in report.gradients.values()} == {torch.float64}


def test_by_hand_means_a_copy_in_16_bits() -> None:
    """The reference of these tests itself: gradients of float32 masters are the bf16 copy's own, cast."""
    model, batch = small_llama()
    captured = captured_llama(BF16)[2]
    mixed_call(model, captured, (), batch).loss.backward()
    narrow = copy.deepcopy(model)
    for q in narrow.parameters():  # not model.bfloat16(), which would cast buffers too
        q.data, q.grad = q.data.bfloat16(), None
    narrow(**batch).loss.backward()
    for (name, p), q in zip(model.named_parameters(), narrow.parameters(), strict=True):
        assert p.dtype == torch.float32 and p.grad is not None and q.grad is not None
        assert torch.equal(p.grad, q.grad.float()), name


def _bytes(graph: fx.Graph, target: Any, purpose: str) -> tuple[int, set[torch.dtype]]:
    """Bytes and dtypes of the collectives of one kind for parameters or gradients."""
    found = [n.meta["piece"] for n in graph.nodes if n.target is target and n.meta.get("piece") is not None]
    mine = [p for p in found if p.purpose == purpose]
    return sum(p.nbytes for p in mine), {p.dtype for p in mine}


def test_what_is_on_the_wire() -> None:
    """ZeRO-3: parameters are gathered in bf16, a half of the bytes of the masters each way, gradients reduced in
    float32; as many collectives as without, and the plan's account says the same."""
    model, plan, forward, backward = graphs(PLANS["zero3-dp4"], BF16)
    masters = sum(p.nbytes for p in model.parameters())
    for graph in (forward, backward):
        assert _bytes(graph, ALL_GATHER, "parameters") == (masters // 2, {torch.bfloat16})
    assert _bytes(backward, REDUCE_SCATTER, "gradients") == (masters, {torch.float32})
    assert {p.shape for p in plan.parameters.values()} == {tuple(p.shape) for p in model.parameters()}
    told = {(c.kind, c.purpose): (c.count, c.bytes) for c in plan.collectives if c.purpose == "parameters"}
    assert told == {("all_gather", "parameters"): (2 * (LAYERS + 1), masters)}
    _, _, plain_forward, plain_backward = graphs(PLANS["zero3-dp4"], Workload())
    for mixed, plain in ((forward, plain_forward), (backward, plain_backward)):
        assert len([n for n in mixed.nodes if n.target in KINDS]) == len([n for n in plain.nodes if n.target in KINDS])


@pytest.mark.slow
def test_gradients_are_reduced_in_the_dtype_asked_for() -> None:
    """bf16 if the workload says so, float32 for a bf16 model without masters if it says that."""
    model, batch = small_llama()
    nbytes = sum(p.numel() for p in model.parameters())
    narrow = Workload(param_dtype="bfloat16", reduce_dtype="bfloat16")
    wide = sum(p.numel() for p in model.parameters() if p.dim() == 1)  # sums over tokens are rounded once whole
    assert _bytes(graphs(PLANS["dp4"], narrow)[3], ALL_REDUCE, "gradients") == (
        2 * (nbytes - wide) + 4 * wide,
        {torch.bfloat16, torch.float32},
    )
    assert _bytes(graphs(PLANS["dp4"], BF16)[3], ALL_REDUCE, "gradients") == (4 * nbytes, {torch.float32})
    model = model.bfloat16()
    workload = Workload(reduce_dtype="float32")
    report = autopar.verify(model, "cpu:4", hints=PLANS["zero3-dp4"], workload=workload, example_inputs=batch)
    assert report.ok and {g.dtype for g in report.gradients.values()} == {torch.bfloat16}, str(report)
    assert report.traffic.bytes["all_gather", "dp"] == 2 * 2 * nbytes
    assert report.traffic.bytes["reduce_scatter", "dp"] == 4 * nbytes


@pytest.mark.slow
def test_state_rests_in_the_masters_dtype() -> None:
    """Memory of a plan: parameters, gradients and AdamW's state in float32, activations in bf16 (and what the model
    itself keeps wide), against all in float32."""
    mixed, wide = (graphs(PLANS["dp4"], w)[1].memory for w in (BF16, Workload()))
    for kind in ("parameters", "gradients", "optimizer"):
        assert mixed[kind] == wide[kind]
    assert 0.5 * wide["activations"] <= mixed["activations"] < 0.8 * wide["activations"]


@pytest.mark.slow
def test_floating_point_inputs_are_cast() -> None:
    """As FSDP2's mixed precision policy does with what a module is called with."""
    model, batch = small_encoder()
    report = autopar.verify(model, "cpu:2", hints=Hints(dp=2, zero=3), workload=BF16, example_inputs=batch)
    assert report.ok, str(report)
    captured = capture_batch(model, (), batch, precision=BF16.precision)
    assert [n.meta["val"].dtype for n in captured.inputs] == [torch.bfloat16]
    assert {p.master for p in captured.parameters} == {torch.float32}


@pytest.mark.slow
def test_micro_batches_are_summed_in_float32() -> None:
    """What a step adds up over micro-batches are float32 values, before or after the reduction over ranks."""
    model, batch = small_llama()
    hints = Hints(dp=2, tp=2, zero=0, micro_batch_size=1)
    plan = autopar.plan(model, "cpu:4", hints=hints, workload=BF16, example_inputs=batch)
    phases = specialize_step(model, plan, (), batch).phases
    assert phases.backward is not None and phases.finish is not None
    reduced = [n for n in phases.finish.module.graph.nodes if n.target is ALL_REDUCE]
    assert reduced and not [n for n in phases.backward.module.graph.nodes
                            if n.target is ALL_REDUCE and axis_of(group_argument(n)) == "dp"]  # fmt: skip
    assert {n.meta["piece"].dtype for n in reduced if n.meta.get("piece") is not None} == {torch.float32}


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize("value", ["bf16", "int8", torch.bfloat16, 16])
def test_dtypes_that_are_none(name: str, value: Any) -> None:
    """One clear error, with the texts that are known."""
    with pytest.raises(WorkloadError, match=name) as error:
        Workload(**{name: value})
    assert "bfloat16" in error.value.expected


def test_precision_of_a_workload() -> None:
    """float32 reduction unless said otherwise; none at all by default; it survives the plan's table."""
    assert Workload().precision is None
    assert BF16.precision is not None and BF16.precision.reduce_dtype == torch.float32
    assert Workload.from_dict(BF16.to_dict()) == BF16
    only = Workload(reduce_dtype="float32").precision
    assert only is not None and only.param_dtype is None
