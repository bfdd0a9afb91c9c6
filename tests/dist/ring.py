"""torchrun ring.py: attention as a ring over all processes, against eager PyTorch on the untouched model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small_models import VOCABULARY, llama, tokens
from training import Pair, join, say

from autopar import Hints
from autopar.runtime.reference import exact_float64


def windows() -> Any:
    """A Mistral that sees 5 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=5, use_cache=False)).train()  # fmt: skip


def padded(seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows that end, or begin, with padding."""
    batch = tokens(8, 16, seed=seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[::2, 11:], mask[1::2, :3] = 0, 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def main() -> None:
    """Three steps of every model."""
    join()
    world = dist.get_world_size()
    ring: dict[str, Any] = {"cp": world, "dp": 1, "tp": 1, "attention": "ring"}
    cases: dict[str, tuple[Any, Hints, Any]] = {
        "causal": (llama(use_cache=False), Hints(**ring), lambda seed: tokens(8, 16, seed=seed)),
        "recomputed": (llama(use_cache=False), Hints(**ring, recompute="full"), lambda seed: tokens(8, 16, seed=seed)),
        "padded": (llama(use_cache=False), Hints(**ring), padded),
        "a window": (windows(), Hints(**ring), lambda seed: tokens(8, 16, seed=seed)),
    }
    with exact_float64():
        for name, (reference, hints, batch) in cases.items():
            pair = Pair(reference.double(), hints, batch(0))
            ways = {(c.kind, c.axis, c.purpose) for c in pair.model.plan.collectives}
            assert ("p2p", "cp", "activations") in ways, ways
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.model, pair.reference)]
            for seed in range(3):
                pair.step(batch(seed), optimizers, max_norm=0.1)
            say(f"ok {name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
