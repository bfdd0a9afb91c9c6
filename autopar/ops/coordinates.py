"""``autopar::starts``: from a rank's coordinates on the mesh to the global index where its shard begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SCHEMA = "(Tensor coordinates, SymInt[] weights) -> Tensor"


def _ndim(coordinates: Tensor, weights: Sequence[int]) -> int:
    n_axes = coordinates.shape[0] if coordinates.dim() == 1 else 0
    if coordinates.dtype != torch.int64 or n_axes == 0 or len(weights) % n_axes:
        raise ValueError(
            f"autopar::starts expects int64 coordinates [n_axes] and n_axes * ndim weights, found {coordinates.dtype} "
            f"{list(coordinates.shape)} and {len(weights)} weights"
        )
    return len(weights) // n_axes


@torch.library.custom_op("autopar::starts", mutates_args=(), schema=_SCHEMA)
def starts(coordinates: Tensor, weights: Sequence[int]) -> Tensor:
    """Global index of the first element of this rank's shard, one entry per dim of the tensor.

    A dim of extent ``n`` that one axis of degree ``d`` splits has weight ``n // d`` for that axis and 0 for the others.

    Args:
        coordinates: int64 [n_axes], the rank's place on each axis; an input of the emitted graph.
        weights: row-major [n_axes * ndim], elements by which a step along the axis moves the shard in the dim.

    Returns:
        int64 [ndim] on the device of ``coordinates``: ``starts[d] = sum_a coordinates[a] * weights[a * ndim + d]``.

    Raises:
        ValueError: coordinates are not a non-empty int64 vector, or the number of weights is no multiple of n_axes.
    """
    shape = coordinates.shape[0], _ndim(coordinates, weights)
    table = torch.tensor(weights, dtype=torch.int64, device=coordinates.device).view(shape)
    return (coordinates[:, None] * table).sum(dim=0)  # CUDA has no integer matrix product


@starts.register_fake
def _(coordinates: Tensor, weights: Sequence[int]) -> Tensor:
    return coordinates.new_empty(_ndim(coordinates, weights))
