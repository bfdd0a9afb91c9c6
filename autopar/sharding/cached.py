"""Where the keys and values that a generation keeps rest.

A step of a generation reads all of them and computes next to nothing, so they lie where attention wants them: samples
over the axes of the batch, heads over the others. That is a rule and no decision, so that whoever fills a cache and
whoever reads it, for other shapes and at another time, agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.sharding.axes import BATCH_AXES, CONTEXT_AXES, TENSOR_AXIS, batch_pieces, degree
from autopar.sharding.layout import Layout, Mesh


def cached_layout(mesh: Mesh, shape: Sequence[int]) -> Layout:
    """The layout of keys or values [B, KV, T, D] that are kept: dim 0 over the axes of the batch, dim 1 over tp and cp,
    where they divide. Where there are too few heads for tp it takes samples too, if those divide."""
    batch, heads = shape[:2]
    by_axis: dict[str, int] = {}
    pieces = 1
    for axis in BATCH_AXES:
        if degree(mesh, axis) > 1 and batch % batch_pieces(mesh, axis) == 0:
            by_axis[axis], pieces = 0, batch_pieces(mesh, axis)
    of_heads = 1
    for axis in (TENSOR_AXIS, *CONTEXT_AXES):
        n = degree(mesh, axis)
        if n > 1 and heads % (of_heads * n) == 0:
            by_axis[axis], of_heads = 1, of_heads * n
        elif n > 1 and axis == TENSOR_AXIS and batch % (pieces * n) == 0:
            by_axis[axis] = 0
    return Layout.shard(len(shape), by_axis, mesh.names)
