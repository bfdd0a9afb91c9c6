"""Ways to run a mixture of experts: each expert's hidden dim over tp, and the two ways in which tokens come to experts
that are spread."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import causal_batch, llama
from test_distributed import ROOT, assert_all_ok, torchrun
from test_experts import expert_pieces, verified
from zoo import MIXTURES

import autopar
from autopar.cluster import Cluster
from autopar.errors import HintError
from autopar.runtime.reference import exact_float64
from autopar.sharding.rules.experts import MEETINGS
from autopar.solver.candidates import Limits, all_degrees

own = torch.ops.autopar
#: The products with weights of experts, forward and backward, and the factor that is an expert's hidden dim there.
HIDDEN = {
    own.gated_mm.default: "i",
    own.gated_mm_backward.default: "i",
    own.gated_outer.default: "i",
}
#: Expert TP alone, beside experts over cp, over dp, with ZeRO, micro-batches and a pipeline. Where ep=2 beside tp=2 may
#: be met by experts over tp as well, whichever is cheaper, etp says which.
WITHIN: dict[str, tuple[int, autopar.Hints]] = {
    "tp2": (2, autopar.Hints(tp=2, ep=1, pp=1)),
    "tp4": (4, autopar.Hints(tp=4, ep=1, pp=1)),
    "cp2-ep2-tp2": (4, autopar.Hints(cp=2, tp=2, ep=2, pp=1)),
    "dp2-ep2-tp2": (4, autopar.Hints(dp=2, tp=2, ep=2, etp=2, pp=1)),
    "dp4-ep2-tp2-zero3": (8, autopar.Hints(dp=4, ep=2, etp=2, zero=3, pp=1)),
    "dp2-ep2-tp2-micro-batches": (4, autopar.Hints(dp=2, tp=2, ep=2, etp=2, zero=1, pp=1, micro_batch_size=1)),
    "pp2-tp2": (4, autopar.Hints(pp=2, tp=2, ep=1, micro_batch_size=2)),
}
#: Where experts are in the two ways in which tokens come to them.
SPREAD: dict[str, tuple[int, autopar.Hints]] = {
    "tp2": (2, autopar.Hints(tp=2, ep=2, pp=1)),
    "dp2": (2, autopar.Hints(dp=2, ep=2, pp=1)),
    "dp2-of-4-zero3": (4, autopar.Hints(dp=4, ep=2, zero=3, pp=1)),
    "dp2-tp2": (4, autopar.Hints(dp=2, tp=2, ep=4, pp=1)),
    "cp2-dp2": (4, autopar.Hints(cp=2, dp=2, ep=4, pp=1)),
}


FAMILIES = ("mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss")
#: What `dist/expert_ways.py` runs, by the number of processes.
PLANS: dict[int, tuple[str, ...]] = {2: (), 4: ("dp=2, ep=2, tp=2", "ep=4, gathered"), 8: ("dp=4, ep=2, tp=2",)}


def mixture(name: str) -> tuple[Any, dict[str, Any]]:
    """A model in float64 and a batch."""
    return next(f for f in MIXTURES if f.name == name).make(torch.float64)


def hinted(hints: autopar.Hints, **more: Any) -> autopar.Hints:
    return autopar.Hints(**{**hints.to_dict(), **more})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"])
@pytest.mark.parametrize("plan", WITHIN)
def test_every_rank_has_a_part_of_every_expert(name: str, plan: str) -> None:
    """Of gate and up alike, whether they are fused one after the other or in turn (gpt-oss): no rank has all of the
    weights of an expert at rest, multiplies more than its part, or has more experts than are asked for."""
    ranks, hints = WITHIN[plan]
    model, batch = mixture(name)
    if hints.micro_batch_size is not None:
        with exact_float64():
            report = autopar.verify(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
        assert report.ok and report.max_error < 1e-10, report
        return
    special, report = verified(model, batch, ranks, hints)
    tp = special.assignment.mesh.names.index("tp")
    for op in special.operators:
        if op.call.target in HIDDEN:
            assert special.assignment.strategies[op.node][tp].factor == HIDDEN[op.call.target], op
    # of few experts one that all tokens ask for has twice the mean, and a rank may have that one
    assert report.flops_share < (2.0 if name == "gpt-oss" else 1.25) / ranks, report
    experts = [p for p in special.captured.parameters if ".experts." in p.name and len(p.spec.shape) == 3]
    held = sum(special.assignment.sources[p.placeholder].local_numel(special.assignment.mesh, p.spec.shape)
               for p in experts)  # fmt: skip
    whole = sum(math.prod(p.spec.shape) for p in experts)
    assert experts and held == whole / (ranks if hints.zero == 3 or hints.ep == 2 else hints.tp or 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
@pytest.mark.parametrize("zero", [0, 3])
def test_experts_are_whole_beside_tp(name: str, zero: int) -> None:
    """Attention and all else over tp, experts over dp or over tp, each with whole matrices: where tp has none of them
    it splits the tokens."""
    model, batch = mixture(name)
    hints = autopar.Hints(dp=2, tp=2, ep=2, etp=1, zero=zero, pp=1)
    special, report = verified(model, batch, 4, hints)
    mesh = special.assignment.mesh
    heavy = [op for op in special.operators if op.is_heavy and op.rule.inward]
    for op in heavy:
        split = {c.factor for c, n in zip(special.assignment.strategies[op.node], mesh.sizes, strict=True) if n > 1}
        assert split == {"e", "c"}, op
    assert heavy and expert_pieces(special) == {2} and report.flops_share < 1.25 / 4, report


@pytest.mark.parametrize(("given", "match"), [
    ({"etp": 0}, "is no degree"),
    ({"etp": 2, "tp": 4}, "etp=2 and tp=4 contradict"),
    ({"etp": 2, "forbid": {"tp"}}, "etp=2 and tp=1 contradict"),
])  # fmt: skip
def test_parts_of_experts_that_there_are_not(given: dict[str, Any], match: str) -> None:
    with pytest.raises(HintError, match=match):
        autopar.Hints(**given)


def test_parts_of_experts_are_those_of_tp() -> None:
    """Of the meshes that are searched: with a part of every expert tp has no experts besides, and no other size."""
    limits = Limits(batch=64, sequence=64, units=8, parts=True, experts=8)
    cluster = Cluster.parse("h100-sxm:2x8")
    found = list(all_degrees(cluster, autopar.Hints(ep=4, etp=2), limits))
    assert found and {d.tp for d in found} == {2}
    assert all(4 in (d.experts.dp * d.experts.cp, d.experts.dp * d.cp) for d in found)
    assert {d.tp for d in all_degrees(cluster, autopar.Hints(ep=4, etp=1), limits)} > {1, 2}


def test_parts_of_experts_that_a_model_has_not() -> None:
    """A model without experts, and one whose experts do not divide."""
    with pytest.raises(HintError, match="etp=2 cannot be kept") as caught:
        autopar.plan(llama(), "cpu:2", hints=autopar.Hints(etp=2, pp=1), example_inputs=causal_batch())
    assert "no experts" in caught.value.found
    model, batch = mixture("mixtral")
    with pytest.raises(HintError, match="etp=3 cannot be kept") as caught:
        autopar.plan(model, "cpu:3", hints=autopar.Hints(etp=3, pp=1), example_inputs=batch)
    assert "matrices with dims of" in caught.value.found


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["exchange", "gather"])
@pytest.mark.parametrize("name", ["mixtral", "granite-moe"])
@pytest.mark.parametrize("plan", SPREAD)
def test_both_ways_to_the_experts(name: str, plan: str, dispatch: str) -> None:
    """Rows are exchanged by all-to-alls with pieces as routers make them; or tokens are gathered and results reduced,
    of fixed size, and every rank picks from all tokens the rows of its own experts."""
    ranks, hints = SPREAD[plan]
    model, batch = mixture(name)
    if dispatch == "exchange" and hints.cp is not None:  # rows of a part of every sequence are no range of tokens
        with pytest.raises(HintError, match="cannot be kept together"):
            verified(model, batch, ranks, hinted(hints, dispatch=dispatch))
        return
    special, report = verified(model, batch, ranks, hinted(hints, dispatch=dispatch))
    assert expert_pieces(special) == {hints.ep} and report.flops_share < 1.25 / ranks, report
    met = [special.assignment.strategies[op.node] for op in special.operators if op.call.target in MEETINGS]
    sizes = special.assignment.mesh.sizes
    spread = {math.prod(n for n, c in zip(sizes, s, strict=True) if c.factor == "e") for s in met}
    assert spread == ({hints.ep} if dispatch == "gather" else {1})
    exchanges = [n for n in special.program.forward.graph.nodes if n.target is own.exchange_pack.default]
    assert bool(exchanges) == (dispatch == "exchange")


def test_a_way_that_there_is_not() -> None:
    with pytest.raises(HintError, match="did you mean gather"):
        autopar.Hints(dispatch="gathered")


@pytest.mark.slow
def test_the_faster_way_is_taken() -> None:
    """Expected before it was planned: to gather the tokens of two ranks moves half of them to each; of eight experts a
    token, half are elsewhere, and all of those rows would be exchanged. A token of four ranks with one expert moves to
    three ranks, or to one at most."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    def planned(top_k: int, ranks: int) -> set[str]:
        config = GraniteMoeConfig(vocab_size=512, hidden_size=1024, intermediate_size=512, num_hidden_layers=2,
                                  num_attention_heads=8, num_key_value_heads=8, num_local_experts=16,
                                  num_experts_per_tok=top_k, use_cache=False)  # fmt: skip
        with torch.device("meta"):
            model = GraniteMoeForCausalLM(config).to(torch.bfloat16)
        hints = autopar.Hints(dp=ranks, ep=ranks, tp=1, pp=1, zero=0)
        workload = autopar.Workload(global_batch=8 * ranks, seq_len=2048)
        plan = autopar.plan(model, f"h100-sxm:1x{ranks}", workload=workload, hints=hints)
        return {c.kind for c in plan.collectives if c.axis == "dp_expert" and c.purpose == "activations"}

    assert "all_to_all" not in planned(8, 2)
    assert "all_to_all" in planned(1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_families_on_real_processes(processes: int) -> None:
    names = [f"{name}, {plan}" for plan in PLANS[processes] for name in FAMILIES]
    names += {2: ["compiled"], 4: ["balanced", "biased"]}.get(processes, [])
    assert_all_ok(torchrun(processes, ROOT / "tests/dist/expert_ways.py", timeout=2400.0), processes, names)
