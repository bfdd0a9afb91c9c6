"""What knows how transformers names, converts and initialises weights; files are read and written in `runtime`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def rebuild(model: nn.Module) -> nn.Module:
    """A transformers model made again from the config of ``model``, on the device of the moment, drawing what its
    constructors draw.

    A config's dtype is that of the weights where the model was made by ``from_config``; one that was cast afterwards
    drew its weights in the default dtype.
    """
    config: Any = copy.deepcopy(model.config)
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    drawn = own if getattr(config, "dtype", None) == own else torch.get_default_dtype()
    made: nn.Module = type(model)._from_config(config, dtype=drawn)  # type: ignore[operator]
    return made


def initialize_in_place(model: nn.Module) -> None:
    """Run the model's own ``init_weights`` on memory that holds nothing yet."""
    whole: Any = model
    for module in whole.modules():
        module._is_hf_initialized = False
    whole.init_weights()
    whole.tie_weights()
