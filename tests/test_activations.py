"""Activations of one transformer layer against a closed form, worked out by hand: Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, table 2).

In units of s b h (tokens x hidden size) and bytes of 16-bit numbers, on t tensor-parallel ranks, a layer keeps there

    10 + 24 / t + 5 a s / (h t)                 (34 + 5 a s / h) / t with sequence parallelism

10: inputs of the two norms (2 + 2), of the projection to q, k, v and of the first product of the MLP (2 + 2), and two
dropout masks of one byte (1 + 1). 24: q, k, v (6), the input of the output projection (2), of GELU (8) and of the
second product (8). 5 a s / h: scores, softmax and its dropout. What differs here, and why:

* -2: dropout is made again from its seed, so there are no masks (autopar/ops/dropout.py); nor does it add anything.
* 5 a s / h becomes 4 a / h: attention never has the scores, but keeps the float32 logarithm of the sum of each row.
* +8 / h: each norm keeps mean and inverse deviation of a token. Captured on a CPU they are 16-bit numbers, 8 bytes a
  token; a GPU's kernel keeps them in float32. Both are nothing beside h = 4096.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Mesh
from autopar.sharding.recompute import kept, made_again
from autopar.solver.memory import memory_of
from autopar.solver.pins import Pins
from autopar.solver.program import solve
from autopar.solver.setting import Setting, keepings
from autopar.solver.spmd import make_program, read
from autopar.specialize import capture_batch

SEQUENCE, BATCH, HIDDEN, HEADS = 64, 8, 64, 4
STATISTICS = 8 / HIDDEN
LOGARITHMS = 4 * HEADS / HIDDEN


def captured_gpt2(layers: int, dropout: float = 0.0, activation: str = "gelu") -> Captured:
    """A GPT-2 in bfloat16, on the meta device."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=128, n_positions=SEQUENCE, n_embd=HIDDEN, n_layer=layers, n_head=HEADS, use_cache=False,
        activation_function=activation, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).to(torch.bfloat16).train()
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    return capture_batch(model, (), {"input_ids": ids, "labels": ids})


def activations(captured: Captured, tp: int, recompute: str, smallest: bool) -> int:
    """Bytes of activations of the fastest assignment on ``tp`` ranks, or of that which keeps the fewest bytes."""
    setting = Setting(captured, read(captured), Cluster.parse(f"cpu:{tp}"), "adamw", recompute)
    space, program = make_program(setting, Mesh((("dp", 1), ("tp", tp))), Pins())
    if smallest:
        pairs = zip(program.seconds, program.memory, strict=True)
        program.seconds = [np.where(np.isfinite(s), m * 1e-9, s) for s, m in pairs]
        program.edges = [replace(e, cost=np.where(np.isfinite(e.cost), 0.0, np.inf)) for e in program.edges]
    solution = solve(program)
    assert solution is not None
    assignment: Assignment = space.assignment(solution.options)
    held = kept(setting.operators, assignment, made_again(setting.operators, recompute))
    keep = keepings(setting, assignment)
    return memory_of(setting, assignment, held, keep, 1)["activations"]


def of_a_layer(tp: int = 1, recompute: str = "none", smallest: bool = False, **model: Any) -> float:
    """Bytes of activations of one layer, in units of s b h: what a third layer adds."""
    found = [activations(captured_gpt2(layers, **model), tp, recompute, smallest) for layers in (2, 3)]
    return (found[1] - found[0]) / (SEQUENCE * BATCH * HIDDEN)


def test_a_layer_keeps_what_the_closed_form_says() -> None:
    """On one rank 10 + 24 without masks."""
    assert of_a_layer() == pytest.approx(8 + 24 + LOGARITHMS + STATISTICS, abs=1e-9)


@pytest.mark.slow
def test_recomputation_keeps_what_enters_and_selective_the_products_too() -> None:
    """Full: 2. Korthikanti's selective one makes attention again alone: 34. Here norms and GELU are made again too,
    which leaves what enters (2), q, k, v (6), the output projection's result (2) and GELU's input (8)."""
    assert of_a_layer(recompute="full") == 2
    assert of_a_layer(recompute="selective") == 2 + 6 + 2 + 8


@pytest.mark.slow
def test_tensor_parallelism_splits_24_and_sequence_parallelism_all() -> None:
    """On two ranks the fastest assignment has Megatron's layouts without sequence parallelism; the one that keeps the
    fewest bytes splits everything."""
    assert of_a_layer(tp=2) == pytest.approx(8 + (24 + LOGARITHMS) / 2 + STATISTICS, abs=1e-9)
    assert of_a_layer(tp=2, smallest=True) == pytest.approx((8 + 24 + LOGARITHMS + STATISTICS) / 2, abs=1e-9)


@pytest.mark.slow
def test_dropout_keeps_nothing_and_a_written_out_gelu_three_more_values() -> None:
    """transformers writes GPT-2's own activation out, x / 2 (1 + tanh(u)): beside x are kept x / 2, 1 + tanh(u), and
    tanh(u), 8 each. Eager PyTorch keeps the same."""
    base = 8 + 24 + LOGARITHMS + STATISTICS
    assert of_a_layer(dropout=0.1) == pytest.approx(base, abs=1e-9)
    assert of_a_layer(activation="gelu_new") == pytest.approx(base + 3 * 8, abs=1e-9)
