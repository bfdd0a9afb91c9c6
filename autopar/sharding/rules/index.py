"""Lookups and scatters. A table split over its rows is looked up by masking: each rank answers for its own rows."""

from __future__ import annotations

from typing import Any

import torch

from autopar.sharding.rule import Arg, Dims, Local, OpCall, Rule, make_rule
from autopar.sharding.rules.common import aligned, aten, linear_args, names, once, own_indices, zero_where
from autopar.sharding.rules.registry import register


@register(aten.bucketize.Tensor)
def bucketize(call: OpCall) -> Rule:
    """(self, boundaries): each element finds its place by itself."""
    dims = names("d", len(call.operands[0].shape))
    return make_rule(call, [dims, ((),)], [dims])


@register(aten.embedding.default)
def embedding(call: OpCall) -> Rule:
    weight, index = call.operands
    dims = names("d", len(index.shape))

    def localize(local: Local) -> Any:
        layout = local.operand_layouts[0]
        if not layout.dims[0]:
            return local.default()
        rows, outside = own_indices(local, local.operands[1], layout, weight.shape, 0)
        found = local.emit(aten.embedding.default, local.operands[0], rows)
        return zero_where(local, found, local.emit(aten.unsqueeze.default, outside, -1))

    return make_rule(
        call,
        [(("v",), ("h",)), dims],
        [(*dims, ("h",))],
        reduced={"v": "sum"},
        linear=linear_args(call, (0,)),
        localize=localize,
    )


@register(aten.embedding_dense_backward.default)
def embedding_dense_backward(call: OpCall) -> Rule:
    """(grad, indices, num_weights, padding_idx, scale_grad_by_freq); the last needs all indices on every rank."""
    padding, by_frequency = call.args[3:5]
    dims = names("d", len(call.operands[1].shape))

    def localize(local: Local) -> Any:
        layout = local.result_layouts[0]
        if not layout.dims[0]:
            return local.default()
        rows, outside = own_indices(local, local.operands[1], layout, call.results[0].shape, 0)
        if padding >= 0:
            padded = local.emit(aten.eq.Scalar, local.operands[1], padding)
            outside = local.emit(aten.logical_or.default, outside, padded)
        grad = zero_where(local, local.operands[0], local.emit(aten.unsqueeze.default, outside, -1))
        return local.emit(call.target, grad, rows, local.result_shape()[0], -1, False)

    fixed = [f for (f,) in dims] + ["v"] if by_frequency else []
    return make_rule(
        call,
        [(*dims, ("h",)), dims],
        [(("v",), ("h",))],
        fixed=fixed,
        linear=linear_args(call, (0,)),
        reduced={} if by_frequency else {f: "sum" for (f,) in dims},
        localize=localize,
    )


def _beside(dim: int, *shapes: tuple[int, ...]) -> Dims:
    """Factors of the dims other than ``dim``, splittable where all ``shapes`` agree."""
    return tuple((f"d{d}",) if d != dim and len({s[d] for s in shapes}) == 1 else () for d in range(len(shapes[0])))


def _with(dims: Dims, dim: int, factor: str) -> Dims:
    return (*dims[:dim], (factor,), *dims[dim + 1 :])


def _as_column(local: Local, mask: Any, ndim: int, dim: int) -> Any:
    """A mask over ``dim`` of a tensor of ``ndim`` dims, shaped so that it broadcasts."""
    shape = [-1 if d == dim else 1 for d in range(ndim)]
    return local.emit(aten.reshape.default, mask, shape)


@register(aten.gather.default)
def gather(call: OpCall) -> Rule | None:
    """(self, dim, index): result[.., i, ..] = self[.., index[.., i, ..], ..]."""
    table, index = call.operands
    if not table.shape or len(table.shape) != len(index.shape):
        return None
    dim = call.args[1] % len(table.shape)
    dims = _beside(dim, table.shape, index.shape)

    def localize(local: Local) -> Any:
        layout = local.operand_layouts[0]
        if not layout.dims[dim]:
            return local.default()
        rows, outside = own_indices(local, local.operands[1], layout, table.shape, dim)
        return zero_where(local, local.emit(call.target, local.operands[0], dim, rows), outside)

    return make_rule(
        call,
        [_with(dims, dim, "v"), _with(dims, dim, "k")],
        [_with(dims, dim, "k")],
        reduced={"v": "sum"},
        linear=linear_args(call, (0,)),
        localize=localize,
    )


@register(aten.index_select.default)
def index_select(call: OpCall) -> Rule | None:
    table, index = call.operands
    if not table.shape or not index.shape:
        return None
    ndim = len(table.shape)
    dim = call.args[1] % ndim
    dims = names("d", ndim)

    def localize(local: Local) -> Any:
        layout = local.operand_layouts[0]
        if not layout.dims[dim]:
            return local.default()
        rows, outside = own_indices(local, local.operands[1], layout, table.shape, dim)
        found = local.emit(call.target, local.operands[0], dim, rows)
        return zero_where(local, found, _as_column(local, outside, ndim, dim))

    return make_rule(
        call,
        [_with(dims, dim, "v"), (("k",),)],
        [_with(dims, dim, "k")],
        reduced={"v": "sum"},
        linear=linear_args(call, (0,)),
        localize=localize,
    )


@register(aten.index_add.default)
def index_add(call: OpCall) -> Rule | None:
    """(self, dim, index, source): source is added to rows of self; split over the rows of source, self counts once."""
    table, index, source = call.operands
    if not table.shape or not index.shape or len(source.shape) != len(table.shape):
        return None
    ndim = len(table.shape)
    dim = call.args[1] % ndim
    dims = names("d", ndim)

    def localize(local: Local) -> Any:
        layout, base = local.result_layouts[0], once(local, 0)
        if not layout.dims[dim]:
            return local.default(arg0=base)
        rows, outside = own_indices(local, local.operands[1], layout, table.shape, dim)
        added = zero_where(local, local.operands[2], _as_column(local, outside, ndim, dim))
        return local.default(arg0=base, arg2=rows, arg3=added)

    return make_rule(
        call,
        [_with(dims, dim, "v"), (("k",),), _with(dims, dim, "k")],
        [_with(dims, dim, "v")],
        reduced={"k": "sum"},
        linear=linear_args(call, (0, 3)),
        localize=localize,
    )


@register(aten.scatter_add.default)
def scatter_add(call: OpCall) -> Rule | None:
    """(self, dim, index, src), the gradient of `gather`; as in `index_add`, self counts once."""
    table, index, source = call.operands
    if not table.shape or len(index.shape) != len(table.shape):
        return None
    dim = call.args[1] % len(table.shape)
    dims = _beside(dim, table.shape, index.shape, source.shape)
    # index may leave out the end of src; then a piece of it would meet the wrong piece of src
    column = _with(dims, dim, "k") if index.shape[dim] == source.shape[dim] else dims

    def localize(local: Local) -> Any:
        layout, base = local.result_layouts[0], once(local, 0)
        if not layout.dims[dim]:
            return local.default(arg0=base)
        rows, outside = own_indices(local, local.operands[1], layout, table.shape, dim)
        # src may be the larger one in dims that are not split
        extents = local.operand_shape(1)
        added = local.operands[2]
        for d, extent in enumerate(extents):
            if extent != local.operand_shape(2)[d]:
                added = local.emit(aten.slice.Tensor, added, d, 0, extent)
        return local.default(arg0=base, arg2=rows, arg3=zero_where(local, added, outside))

    return make_rule(
        call,
        [_with(dims, dim, "v"), column, column],
        [_with(dims, dim, "v")],
        reduced={"k": "sum"},
        linear=linear_args(call, (0, 3)),
        localize=localize,
    )


@register(aten.scatter.src, aten.scatter.value)
def scatter(call: OpCall) -> Rule | None:
    """(self, dim, index, src or value). The last writer wins, so what is written along ``dim`` cannot be split."""
    table, index = call.operands[:2]
    if not table.shape or len(index.shape) != len(table.shape):
        return None
    dim = call.args[1] % len(table.shape)
    dims = _beside(dim, *(spec.shape for spec in call.operands))

    def localize(local: Local) -> Any:
        layout, emit = local.result_layouts[0], local.emit
        if not layout.dims[dim]:
            return local.default()
        # what belongs to other ranks is written to one more row, cut off after
        size = local.result_shape()[dim]
        rows, outside = own_indices(local, local.operands[1], layout, table.shape, dim)
        rows = emit(aten.masked_fill.Scalar, rows, outside, size)
        padding = [0, 0] * (len(table.shape) - 1 - dim) + [0, 1]
        longer = emit(aten.constant_pad_nd.default, local.operands[0], padding)
        return emit(aten.slice.Tensor, local.default(arg0=longer, arg2=rows), dim, 0, size)

    group = [(0, 3)] if call.target is aten.scatter.src else [(0,)] if call.args[3] == 0 else []
    return make_rule(
        call,
        [_with(dims, dim, "v"), *[dims] * (len(call.operands) - 1)],
        [_with(dims, dim, "v")],
        linear=linear_args(call, *group),
        localize=localize,
    )


def _indexing(call: OpCall) -> tuple[Dims, list[Dims], Dims, tuple[int, ...], list[str]] | None:
    """For ``self[indices]``: dims of self, of every index, and of what is selected with its shape; the factors of the
    indices. Indexed dims of self are unsplittable. None if there is a mask among the indices."""
    given = [a for a in call.args[1] if isinstance(a, Arg)]
    if any(call.operands[a.index].dtype in (torch.bool, torch.uint8) for a in given):
        return None
    at = [d for d, a in enumerate(call.args[1]) if isinstance(a, Arg)]
    shape = torch.broadcast_shapes(*(call.operands[a.index].shape for a in given))
    picks = names("k", len(shape))
    indices = [aligned(call.operands[a.index], picks, shape) for a in given]
    table = tuple(() if d in at else (f"d{d}",) for d in range(len(call.operands[0].shape)))
    rest = [d for d in range(len(table)) if d not in at]
    # adjacent indices put their dims where they stand, others in front
    front = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    selected = (*(table[d] for d in rest[:front]), *picks, *(table[d] for d in rest[front:]))
    old = call.operands[0].shape
    selected_shape = (*(old[d] for d in rest[:front]), *shape, *(old[d] for d in rest[front:]))
    return table, indices, selected, selected_shape, [f for (f,) in picks]


@register(aten._unsafe_index.Tensor, aten.index.Tensor)
def index(call: OpCall) -> Rule | None:
    if (found := _indexing(call)) is None:
        return None
    table, indices, selected, _, _ = found
    return make_rule(call, [table, *indices], [selected], linear=linear_args(call, (0,)))


@register(aten._unsafe_index_put.default, aten.index_put.default)
def index_put(call: OpCall) -> Rule | None:
    """(self, indices, values, accumulate), with ``accumulate`` the gradient of `index`; self then counts once."""
    if (found := _indexing(call)) is None:
        return None
    table, indices, selected, shape, picks = found
    accumulate = call.argument(3, "accumulate", False)
    return make_rule(
        call,
        [table, *indices, aligned(call.operands[-1], selected, shape)],
        [table],
        reduced={f: "sum" for f in picks} if accumulate else {},
        fixed=() if accumulate else picks,
        linear=linear_args(call, (0, 2)),
        localize=lambda local: local.default(arg0=once(local, 0)),
    )
