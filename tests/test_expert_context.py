"""Experts over a part of cp: the ranks of cp that have them are an axis of their own, and a part of cp to all else."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import DeviceMesh
from zoo import MIXTURES

import autopar
from autopar.cluster import Cluster
from autopar.ops.rows import MAKE_ROWS
from autopar.runtime.process import group_places
from autopar.runtime.reference import exact_float64
from autopar.runtime.verify import compare
from autopar.sharding.axes import ExpertRanks, degrees, expert_ranks, joint_axes, make_mesh, sequence_pieces
from autopar.sharding.rule import layouts
from autopar.solver.candidates import Degrees, Limits, all_degrees
from autopar.solver.carry import shrink
from autopar.specialize import specialize

#: Mixture and hints; ranks are those of the degrees.
PLANS: dict[str, tuple[str, autopar.Hints]] = {
    "ring": ("mixtral", autopar.Hints(cp=4, ep=2, attention="ring")),
    "heads": ("mixtral", autopar.Hints(cp=4, ep=2, attention="heads")),
    "gathered keys": ("qwen3-moe", autopar.Hints(cp=4, ep=2, attention="gather")),
    "gather": ("gpt-oss", autopar.Hints(cp=4, ep=2, dispatch="gather")),
    "tp": ("qwen3-moe", autopar.Hints(cp=4, tp=2, ep=4)),
    "dp": ("qwen3-moe", autopar.Hints(dp=2, cp=4, ep=4, zero=1)),
    "part of dp, ZeRO-3": ("mixtral", autopar.Hints(dp=4, cp=4, ep=4, zero=3)),
    "hybrid ZeRO": ("deepseek-v3", autopar.Hints(dp=4, cp=4, ep=2, zero=3, zero_group_size=2)),
    "pipeline": ("mixtral", autopar.Hints(pp=2, cp=4, ep=2, zero=1, micro_batch_size=1)),
}


def _hints(hints: autopar.Hints) -> tuple[int, autopar.Hints]:
    """The ranks of all degrees, and the hints with those that were left out."""
    given = {axis: getattr(hints, axis) or 1 for axis in ("pp", "dp", "cp", "tp")}
    return math.prod(given.values()), autopar.Hints(**{**hints.to_dict(), **given})


def _verified(name: str, hints: autopar.Hints) -> tuple[autopar.Plan, Any]:
    """The plan, with what it became; proved equal to eager."""
    model, batch = next(f for f in MIXTURES if f.name == name).make(torch.float64)
    ranks, hints = _hints(hints)
    with exact_float64():
        plan = autopar.plan(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
        special = specialize(model, plan, (), batch)
        report = compare(model, special, (), batch)
    assert report.ok and report.max_error < 1e-10, report
    assert report.flops_share < 0.5, report
    return plan, special


def test_experts_over_half_of_cp() -> None:
    """Four ranks of cp in two parts of two: each has half of the experts, keys go round all four, and what experts give
    is summed within a part. With ZeRO a quarter of the experts rests on a rank."""
    plan, special = _verified("mixtral", autopar.Hints(cp=4, ep=2, zero=1, attention="ring"))
    assert plan.degrees == {"pp": 1, "dp": 1, "cp": 4, "tp": 1, "ep": 2}
    assert (plan.expert_group_size, plan.expert_context_size) == (None, 2)
    mesh = special.assignment.mesh
    pieces = {
        layouts(op.rule, special.assignment.strategies[op.node], mesh)[0][1].splits(mesh, 0)
        for op in special.operators
        if op.call.target is torch.ops.autopar.grouped_mm.default
    }
    assert pieces == {2} and any(op.call.target in MAKE_ROWS for op in special.operators)
    moved = {(c.kind, c.axis) for c in plan.collectives if c.purpose == "activations"}
    assert {("reduce_scatter", "cp_expert"), ("p2p", "cp+cp_expert")} <= moved
    assert ("reduce_scatter", "cp") not in moved
    experts = [p for name, p in plan.parameters.items() if ".experts." in name]
    assert {p.storage.local_numel(mesh, p.shape) / math.prod(p.shape) for p in experts} == {1 / 4}
    assert all(p.used == ("cp_expert",) for p in experts)
    assert "cp 4 of the plan is cp 2 x cp_expert 2" in plan.report(format="html")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_experts_over_a_part_of_cp_are_exact(plan: str) -> None:
    name, hints = PLANS[plan]
    found, _ = _verified(name, hints)
    assert found.degrees["ep"] == hints.ep


@pytest.mark.slow
def test_verify_keeps_two_parts_of_cp() -> None:
    """What `verify` shrinks keeps the parts, and a saved plan names them."""
    model, batch = MIXTURES[0].make(torch.float64)
    ranks, hints = _hints(autopar.Hints(cp=8, ep=4, attention="gather"))
    plan = autopar.plan(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
    small = shrink(plan)
    assert (small.degrees["cp"], small.expert_context_size, small.mesh.degree("cp_expert")) == (4, 2, 2)
    with exact_float64():
        report = autopar.verify(model, plan, example_inputs=batch)
    assert report.ok and report.max_error < 1e-10, report


def test_a_mesh_whose_cp_is_two_axes() -> None:
    """4 of dp in parts of 2 and 8 of cp in parts of 4: the sequence is cut into 8, and one ring can go over both."""
    mesh = make_mesh(4, 8, 2, None, ExpertRanks(2, 4))
    assert mesh.axes == (("dp", 2), ("dp_expert", 2), ("cp", 2), ("cp_expert", 4), ("tp", 2))
    assert degrees(mesh) == {"dp": 4, "cp": 8, "tp": 2} and expert_ranks(mesh) == ExpertRanks(2, 4)
    assert (sequence_pieces(mesh, "cp"), sequence_pieces(mesh, "cp_expert")) == (2, 8)
    assert ("cp", "cp_expert") in joint_axes(mesh) and mesh.stride("cp+cp_expert") == 2


def test_places_in_groups_of_several_axes() -> None:
    """On cp 2 x 2 x tp 2 a rank's place in the group of both axes of cp is its rank without tp's."""
    mesh = make_mesh(1, 4, 2, None, ExpertRanks(1, 2))

    def places(rank: int) -> dict[str, int]:
        own = dict(zip(mesh.names, mesh.coordinates(rank), strict=True))
        return group_places(cast(DeviceMesh, SimpleNamespace(get_local_rank=own.__getitem__)), mesh)

    assert [places(rank)["cp+cp_expert"] for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [places(rank)["cp_expert"] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_where_experts_may_be_on_cp() -> None:
    """16 devices, 8 experts. Unhinted, eight of 16 ranks of cp may have some each, and all of 8; ep=4 of cp=16 is a
    part of it, of cp=4 all of it; where dp has ranks too, these or both."""
    cluster, limits = Cluster.parse("h100-sxm:2x8"), Limits(batch=64, sequence=1 << 20, units=1, parts=True, experts=8)

    def experts(**hints: Any) -> set[tuple[int, int]]:
        found: list[Degrees] = list(all_degrees(cluster, autopar.Hints(pp=1, tp=1, **hints), limits))
        return {tuple(d.experts) for d in found}

    assert experts(cp=16) == {(1, 1), (1, 8)}
    assert experts(cp=8) == {(1, 1), (2, 1)}
    assert experts(cp=16, ep=4) == {(1, 4)}
    assert experts(cp=4, ep=4) == {(1, 1), (4, 1), (2, 2)}
    assert experts(cp=8, ep=4) == {(1, 4), (2, 2)}
