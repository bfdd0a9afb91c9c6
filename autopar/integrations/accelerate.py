"""accelerate on parallel modules.

An `Accelerator` gives every process other samples and wraps models in DistributedDataParallel. A parallel module takes
the same global batch on every process and does the rest itself, so here every process is one that is alone with its
model: data loaders stay as they are, models are not wrapped, and nothing is gathered. The script stays as it was::

    accelerator = AutoparAccelerator(gradient_accumulation_steps=4)
    model = autopar.parallelize(model, hints=...)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Tried with accelerate 1.15, whose methods of the same names are replaced here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.errors import InputError
from autopar.integrations.checkpoints import load_state, save_state
from autopar.runtime.module import ParallelModule

#: What of an accelerator's own ways to distribute, or to compute in another precision, a plan does.
_INSTEAD = {
    "mixed_precision": 'parallelize(model, workload=Workload(param_dtype="bfloat16"))',
    "fsdp_plugin": "Hints(zero=3)",
    "deepspeed_plugin": "Hints(zero=3)",
    "megatron_lm_plugin": "Hints(tp=..., pp=...)",
    "parallelism_config": "Hints(tp=...)",
    "dynamo_backend": "parallelize(model, compile=True)",
    "dynamo_plugin": "parallelize(model, compile=True)",
}


class OneProcess(Accelerator):
    """An accelerator that is alone with its model, whatever process group that uses. Which process it is stays, so that
    one writes and the others do not."""

    #: Whether a batch takes `ParallelModule.train_step`, which reduces its gradients itself; asked before each.
    in_steps: Callable[[], bool] = staticmethod(lambda: False)

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
        holds = model.plan.schedule is None and not self.in_steps()
        return model.accumulate() if holds else contextlib.nullcontext()


class AutoparAccelerator(OneProcess):
    """An `Accelerator` for what `autopar.parallelize` returned, with the arguments of the original but those that do
    what a plan does. Every process passes the same global batches. ``save_state`` and ``load_state`` keep what
    `autopar.TrainingState` has, so that any plan for the model, on any number of ranks, goes on; ``save_model`` writes
    what ``from_pretrained`` reads. Gradients are clipped over all ranks. Pipelines train by ``model.train_step``, which
    takes the place of forward and ``accelerator.backward``.

    InputError for other models, and for arguments that would do again what a plan does.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, instead in _INSTEAD.items():
            if kwargs.get(name) not in (None, "no"):
                raise InputError(
                    f"the argument {name} is for a model that is not split yet",
                    expected=instead,
                    found=f"{name}={kwargs[name]!r}",
                    change=f"leave {name} out",
                )
        super().__init__(*args, **kwargs)
        if self.mixed_precision != "no":  # of accelerate's config file or environment
            raise InputError(
                f"mixed_precision={self.mixed_precision} is for a model that is not split yet",
                expected=_INSTEAD["mixed_precision"],
                found=f"mixed_precision={self.mixed_precision!r} from accelerate's configuration",
                change='pass mixed_precision="no"',
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The module itself. InputError for one that is no parallel module or takes other batches."""
        if not isinstance(model, ParallelModule) or getattr(model, "inputs", "global") == "local":
            raise InputError(
                "this accelerator is for parallel modules that take whole batches",
                expected='what autopar.parallelize returned, made with inputs="global"',
                found=f"{type(model).__name__}" + (', inputs="local"' if isinstance(model, ParallelModule) else ""),
                change="model = autopar.parallelize(model) before the optimizer is made and before prepare",
            )
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As accelerate does, for batches that are not larger than one process would have: a step of the optimizer is
        one of the schedule, not one for every process."""
        found = super().prepare_scheduler(scheduler)
        found.split_batches = True
        return found

    def gather(self, tensor: Any) -> Any:
        """Tensors whole, as they are on every process."""
        return pytree.tree_map_only(DTensor, lambda t: t.full_tensor(), tensor)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """One norm over all ranks and stages. InputError unless the parameters are all of one prepared module."""
        given = {id(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        self.unscale_gradients()
        for model in self._models:
            if given == {id(p) for p in model.parameters()}:
                return model.clip_grad_norm_(max_norm, norm_type)
        raise InputError(
            "gradients are clipped by the norm of a whole module",
            expected="model.parameters() of a prepared module",
            found=f"{len(given)} parameters",
            change="pass all of a module's parameters, or call torch.nn.utils.clip_grad_norm_ (without a pipeline)",
        )

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """The state dict with whole tensors on every rank."""
        found: dict[str, Any] = self.gather(model.state_dict())
        return found

    def save_model(
        self, model: Any, save_directory: str | os.PathLike[str], max_shard_size: int | str = "10GB", **kwargs: Any
    ) -> None:
        """`ParallelModule.save_pretrained`."""
        model.save_pretrained(save_directory, max_shard_size=max_shard_size)

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> str:
        """As accelerate does; modules and optimizers are written by all ranks together. Returns the directory."""
        with self._without_modules() as pairs:
            found = str(super().save_state(output_dir, **kwargs))
        for i, (model, optimizers) in enumerate(pairs):
            save_state(Path(found) / f"module_{i}", model, optimizers)
        return found

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """What `save_state` wrote, under this plan or another. WeightsError for a state of another kind."""
        if input_dir is None:
            raise InputError(
                "load_state needs a directory",
                expected="what save_state returned",
                found="None",
                change="load_state(directory)",
            )
        with self._without_modules() as pairs:
            super().load_state(input_dir, **kwargs)
        for i, (model, optimizers) in enumerate(pairs):
            load_state(Path(input_dir) / f"module_{i}", model, optimizers)

    @contextlib.contextmanager
    def _without_modules(self) -> Iterator[list[tuple[ParallelModule, list[torch.optim.Optimizer]]]]:
        """For a while without modules and their optimizers, which accelerate would write from one process: they are
        what it is entered as."""
        models, optimizers = self._models, self._optimizers
        pairs = []
        for model in models:
            own = {id(p) for p in model.parameters()}
            pairs.append((model, [_inner(o) for o in optimizers if _holds(o, own)]))
        self._models, self._optimizers = [], []
        try:
            yield pairs
        finally:
            self._models, self._optimizers = models, optimizers


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that accelerate has wrapped."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _holds(optimizer: torch.optim.Optimizer, parameters: set[int]) -> bool:
    """Whether an optimizer is for one of the parameters, given by id."""
    return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
