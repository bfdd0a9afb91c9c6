"""transformers models made from a config alone, or with the weights beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import CommandError

CONFIG = "config.json"


def has_weights(path: Path) -> bool:
    """Whether ``path`` is a directory in which weights lie."""
    return any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))


def model_from_config(path: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a directory's ``config.json``, or of a config file, on the meta device: of the class that
    ``architectures`` names, else the one for causal language modelling. ``dtype`` replaces the config's. CommandError
    if transformers cannot make it."""
    config = _config(path)
    kind = _class(config, path)
    try:
        with torch.device("meta"):
            model: nn.Module = kind._from_config(config, dtype=dtype or config.dtype)
    except Exception as error:  # whatever a model's constructor makes of its config
        raise _unusable(path, f"The model of {path} cannot be made.", error) from error
    return model


def model_with_weights(path: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a directory with its weights. CommandError if transformers cannot load it."""
    kind = _class(_config(path), path)
    try:
        model: nn.Module = kind.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
    except Exception as error:  # files that are broken or of another model, in transformers' or safetensors' words
        raise _unusable(path, f"The weights in {path} cannot be loaded.", error) from error
    return model


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise CommandError(
            f"There is no {CONFIG} in {path}.",
            expected="a directory in Hugging Face format",
            found=", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "an empty directory",
            change="give the directory that save_pretrained wrote, or the config file itself",
        )
    try:
        return AutoConfig.from_pretrained(file, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # no JSON, an unknown model_type, a field that the config's class refuses
        raise _unusable(path, f"{file} is not a config of a model that transformers has.", error) from error


def _class(config: Any, path: Path) -> Any:
    """The class that ``architectures`` names, else that for causal language modelling."""
    import transformers

    name = (getattr(config, "architectures", None) or [None])[0]
    if name is not None:
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
        raise _unusable(path, f"transformers {transformers.__version__} has no model {name}.", "architectures: " + name)
    known = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in known:
        return known[type(config)]
    kinds = f"architectures: none, and {type(config).__name__} is of no causal language model"
    raise _unusable(path, f"The config in {path} names no model.", kinds)


def _unusable(path: Path, what: str, found: Exception | str) -> CommandError:
    text = found if isinstance(found, str) else f"{type(found).__name__}: {found}"
    return CommandError(
        what,
        expected="a config whose architectures names a class of transformers",
        found=" ".join(text.split())[:300],
        change="correct the file, or write a function that returns the model and pass package.module:function",
    )
