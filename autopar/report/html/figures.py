"""The numbers of a plan that the page begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autopar.cluster import Cluster
from autopar.workload import Workload

if TYPE_CHECKING:
    from autopar.plan import Plan

_COUNTS = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def work_of(plan: Plan) -> tuple[int, str]:
    """How much a step works on, and of what: tokens, or samples where sequences have no known length; 0 if the plan
    does not say."""
    workload = Workload.from_dict(plan.workload)
    if workload.global_batch is None:
        return 0, "samples"
    if plan.prefill is not None:  # a token more of every sample
        return workload.global_batch, "tokens"
    if workload.seq_len is None:
        return workload.global_batch, "samples"
    return workload.global_batch * workload.seq_len, "tokens"


def mfu(plan: Plan) -> float | None:
    """The model's FLOPs over those that all devices could do in a step at their peak (Chowdhery et al., 2022: attention
    counted whole, nothing for what is made again); None if the plan does not say them."""
    if not plan.flops or not plan.step_time:
        return None
    device = Cluster.from_dict(plan.cluster).device
    seconds = sum(flops / device.peak(getattr(torch, dtype, torch.float32)) for dtype, flops in plan.flops.items())
    return seconds / plan.world_size / plan.step_time


def count_text(count: float) -> str:
    """A count with three digits: ``count_text(538_400) == "538k"``."""
    for unit, size in _COUNTS:
        if float(f"{count / size:.3g}") >= 1:
            return f"{float(f'{count / size:.3g}'):.12g}{unit}"
    return f"{float(f'{count:.3g}'):.12g}"
