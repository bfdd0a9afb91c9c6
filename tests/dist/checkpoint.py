"""torchrun checkpoint.py FOLDER save|load|kill|resume PLAN: a run saved by torch.distributed.checkpoint and continued
under other plans.

What the saving run had, and the losses of its next steps, are in FOLDER/truth.pt.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import gpt2, tokens
from torch import Tensor
from torch.distributed.tensor import DTensor
from training import join, parameters, say

import autopar
from autopar import Hints, TrainingState
from autopar.runtime.checkpoint import METADATA

#: Steps before the save, and after it.
BEFORE, AFTER = 3, 3
FROZEN = "transformer.wpe.weight"


def plan_named(name: str) -> Hints:
    """The plans that runs are saved and loaded under."""
    world = dist.get_world_size()
    plans = {"both": Hints(tp=2, zero=3), "tp": Hints(tp=world), "dp": Hints(dp=world, zero=3), "ddp": Hints(dp=world)}
    plans["hybrid"] = Hints(dp=world, zero=3, zero_group_size=2)
    plans["cp"] = Hints(dp=world // 2, cp=2, zero=3)
    return plans[name]


class Run:
    """A GPT-2 with dropout, tied embeddings and frozen positions, its optimizer and its scheduler of batches."""

    def __init__(self, hints: Hints | None, seed: int) -> None:
        reference = gpt2(dropout=0.2, layers=2)
        reference.get_parameter(FROZEN).requires_grad_(False)
        torch.manual_seed(seed)  # of dropout: a run that is continued must not go on with its own
        self.model = autopar.parallelize(reference, hints=hints, example_inputs=tokens(8, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = {"training": TrainingState(self.model, self.optimizer)}

    def train(self, steps: range) -> list[float]:
        """The losses of these steps."""
        losses = []
        for step in steps:
            loss = self.model(**tokens(8, 8, seed=step)).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def everything(self) -> dict[str, Tensor]:
        """Parameters, moments, step counts and the dropout counter, whole, by name."""
        found = {f"parameter {n}": p for n, p in parameters(self.model).items()}
        for name, p in self.model.named_parameters():
            for kind, value in self.optimizer.state.get(p, {}).items():
                found[f"{kind} {name}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        return {**found, "dropout": self.model.seed.clone()}


def save(folder: Path, plan: str) -> None:
    """A run saved at once, and in the background while it trains on."""
    run = Run(plan_named(plan), seed=3)
    run.train(range(BEFORE))
    dcp.save(run.state, checkpoint_id=folder / f"step-{BEFORE}")
    at_save = run.everything()
    assert len(at_save) == 28 + 3 * 27 + 1 and float(at_save["step transformer.wte.weight"]) == BEFORE
    assert at_save["dropout"].tolist() == [3, BEFORE]
    # a group of its own: collectives of the saving thread must not mix with those of training
    done = dcp.async_save(
        run.state, checkpoint_id=folder / "background-1", process_group=dist.new_group(backend="gloo")
    )
    losses = run.train(range(BEFORE, BEFORE + AFTER))
    assert any(not torch.equal(t, at_save[n]) for n, t in run.everything().items())
    done.result()
    if dist.get_rank() == 0:
        torch.save({"at_save": at_save, "losses": losses}, folder / "truth.pt")
    dist.barrier()


def load(folder: Path, plan: str) -> None:
    """Everything is as it was, from both checkpoints, and training goes on with the same masks on the same curve."""
    truth: dict[str, Any] = torch.load(folder / "truth.pt")
    run = Run(plan_named(plan), seed=99)
    assert run.model.seed.tolist() == [99, 0]
    for name in ("background-1", f"step-{BEFORE}"):
        dcp.load(run.state, checkpoint_id=folder / name)
        found = run.everything()
        assert found.keys() == truth["at_save"].keys()
        for key, value in found.items():
            assert torch.equal(value, truth["at_save"][key]), (name, key)
        losses = run.train(range(BEFORE, BEFORE + AFTER))
        assert max(abs(a - b) for a, b in zip(losses, truth["losses"], strict=True)) < 1e-5, (losses, truth["losses"])
        assert len(set(losses)) == AFTER


def plans(folder: Path) -> None:
    """Saved under one plan and loaded under another in the same run."""
    save(folder, "both" if dist.get_world_size() == 4 else "dp")
    load(folder, "ddp" if dist.get_world_size() == 4 else "tp")


def kill(folder: Path, plan: str) -> None:
    """The last rank is killed while it writes its part of the second checkpoint."""
    run = Run(plan_named(plan), seed=3)
    for step in range(2):
        run.train(range(step, step + 1))
        target = folder / f"step-{step + 1}"
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # PyTorch calls it when its file is written
        elif step == 0:
            at_save = run.everything()
            if dist.get_rank() == 0:
                torch.save(at_save, folder / "truth.pt")
        dcp.save(run.state, checkpoint_id=target)
        assert (target / METADATA).exists()
        say(f"saved {target.name}")


def resume(folder: Path, plan: str) -> None:
    """The last complete checkpoint is what the run had when it saved it."""
    run = Run(plan_named(plan), seed=99)
    latest = autopar.latest_checkpoint(folder)
    assert latest == folder / "step-1"
    dcp.load(run.state, checkpoint_id=latest)
    truth, found = torch.load(folder / "truth.pt"), run.everything()
    assert found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)


def main() -> None:
    """One part."""
    join()
    part = {"save": save, "load": load, "kill": kill, "resume": resume}[sys.argv[2]]
    part(Path(sys.argv[1]), sys.argv[3])
    say(f"ok {sys.argv[2]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
