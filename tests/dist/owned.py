"""torchrun owned.py FOLDER save|load: optimizers of whole matrices, which ranks own, saved under one plan and continued
under others, on another number of ranks.

What the saving run had, and the losses of its next steps, are in FOLDER/NAME.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import llama, tokens
from torch import Tensor
from torch.distributed.tensor import DTensor
from training import join, parameters, say

import autopar
from autopar import Hints, TrainingState, WholeOptimizer

#: Steps before the save, and after it.
BEFORE, AFTER = 2, 2


def muon(model: Any) -> list[torch.optim.Optimizer]:
    """Muon on matrices, AdamW on the rest, as Muon is meant to be used."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [WholeOptimizer(matrices, torch.optim.Muon, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def adafactor(model: Any) -> list[torch.optim.Optimizer]:
    """torch's Adafactor: means of rows and columns, and a count of steps."""
    return [WholeOptimizer(model.parameters(), torch.optim.Adafactor, lr=1e-2)]


OPTIMIZERS = {"muon": muon, "adafactor": adafactor}


class Run:
    """A small Llama and its optimizers."""

    def __init__(self, name: str, hints: Hints) -> None:
        reference = llama(num_hidden_layers=1)
        self.model = autopar.parallelize(reference, hints=hints, example_inputs=tokens(8, 8))
        self.optimizers = OPTIMIZERS[name](self.model)
        self.state = {"training": TrainingState(self.model, self.optimizers)}

    def train(self, steps: range) -> list[float]:
        """The losses of these steps."""
        losses = []
        for step in steps:
            loss = self.model(**tokens(8, 8, seed=step)).loss
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def everything(self) -> dict[str, Tensor]:
        """Parameters and the optimizers' state, whole, by name, on every rank, whoever owns it."""
        owned = {}
        for name, p in self.model.named_parameters():
            for optimizer in self.optimizers:
                for kind, value in optimizer.state.get(p, {}).items():
                    owned[f"{kind} {name}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, owned)
        found = {name: value for of_rank in every for name, value in of_rank.items()}
        return {**{f"parameter {n}": p for n, p in parameters(self.model).items()}, **found}


def save(folder: Path, name: str) -> None:
    """Four ranks on two axes."""
    run = Run(name, Hints(dp=2, tp=2, zero=3))
    run.train(range(BEFORE))
    dcp.save(run.state, checkpoint_id=folder / name)
    at_save, losses = run.everything(), run.train(range(BEFORE, BEFORE + AFTER))
    if dist.get_rank() == 0:
        torch.save({"at_save": at_save, "losses": losses}, folder / f"{name}.pt")
    dist.barrier()
    load(folder, name, Hints(dp=4, zero=0))


def load(folder: Path, name: str, hints: Hints) -> None:
    """Everything is as it was, and training goes on on the same curve; ranks own other parameters than before."""
    truth: dict[str, Any] = torch.load(folder / f"{name}.pt")
    run = Run(name, hints)
    dcp.load(run.state, checkpoint_id=folder / name)
    found = run.everything()
    kinds = {"muon": 8 + 3 * 3, "adafactor": 8 * 3 + 3 * 2}[name]  # of 8 matrices, tied ones once, and 3 vectors
    assert found.keys() == truth["at_save"].keys() and len(found) == 11 + kinds, sorted(found)
    for key, value in found.items():
        assert torch.equal(value, truth["at_save"][key]), key
    losses = run.train(range(BEFORE, BEFORE + AFTER))
    assert max(abs(a - b) for a, b in zip(losses, truth["losses"], strict=True)) < 1e-5, (losses, truth["losses"])
    assert len(set(losses)) == AFTER


def main() -> None:
    """One part, for both kinds of optimizer."""
    join()
    folder, part = Path(sys.argv[1]), sys.argv[2]
    for name in OPTIMIZERS:
        if part == "save":
            save(folder, name)
        else:
            load(folder, name, Hints(tp=dist.get_world_size()))
        say(f"ok {part} {name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
