"""What other libraries ask a model about itself, answered by a parallel module as by the model it was made from."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from autopar.capture.hf_adapters import core
from autopar.errors import InputError
from autopar.runtime.module import ParallelModule


class _Answering(ParallelModule):
    """A parallel module under the name of its model's class: transformers looks there for what a loss does with its
    labels, and in the arguments of ``forward`` for their names."""

    inputs: str

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Whether the model places and reduces by itself. Nobody but transformers' Trainer asks; InputError if it is
        not the one of `autopar.integrations.trainer`."""
        if not self.__dict__.get("in_trainer", False):
            raise InputError(
                "transformers' Trainer gives every process other samples and scales losses for DistributedDataParallel",
                expected="the Trainer of autopar.integrations.trainer, which is the same for a parallel module",
                found="another one",
                change="from autopar.integrations.trainer import AutoparTrainer, or put its ParallelTrainerMixin "
                "before yours",
            )
        return True


def answering(module: ParallelModule, model: nn.Module, inputs: str) -> ParallelModule:
    """``module`` itself, which from now on answers as ``model`` does, or as the model that its adapters are in;
    ``inputs`` are whose its batches are."""

    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    original = type(core(model))
    forward.__doc__ = ParallelModule.forward.__doc__
    forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
    module.__class__ = type(original.__name__, (_Answering,), {"forward": forward, "inputs": inputs})
    return module
