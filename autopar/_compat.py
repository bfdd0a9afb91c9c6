"""The only place that imports private PyTorch names. Tried on torch 2.13.0; the names exist from 2.11 to 2.14."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "aot_export_joint_with_descriptors",
    "compiling",
    "core_aten_decompositions",
    "get_decompositions",
]


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true: model code then does not look at values (transformers' masks do)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def fake_mode_of(tensor: Any) -> FakeTensorMode | None:
    """The fake mode of a fake tensor, else None."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None
