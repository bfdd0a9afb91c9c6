"""torchrun axes.py FOLDER: context parallelism and hybrid ZeRO on four ranks, against eager."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import checkpoint
import torch
import torch.distributed as dist
from small_models import gradients, llama, tokens
from torch.distributed.tensor import DTensor
from training import Pair, assert_close, join, parameters, say, whole
from transformers import LlamaForCausalLM

import autopar
from autopar import Hints

PLANS = {
    "cp": Hints(dp=2, cp=2, zero=3),
    "hybrid": Hints(dp=4, zero=3, zero_group_size=2),
}
#: The axes of more than one rank, what each rank has of a parameter, and which part of the batch.
AXES = {"cp": ("dp", "cp"), "hybrid": ("dp_replicate", "dp")}
SHARE = {"cp": 4, "hybrid": 2}
PARTS = {"cp": [0, 0, 1, 1], "hybrid": [0, 1, 2, 3]}


def loops(folder: Path) -> None:
    """Three steps of AdamW in a loop of one's own with torch's clipping; where everything lies; a saved model."""
    for name, hints in PLANS.items():
        batches = [tokens(8, 8, seed=i) for i in range(3)]
        pair = Pair(llama(num_hidden_layers=2), hints, batches[0])
        model, mesh = pair.model, pair.model.plan.mesh
        assert tuple(axis for axis, n in mesh.axes if n > 1) == AXES[name]
        assert model.data_rank == PARTS[name][dist.get_rank()] and model.data_world_size == len(set(PARTS[name]))
        split = [p for p in model.parameters() if p.to_local().numel() < p.numel()]
        assert len(split) == len(list(model.parameters()))
        assert all(p.to_local().numel() * SHARE[name] == p.numel() for p in split)
        pair.train(lambda ps: torch.optim.AdamW(ps, lr=1e-3), batches, steady=True)
        model.save_pretrained(folder / name)
        dist.barrier()
        saved = dict(LlamaForCausalLM.from_pretrained(folder / name).named_parameters())
        assert all(torch.equal(saved[n], p) for n, p in parameters(model).items())
    say("ok loops: cp and hybrid")


def steps() -> None:
    """``train_step`` in micro-batches and the module's own clipping, each rank with its part of the batch."""
    for hints in PLANS.values():
        for zero in (1, 2):
            reference, batch = llama(num_hidden_layers=2), tokens(8, 8)
            given = Hints(**{**hints.to_dict(), "zero": zero, "micro_batch_size": 1})
            model = autopar.parallelize(copy.deepcopy(reference), hints=given, example_inputs=batch, inputs="local")
            assert model.plan.num_micro_batches == 8 // model.data_world_size > 1
            own = {n: t.chunk(model.data_world_size)[model.data_rank] for n, t in batch.items()}
            loss = model.train_step(**own)
            truth = reference(**batch).loss
            truth.backward()
            assert_close({"loss": loss}, {"loss": truth.detach()}, "loss")
            assert_close(whole(gradients(model)), gradients(reference), "gradients")
            norm = model.clip_grad_norm_(0.05)
            assert_close({"norm": norm}, {"norm": torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)}, "norm")
            assert_close(whole(gradients(model)), gradients(reference), "clipped gradients")
            assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    say("ok steps: ZeRO 1 and 2")


def checkpoints(folder: Path) -> None:
    """A run saved under hybrid ZeRO goes on under ZeRO-3 over all ranks and under cp."""
    checkpoint.save(folder, "hybrid")
    checkpoint.load(folder, "dp")
    checkpoint.load(folder, "cp")
    say("ok checkpoints: hybrid, loaded under dp and cp")


def accumulated() -> None:
    """Two backwards, of which the second reduces: over the groups of hybrid ZeRO too, and over cp."""
    for name, hints in PLANS.items():
        reference, batches = llama(num_hidden_layers=2), [tokens(8, 8, seed=i) for i in range(2)]
        model = autopar.parallelize(copy.deepcopy(reference), hints=hints, example_inputs=batches[0])
        with model.accumulate():
            model(**batches[0]).loss.backward()
        assert all(p.grad is None for p in model.parameters())
        model(**batches[1]).loss.backward()
        for batch in batches:
            reference(**batch).loss.backward()
        assert_close(whole(gradients(model)), gradients(reference), f"gradients under {name}")
    say("ok accumulated: cp and hybrid")


def main() -> None:
    """All parts."""
    join()
    folder = Path(sys.argv[1])
    loops(folder)
    steps()
    accumulated()
    checkpoints(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
