"""``torch.autocast`` around a parallel module: what is captured inside has the casts in its graph."""

from __future__ import annotations

import contextlib

import torch


def autocast_state(device: str) -> str:
    """Whether autocast is on for a kind of device, and in which dtype; programs differ by it."""
    if not torch.is_autocast_enabled(device):
        return "no autocast"
    return f"autocast to {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"


def as_captured(device: str) -> contextlib.AbstractContextManager[None]:
    """Where emitted graphs run: nothing is cast besides what was when they were captured. Autocast would cast what the
    model keeps from it (rotary angles, in transformers) a second time."""
    return torch.autocast(device, enabled=False)
