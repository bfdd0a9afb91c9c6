"""Mesh axes and layouts: where the pieces of a tensor lie.

A layout is one placement an axis, and where several axes split one dim, also their order. It is kept by dim (which axes
split it, outermost first) because that is what nesting, redistribution and local shapes ask for; `placements` gives the
view by axis that ``torch.distributed.tensor`` uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

#: Between the names of neighbouring axes over which one collective goes: "dp+cp".
JOINT = "+"
#: The axis over which micro-batches are laid out. Its pieces are made one after the other by the same ranks, so it is
#: the outermost axis of a program's mesh and no axis of the cluster.
MICRO_BATCH = "mb"


@dataclass(frozen=True)
class Mesh:
    """The named axes of a device mesh, outermost first: neighbouring ranks differ in the last axis."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names) or any(size < 1 for _, size in self.axes):
            raise ValueError(f"a mesh needs distinct axes of positive size, got {self.axes}")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Mesh], tuple[object]]:
        return Mesh, (self.axes,)  # without the hash, which is another one in every process

    @cached_property
    def _hash(self) -> int:
        return hash(self.axes)  # once: a key of large tables

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Degrees, in the order of `names`."""
        return tuple(size for _, size in self.axes)

    @cached_property
    def _degrees(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def degree(self, axis: str) -> int:
        """Size of one axis, or of several taken together ("dp+cp")."""
        return self._degrees[axis] if axis in self._degrees else math.prod(map(self.degree, axis.split(JOINT)))

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on ``axis``, or on axes taken together, of which they are neighbours on
        the last."""
        return math.prod(self.sizes[self.names.index(axis.split(JOINT)[-1]) + 1 :])

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Coordinates of ``rank``, one an axis."""
        return tuple(rank // self.stride(axis) % size for axis, size in self.axes)

    def without(self, axis: str) -> Mesh:
        """The mesh of the other axes."""
        return Mesh(tuple(pair for pair in self.axes if pair[0] != axis))


@dataclass(frozen=True)
class TensorSpec:
    """Global shape and dtype of a tensor. ``routed``: rows of experts (`autopar.ops.experts`), whose first two dims are
    declared with their means, and of which each rank has as many as it happens to have: where ranks have different
    experts the busiest has ``imbalance`` times the mean. ``by_expert``: dim 0 are the experts, of rows and of weights
    and their gradients alike."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    routed: bool = False
    by_expert: bool = False
    imbalance: float = 1.0

    @property
    def fixed(self) -> tuple[int, ...]:
        """The dims along which nothing is cut or gathered: rows are only exchanged between ranks, those of tokens for
        those of experts."""
        return (0, 1) if self.routed else ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, order=True)
class Layout:
    """``dims[d]`` are the axes that split dim ``d``, outermost first; ``partial`` the (axis, reduction) pairs over
    which the pieces still have to be reduced, sorted by axis. An axis named nowhere holds replicas."""

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def replicated(ndim: int) -> Layout:
        """The layout with a whole copy on every rank."""
        return Layout(((),) * ndim)

    @staticmethod
    def shard(ndim: int, by_axis: Mapping[str, int], order: Iterable[str] | None = None) -> Layout:
        """Split dim ``by_axis[axis]`` on each axis; ``order`` is the nesting order (default: that of the mapping)."""
        dims: list[tuple[str, ...]] = [()] * ndim
        for axis in by_axis if order is None else [axis for axis in order if axis in by_axis]:
            dims[by_axis[axis]] += (axis,)
        return Layout(tuple(dims))

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Axes that split some dim."""
        return tuple(axis for axes in self.dims for axis in axes)

    def dim_of(self, axis: str) -> int | None:
        """The dim that ``axis`` splits, if any."""
        return next((d for d, axes in enumerate(self.dims) if axis in axes), None)

    def splits(self, mesh: Mesh, dim: int) -> int:
        """In how many pieces ``dim`` is cut."""
        pieces = 1
        for axis in self.dims[dim]:
            pieces *= mesh.degree(axis)
        return pieces

    def local_shape(self, mesh: Mesh, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one rank's piece of a tensor of ``shape``."""
        return tuple(size // self.splits(mesh, d) for d, size in enumerate(shape))

    def divides(self, mesh: Mesh, shape: Sequence[int]) -> bool:
        """Whether every piece has the same shape."""
        return all(size % self.splits(mesh, d) == 0 for d, size in enumerate(shape))

    def pieces(self, mesh: Mesh) -> int:
        """In how many pieces a tensor is cut."""
        return math.prod(mesh.degree(axis) for axis in self.split_axes)

    def local_numel(self, mesh: Mesh, shape: Sequence[int]) -> int:
        """Number of elements of one rank's piece of a tensor of ``shape``."""
        return math.prod(shape) // self.pieces(mesh)

    def local_bytes(self, mesh: Mesh, spec: TensorSpec) -> int:
        """Bytes of one rank's piece, the largest."""
        mean = spec.bytes // self.pieces(mesh)
        return mean if spec.imbalance == 1.0 else int(mean * self.excess(spec))

    def excess(self, spec: TensorSpec) -> float:
        """The largest piece over the mean: more than 1 for rows of experts that ranks share out."""
        return spec.imbalance if spec.routed and self.dims[0] else 1.0

    def start_weights(self, mesh: Mesh, shape: Sequence[int]) -> list[int]:
        """Row-major [axes x dims] integers w with start[d] = sum_a coordinate[a] * w[a][d]: the global index of the
        first element of a rank's piece, as the operator ``autopar::starts`` takes them."""
        weights = [[0] * len(shape) for _ in mesh.names]
        for d, axes in enumerate(self.dims):
            extent = shape[d]
            for axis in axes:
                extent //= mesh.degree(axis)
                weights[mesh.names.index(axis)][d] = extent
        return [w for row in weights for w in row]

    def starts(self, mesh: Mesh, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Global index of the first element of ``rank``'s piece."""
        flat, ndim = self.start_weights(mesh, shape), len(shape)
        where = mesh.coordinates(rank)
        return tuple(sum(c * flat[a * ndim + d] for a, c in enumerate(where)) for d in range(ndim))

    def local_slice(self, mesh: Mesh, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """``rank``'s piece of a whole tensor (partial axes: as if replicated), a view."""
        begin = self.starts(mesh, tensor.shape, rank)
        extent = self.local_shape(mesh, tensor.shape)
        return tensor[tuple(slice(b, b + e) for b, e in zip(begin, extent, strict=True))]

    def __str__(self) -> str:
        parts = [f"{d}:{'+'.join(axes)}" for d, axes in enumerate(self.dims) if axes]
        parts += [f"partial({op}):{axis}" for axis, op in self.partial]
        return "[" + ", ".join(parts) + "]"
