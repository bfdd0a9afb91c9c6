"""``autopar::dropout``, whose mask does not depend on how tensors are split (`mask`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.mask import check, check_probability, keep_mask

_SCHEMA = "(Tensor x, Tensor seed, Tensor starts, float p, int stream, SymInt[] extent) -> Tensor"


@torch.library.custom_op("autopar::dropout", mutates_args=(), schema=_SCHEMA)
def dropout(x: Tensor, seed: Tensor, starts: Tensor, p: float, stream: int, extent: Sequence[int]) -> Tensor:
    """``x / (1 - p)`` where ``keep_mask`` is True, else 0; a shard draws its part of the whole tensor's mask.

    Args:
        x: floating point, any shape [ndim dims]; the shard.
        seed: int64 [2], the seed and the step. starts: int64 [ndim], global index of the shard's first element.
        p: probability of dropping an element. 0 gives a copy, 1 gives zeros.
        stream: number of the operator in the model.
        extent: shape of the whole tensor, ndim entries.

    Returns:
        Like ``x`` in shape, dtype and memory format. The gradient is the same operator applied to the gradient.

    Raises:
        ValueError: as ``keep_mask``.
    """
    keep = keep_mask(seed, starts, p, stream, x.shape, extent, x.device)
    out = torch.empty_like(x)
    torch.div(x, 1.0 - p if p < 1.0 else 1.0, out=out)
    return out.masked_fill_(keep.logical_not_(), 0.0)


@dropout.register_fake
def _(x: Tensor, seed: Tensor, starts: Tensor, p: float, stream: int, extent: Sequence[int]) -> Tensor:
    check_probability(p)
    check(seed, starts, x.shape, extent)
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, starts, ctx.p, ctx.stream, ctx.extent = inputs
    ctx.save_for_backward(seed, starts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    seed, starts = ctx.saved_tensors
    return dropout(grad, seed, starts, ctx.p, ctx.stream, ctx.extent), None, None, None, None, None


dropout.register_autograd(_backward, setup_context=_setup_context)
