"""Every way to split attention over cp, for every kind of attention: each of heads, a ring and gathered keys on two and
on four ranks, with grouped, single and latent keys and values, windows, padding, packed documents, and without
causality. Two steps against eager, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from dist.small_models import tokens
from test_axes import LAYERS, LENGTH, SAMPLES, packed, uncached_llama
from torch import Tensor, nn

from autopar import Hints
from autopar.runtime.reference import exact_float64
from autopar.sharding.rules.attention import WAYS

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4}


def latent() -> nn.Module:
    """DeepSeek-V3's attention, whose keys are longer than its values, without experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    model: nn.Module = DeepseekV3ForCausalLM(DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, first_k_dense_replace=LAYERS, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=64, use_cache=False)).train()  # fmt: skip
    return model


def window() -> nn.Module:
    """A window of 3 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model: nn.Module = MistralForCausalLM(MistralConfig(
        **SIZES, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, head_dim=4,
        max_position_embeddings=64, sliding_window=3, use_cache=False)).train()  # fmt: skip
    return model


def even() -> dict[str, Tensor]:
    """A batch in which every token counts."""
    return tokens(SAMPLES, LENGTH)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "grouped": (lambda: uncached_llama(**SIZES), even),
    "single": (lambda: uncached_llama(**{**SIZES, "num_key_value_heads": 1}), even),
    "latent": (latent, even),
    "a window": (window, even),
    "padded": (models.seeded(models.llama), models.causal_batch),
    "packed": (lambda: uncached_llama(**SIZES), packed),
    "not causal": (models.seeded(models.bert), models.masked_batch),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cp", [2, 4])
def test_all_ways(cp: int, way: str, kind: str) -> None:
    """It is split as asked for, nobody does more than a share, and the numbers are those of eager."""
    build, batch = KINDS[kind]
    hints = Hints(cp=cp, dp=1, tp=1, attention=way)
    with exact_float64():
        model: Any = build().double()
        plan, report = models.planned_and_compared(model, batch(), f"h100-sxm:1x{cp}", hints, 2)
    split = {choice["cp"] for key, choice in plan.operators.items() if " attention" in key}
    assert split and split <= WAYS[way], split
    assert report.ok and report.bound == 1e-10, str(report)
    assert report.flops_share <= 1.1 / cp, str(report)
