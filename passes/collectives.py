"""Redistribution steps as functional collectives on axis-named groups.

Groups are written as ``axis:NAME`` and bound to process groups when a graph is loaded (bind.py), so the emitted graph
is the same on every rank and on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

import autopar.ops.permute  # noqa: F401  defines the operator
from autopar.ops.exchange import piece_sizes
from autopar.sharding.axes import GROUP_PREFIX, group_of
from autopar.sharding.layout import Mesh
from autopar.sharding.redistribute import Step

aten = torch.ops.aten
functional = torch.ops._c10d_functional

ALL_GATHER = functional.all_gather_into_tensor.default
REDUCE_SCATTER = functional.reduce_scatter_tensor.default
ALL_REDUCE = functional.all_reduce.default
ALL_TO_ALL = functional.all_to_all_single.default
WAIT = functional.wait_tensor.default
#: Every rank sends to one other: no functional collective until `bind` makes it one.
PERMUTE = torch.ops.autopar.permute.default

#: Functional collective -> its name in the cost model.
KINDS = {
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_REDUCE: "all_reduce",
    ALL_TO_ALL: "all_to_all",
    PERMUTE: "p2p",
}

Emit = Callable[..., Any]


def axis_of(group: str) -> str:
    """The axis of a group as `group_of` writes it."""
    return group.removeprefix(GROUP_PREFIX)


def group_argument(node: fx.Node) -> str:
    """The group of a collective node: its last argument."""
    return str(node.args[-1])


def operand(collective: fx.Node) -> fx.Node:
    """What a collective sends, without the copy that makes it contiguous: whoever lays it elsewhere needs none."""
    sent = collective.args[0]
    if isinstance(sent, fx.Node) and sent.target is aten.contiguous.default:
        sent = sent.args[0]
    assert isinstance(sent, fx.Node)
    return sent


def _cut_to_front(emit: Emit, x: Any, shape: Sequence[int], dim: int, n: int) -> tuple[Any, list[int]]:
    """Cut ``dim`` in n pieces and stack them along dim 0; returns the stack as [n * d0, ...] and one piece's shape."""
    piece = [*shape[:dim], shape[dim] // n, *shape[dim + 1 :]]
    if dim > 0:
        x = emit(aten.reshape.default, x, [*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :]])
        order = [dim, *range(dim), *range(dim + 1, len(shape) + 1)]
        x = emit(aten.permute.default, x, order)
        x = emit(aten.reshape.default, x, [n * piece[0], *piece[1:]])
    return x, piece


def _front_to_dim(emit: Emit, x: Any, piece: Sequence[int], dim: int, n: int) -> Any:
    """Inverse of stacking: [n * d0, ...] of n pieces -> the pieces side by side along ``dim``."""
    if dim == 0:
        return x
    x = emit(aten.reshape.default, x, [n, *piece])
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(piece) + 1)]
    x = emit(aten.permute.default, x, order)
    return emit(aten.reshape.default, x, [*piece[:dim], n * piece[dim], *piece[dim + 1 :]])


def emit_exchange(
    emit: Emit, rows: Any, step: Step, mesh: Mesh, shape: Sequence[int], coordinate: Any, index: Any, first: Any
) -> Any:
    """Write the all-to-all by which rows of experts (`autopar.ops.exchange`) of global ``shape`` go from the ranks that
    have their tokens to those that have their experts, or back. ``coordinate`` is this rank's on the step's axis, int64
    [1]; ``index`` that of all tokens of the group; ``first`` the first of the group's experts, None for 0."""
    n, to_experts = mesh.degree(step.axis), step.target == 0
    experts = (step.before if to_experts else step.after).local_shape(mesh, shape)[0]
    mean = math.prod(step.before.local_shape(mesh, shape)[:2]) // n
    own = index if first is None else emit(aten.sub.Tensor, index, first)
    call = (own, coordinate, experts, n, to_experts)
    sizes = emit(torch.ops.autopar.exchange_sizes.default, *call)
    sent, received = (emit(piece_sizes, sizes, which, mean) for which in (0, 1))
    packed = emit(torch.ops.autopar.exchange_pack.default, rows, *call)
    arrived = emit(WAIT, emit(ALL_TO_ALL, packed, received, sent, group_of(step.axis)))
    return emit(torch.ops.autopar.exchange_unpack.default, arrived, *call)


def emit_step(
    emit: Emit,
    x: Any,
    step: Step,
    mesh: Mesh,
    shape: Sequence[int],
    coordinate: Callable[[str], Any],
    routed: bool = False,
) -> Any:
    """Write one redistribution step. ``shape`` is the tensor's global shape, ``coordinate(axis)`` gives this rank's
    coordinate, int64 [1]. Of ``routed`` rows there are as many as there happen to be; their last dim alone is cut or
    gathered."""
    n = mesh.degree(step.axis)
    local = list(step.before.local_shape(mesh, shape))
    if routed:
        local[:2] = [1, -1]
    group = group_of(step.axis)
    if step.kind == "chunk":
        d = step.target
        assert d is not None
        x = emit(aten.reshape.default, x, [*local[:d], n, local[d] // n, *local[d + 1 :]])
        x = emit(aten.index_select.default, x, d, coordinate(step.axis))
        return emit(aten.squeeze.dim, x, d)
    if step.kind == "mask":
        kept = emit(aten.where.ScalarOther, emit(aten.eq.Scalar, coordinate(step.axis), 0), x, 0)
        return kept if local else emit(aten.squeeze.dim, kept, 0)  # a coordinate is [1], so a number becomes one
    if step.kind == "all_reduce":
        return emit(WAIT, emit(ALL_REDUCE, emit(aten.contiguous.default, x), step.op, group))
    if step.kind == "all_gather":
        assert step.source is not None
        x = emit(WAIT, emit(ALL_GATHER, emit(aten.contiguous.default, x), n, group))
        return _front_to_dim(emit, x, local, step.source, n)
    assert step.target is not None
    x, piece = _cut_to_front(emit, x, local, step.target, n)
    x = emit(aten.contiguous.default, x)
    if step.kind == "reduce_scatter":
        return emit(WAIT, emit(REDUCE_SCATTER, x, step.op, n, group))
    assert step.kind == "all_to_all" and step.source is not None
    rows = [piece[0]] * n
    x = emit(WAIT, emit(ALL_TO_ALL, x, rows, rows, group))
    return _front_to_dim(emit, x, piece, step.source, n)
