"""Models with PEFT's adapters: the model that they are in, and how they are stored."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def is_adapted(model: nn.Module) -> bool:
    """Whether ``model`` is one of PEFT's (without importing PEFT for others)."""
    return any(cls.__module__.startswith("peft.") and cls.__name__ == "PeftModel" for cls in type(model).__mro__)


def core(model: nn.Module) -> nn.Module:
    """The model that adapters are in; one without adapters is its own."""
    found: nn.Module = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]
    return found


def adapter_names(model: nn.Module) -> dict[str, dict[str, str]]:
    """By adapter of a PEFT model, under which name each of its tensors is stored, and which one of ``model`` it is."""
    from peft import get_peft_model_state_dict

    shown = {name: torch.empty(tensor.shape, device="meta") for name, tensor in model.state_dict().items()}
    name_of = {id(tensor): name for name, tensor in shown.items()}
    found = {}
    for adapter in model.peft_config:  # type: ignore[union-attr]
        stored = get_peft_model_state_dict(model, state_dict=shown, adapter_name=adapter)
        found[adapter] = {key: name_of[id(tensor)] for key, tensor in stored.items()}
    return found


def save_adapters(model: nn.Module, tensors: Mapping[str, Tensor], directory: str | os.PathLike[str]) -> None:
    """Write a PEFT model's adapters and their configs, as its ``save_pretrained`` does; ``tensors`` are those of
    `adapter_names`, whole, by their names in the model."""
    model.save_pretrained(os.fspath(directory), state_dict=dict(tensors))  # type: ignore[operator]


def read_adapters(model: nn.Module, directory: str | os.PathLike[str]) -> dict[str, Tensor]:
    """What `save_adapters` wrote, whole, by the names in ``model``. KeyError for another adapter's."""
    from peft.utils import load_peft_weights

    found: dict[str, Tensor] = {}
    for adapter, names in adapter_names(model).items():
        folder = os.path.join(directory, adapter) if adapter != "default" else os.fspath(directory)
        stored = load_peft_weights(folder, device="cpu")
        found |= {names[key]: tensor for key, tensor in stored.items()}
    return found
