"""The axes cp and dp_replicate: context parallelism and hybrid ZeRO, every rank simulated against eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import test_redistribution as pairs
import torch
from dist.small_models import gpt2, llama, tokens
from test_distributed import SCRIPTS, assert_all_ok, torchrun
from torch import Tensor, nn

import autopar
from autopar import Cluster, Hints, Plan
from autopar.errors import HintError
from autopar.runtime.reference import exact_float64
from autopar.runtime.simulate import Traffic, run_ranks
from autopar.runtime.verify import VerifyReport
from autopar.sharding.axes import data_degree, data_rank, degrees, joint_axes, make_mesh, zero_group_size
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.redistribute import redistribution
from autopar.solver.carry import shrink
from autopar.specialize import capture_batch, specialize_step

LAYERS, SAMPLES, LENGTH = 2, 8, 8
#: Blocks, and the root with embedding (tied to the head) and last norm: what is gathered at once. The gradients of the
#: root go with those of the first block.
UNITS, REDUCED = LAYERS + 1, LAYERS

Batch = dict[str, Tensor]


def packed() -> Batch:
    """Two sequences of uneven lengths in every row; they must not see one another."""
    batch = tokens(SAMPLES, LENGTH)
    lengths = [1 + row % (LENGTH - 1) for row in range(SAMPLES)]
    batch["position_ids"] = torch.tensor([[*range(n), *range(LENGTH - n)] for n in lengths])
    return batch


def uncached_llama(**changes: Any) -> nn.Module:
    """A Llama that looks for packed sequences, which transformers does only without a cache."""
    model: nn.Module = llama(num_hidden_layers=LAYERS, use_cache=False, **changes)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "llama": (uncached_llama, lambda: tokens(SAMPLES, LENGTH)),
    "llama, no KV head for every rank": (
        lambda: uncached_llama(num_attention_heads=2, num_key_value_heads=1), lambda: tokens(SAMPLES, LENGTH)),
    "llama, padded left and right": (models.seeded(models.llama), models.causal_batch),
    "llama, packed": (uncached_llama, packed),
    "llama, windows": (lambda: mistral(), lambda: tokens(SAMPLES, LENGTH)),
    "gpt2, dropout": (lambda: gpt2(0.1, layers=LAYERS), lambda: tokens(SAMPLES, LENGTH)),
    "gpt2, dropout, padded": (models.seeded(models.gpt2), models.causal_batch),
    "bert, dropout": (models.seeded(models.bert), models.masked_batch),
}  # fmt: skip


def mistral() -> nn.Module:
    """A window of 3 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model: nn.Module = MistralForCausalLM(MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=3, use_cache=False)).train()  # fmt: skip
    return model


def verified(name: str, ranks: int, steps: int = 1, **given: Any) -> tuple[Plan, VerifyReport]:
    """The plan of a model of `MODELS` on a host of ``ranks`` GPUs, and how all of them compute, in float64."""
    build, batch = MODELS[name]
    with exact_float64():
        model = build().double()
        plan, report = models.planned_and_compared(model, batch(), f"h100-sxm:1x{ranks}", Hints(**given), steps)
    for axis, degree in given.items():
        assert plan.degrees.get(axis, degree) == degree
    assert report.ok and report.bound == 1e-10, str(report)
    assert report.world_size == ranks
    assert {n: g.shape for n, g in report.gradients.items()} == {n: p.shape for n, p in model.named_parameters()}
    return plan, report


#: Model, ranks and hints; all work is split on all axes where there is no pipeline.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "cp 2": ("llama", 2, {"cp": 2, "dp": 1, "tp": 1}),
    "cp 4, queries": ("llama", 4, {"cp": 4, "dp": 1, "tp": 1}),
    "cp 4, one KV head": ("llama, no KV head for every rank", 4, {"cp": 4, "dp": 1, "tp": 1}),
    "cp 2, padded": ("llama, padded left and right", 2, {"cp": 2, "dp": 1, "tp": 1}),
    "cp 8, padded, queries": ("llama, padded left and right", 8, {"cp": 8, "dp": 1, "tp": 1}),
    "cp 2, packed": ("llama, packed", 2, {"cp": 2, "dp": 1, "tp": 1}),
    "cp 4, packed, queries": ("llama, packed", 4, {"cp": 4, "dp": 1, "tp": 1}),
    "cp 4, windows, queries": ("llama, windows", 4, {"cp": 4, "dp": 1, "tp": 1}),
    "cp 2, gpt2": ("gpt2, dropout", 2, {"cp": 2, "dp": 1, "tp": 1}),
    "cp 8, gpt2, queries": ("gpt2, dropout", 8, {"cp": 8, "dp": 1, "tp": 1}),
    "cp 2, gpt2, padded": ("gpt2, dropout, padded", 2, {"cp": 2, "dp": 1, "tp": 1}),
    "cp 2, bert": ("bert, dropout", 2, {"cp": 2, "dp": 1, "tp": 1}),
    "cp 4 x tp 2, bert": ("bert, dropout", 8, {"cp": 4, "tp": 2, "dp": 1}),
    "cp 2 x tp 2": ("llama", 4, {"cp": 2, "tp": 2, "dp": 1}),
    "cp 2 x dp 2": ("llama", 4, {"cp": 2, "dp": 2, "tp": 1, "zero": 0}),
    "cp 2 x dp 2, ZeRO 1": ("llama", 4, {"cp": 2, "dp": 2, "tp": 1, "zero": 1}),
    "cp 2 x dp 2, ZeRO 3": ("llama", 4, {"cp": 2, "dp": 2, "tp": 1, "zero": 3}),
    "cp 2 x dp 2 x tp 2, ZeRO 3": ("llama", 8, {"cp": 2, "dp": 2, "tp": 2, "zero": 3}),
    "cp 2, micro-batches": ("llama", 2, {"cp": 2, "dp": 1, "tp": 1, "micro_batch_size": 2}),
    "cp 2 x dp 2, ZeRO 2, micro-batches": (
        "gpt2, dropout", 4, {"cp": 2, "dp": 2, "tp": 1, "zero": 2, "micro_batch_size": 1}),
    "cp 2, recomputed": ("llama", 2, {"cp": 2, "dp": 1, "tp": 1, "recompute": "full"}),
    "cp 2 x pp 2": ("llama", 4, {"cp": 2, "pp": 2, "dp": 1, "tp": 1, "micro_batch_size": 2}),
    "cp 2 x dp 2 x pp 2, ZeRO 3": (
        "llama", 8, {"cp": 2, "dp": 2, "pp": 2, "tp": 1, "zero": 3, "micro_batch_size": 1}),
    "hybrid x tp 2": ("llama", 8, {"dp": 4, "tp": 2, "zero": 3, "zero_group_size": 2}),
    "hybrid x cp 2": ("llama", 8, {"dp": 4, "cp": 2, "tp": 1, "zero": 3, "zero_group_size": 2}),
    "hybrid x pp 2": (
        "llama", 8, {"dp": 4, "pp": 2, "tp": 1, "zero": 2, "zero_group_size": 2, "micro_batch_size": 1}),
    "hybrid x cp 2 x micro-batches": (
        "gpt2, dropout", 8, {"dp": 4, "cp": 2, "tp": 1, "zero": 2, "zero_group_size": 2, "micro_batch_size": 1}),
}  # fmt: skip
DEFAULT = ("cp 4, queries",)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in DEFAULT)) for c in CASES])
def test_a_plan_computes_what_eager_computes(case: str) -> None:
    """Loss, gradients and the parameters after two steps; and every rank does its share of the work and no more (what a
    pipeline and recomputation add is in test_every_plan.py)."""
    name, ranks, given = CASES[case]
    plan, report = verified(name, ranks, steps=2, **given)
    if "pp" not in given and "recompute" not in given:
        assert report.flops_share <= 1.1 / ranks, str(report)
        assert plan.flops_share <= 1.1 / ranks
    assert ("cp" in plan.mesh.names) == ("cp" in given)
    split = {choice.get("cp") for key, choice in plan.operators.items() if " attention" in key}
    if "queries" in case:  # its heads do not divide
        assert split and split <= {"positions", "s"}


# What is communicated, in closed form.


def told(plan: Plan, report: VerifyReport) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes by kind and axis as they ran; the plan says the same, but for a few numbers such as the loss."""
    ran = {key: (n, report.traffic.bytes[key]) for key, n in report.traffic.count.items()}
    planned: dict[tuple[str, str], tuple[int, int]] = {}
    for c in plan.collectives:
        count, nbytes = planned.get((c.kind, c.axis), (0, 0))
        planned[c.kind, c.axis] = count + c.count, nbytes + c.bytes
    assert {key: n for key, (n, _) in planned.items()} == {key: n for key, (n, _) in ran.items()}
    assert all(abs(planned[key][1] - nbytes) <= 64 for key, (_, nbytes) in ran.items())
    return ran


@pytest.mark.parametrize(("zero", "m"), [
    (2, 2),
    *(pytest.param(zero, m, marks=pytest.mark.slow) for zero, m in ((1, 1), (1, 2), (2, 1), (3, 1), (3, 2))),
])  # fmt: skip
def test_hybrid_zero_communicates_as_hsdp_does(zero: int, m: int) -> None:
    """dp 4 in groups of 2. Gathers and reduce-scatters over a group are those of ZeRO over 2 ranks, and the shards of
    all gradients, half of their bytes, are all-reduced over the groups once a step, in one collective a unit."""
    plan, report = verified("llama", 4, dp=4, tp=1, zero=zero, zero_group_size=2, micro_batch_size=SAMPLES // 4 // m)
    assert (plan.zero, plan.zero_group_size, plan.num_micro_batches) == (zero, 2, m)
    assert plan.mesh == Mesh((("dp_replicate", 2), ("dp", 2), ("tp", 1)))
    assert all(p.storage.split_axes == ("dp",) for p in plan.parameters.values())
    nbytes = sum(8 * p.numel() for p in uncached_llama().parameters())
    gathers = 1 if zero < 3 else 2 * m
    scatters = 1 if zero == 1 else m
    ran = told(plan, report)
    assert ran.pop(("all_gather", "dp")) == (gathers * UNITS, gathers * nbytes)
    assert ran.pop(("reduce_scatter", "dp")) == (scatters * REDUCED, scatters * nbytes)
    assert ran.pop(("all_reduce", "dp_replicate")) == (REDUCED, nbytes // 2)
    assert set(ran) == {("all_reduce", "dp_replicate+dp")}  # the loss, and how many tokens count
    assert ran["all_reduce", "dp_replicate+dp"][1] <= 64


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_cp_and_dp_reduce_together(zero: int) -> None:
    """cp 2 x dp 2: gradients are sums over both, reduced by one collective a bucket over all four ranks."""
    plan, report = verified("llama", 4, dp=2, cp=2, tp=1, zero=zero)
    nbytes = sum(8 * p.numel() for p in uncached_llama().parameters())
    ran = told(plan, report)
    if zero == 3:
        assert all(p.storage.split_axes == ("dp", "cp") for p in plan.parameters.values())
        assert ran.pop(("all_gather", "dp+cp")) == (2 * UNITS, 2 * nbytes)
        assert ran.pop(("reduce_scatter", "dp+cp")) == (REDUCED, nbytes)
    assert ran["all_reduce", "dp+cp"][1] - (0 if zero else nbytes) in range(65)
    assert {axis for _, axis in ran} == {"dp+cp", "cp"}  # over cp alone what attention needs
    assert sum(1 for kind, axis in ran if axis == "dp+cp") == 1


#: How attention is split over cp, and what it then moves a layer: calls, and times the bytes of all query heads. There
#: are half as many heads of keys and values. Heads: q, k, v and the result are exchanged, so are the gradients of all
#: four, and in the backward once more what the forward has exchanged. Queries: keys and values are gathered, for the
#: backward again, and their gradients summed up and scattered.
MOVED = {
    "g": {"all_to_all": (4 + 4 + 4, (1 + 0.5 + 0.5 + 1) * 3)},
    "positions": {"all_gather": (2 + 2, 2 * (0.5 + 0.5)), "reduce_scatter": (2, 0.5 + 0.5)},
}


@pytest.mark.slow
@pytest.mark.parametrize("factor", MOVED)
def test_attention_moves_heads_or_keys(factor: str) -> None:
    """A plan of cp 2 that is told which of both; besides gradients and a few numbers nothing else is moved."""
    batch = tokens(SAMPLES, LENGTH)
    with exact_float64():
        model = uncached_llama().double()
        plan = autopar.plan(model, "h100-sxm:1x2", hints=Hints(cp=2, dp=1, tp=1), example_inputs=batch)
        told = {k: {**c, "cp": factor} if " attention" in k else c for k, c in plan.operators.items()}
        report = autopar.verify(model, replace(plan, operators=told), example_inputs=batch)
    assert report.ok and report.bound == 1e-10, str(report)
    ran = {kind: (n, report.traffic.bytes[kind, axis]) for (kind, axis), n in report.traffic.count.items()}
    gradients = sum(8 * p.numel() for p in model.parameters())
    assert ran.pop("all_reduce")[1] - gradients in range(65)
    queries = SAMPLES * LENGTH * 32 * 8
    assert ran == {kind: (LAYERS * n, LAYERS * times * queries) for kind, (n, times) in MOVED[factor].items()}


# What is asked for, and what is refused.


def test_meshes() -> None:
    """cp and the groups of hybrid ZeRO are axes only where there is something on them."""
    assert make_mesh(4, 1, 2) == Mesh((("dp", 4), ("tp", 2)))
    assert make_mesh(4, 1, 2, 4) == make_mesh(4, 1, 2)
    whole = make_mesh(4, 2, 2, 2)
    assert whole == Mesh((("dp_replicate", 2), ("dp", 2), ("cp", 2), ("tp", 2)))
    assert (degrees(whole), data_degree(whole)) == ({"dp": 4, "cp": 2, "tp": 2}, 4)
    assert (zero_group_size(whole), zero_group_size(make_mesh(4, 2, 2))) == (2, None)
    assert [data_rank(whole, rank) for rank in (0, 3, 4, 8, 15, 16)] == [0, 0, 1, 2, 3, 0]
    assert joint_axes(make_mesh(4, 1, 2)) == ()
    assert joint_axes(whole) == (("dp_replicate", "dp"), ("dp_replicate", "dp", "cp"), ("dp", "cp"))


def test_small_gradients_are_scattered_before_they_are_all_reduced() -> None:
    """One all-reduce over everything would be fewer starts, but a gradient is in a bucket."""
    mesh, owed = make_mesh(4, 1, 1, 2), Layout(((),), (("dp", "sum"), ("dp_replicate", "sum")))
    steps = redistribution(owed, Layout((("dp",),)), mesh, (32,), 4)
    assert steps is not None
    assert [(s.kind, s.axis) for s in steps] == [("reduce_scatter", "dp"), ("all_reduce", "dp_replicate")]
    whole = redistribution(owed, Layout(((),)), mesh, (32,), 4)
    assert whole is not None and [(s.kind, s.axis) for s in whole] == [("all_reduce", "dp_replicate+dp")]


def some_layouts(mesh: Mesh, shape: tuple[int, ...], count: int) -> list[Layout]:
    """Layouts of equal pieces, drawn at random: on every axis whole, owed a sum, or split along a dim, in any order."""
    draw, found = random.Random(5), []
    while len(found) < count:
        axes = draw.sample(mesh.names, len(mesh.names))
        by_axis = {axis: draw.choice([None, "sum", *range(len(shape))]) for axis in axes}
        split = {axis: d for axis, d in by_axis.items() if isinstance(d, int)}
        owed = tuple(sorted((axis, "sum") for axis, d in by_axis.items() if d == "sum"))
        layout = Layout(Layout.shard(len(shape), split).dims, owed)
        if layout.divides(mesh, shape):
            found.append(layout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [make_mesh(2, 2, 2), make_mesh(4, 2, 1, 2)], ids=str)
def test_redistributions_on_three_axes(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any layout to any other: each rank ends with its piece of the whole, by the collectives that are priced."""
    monkeypatch.setattr(pairs, "MESH", mesh)
    shape, joint = (8, 4, 8), 0
    layouts, whole = some_layouts(mesh, shape, 400), pairs.whole_tensor(shape)
    for source, target in zip(layouts[::2], layouts[1::2], strict=True):
        steps = redistribution(source, target, mesh, shape, 8)
        assert steps is not None, f"{source} -> {target}"
        traffic = Traffic()
        inputs = [[p, torch.tensor(mesh.coordinates(r))] for r, p in enumerate(pairs.scatter(whole, source))]
        results = [out[0] for out in run_ranks(pairs.emitted(steps, shape), inputs, mesh, traffic)]
        for rank, result in enumerate(pairs.owed(results, target)):
            assert torch.equal(result, target.local_slice(mesh, whole, rank)), f"{source} -> {target}, rank {rank}"
        assert (traffic.count, traffic.bytes) == pairs.priced(steps, shape), f"{source} -> {target}"
        joint += any("+" in axis for _, axis in traffic.count)
    assert joint > 5


@pytest.mark.parametrize(("given", "message"), [
    ({"zero": 3, "zero_group_size": 1}, "is no number of ranks"),
    ({"zero_group_size": 2}, "needs ZeRO"),
    ({"zero": 0, "zero_group_size": 2}, "needs ZeRO"),
    ({"zero": 3, "dp": 6, "zero_group_size": 4}, "does not divide dp=6"),
    ({"cp": 0}, "cp=0 is no degree"),
    ({"zero": 0, "shard": {"*": {"cp": 0}}}, "rests split over cp"),
])  # fmt: skip
def test_hints_that_cannot_be_kept(given: dict[str, Any], message: str) -> None:
    """One clear error each, before any model is looked at."""
    with pytest.raises(HintError, match=message):
        Hints(**given)


def test_groups_that_the_cluster_does_not_divide_into() -> None:
    """dp follows from the number of ranks and the other degrees."""
    with pytest.raises(HintError, match="zero_group_size=4 does not divide dp=6"):
        autopar.plan(llama(), "cpu:12", hints=Hints(pp=1, cp=1, tp=2, zero=3, zero_group_size=4),
                     example_inputs=tokens())  # fmt: skip


@pytest.mark.slow
def test_a_hint_says_which_dim_rests_split_over_cp() -> None:
    """Beside dp on another dim; and a plan keeps its axes on the way through a file and when it is made smaller."""
    name = "model.layers.*.mlp.down_proj.weight"
    hints = Hints(dp=4, cp=4, tp=1, zero=3, zero_group_size=2, shard={name: {"dp": 0, "cp": 1}})
    plan = autopar.plan(uncached_llama(), "cpu:16", hints=hints, example_inputs=tokens(SAMPLES, LENGTH))
    assert plan.layout("model.layers.1.mlp.down_proj.weight") == Layout((("dp",), ("cp",)))
    assert Plan.from_dict(plan.to_dict()) == plan
    small = shrink(plan)
    assert small.degrees == {"pp": 1, "dp": 4, "cp": 2, "tp": 1} and small.zero_group_size == 2
    report = " ".join(plan.report().split())
    assert "Degrees pp 1 x dp 4 x cp 4 x tp 1" in report
    assert "split over groups of 2 ranks of dp and cp; 2 groups have replicas" in report


@pytest.mark.slow
def test_coordinates_are_inputs_of_the_program() -> None:
    """So it is the same text on every rank, also where attention needs the position of its queries."""
    model, batch = uncached_llama(), tokens(SAMPLES, LENGTH)
    hints = Hints(cp=4, dp=1, tp=1)
    plan = autopar.plan(model, Cluster.parse("h100-sxm:1x4"), hints=hints, example_inputs=batch)
    text = "".join(p.module.code for p in specialize_step(model, plan, (), batch).phases.all())
    assert "autopar.starts" in text and "coordinates" in text


@pytest.mark.slow
@pytest.mark.dist
def test_four_processes(tmp_path: Path) -> None:
    """Loops, steps in micro-batches, accumulation, saved models, and a checkpoint written under hybrid ZeRO and read
    under dp with ZeRO-3 and under cp (``axes.py``)."""
    parts = ["loops", "steps", "accumulated", "checkpoints"]
    assert_all_ok(torchrun(4, SCRIPTS / "axes.py", str(tmp_path), timeout=900), 4, parts)


# Tokens that a model merges.


class Flat(nn.Module):
    """Flattens tokens for all kinds of things: what treats rows alike, what sums over them, and what mixes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 12)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """ids int64 [B, S], weights [B, S] -> a number."""
        rows = self.head(self.embed(ids)).flatten(0, 1)
        best, _ = rows.max(1)
        scores = (rows - best[:, None]).exp() * weights.reshape(-1, 1)
        mixed = scores.cumsum(0) + rows.sum(0, keepdim=True).expand(rows.shape[0], -1)
        again = scores.unflatten(0, ids.shape).transpose(0, 1).tanh()
        return mixed.square().mean() + again.sum() + (scores.amax(1) - scores.mean(0).sum()).sum()


def test_a_loss_keeps_batch_and_sequence_apart() -> None:
    """No value of the graph has both in one dim, of a size (4 x 7) that no other dim has."""
    captured = capture_batch(llama(num_hidden_layers=1), (), tokens(4, 7), True)
    values = [v for n in captured.graph.nodes if isinstance(v := n.meta.get("val"), Tensor)]
    assert any(v.shape == (4, 7, 64) for v in values) and not any(28 in v.shape for v in values)


@pytest.mark.slow
@pytest.mark.parametrize("given", [
    {"cp": 2, "dp": 1, "tp": 1}, {"cp": 2, "dp": 2, "tp": 1}, {"dp": 2, "tp": 2},
], ids=str)  # fmt: skip
def test_what_mixes_flattened_tokens_has_them_flat(given: dict[str, int]) -> None:
    """Sums along tokens stay along tokens, whatever is split."""
    batch = {"ids": tokens(4, 6)["input_ids"], "weights": torch.rand(4, 6, dtype=torch.float64)}
    ranks = given.get("cp", 1) * given["dp"] * given["tp"]
    with exact_float64():
        report = autopar.verify(Flat().double(), f"cpu:{ranks}", hints=Hints(**given), example_inputs=batch)
    assert report.ok and report.bound == 1e-10, str(report)
