"""torchrun experts.py FOLDER: mixtures of experts on real processes, against eager PyTorch on the untouched model.

Rows go from the ranks that have their tokens to those that have their experts and back by all-to-alls whose pieces are
as large as the router makes them; a router that cannot tell its experts apart leaves ranks without any row.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import VOCABULARY, tokens
from torch.distributed.tensor import DTensor
from training import Pair, assert_close, join, parameters, say, whole

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


#: Plans of four processes, with the axis over which rows are exchanged, or of a part of cp the results of experts.
PLANS: dict[str, tuple[autopar.Hints, str]] = {
    "dp=2, tp=2, zero=3": (autopar.Hints(dp=2, tp=2, ep=2, zero=3), "tp"),
    "dp=4, ep=4, zero=1": (autopar.Hints(dp=4, ep=4, zero=1), "dp_expert"),
    "dp=4, ep=2, zero=3": (autopar.Hints(dp=4, ep=2, zero=3), "dp_expert"),
    "dp=2, tp=2, ep=4": (autopar.Hints(dp=2, tp=2, ep=4), "dp_expert"),
    "dp=2, cp=2, ep=4": (autopar.Hints(dp=2, cp=2, ep=4), "dp_expert"),
    "cp=4, ep=2": (autopar.Hints(dp=1, cp=4, ep=2), "cp_expert"),
}


def whole_step() -> None:
    """A pipeline whose stages spread their experts over dp, in micro-batches."""
    reference = sparse("Qwen3Moe", num_experts=8, moe_intermediate_size=24, head_dim=8).double()
    hints, batch = autopar.Hints(pp=2, dp=2, ep=2, zero=1, micro_batch_size=1), tokens(8, 8)
    model = autopar.parallelize(copy.deepcopy(reference), hints=hints, example_inputs=batch)
    loss, truth = model.train_step(**batch), reference(**batch).loss
    truth.backward()
    assert_close({"loss": loss.detach()}, {"loss": truth.detach()}, "loss")
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    found = {name: p.grad for name, p in model.named_parameters()}
    assert any(".experts." in name for name in found)
    assert_close(whole(found), {name: gradients[name] for name in found}, "gradients")


def moved_elsewhere(folder: Path) -> None:
    """What a run with experts over dp has saved, weights and moments, is loaded by one with experts over tp; and the
    weights by transformers."""
    saved, loaded = (
        Pair(sparse("Qwen3Moe", num_experts=8, moe_intermediate_size=24, head_dim=8, vocab_size=VOCABULARY).double(),
             hints, tokens(8, 8))
        for hints in (autopar.Hints(dp=4, ep=2, zero=1), autopar.Hints(dp=2, tp=2, ep=2, zero=3))
    )  # fmt: skip
    optimizers = [torch.optim.AdamW(pair.model.parameters(), lr=1e-2) for pair in (saved, loaded)]
    for pair, optimizer in zip((saved, loaded), optimizers, strict=True):
        pair.model(**tokens(8, 8, seed=len(str(pair.model.plan.degrees)))).loss.backward()
        optimizer.step()
    states = [
        {"run": autopar.TrainingState(pair.model, optimizer)}
        for pair, optimizer in zip((saved, loaded), optimizers, strict=True)
    ]
    dcp.save(states[0], checkpoint_id=folder / "run")
    dcp.load(states[1], checkpoint_id=folder / "run")
    assert_close(parameters(loaded.model), parameters(saved.model), "parameters of another plan")
    for kind in ("exp_avg", "exp_avg_sq"):
        found = [
            {name: o.state[p][kind] for name, p in pair.model.named_parameters()}
            for pair, o in zip((saved, loaded), optimizers, strict=True)
        ]
        assert all(isinstance(moment, DTensor) for moments in found for moment in moments.values())
        assert_close(whole(found[1]), whole(found[0]), kind)
    saved.model.save_pretrained(folder / "model")
    dist.barrier()
    again = type(saved.reference).from_pretrained(folder / "model", dtype=torch.float64)
    assert_close(parameters(again), parameters(saved.model), "what transformers reads")


def main() -> None:
    """Three steps of every model under plans that spread its experts; then what becomes of them besides."""
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
    plans = {f"tp={world}": (autopar.Hints(tp=world), "tp")} | (PLANS if world == 4 else {})
    with exact_float64():
        for name, reference in models.items():
            for plan, (hints, axis) in plans.items():
                pair = Pair(reference.double(), hints, tokens(8, 8))
                ways = {(c.kind, c.axis, c.purpose) for c in pair.model.plan.collectives}
                kind = "reduce_scatter" if axis == "cp_expert" else "all_to_all"
                assert (kind, axis, "activations") in ways, ways
                optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.model, pair.reference)]
                for seed in range(3):
                    pair.step(tokens(8, 8, seed=seed), optimizers, max_norm=1.0)
                say(f"ok {name}, {plan}")
        if world == 4:
            whole_step()
            say("ok whole step")
            moved_elsewhere(Path(sys.argv[1]))
            say("ok moved elsewhere")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
