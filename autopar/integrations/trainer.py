"""transformers' ``Trainer`` on a parallel module.

Under torchrun the Trainer gives every process other samples, wraps the model in DistributedDataParallel, and multiplies
the loss by the number of processes, since DDP takes the mean of gradients. A parallel module does all of that itself:
every process passes the same global batch, and loss and gradients are those of the global batch. So here every process
is the one process of a Trainer that has the whole batch (`OneProcess`), and only rank 0 writes files.
``per_device_train_batch_size`` is then the global batch, and the loop is step by step that of one process.

Tried with transformers 5.24 and accelerate 1.15, whose methods of the same names are replaced here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_pt_utils import safe_globals

from autopar._compat import pytree
from autopar.errors import InputError
from autopar.integrations.accelerate import OneProcess
from autopar.integrations.checkpoints import load_state, load_weights, save_state
from autopar.integrations.training_arguments import Wanted, as_planned, check, split, warn_of_own_loss
from autopar.runtime.batches import check_alike, contents, describe
from autopar.runtime.module import ParallelModule
from autopar.runtime.process import host_group

if TYPE_CHECKING:
    from transformers import Trainer as _Mixed
else:
    _Mixed = object

#: The random state of all ranks, who draw alike, under the name that a Trainer of one process gives it.
RANDOM_STATE = "rng_state.pth"


class ParallelTrainerMixin(_Mixed):
    """Before a Trainer class, ``class MyTrainer(ParallelTrainerMixin, SFTTrainer)``, it makes it one for a parallel
    module; `AutoparTrainer` is that for transformers' own.

    ``model`` is what `autopar.parallelize` returned, or a model that is not split yet: that is split here, for batches
    like the first of ``train_dataset`` (or ``example_inputs``), by ``plan`` or as ``hints``, ``workload`` and
    ``cluster`` say; of the training arguments ``bf16`` is then ``Workload(param_dtype="bfloat16")`` and
    ``gradient_checkpointing`` ``Hints(recompute="full")``. ``model_init`` is split likewise.

    InputError for a module made with ``inputs="local"``, and for arguments that would do again what the plan does.
    Checkpoints hold the model as ``save_pretrained`` writes it, and what `autopar.TrainingState` has, so that any plan
    for the model, on any number of ranks, goes on from them.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *rest: Any,
        plan: Any = None,
        hints: Any = None,
        workload: Any = None,
        cluster: Any = None,
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args or transformers.TrainingArguments(output_dir="tmp_trainer")
        tokenizer = kwargs.get("processing_class", rest[1] if len(rest) > 1 else None)
        data = (train_dataset, data_collator, tokenizer)
        self.__dict__["_wanted"] = Wanted(args, data, plan, hints, workload, cluster, example_inputs)
        if model is not None:
            model = self._split(model)
        only, args = args.save_only_model, as_planned(args)
        args.save_only_model = True  # the Trainer knows no way to keep optimizers of models that it does not wrap
        try:
            super().__init__(model, args, data_collator, train_dataset, *rest, **kwargs)
        finally:
            args.save_only_model = only
            for module in (model, getattr(self, "model", None)):
                if isinstance(module, ParallelModule):
                    module.__dict__["in_trainer"] = False
        if self.model.plan.schedule is not None and self._own_loss is not None:
            raise InputError(
                "a pipeline computes the loss of the model itself",
                expected="a model that returns its loss",
                found=f"{self._own_loss}, and a plan with a pipeline",
                change="leave it out, or take a plan without a pipeline: Hints(pp=1)",
            )
        if self._own_loss is not None and self.model.plan.num_micro_batches > 1:
            warn_of_own_loss(self.model.plan, self._own_loss)

    def _split(self, model: Any) -> ParallelModule:
        """The parallel module of a model, which from now on answers the questions of a Trainer's constructor."""
        found = split(model, self._wanted)
        check(found, self._wanted.args)
        found.__dict__["in_trainer"] = True
        return found

    def call_model_init(self, trial: Any = None) -> Any:
        """The model of ``model_init``, split."""
        return self._split(super().call_model_init(trial))

    @property
    def _own_loss(self) -> str | None:
        """What computes the loss, in words, unless it is the model."""
        if self.compute_loss_func is not None:
            return "compute_loss_func"
        if self.label_smoother is not None:
            return "label_smoothing_factor"
        overridden = type(self).compute_loss is not transformers.Trainer.compute_loss
        return f"{type(self).__name__}.compute_loss" if overridden else None

    @property
    def _in_steps(self) -> bool:
        """Whether a batch takes `ParallelModule.train_step`, in the plan's micro-batches."""
        plan = self.model.plan
        return plan.schedule is not None or (plan.num_micro_batches > 1 and self._own_loss is None)

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer does, for one process."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = OneProcess
        self.accelerator.in_steps = lambda: self._in_steps
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

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a batch; returns its loss, of tokens that count in the whole optimizer step where the
        model takes their number."""
        if not self._in_steps:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        model.train()
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()
        given = self._prepare_inputs(inputs)
        scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        if scaled:
            given = {**given, "num_items_in_batch": num_items_in_batch}
        if self.loss_is_scaled_for_ga is not None:
            scaled = self.loss_is_scaled_for_ga
        loss = self.model.train_step(**given)
        if scaled:
            return loss
        if self.accelerator.sync_gradients:  # the last batch of the step: their mean, as the Trainer takes it
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= self.current_gradient_accumulation_steps
        return loss / self.current_gradient_accumulation_steps

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.model.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Called by all ranks: what the Trainer writes, the weights by the module itself."""
        folder = Path(output_dir or self.args.output_dir)
        self.model.save_pretrained(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self._wanted.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """All ranks write their pieces of the training state, rank 0 the schedule."""
        save_state(output_dir, self.model, self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            state = {
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "cpu": torch.random.get_rng_state(),
            }
            if torch.cuda.is_available():
                state["cuda"] = torch.cuda.get_rng_state()
            torch.save(state, Path(output_dir) / RANDOM_STATE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(resume_from_checkpoint, model or self.model)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        load_weights(self.state.best_model_checkpoint, self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and load_state(checkpoint, self.model, self.optimizer.optimizer):
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (file := Path(checkpoint) / RANDOM_STATE).is_file():
            return
        with safe_globals():
            state = torch.load(file, weights_only=True)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.random.set_rng_state(state["cpu"])
        if torch.cuda.is_available() and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])


class AutoparTrainer(ParallelTrainerMixin, transformers.Trainer):
    """transformers' Trainer for parallel modules; see `ParallelTrainerMixin`. All else is as there."""
