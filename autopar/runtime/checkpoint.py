"""What `torch.distributed.checkpoint` saves and loads of a training run.

The format, and reading it under another plan and world size, are PyTorch's; parameters and moments are DTensors, which
it knows. A checkpoint is written into a directory of its own, and is complete when its metadata appears, last of all::

    state = autopar.TrainingState(model, optimizer)
    dcp.save({"training": state}, checkpoint_id=f"checkpoints/step-{step}")
    ...
    dcp.load({"training": state}, checkpoint_id=autopar.latest_checkpoint("checkpoints"))
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from autopar.errors import InputError, OptimizerError
from autopar.runtime.module import ParallelModule
from autopar.runtime.process import agree

#: What PyTorch writes when all else is written, by renaming.
METADATA = ".metadata"

#: Every parameter's settings and moments under names of their own: the stages of a pipeline have different parameters.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class TrainingState(Stateful):
    """The state of a parallel module and its optimizers, as `torch.distributed.checkpoint` takes it.

    It has the module's parameters and persistent buffers under the model's own names, the optimizers' state by
    parameter name, and where the module's dropout has got to (`ParallelModule.seed`): a run that is continued draws the
    masks that an uninterrupted one draws. Any plan for the same model, on any number of ranks, can load it.
    Without ``frozen`` parameters it has those that are trained alone, as of a model with adapters.
    InputError for another module, OptimizerError for an optimizer of other parameters.
    """

    def __init__(
        self, model: ParallelModule, optimizers: Optimizer | Iterable[Optimizer] = (), *, frozen: bool = True
    ) -> None:
        self.model = model
        self.options = OPTIONS if frozen else replace(OPTIONS, ignore_frozen_params=True)
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if not isinstance(model, ParallelModule):
            raise InputError(
                "this model has no parallel training state",
                expected="the module that autopar.parallelize returned",
                found=type(model).__name__,
                change="give its state_dict to torch.distributed.checkpoint itself",
            )
        own = {id(p) for p in model.parameters()}
        for optimizer in self.optimizers:
            if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
                raise OptimizerError(
                    f"the optimizer ({type(optimizer).__name__}) holds parameters that are not the module's",
                    expected="an optimizer of model.parameters()",
                    found="other parameters",
                    change="make the optimizer after parallelize, from the module's parameters",
                )

    def state_dict(self) -> dict[str, Any]:
        """References to all tensors, not copies; the optimizers get their state if they have made no step yet."""
        with _without_empty_groups(self.optimizers):
            model, optimizers = get_state_dict(self.model, self.optimizers, options=self.options)
        if self.options.ignore_frozen_params:  # PyTorch leaves in the further names of tied ones
            every = self.model.named_parameters(remove_duplicate=False)
            frozen = {name for name, p in every if not p.requires_grad}
            model = {name: tensor for name, tensor in model.items() if name not in frozen}
        return {"model": model, "optimizers": optimizers, "dropout": self.model.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was read into the tensors of `state_dict`."""
        with _without_empty_groups(self.optimizers):
            set_state_dict(
                self.model,
                self.optimizers,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optimizers"],
                options=replace(self.options, strict=not self.options.ignore_frozen_params),
            )
        self.model.seed.copy_(state_dict["dropout"])


@contextlib.contextmanager
def _without_empty_groups(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """For a while without groups that have no parameters, as on a pipeline stage that has none of a kind: PyTorch looks
    up the settings of a group by the name of its first."""
    hidden = [(o, i, group) for o in optimizers for i, group in enumerate(o.param_groups) if not group["params"]]
    for optimizer in optimizers:
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    try:
        yield
    finally:
        for optimizer, i, group in hidden:
            optimizer.param_groups.insert(i, group)


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in ``directory`` whose name ends in the highest number, None if there is none; under
    torchrun rank 0 looks and every rank gets its answer. One that was interrupted is passed over."""
    found = [
        (int(number[1]), entry)
        for entry in (Path(directory).iterdir() if Path(directory).is_dir() else ())
        if (number := re.search(r"(\d+)$", entry.name)) and (entry / METADATA).is_file()
    ]
    latest: Path | None = agree(max(found)[1] if found else None)
    return latest
