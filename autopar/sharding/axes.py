"""The axes on which ranks are laid out, and what each of them is for (DESIGN section 8).

Ranks = pp x dp x cp x tp. ``dp`` splits the batch, ``cp`` the sequence (and heads inside attention), ``tp`` anything. A
parameter is split over tp alone where it is used; where it rests, ZeRO splits it over dp and cp too. With hybrid ZeRO,
which shards inside of groups of dp and replicates across them, the mesh has the groups as an axis of their own,
`REPLICATE_AXIS`, and `DATA_AXIS` are the ranks of one group: together they are the degree dp of a plan.

Experts may be spread over the axes of the tokens too: then the parameters of experts are split there where they are
used, each rank has all tokens of its experts, and ZeRO splits their state over the axes that are left. Of dp they take
the innermost ranks, which are an axis of their own, `EXPERT_AXIS`: to all else it is a part of dp. Of cp they take all
ranks or, on a mesh that has `CONTEXT_EXPERT_AXIS`, the innermost ones, which are a part of cp to all else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import NamedTuple

from autopar.sharding.layout import JOINT, Layout, Mesh

#: Across the groups of hybrid ZeRO: the batch is split, nothing rests split.
REPLICATE_AXIS = "dp_replicate"
#: The batch; ZeRO.
DATA_AXIS = "dp"
#: The ranks of dp over which experts are spread, where they are: the batch; experts; ZeRO of all other parameters.
EXPERT_AXIS = "dp_expert"
#: The sequence, and heads inside attention; ZeRO.
CONTEXT_AXIS = "cp"
#: The ranks of cp over which experts are spread, where these are a part of it: as cp; experts.
CONTEXT_EXPERT_AXIS = "cp_expert"
#: Anything.
TENSOR_AXIS = "tp"

#: Axes that split the batch, outermost first.
BATCH_AXES = (REPLICATE_AXIS, DATA_AXIS, EXPERT_AXIS)
#: Axes that split the sequence, outermost first.
CONTEXT_AXES = (CONTEXT_AXIS, CONTEXT_EXPERT_AXIS)
#: How the name of a group begins in an emitted graph, where it is that of an axis.
GROUP_PREFIX = "axis:"
#: Axes over which ZeRO may split what rests: but for those of experts, parameters are whole on them in use.
STATE_AXES = (DATA_AXIS, EXPERT_AXIS, *CONTEXT_AXES)
#: Axes of the tokens that are there to spread experts.
EXPERT_AXES = (EXPERT_AXIS, CONTEXT_EXPERT_AXIS)
#: Axes over which the tokens are split, so that gradients of parameters are sums over them.
TOKEN_AXES = (*BATCH_AXES, *CONTEXT_AXES)


class ExpertRanks(NamedTuple):
    """Over how many ranks of dp, and of cp where that is a part of it, experts are spread; ``cp`` is 1 where they are
    over all of cp or over none."""

    dp: int = 1
    cp: int = 1

    def refines(self, other: ExpertRanks) -> bool:
        """Whether the ranks of dp are a multiple of another's, over the same part of cp."""
        return self.dp % other.dp == 0 and self.cp == other.cp


#: Experts on every rank, or over all of cp.
NOWHERE = ExpertRanks()


def degree_of_plan(axis: str) -> str:
    """Which degree of a plan an axis is, or is a part of: dp of all `BATCH_AXES`, cp of all `CONTEXT_AXES`."""
    return DATA_AXIS if axis in BATCH_AXES else CONTEXT_AXIS if axis in CONTEXT_AXES else axis


def group_of(axis: str) -> str:
    """How the group of an axis is written in an emitted graph."""
    return GROUP_PREFIX + axis


@functools.cache
def joint_axes(mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """The `TOKEN_AXES` that one collective can go over: gradients are sums over all of them, and what ZeRO splits over
    dp and cp is gathered over both."""
    present = [axis for axis in TOKEN_AXES if degree(mesh, axis) > 1]
    return tuple(tuple(present[i:j]) for i in range(len(present)) for j in range(i + 2, len(present) + 1))


def is_of_tokens(axis: str) -> bool:
    """Whether ``axis``, or all of several taken together, are of `TOKEN_AXES`."""
    return all(part in TOKEN_AXES for part in axis.split(JOINT))


def make_mesh(
    dp: int, cp: int, tp: int, zero_group_size: int | None = None, experts: ExpertRanks = NOWHERE
) -> Mesh:
    """The device mesh of a pipeline stage. tp is innermost, so its ranks are neighbours. ``zero_group_size`` (a divisor
    of ``dp``) makes two axes of dp; the ranks that ``experts`` are spread over, of dp (a divisor of both) or of a part
    of cp (a divisor of ``cp``, other than itself), are axes too. cp is left out where its degree is 1, because nothing
    would be on it."""
    groups = () if zero_group_size in (None, dp) else ((REPLICATE_AXIS, dp // zero_group_size),)
    inside = dp // groups[0][1] if groups else dp
    parts = ((EXPERT_AXIS, experts.dp), (CONTEXT_AXIS, cp // experts.cp), (CONTEXT_EXPERT_AXIS, experts.cp))
    wider = ((axis, n) for axis, n in parts if n > 1)
    return Mesh((*groups, (DATA_AXIS, inside // experts.dp), *wider, (TENSOR_AXIS, tp)))


def batch_pieces(mesh: Mesh, axis: str) -> int:
    """In how many pieces the batch is cut by one of `BATCH_AXES` and those outside of it."""
    return _pieces(mesh, BATCH_AXES, axis)


def sequence_pieces(mesh: Mesh, axis: str) -> int:
    """In how many pieces the sequence is cut by one of `CONTEXT_AXES` and those outside of it."""
    return _pieces(mesh, CONTEXT_AXES, axis)


def _pieces(mesh: Mesh, axes: tuple[str, ...], last: str) -> int:
    return math.prod(degree(mesh, other) for other in axes[: axes.index(last) + 1])


def data_degree(mesh: Mesh) -> int:
    """Over how many ranks the batch is split: the degree dp of a plan."""
    return batch_pieces(mesh, BATCH_AXES[-1])


def data_rank(mesh: Mesh, rank: int) -> int:
    """Which of the `data_degree` parts of the batch ``rank`` works on; of a pipeline any stage's rank will do."""
    where, found = dict(zip(mesh.names, mesh.coordinates(rank), strict=True)), 0
    for axis in BATCH_AXES:
        found = found * degree(mesh, axis) + where.get(axis, 0)
    return found


def degree(mesh: Mesh, axis: str) -> int:
    """Size of an axis, 1 if the mesh has none of that name."""
    return mesh.degree(axis) if axis in mesh.names else 1


def degrees(mesh: Mesh) -> dict[str, int]:
    """The degrees dp, cp and tp that a mesh stands for."""
    return {
        DATA_AXIS: data_degree(mesh),
        CONTEXT_AXIS: sequence_pieces(mesh, CONTEXT_AXES[-1]),
        TENSOR_AXIS: degree(mesh, TENSOR_AXIS),
    }


def zero_group_size(mesh: Mesh) -> int | None:
    """Over how many ranks of dp hybrid ZeRO shards on ``mesh``; None without it."""
    return data_degree(mesh) // mesh.degree(REPLICATE_AXIS) if REPLICATE_AXIS in mesh.names else None


def expert_ranks(mesh: Mesh) -> ExpertRanks:
    """How ``mesh`` spreads experts."""
    return ExpertRanks(degree(mesh, EXPERT_AXIS), degree(mesh, CONTEXT_EXPERT_AXIS))


def spread_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of the tokens of more than one rank over which experts may be spread as well."""
    context = CONTEXT_EXPERT_AXIS if CONTEXT_EXPERT_AXIS in mesh.names else CONTEXT_AXIS
    return tuple(axis for axis in (EXPERT_AXIS, context) if degree(mesh, axis) > 1)


def state_axes(layout: Layout, used: Collection[str] = ()) -> tuple[str, ...]:
    """The axes over which ZeRO splits a parameter that rests in ``layout`` and is ``used`` split over those axes: what
    splits it in use too is no ZeRO. Empty if ZeRO splits it over none."""
    return tuple(axis for axis in STATE_AXES if axis in layout.split_axes and axis not in used)


def state_ranks(layout: Layout, mesh: Mesh, used: Collection[str] = ()) -> int:
    """Over how many ranks ZeRO splits a parameter that rests in ``layout`` and is ``used`` split over those axes."""
    return math.prod(mesh.degree(axis) for axis in state_axes(layout, used))
