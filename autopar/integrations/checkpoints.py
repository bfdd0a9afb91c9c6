"""The training state beside the weights in a Trainer's checkpoint, which any plan for the same model can read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.capture.hf_adapters import is_adapted, read_adapters
from autopar.errors import WeightsError
from autopar.runtime.checkpoint import METADATA, TrainingState
from autopar.runtime.module import ParallelModule
from autopar.runtime.process import host_group
from autopar.runtime.weights import load_from

#: The folder of `torch.distributed.checkpoint` in a checkpoint, and what it has.
FOLDER, KEY = "training_state", "training"
#: What a Trainer of one process writes its optimizer's state to.
_OPTIMIZER_OF_ONE = "optimizer.pt"

Optimizers = Optimizer | Sequence[Optimizer]


def save_state(checkpoint: str | os.PathLike[str], model: ParallelModule, optimizers: Optimizers) -> None:
    """Write the training state in the place of an older one; all ranks call it."""
    folder = Path(checkpoint) / FOLDER
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier(group=host_group())
    save({KEY: TrainingState(model, optimizers, frozen=_keeps_frozen(model))}, checkpoint_id=folder)


def load_state(checkpoint: str | os.PathLike[str], model: ParallelModule, optimizers: Optimizers) -> bool:
    """Read the training state, all ranks together; False if the checkpoint holds weights only. WeightsError for that of
    a run of another kind."""
    if _has_state(checkpoint):
        state = TrainingState(model, optimizers, frozen=_keeps_frozen(model))
        load({KEY: state}, checkpoint_id=Path(checkpoint) / FOLDER)
        return True
    if (Path(checkpoint) / _OPTIMIZER_OF_ONE).exists():
        raise WeightsError(
            f"the optimizer's state in {checkpoint} is that of a run without autopar",
            expected=f"{FOLDER}/, which AutoparTrainer writes",
            found=_OPTIMIZER_OF_ONE,
            change=f"remove {_OPTIMIZER_OF_ONE} to go on with its weights and a new optimizer",
        )
    return False


def load_weights(checkpoint: str | os.PathLike[str], model: ParallelModule) -> None:
    """Take over the weights of a checkpoint, each rank its pieces; all ranks call it. WeightsError if they are not the
    model's."""
    if _has_state(checkpoint):
        state = TrainingState(model, frozen=_keeps_frozen(model))
        load({KEY: state}, checkpoint_id=Path(checkpoint) / FOLDER)
        return
    own, tree = dict(model.named_parameters()), model._original
    if is_adapted(tree):
        model.load_state_dict(read_adapters(tree, checkpoint), strict=False)
        return
    layouts = {name: p.storage for name, p in model.plan.parameters.items() if name in own}
    pieces = load_from(checkpoint)(tree, layouts, model.mesh, dist.get_rank() % model.mesh.size)
    with torch.no_grad():
        for name, piece in pieces.parameters.items():
            p = own[name]
            (p.to_local() if isinstance(p, DTensor) else p).copy_(piece)
        for name, buffer in pieces.buffers.items():
            tree.get_buffer(name).copy_(buffer)


def _keeps_frozen(model: ParallelModule) -> bool:
    """Whether what is not trained belongs into a checkpoint: what adapters are put into does not."""
    return not is_adapted(model._original)


def _has_state(checkpoint: str | os.PathLike[str]) -> bool:
    """Whether there is a training state; WeightsError for one that was not written to its end."""
    folder = Path(checkpoint) / FOLDER
    if folder.exists() and not (folder / METADATA).is_file():
        raise WeightsError(
            f"the checkpoint {checkpoint} is not complete",
            expected=f"{FOLDER}/{METADATA}, which is written last",
            found="a save that was interrupted",
            change="go on from an earlier checkpoint: train(resume_from_checkpoint=...)",
        )
    return folder.exists()
