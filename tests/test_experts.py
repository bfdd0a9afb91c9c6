"""Mixtures of experts of transformers, unmodified: experts over an axis, tokens over the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_compile import cut
from test_distributed import ROOT, assert_all_ok, torchrun
from torch import fx, nn
from zoo import MIXTURES, Architecture

import autopar
from autopar.capture.routed import mark_routed
from autopar.errors import CaptureError, MicroBatchError
from autopar.ops.experts import MAKE_ROWS, TAKE_ROWS
from autopar.report.describe import describe_layers
from autopar.runtime.reference import exact_float64
from autopar.runtime.verify import compare
from autopar.sharding.rule import layouts
from autopar.specialize import specialize

INDEX = torch.tensor([[0, 1]] * 8)
dispatch = torch.ops.autopar.dispatch.default
PLANS: dict[str, tuple[int, autopar.Hints]] = {
    "tp2": (2, autopar.Hints(tp=2, pp=1)),
    "tp4": (4, autopar.Hints(tp=4, pp=1)),
    "dp2-tp2-zero3": (4, autopar.Hints(dp=2, tp=2, zero=3, pp=1)),
    "dp4-zero1": (4, autopar.Hints(dp=4, zero=1, pp=1)),
    "cp2-tp2": (4, autopar.Hints(cp=2, tp=2, pp=1)),
}
#: What runs a whole step: pipelines, micro-batches and recomputation.
STEPS: dict[str, tuple[int, autopar.Hints]] = {
    "pp2-tp2": (4, autopar.Hints(pp=2, tp=2, micro_batch_size=2)),
    "pp2-dp2-zero1": (4, autopar.Hints(pp=2, dp=2, zero=1, micro_batch_size=1)),
    "pp2-tp2-zero3": (4, autopar.Hints(pp=2, tp=2, zero=3, micro_batch_size=2)),
    "tp2-micro-batches": (2, autopar.Hints(tp=2, pp=1, micro_batch_size=2)),
    "tp2-full": (2, autopar.Hints(tp=2, pp=1, recompute="full")),
    "tp2-selective": (2, autopar.Hints(tp=2, pp=1, recompute="selective")),
}


def verified(model: nn.Module, batch: dict[str, Any], ranks: int, hints: autopar.Hints) -> tuple[Any, Any]:
    with exact_float64():
        plan = autopar.plan(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
        special = specialize(model, plan, (), batch)
        report = compare(model, special, (), batch)
    assert report.ok and report.max_error < 1e-10, report
    return special, report


def expert_pieces(special: Any) -> set[int]:
    """In how many pieces the experts of every operator on their weights are."""
    found = set()
    for op in special.operators:
        if op.call.target is torch.ops.autopar.grouped_mm.default:
            ins, _ = layouts(op.rule, special.assignment.strategies[op.node], special.assignment.mesh)
            found.add(ins[1].splits(special.assignment.mesh, 0))
    return found


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, id=f.name, marks=[pytest.mark.slow] * (f.name != "mixtral"))
        for f in MIXTURES
    ],
)
def test_experts_over_tp(family: Architecture) -> None:
    """Every rank has half of the experts, and of all work half."""
    special, report = verified(*family.make(torch.float64), *PLANS["tp2"])
    assert expert_pieces(special) == {2}
    assert all(op.has_rule for op in special.operators if op.call.target in MAKE_ROWS | TAKE_ROWS)
    assert 0.4 < report.flops_share < 0.6, report


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in MIXTURES if f.name in ("mixtral", "deepseek-v3")], ids=lambda f: f.name)
@pytest.mark.parametrize("plan", [name for name in PLANS if name != "tp2"])
def test_experts_under_other_plans(family: Architecture, plan: str) -> None:
    ranks, hints = PLANS[plan]
    special, report = verified(*family.make(torch.float64), ranks, hints)
    assert expert_pieces(special) == {hints.tp or 1}
    assert report.flops_share < (0.6 if hints.cp else 0.35), report


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("plan", STEPS)
def test_experts_in_a_whole_step(name: str, plan: str) -> None:
    ranks, hints = STEPS[plan]
    model, batch = next(f for f in MIXTURES if f.name == name).make(torch.float64)
    with exact_float64():
        report = autopar.verify(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
    assert report.ok and report.max_error < 1e-10, report


def test_a_balancing_loss_is_not_cut_in_micro_batches() -> None:
    """Mixtral's is a product of two means over the whole batch, not the sum of such products of micro-batches."""
    model, batch = MIXTURES[0].make()
    with pytest.raises(MicroBatchError, match="a sum over the batch depends on"):
        autopar.plan(model, "cpu:2", hints=autopar.Hints(tp=2, pp=1, micro_batch_size=2), example_inputs=batch)


def test_ranks_exchange_rows() -> None:
    """Tokens are embedded and normed in pieces, experts multiply the rows of all of them: between them goes an
    all-to-all. The report says what is spread."""
    special, _ = verified(*MIXTURES[2].make(torch.float64), *PLANS["tp4"])
    packed = [n for n in special.program.forward.graph.nodes if n.target is torch.ops.autopar.exchange_pack.default]
    assert len(packed) >= 2, "one for each block at least"
    (layer,) = (layer for layer in special_layers(special) if layer.name.endswith("mlp"))
    assert ("experts", "tp") in layer.splits


def special_layers(special: Any) -> Any:
    return describe_layers(special.captured, special.operators, special.assignment)


def test_rows_of_two_routers_are_refused() -> None:
    """As many rows, and each in an order of its own: to add them up would give a wrong number and no error."""
    graph = fx.Graph()
    x, first, second = (graph.placeholder(name) for name in ("x", "first", "second"))
    for node, val in ((x, torch.zeros(8, 4)), (first, INDEX), (second, INDEX)):
        node.meta["val"] = val
    rows = [graph.call_function(dispatch, (x, index, None, 4, 2)) for index in (first, second)]
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, tuple(rows)),))
    with pytest.raises(CaptureError) as caught:
        mark_routed(graph)
    assert caught.value.found == "aten.add.Tensor of rows that two routers made"


def test_rows_are_not_compiled() -> None:
    """What Inductor is given has the same shapes in every step; what it leaves computes the same."""
    special, _ = verified(*MIXTURES[2].make(torch.float64), *PLANS["tp4"])
    for module in (special.program.forward, special.program.backward):
        outer, segments = cut(module.graph)
        inside = {node.target for segment in segments for node in segment.graph.nodes}
        assert not inside & (MAKE_ROWS | TAKE_ROWS) and torch.ops.aten.silu.default not in inside
        assert len(segments) > 2
        assert {n.target for n in outer.nodes} & MAKE_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_experts_on_real_processes(processes: int) -> None:
    plans = [f"tp={processes}"] + ["dp=2, tp=2, zero=3"] * (processes == 4)
    names = [f"{model}, {plan}" for model in ("mixtral", "qwen3-moe", "without rows") for plan in plans]
    assert_all_ok(torchrun(processes, ROOT / "tests/dist/experts.py"), processes, names)


def test_experts_without_tokens() -> None:
    """A router that cannot tell its experts apart sends every token to the first two: a rank then has all the rows and
    the other none."""
    model, batch = MIXTURES[0].make(torch.float64)
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.gate.weight.zero_()
    special, _ = verified(model, batch, *PLANS["tp2"])
    assert expert_pieces(special) == {2}


class _Counting(nn.Module):
    """Looks at how many rows there are, which differs from rank to rank."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(dim=(0, 1), keepdim=True)


class _ByExpert(nn.Module):
    """Scales what is declared as [E, C, F] by expert; real rows have no dim of experts."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.arange(rows.shape[0], dtype=rows.dtype)[:, None, None]


@pytest.mark.parametrize("gate", [_Counting, _ByExpert])
def test_what_depends_on_the_number_of_rows_is_refused(gate: type[nn.Module]) -> None:
    model, batch = MIXTURES[0].make()
    for block in model.model.layers:
        block.mlp.experts.act_fn = gate()
    with pytest.raises(CaptureError, match="rows of its experts that depends on how many there are"):
        autopar.plan(model, "cpu:2", example_inputs=batch)

