"""Attention as a ring over cp: parity with eager on every rank, messages in closed form, their order, and their price.

n ranks, b samples, s tokens, heads h of queries and k of keys and values, head dim d, elements of e bytes. A rank's
keys and values are kv = 2 b (s/n) k d e bytes, its queries q = b (s/n) h d e, its lse l = b (s/n) h of 8 bytes (4 in
less than float64). Of m steps (n, or fewer under a window) all but the last pass kv on; in the backward besides each of
them passes on the sums of the gradients of what it has, as many numbers in at least fp32, the last one home. Balanced,
a rank exchanges half of a tensor with its mirror image: q and kv before, out and lse after; in the backward q, the
gradient of out, out, lse and kv before, and the gradients of q and of kv after.
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from dist.small_models import llama, tokens
from emitted_peaks import with_peak
from test_axes import LAYERS, LENGTH, MODELS, SAMPLES, told, uncached_llama, verified
from test_distributed import SCRIPTS, assert_all_ok, torchrun
from torch import fx, nn

import autopar
from autopar import Cluster, Hints, Plan, Workload
from autopar.errors import HintError
from autopar.passes.bind import bind
from autopar.passes.collectives import ALL_TO_ALL, PERMUTE, WAIT
from autopar.runtime.reference import exact_float64
from autopar.sharding.axes import make_mesh
from autopar.sharding.rule import Hop, Passing
from autopar.solver.costs import Prices
from autopar.specialize import capture_batch, specialize

KV_HEADS, HEADS, HEAD_DIM = 2, 4, 8
RING: dict[str, Any] = {"dp": 1, "tp": 1, "attention": "ring"}


def moved(n: int, balanced: bool, made_again: bool = False, steps: int | None = None) -> tuple[int, int]:
    """Messages of a layer in float64, and their bytes (see the module). A forward that is made again is run twice, and
    only the second time for its lse."""
    m = n if steps is None else steps
    q, kv, lse = (SAMPLES * LENGTH // n * 8 * count for count in (HEADS * HEAD_DIM, 2 * KV_HEADS * HEAD_DIM, HEADS))
    forward, backward = [kv] * (m - 1), [kv] * (m - 1) + [kv] * m
    if balanced:
        forward += [q // 2, kv // 2, q // 2, lse // 2]
        backward += [3 * q // 2, lse // 2, kv // 2, q // 2, kv // 2]
    messages = [*forward, *(forward[:-1] if balanced else forward) * made_again, *backward]
    return len(messages), sum(messages)


def is_ring(plan: Plan) -> bool:
    """Whether all attention, forward and backward, is one."""
    return {choice["cp"] for key, choice in plan.operators.items() if " attention" in key} == {"ring"}


# Parity, and what is sent.

#: Model, cp, hints, whether pieces are balanced, and how many steps there are if not cp.
CASES: dict[str, tuple[str, int, dict[str, Any], bool, int | None]] = {
    "causal": ("llama", 4, {}, True, None),
    "causal, 2 ranks": ("llama", 2, {}, True, None),
    "causal, full": ("llama", 2, {"recompute": "full"}, True, None),
    "causal, selective": ("llama", 4, {"recompute": "selective"}, True, None),
    "causal, chunks that are not equal": ("llama", 8, {}, False, None),
    "multi-query": ("llama, no KV head for every rank", 4, {}, True, None),
    "padded": ("llama, padded left and right", 4, {}, True, None),
    "packed": ("llama, packed", 4, {}, False, None),
    "a window": ("llama, windows", 4, {}, False, 2),
    "a window of two ranks": ("llama, windows", 8, {}, False, 3),
    "dropout": ("gpt2, dropout", 4, {}, False, None),
    "dropout, padded": ("gpt2, dropout, padded", 2, {}, False, None),
    "not causal": ("bert, dropout", 2, {}, False, None),
}
DEFAULT = ("causal",)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in DEFAULT)) for c in CASES])
def test_a_ring_computes_what_eager_computes(case: str) -> None:
    """Loss, gradients and the parameters after two steps; every rank does its share; the messages that ran are those of
    the plan, and those of the closed form where the model is the one that this is written for."""
    name, n, given, balanced, steps = CASES[case]
    plan, report = verified(name, n, steps=2, cp=n, **RING, **given)
    assert is_ring(plan) and any(("sequence as a ring", "cp") in layer.splits for layer in plan.layers)
    if "recompute" not in given:
        assert report.flops_share <= 1.1 / n, str(report)
    ran = told(plan, report)
    if name in ("llama", "llama, windows", "llama, packed"):
        count, nbytes = moved(n, balanced, "recompute" in given, steps)
        assert ran["p2p", "cp"] == (LAYERS * count, LAYERS * nbytes)
    gathers, _ = ran.get(("all_gather", "cp"), (0, 0))
    assert ("all_to_all", "cp") not in ran and gathers == (1 if "bert" in name else 0)  # BERT's loss merges its rows


@pytest.mark.slow
@pytest.mark.parametrize("given", [
    {"cp": 2, "tp": 2, "dp": 1},
    {"cp": 2, "dp": 2, "tp": 1, "zero": 3},
    {"cp": 2, "dp": 1, "tp": 1, "micro_batch_size": 2},
    {"cp": 2, "dp": 2, "tp": 2, "zero": 1, "micro_batch_size": 1, "recompute": "full"},
    {"cp": 2, "pp": 2, "dp": 1, "tp": 1, "micro_batch_size": 2},
    {"cp": 2, "pp": 2, "dp": 1, "tp": 1, "micro_batch_size": 2, "schedule": "zbv", "recompute": "full:1"},
], ids=str)  # fmt: skip
def test_a_ring_beside_other_axes(given: dict[str, Any]) -> None:
    """Heads over tp, the batch over dp, micro-batches, a pipeline; what ran is what the plan says."""
    ranks = given["cp"] * given["dp"] * given["tp"] * given.get("pp", 1)
    if given.get("schedule") == "zbv":
        MODELS["llama of four"] = (lambda: llama(num_hidden_layers=4, use_cache=False), MODELS["llama"][1])
    plan, report = verified("llama of four" if "schedule" in given else "llama", ranks, attention="ring", **given)
    assert is_ring(plan)
    if given["tp"] == 2:
        assert {c["tp"] for key, c in plan.operators.items() if " attention" in key} <= {"g", "r"}
    if given.get("pp", 1) == 1:
        count, _ = moved(2, True, "recompute" in given)
        assert told(plan, report)["p2p", "cp"][0] == LAYERS * plan.num_micro_batches * count


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5])
def test_a_ring_of_an_odd_number(n: int) -> None:
    """The middle rank is its own mirror image."""
    batch, hints = tokens(4, 6 * n), Hints(cp=n, **RING)
    with exact_float64():
        plan, report = models.planned_and_compared(uncached_llama().double(), batch, f"cpu:{n}", hints, 1)
    assert is_ring(plan) and report.ok and report.bound == 1e-10, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_latent_attention(n: int) -> None:
    """Keys are longer than values."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    model: nn.Module = DeepseekV3ForCausalLM(DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, first_k_dense_replace=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=64, use_cache=False)).train()  # fmt: skip
    with exact_float64():
        plan, report = models.planned_and_compared(
            model.double(), tokens(4, 16), f"h100-sxm:1x{n}", Hints(cp=n, **RING), 1)  # fmt: skip
    assert is_ring(plan) and report.ok and report.bound == 1e-10, str(report)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_rings_of_processes(world: int) -> None:
    """Three steps on real processes, causal, padded and with a window (``tests/dist/ring.py``)."""
    assert_all_ok(torchrun(world, SCRIPTS / "ring.py"), world, ["causal", "recomputed", "padded", "a window"])


# The emitted graphs.


def graphs(recompute: str) -> tuple[fx.Graph, fx.Graph]:
    """Forward and backward of a small Llama on a ring of four."""
    model, batch = uncached_llama(), tokens(SAMPLES, LENGTH)
    hints = Hints(cp=4, recompute=recompute, **RING)
    plan = autopar.plan(model, "cpu:4", hints=hints, example_inputs=batch)
    program = specialize(model, plan, (), batch, captured=capture_batch(model, (), batch)).loss_only()
    assert program.backward is not None
    return program.forward.graph, program.backward.graph


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_what_goes_round_travels_beside_a_step(recompute: str) -> None:
    """Every message of keys starts before the step that computes with them, and is waited for after it; so in the
    backward, and where the forward is made again. Of all that is under way only these and the sums are kept."""
    own = torch.ops.autopar
    steps = (own.ring_step.default, own.ring_step_backward.default)
    for graph, passes in zip(graphs(recompute), (1, 2 if recompute == "full" else 1), strict=True):
        place = {node: i for i, node in enumerate(graph.nodes)}
        found = 0
        for node in graph.nodes:
            if node.target not in steps:
                continue
            kv = node.args[3]  # in both operators
            for hop in (user for user in kv.users if user.target is PERMUTE):
                (wait,) = hop.users
                assert wait.target is WAIT and place[hop] < place[node] < place[wait]
                found += 1
        assert found == LAYERS * 3 * passes


def test_a_permutation_is_bound_as_an_all_to_all() -> None:
    """To whom rank 2 of 4 sends, and from whom it gets: the same graph on all ranks until then."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    sent = graph.call_function(PERMUTE, (x, 6, [1, 2, 3, 0], "axis:cp"))
    graph.output((graph.call_function(WAIT, (sent,)),))
    module = fx.GraphModule(nn.Module(), graph)
    bind(module, {"cp": "7"}, {"cp": 2}, torch.device("cpu"))
    (node,) = module.graph.find_nodes(op="call_function", target=ALL_TO_ALL)
    assert node.args[1:] == ([0, 6, 0, 0], [0, 0, 0, 6], "7")
    with pytest.raises(RuntimeError, match="bound"):
        torch.ops.autopar.permute(torch.zeros(6), 6, [1, 0], "axis:cp")


# What it costs.


def test_the_price_of_passing_on() -> None:
    """Four steps of 1 s. What travels beside a step is hidden but for the part of the device that it takes; what takes
    longer than a step is exposed beyond it, and what has nothing beside it wholly."""
    cluster = Cluster.parse("h100-sxm:1x4")
    prices = Prices(cluster, make_mesh(1, 4, 1))
    rate = cluster.device.overlap_rate

    def seconds(nbytes: int) -> float:
        return prices.collective_seconds("p2p", "cp", nbytes)

    def passing(*hops: tuple[int, int | None]) -> Passing:
        return Passing(4, tuple(Hop("cp", nbytes, beside) for nbytes, beside in hops), 1.0, 1, 1, 1)

    small, large = 10**9, 10**12
    assert 0 < seconds(small) < 0.1 and seconds(large) > 2
    def added(*hops: tuple[int, int | None], parts: int = 1) -> float:
        return prices.passing_seconds(passing(*hops), 4.0, parts)

    assert added((small, 0), (small, 2)) == pytest.approx(2 * seconds(small) * (1 - rate))
    assert added((large, 1)) == pytest.approx(seconds(large) - 1.0)
    assert added((small, None)) == pytest.approx(seconds(small))
    assert added((2 * small, None), parts=2) == pytest.approx(seconds(small))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_of_a_ring_is_estimated(recompute: str) -> None:
    """What a plan says of itself is what its emitted program has."""
    model, batch = llama(num_hidden_layers=6, hidden_size=32, intermediate_size=64, use_cache=False), tokens(4, 64)
    plan = autopar.plan(model, "cpu:4", hints=Hints(cp=4, recompute=recompute, **RING), example_inputs=batch)
    exact = with_peak(plan, model, (), batch, capture_batch(model, (), batch))
    assert is_ring(plan) and exact is not plan
    assert plan.peak_memory == pytest.approx(exact.peak_memory, rel=0.02)


@pytest.mark.slow
def test_which_way_long_sequences_take() -> None:
    """Llama-3-8B's attention at 131,072 tokens on eight GPUs: heads and the ring, which leave out what causality hides,
    take about as long; with gathered keys, of which one rank needs all, attention takes nearly twice as long, which of
    two layers with a head is a good quarter. Eight KV heads are all that ranks can have, one each: over sixteen ranks
    only the ring is that fast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, use_cache=False, tie_word_embeddings=False)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)

    def planned(cp: int, attention: str | None = None) -> Plan:
        workload = Workload(global_batch=1, seq_len=131072, param_dtype="bfloat16")
        hints = Hints(cp=cp, dp=1, tp=1, pp=1, recompute="full", attention=attention)
        return autopar.plan(model, f"h100-sxm:{max(1, cp // 8)}x8", workload=workload, hints=hints)

    heads, ring, gather = (planned(8, way).step_time for way in ("heads", "ring", "gather"))
    assert abs(heads - ring) < 0.05 * ring and gather > 1.25 * ring
    assert planned(8).step_time <= 1.001 * min(heads, ring)
    assert is_ring(planned(16))
    with pytest.raises(HintError, match="heads"):
        planned(16, "heads")


# What is asked for, and what is refused.


@pytest.mark.parametrize(("given", "message"), [
    ({"attention": "rings", "cp": 2}, "did you mean ring"),
    ({"attention": "ring"}, "give cp"),
    ({"attention": "ring", "cp": 1}, "give cp"),
])  # fmt: skip
def test_hints_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(HintError, match=message):
        Hints(**given)


@pytest.mark.slow
def test_a_way_that_is_not_there_is_named() -> None:
    """Two heads on four ranks."""
    batch = tokens(SAMPLES, LENGTH)
    with pytest.raises(HintError, match="attention='heads'"):
        autopar.plan(uncached_llama(num_attention_heads=2, num_key_value_heads=1), "cpu:4",
                     hints=Hints(cp=4, dp=1, tp=1, attention="heads"), example_inputs=batch)  # fmt: skip
