"""``autopar::uniform``: random numbers in [0, 1) that do not depend on how tensors are split (`mask`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ops.mask import check, random_bits

#: Of a random number: what float32 resolves in [0, 1). float64 has no more, so that a reference in it draws the same.
BITS = 24


def _bits(dtype: torch.dtype) -> int:
    """How many bits ``dtype`` keeps without rounding up to 1."""
    return min(BITS, 1 - round(math.log2(torch.finfo(dtype).eps)))


@torch.library.custom_op(
    "autopar::uniform",
    mutates_args=(),
    schema="(Tensor x, Tensor seed, Tensor starts, int stream, SymInt[] extent) -> Tensor",
)
def uniform(x: Tensor, seed: Tensor, starts: Tensor, stream: int, extent: Sequence[int]) -> Tensor:
    """Random numbers uniform in [0, 1), of the shape, dtype and device of ``x``, whose values do not matter; a shard
    draws its part of the whole tensor's. Multiples of 2**-24, or as fine as a narrower dtype is below 1.

    Args:
        x: floating point, any shape [ndim dims]; the shard.
        seed: int64 [2], the seed and the step. starts: int64 [ndim], global index of the shard's first element.
        stream: number of the operator in the model.
        extent: shape of the whole tensor, ndim entries.

    Raises:
        ValueError: as `random_bits`.
    """
    count = _bits(x.dtype)
    return random_bits(seed, starts, stream, x.shape, extent, x.device, count).to(x.dtype).mul_(2.0**-count)


@uniform.register_fake
def _(x: Tensor, seed: Tensor, starts: Tensor, stream: int, extent: Sequence[int]) -> Tensor:
    check(seed, starts, x.shape, extent)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
