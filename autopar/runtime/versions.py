"""Whether a parameter has changed: what was made of it before is then out of date."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar._compat import piece_of

_steps = WeakIdKeyDictionary()


@functools.cache
def count_steps() -> None:
    """From now on count the steps that optimizers take with DTensors."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, DTensor):
                _steps[p] = _steps.get(p, 0) + 1


def version(p: Tensor) -> tuple[int, ...]:
    """What changes when a parameter does: its version counter, that of a DTensor's piece, and how many optimizer steps
    it has seen, because foreach and fused optimizers leave the counters of DTensors as they are (tried, torch 2.13).
    Not seen are changes through ``p.data``, and by foreach functions on DTensors outside of an optimizer."""
    if not isinstance(p, DTensor):
        return (p._version,)
    return p._version, piece_of(p)._version, _steps.get(p, 0)
