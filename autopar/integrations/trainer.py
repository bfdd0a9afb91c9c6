"""transformers' ``Trainer`` on a parallel module.

Under torchrun the Trainer gives every process other samples, wraps the model in DistributedDataParallel, and multiplies
the loss by the number of processes, since DDP takes the mean of gradients. A parallel module does all of that itself:
every process passes the same global batch, and loss and gradients are those of the global batch. So here every process
is the one process of a Trainer that has the whole batch (`_OneProcess`), and only rank 0 writes files.
``per_device_train_batch_size`` is then the global batch, and the loop is step by step that of one process.

Tried with transformers 5.24 and accelerate 1.15, whose methods of the same names are replaced here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.errors import InputError
from autopar.runtime.batches import check_alike, contents, describe
from autopar.runtime.module import ParallelModule
from autopar.runtime.process import host_group

if TYPE_CHECKING:
    from transformers import Trainer as _Mixed
else:
    _Mixed = object

#: Training arguments that would do again what a plan does, or something that only works on one process, and what does
#: it instead.
_INSTEAD = {
    "bf16": "Workload(param_dtype=torch.bfloat16)",
    "fp16": "Workload(param_dtype=torch.float16)",
    "bf16_full_eval": "model.to(torch.bfloat16) before parallelize",
    "fp16_full_eval": "model.to(torch.float16) before parallelize",
    "fsdp": "Hints(zero=3)",
    "deepspeed": "Hints(zero=3)",
    "parallelism_config": "Hints(tp=...)",
    "activation_checkpointing": "Hints(recompute=...)",
    "gradient_checkpointing": "Hints(recompute=...)",
    "torch_compile": "graphs as they are emitted",
    "auto_find_batch_size": "Hints(memory_limit=...), and a plan that fits",
    "load_best_model_at_end": "from_pretrained of the best checkpoint when training is done",
}


class ParallelTrainerMixin(_Mixed):
    """Before a Trainer class, ``class MyTrainer(ParallelTrainerMixin, SFTTrainer)``, it makes it one for a parallel
    module; `Trainer` is that for transformers' own.

    InputError for another model, for a module made with ``inputs="local"``, and for arguments that would do again what
    the plan does. Checkpoints hold weights (``save_only_model=True``), written by all ranks together.
    """

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        check(model, args)
        model.__dict__["in_trainer"] = True
        try:
            super().__init__(model, args, *rest, **kwargs)
        finally:
            model.__dict__["in_trainer"] = False

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer does, for one process."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _OneProcess
        self.gather_function = self.accelerator.gather_for_metrics

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an optimizer step, of all processes together."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def _prepare_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch on its device. RuntimeFailure, on all ranks, unless it is the same on all: a dataset that shuffles
        by itself would train on a mixture that no batch ever was."""
        found: Mapping[str, Any] = super()._prepare_inputs(inputs)
        tensors = [t for t in pytree.tree_leaves(dict(found)) if isinstance(t, Tensor)]
        check_alike(f"{describe((), found)} with contents {contents(tensors)}", host_group())
        return found

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return _whole(super()._clip_grad_norm(model))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return _whole(super()._get_grad_norm(model, grad_norm))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Called by all ranks: what the Trainer writes, the weights by the module itself."""
        folder = Path(output_dir or self.args.output_dir)
        self.model.save_pretrained(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")


class Trainer(ParallelTrainerMixin, transformers.Trainer):
    """transformers' Trainer for what `autopar.parallelize` returns; all else is as there."""


def check(model: object, args: Any) -> None:
    """InputError for a model or training arguments with which training would not be that of one process."""

    def refuse(what: str, expected: str, found: str, change: str) -> None:
        raise InputError(what, expected=expected, found=found, change=change)

    if not isinstance(model, ParallelModule):
        refuse("this Trainer is for parallel modules", "what autopar.parallelize returned", type(model).__name__,
               "pass model=autopar.parallelize(model), or use transformers.Trainer")  # fmt: skip
    if getattr(model, "inputs", "global") == "local":
        refuse("this Trainer gives all processes the same batch", 'a module made with inputs="global"',
               'inputs="local"', "leave inputs out; per_device_train_batch_size is then the global batch")  # fmt: skip
    for name, instead in _INSTEAD.items():
        if getattr(args, name, None):
            refuse(f"the training argument {name} is for a model that is not split yet", instead,
                   f"{name}={getattr(args, name)!r}", f"leave {name} out")  # fmt: skip
    if getattr(args, "save_strategy", "no") != "no" and not args.save_only_model:
        refuse("the Trainer writes the optimizer state of one process only", "checkpoints of weights alone",
               f"save_strategy={str(args.save_strategy)!r}",
               "save_only_model=True, or save_strategy='no' and torch.distributed.checkpoint")  # fmt: skip


def _whole(norm: Any) -> Any:
    """A norm as a plain number or tensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class _OneProcess(Accelerator):
    """An accelerator that is alone with its model, whatever process group that uses. Which process it is stays, so that
    one writes and the others do not."""

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def use_distributed(self) -> bool:
        return False

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.NO

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Of tensors what counts in a last batch that is short; other objects as they are."""
        return input_data if use_gather_object else super().gather_for_metrics(input_data)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return tensor

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor

    def no_sync(self, model: Any) -> Any:
        """The micro-batches of a step but the last."""
        return model.accumulate()
