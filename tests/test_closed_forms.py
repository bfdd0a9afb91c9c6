"""What tensor parallelism communicates in a step, counted as it runs, against closed forms written out here.

A step of Megatron's tensor parallelism all-reduces X = batch x sequence x hidden elements twice a layer in the forward
and twice in the backward (Shoeybi et al., arXiv:1909.08053), and once for the gradient of what enters the head. ZeRO's
closed forms are in test_zero.py, those of a pipeline in test_pipeline.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from dist.small_models import HIDDEN, llama, tokens
from models import planned_and_compared

import autopar
from autopar import Hints
from autopar.runtime.reference import exact_float64

LAYERS, BATCH, LENGTH, ITEMSIZE = 2, 8, 16, 8
X = BATCH * LENGTH * HIDDEN * ITEMSIZE

_COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROW = ("self_attn.o_proj", "mlp.down_proj")
#: Column- and row-parallel weights, as an expert writes them, and the vocabulary of embedding and head.
MEGATRON = {
    "model.embed_tokens.weight": {"tp": 0},
    **{f"model.layers.*.{name}.weight": {"tp": 0} for name in _COLUMN},
    **{f"model.layers.*.{name}.weight": {"tp": 1} for name in _ROW},
}

#: Hints beside Megatron's split, and how many times X is all-reduced over tp.
FORMS: dict[str, tuple[dict[str, Any], float]] = {
    "tp 2": ({"tp": 2}, 4 * LAYERS + 1),
    "tp 4": ({"tp": 4}, 4 * LAYERS + 1),
    "four micro-batches": ({"tp": 2, "micro_batch_size": 2}, 4 * LAYERS + 1),  # of a quarter of the size each
    # made again: what attention gives, which the second norm needs; not what the block ends with
    "recomputed": ({"tp": 2, "recompute": "full"}, 5 * LAYERS + 1),
    "dp 2 x tp 2": ({"tp": 2, "dp": 2}, (4 * LAYERS + 1) / 2),  # of half of the batch
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "tp 4")) for n in FORMS])
def test_tensor_parallelism(name: str) -> None:
    """All-reduced bytes over tp, but for the loss (a few numbers a token); the plan says the same."""
    given, times = FORMS[name]
    ranks = given["tp"] * given.get("dp", 1)
    hints, batch = Hints(shard=MEGATRON, zero=0, **given), tokens(BATCH, LENGTH)
    with exact_float64():
        model = llama(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4).double()
        plan, report = planned_and_compared(model, batch, f"h100-sxm:1x{ranks}", hints)
    assert report.ok, str(report)
    ran = report.traffic.bytes["all_reduce", "tp"]
    numbers = 4 * BATCH * LENGTH * ITEMSIZE
    assert times * X <= ran <= times * X + numbers
    told = [c for c in plan.collectives if (c.kind, c.axis) == ("all_reduce", "tp")]
    assert sum(c.bytes for c in told) == ran
    assert sum(c.count for c in told) == report.traffic.count["all_reduce", "tp"]
    assert report.traffic.count["reduce_scatter", "tp"] == 0


def test_gradients_of_split_weights() -> None:
    """dp 2 x tp 2 without ZeRO all-reduces over dp what a rank has: half of the split weights, all of the others."""
    batch = tokens(BATCH, LENGTH)
    model = llama(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4)
    hints = Hints(tp=2, dp=2, zero=0, shard=MEGATRON)
    plan, report = planned_and_compared(model, batch, "h100-sxm:1x4", hints)
    assert report.ok, str(report)
    split = {n for n, p in plan.parameters.items() if "tp" in p.storage.split_axes}
    blocks = {f"model.layers.{i}.{name}.weight" for i in range(LAYERS) for name in (*_COLUMN, *_ROW)}
    assert split == {"model.embed_tokens.weight", *blocks}
    local = sum(p.nbytes // (2 if n in split else 1) for n, p in model.named_parameters())
    ran = report.traffic.bytes["all_reduce", "dp"]
    assert local <= ran <= local + 64  # the loss, and the number of tokens that count


@pytest.mark.parametrize("hints", [
    Hints(dp=2, zero=0, micro_batch_size=2),
    pytest.param(Hints(dp=2, tp=2, zero=3, micro_batch_size=1), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_micro_batches_reduce_numbers_once(hints: Hints) -> None:
    """Over dp a step reduces, besides parameters' gradients, the number of tokens that count, before the first backward
    needs it, and the loss, at the end: a number each. All that runs is what the plan prices, by kind and axis."""
    batch, model = tokens(BATCH, LENGTH), llama(num_hidden_layers=1)
    cluster = f"h100-sxm:1x{2 * (hints.tp or 1)}"
    report = autopar.verify(model, cluster, hints=hints, example_inputs=batch)
    plan = autopar.plan(model, cluster, hints=hints, example_inputs=batch)
    assert report.ok, str(report)
    numbers = [c for c in plan.collectives if (c.kind, c.axis, c.purpose) == ("all_reduce", "dp", "activations")]
    assert [(c.count, c.bytes) for c in numbers] == [(2, 2 * 4)]
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for c in plan.collectives:
        counts[c.kind, c.axis] += c.count
        sizes[c.kind, c.axis] += c.bytes
    assert report.traffic.count == counts
    assert report.traffic.bytes == sizes
