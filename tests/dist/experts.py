"""torchrun experts.py: mixtures of experts on real processes, against eager PyTorch on the untouched model.

Rows go from the ranks that have their tokens to those that have their experts and back by all-to-alls whose pieces are
as large as the router makes them; a router that cannot tell its experts apart leaves ranks without any row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small_models import VOCABULARY, tokens
from training import Pair, join, say

import autopar
from autopar.runtime.reference import exact_float64


def sparse(kind: str, **changes: Any) -> Any:
    """A decoder of two blocks with eight experts of which each token has two."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()


def main() -> None:
    """Three steps of every model under a plan that spreads its experts."""
    join()
    world = dist.get_world_size()
    models = {
        "mixtral": sparse("Mixtral", num_local_experts=8),
        "qwen3-moe": sparse("Qwen3Moe", num_experts=8, moe_intermediate_size=24, head_dim=8),
        "without rows": sparse("Mixtral", num_local_experts=8),
    }
    with torch.no_grad():
        for block in models["without rows"].model.layers:
            block.mlp.gate.weight.zero_()
    plans = {f"tp={world}": autopar.Hints(tp=world)}
    if world == 4:
        plans["dp=2, tp=2, zero=3"] = autopar.Hints(dp=2, tp=2, zero=3)
    with exact_float64():
        for name, reference in models.items():
            for plan, hints in plans.items():
                pair = Pair(reference.double(), hints, tokens(8, 8))
                ways = {(c.kind, c.axis, c.purpose) for c in pair.model.plan.collectives}
                assert ("all_to_all", "tp", "activations") in ways, ways
                optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.model, pair.reference)]
                for seed in range(3):
                    pair.step(tokens(8, 8, seed=seed), optimizers, max_norm=1.0)
                say(f"ok {name}, {plan}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
