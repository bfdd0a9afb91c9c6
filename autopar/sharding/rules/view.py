"""Views and other rearrangements. All of them are linear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.sharding.rule import Dims, Local, OpCall, Rule, make_rule
from autopar.sharding.rules.common import (
    aten,
    contiguous_args,
    dim_by_dim,
    linear_args,
    names,
    normalized,
    takes_every,
    without,
)
from autopar.sharding.rules.registry import register


def reshape_factors(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], list[str]]:
    """Factors of the dims of two shapes of the same elements in the same order: (of source, of target, sizes, unsplit).

    Walks both shapes from the outside in and gives to both the largest factor that what is left of their current dims
    has in common: [6, 4] to [2, 12] is (a b) c to a (b c). Where then neither rest is used up ([6, 4] to [4, 6] after
    the common 2), all up to the next common boundary is ``unsplit``. Dims of size 1 have no factor. No size may be 0.
    """
    ins: list[list[str]] = [[] for _ in source]
    outs: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    unsplit: list[str] = []

    def factor(size: int, *dims: list[str], split: bool = True) -> int:
        name = f"f{len(sizes)}"
        sizes[name] = size
        unsplit.extend([] if split else [name])
        for dim in dims:
            dim.append(name)
        return size

    sources = iter([(size, dim) for size, dim in zip(source, ins, strict=True) if size > 1])
    targets = iter([(size, dim) for size, dim in zip(target, outs, strict=True) if size > 1])
    left, right = 1, 1  # what is left of the current dims
    while True:
        if left == 1:
            left, in_dim = next(sources, (1, []))
        if right == 1:
            right, out_dim = next(targets, (1, []))
        if left == 1:  # then right is, too: there are as many elements in both
            return tuple(map(tuple, ins)), tuple(map(tuple, outs)), sizes, unsplit
        common = math.gcd(left, right)
        if common > 1:
            factor(common, in_dim, out_dim)
            left, right = left // common, right // common
        if left > 1 and right > 1:
            left, right = factor(left, in_dim, split=False), factor(right, out_dim, split=False)
            while left != right:
                size, dim = next(sources if left < right else targets)
                factor(size, dim, split=False)
                left, right = (left * size, right) if left < right else (left, right * size)
            left = right = 1


@register(
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.view.default,
)
def reshape(call: OpCall) -> Rule | None:
    if 0 in call.results[0].shape:
        return None
    source, target, sizes, unsplit = reshape_factors(call.operands[0].shape, call.results[0].shape)

    def localize(local: Local) -> Any:
        # reshape, because a piece may have strides that no view can have, and because a squeeze would also drop a dim
        # of which each rank has one element
        return local.emit(aten.reshape.default, local.operands[0], local.result_shape())

    return make_rule(
        call, [source], [target], sizes=sizes, fixed=unsplit, linear=linear_args(call, (0,)), localize=localize
    )


def _rearranged(call: OpCall, order: Sequence[int]) -> Rule:
    dims = names("d", len(order))
    return make_rule(call, [dims], [tuple(dims[d] for d in order)], linear=linear_args(call, (0,)))


@register(aten.permute.default)
def permute(call: OpCall) -> Rule:
    ndim = len(call.operands[0].shape)
    return _rearranged(call, [d % ndim for d in call.args[1]])


@register(aten.t.default)
def t(call: OpCall) -> Rule:
    return _rearranged(call, list(range(len(call.operands[0].shape)))[::-1])


@register(aten.transpose.int)
def transpose(call: OpCall) -> Rule:
    order = list(range(len(call.operands[0].shape)))
    if order:
        a, b = call.args[1], call.args[2]
        order[a], order[b] = order[b], order[a]
    return _rearranged(call, order)


@register(aten.expand.default)
def expand(call: OpCall) -> Rule:
    """Dims that come into being belong to the result alone: each rank expands to its own extent."""
    ndim = len(call.results[0].shape)
    skip = ndim - len(call.operands[0].shape)
    operand = tuple(
        (f"d{skip + d}",) if size == call.results[0].shape[skip + d] else ()
        for d, size in enumerate(call.operands[0].shape)
    )
    return make_rule(
        call,
        [operand],
        [names("d", ndim)],
        linear=linear_args(call, (0,)),
        localize=lambda local: local.default(arg1=local.result_shape()),
    )


@register(aten.repeat.default)
def repeat(call: OpCall) -> Rule:
    """Dims of size 1 are repeated as by `expand`; one that has more elements cannot be split where it is repeated."""
    repeats, shape = call.args[1], call.results[0].shape
    skip = len(repeats) - len(call.operands[0].shape)
    old = (1,) * skip + call.operands[0].shape
    dims = tuple((f"d{d}",) if old[d] == 1 or repeats[d] == 1 else () for d in range(len(shape)))
    operand = tuple(dims[d] if repeats[d] == 1 else () for d in range(skip, len(shape)))

    def localize(local: Local) -> Any:
        new = local.result_shape()
        return local.default(arg1=[n if old[d] > 1 or n == 1 else new[d] for d, n in enumerate(repeats)])

    return make_rule(call, [operand], [dims], linear=linear_args(call, (0,)), localize=localize)


@register(aten.view.dtype)
def view_dtype(call: OpCall) -> Rule:
    """The bits of every element as another dtype; where that is of another size, the last dim has more or fewer."""
    (source,), (result,) = call.operands, call.results
    dims = names("d", len(source.shape))
    dims = without(dims, [] if source.shape == result.shape else [len(dims) - 1])
    return make_rule(call, [dims], [dims], localize=lambda local: local.default(**contiguous_args(local, 0)))


def _copied(local: Local, **replaced: Any) -> Any:
    """The operator on a copy of its first operand: what is contiguous may still begin inside of a larger tensor, and
    offsets count from the beginning of that."""
    copy = local.emit(aten.clone.default, local.operands[0], memory_format=torch.contiguous_format)
    return local.default(arg0=copy, **replaced)


@register(aten.as_strided.default)
def as_strided(call: OpCall) -> Rule | None:
    """(self, size, stride, storage_offset), counted in a contiguous tensor (`capture.strides`). Outer dims of which
    every index stays within its own part pass through."""
    (source,), size, stride, offset = call.operands, *call.args[1:]
    if 0 in (*source.shape, *size):
        return None
    shape, inner = source.shape, [math.prod(source.shape[d + 1 :]) for d in range(len(source.shape))]
    last, outer = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)), 0
    for d in range(min(len(shape), len(size))):
        last -= (size[d] - 1) * stride[d]
        if size[d] != shape[d] or stride[d] != inner[d] or last >= inner[d]:
            break
        outer = d + 1
    ins, outs = (without(names("d", n), range(outer, n)) for n in (len(shape), len(size)))

    def localize(local: Local) -> Any:
        own, new = local.operand_shape(0), local.result_shape()
        strides = [math.prod(own[d + 1 :]) if d < outer else s for d, s in enumerate(stride)]
        return _copied(local, arg1=new, arg2=strides)

    return make_rule(call, [ins], [outs], linear=linear_args(call, (0,)), localize=localize)


@register(aten.as_strided_scatter.default)
def as_strided_scatter(call: OpCall) -> Rule:
    """(self, src, size, stride, storage_offset), counted in a contiguous tensor; nothing is split."""
    dims = [((),) * len(spec.shape) for spec in (*call.operands, *call.results)]
    return make_rule(call, dims[:-1], dims[-1:], localize=_copied)


@register(aten.select.int)
def select(call: OpCall) -> Rule:
    ndim = len(call.operands[0].shape)
    dims, dim = names("d", ndim), call.args[1] % ndim
    return make_rule(call, [without(dims, [dim])], [dims[:dim] + dims[dim + 1 :]], linear=linear_args(call, (0,)))


@register(aten.select_backward.default)
def select_backward(call: OpCall) -> Rule:
    ndim = len(call.results[0].shape)
    dims, dim = names("d", ndim), call.args[2] % ndim
    return make_rule(
        call,
        [dims[:dim] + dims[dim + 1 :]],
        [without(dims, [dim])],
        linear=linear_args(call, (0,)),
        localize=lambda local: local.default(arg1=local.result_shape()),
    )


@register(aten.slice.Tensor)
def slice_(call: OpCall) -> Rule:
    """A slice that takes all of its dim leaves it as splittable as the others: its bounds hold for any piece; and so
    does one that takes every so many-th of it."""
    dim = call.argument(1, "dim", 0) % len(call.operands[0].shape)
    start, end, step = call.argument(2, "start"), call.argument(3, "end"), call.argument(4, "step", 1)
    if takes_every(call.operands[0].shape[dim], start or 0, end, step):
        dims = names("d", len(call.operands[0].shape))
        every = (*dims[:dim], (*dims[dim], "step"), *dims[dim + 1 :])
        return make_rule(call, [every], [dims], fixed=["step"], linear=linear_args(call, (0,)))
    unsplit = [dim] if call.operands[0].shape != call.results[0].shape else []
    return dim_by_dim(call, unsplit, linear=linear_args(call, (0,)))


@register(aten.slice_backward.default)
def slice_backward(call: OpCall) -> Rule:
    dim = call.args[2] % len(call.results[0].shape)
    unsplit = [dim] if call.operands[0].shape != call.results[0].shape else []
    return dim_by_dim(
        call, unsplit, linear=linear_args(call, (0,)), localize=lambda local: local.default(arg1=local.result_shape())
    )


@register(aten.slice_scatter.default)
def slice_scatter(call: OpCall) -> Rule:
    dim = call.argument(2, "dim", 0) % len(call.results[0].shape)
    unsplit = [dim] if call.operands[0].shape != call.operands[1].shape else []
    return dim_by_dim(call, unsplit, linear=linear_args(call, (0, 1)))


@register(aten.select_scatter.default)
def select_scatter(call: OpCall) -> Rule:
    ndim = len(call.results[0].shape)
    dims, dim = names("d", ndim), call.args[2] % ndim
    whole = without(dims, [dim])
    return make_rule(call, [whole, dims[:dim] + dims[dim + 1 :]], [whole], linear=linear_args(call, (0, 1)))


@register(aten.cat.default)
def cat(call: OpCall) -> Rule | None:
    ndim = len(call.results[0].shape)
    if any(len(spec.shape) != ndim for spec in call.operands):
        return None  # torch skips empty vectors among tensors of any number of dims
    return dim_by_dim(call, [call.argument(1, "dim", 0) % ndim], linear=_all_operands(call))


@register(aten.stack.default)
def stack(call: OpCall) -> Rule:
    ndim = len(call.results[0].shape)
    dims, dim = names("d", ndim), call.argument(1, "dim", 0) % ndim
    return make_rule(
        call, [dims[:dim] + dims[dim + 1 :]] * len(call.operands), [without(dims, [dim])], linear=_all_operands(call)
    )


def _all_operands(call: OpCall) -> list[tuple[int, ...]]:
    floating = all(spec.dtype.is_floating_point for spec in call.operands)
    return [tuple(range(len(call.operands)))] if floating else []


@register(aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor)
def split(call: OpCall) -> Rule:
    dim = call.argument(2, "dim", 0) % len(call.operands[0].shape)
    return dim_by_dim(call, [dim], linear=linear_args(call, (0,)))


@register(aten.unbind.int)
def unbind(call: OpCall) -> Rule:
    ndim = len(call.operands[0].shape)
    dims, dim = names("d", ndim), call.argument(1, "dim", 0) % ndim
    return make_rule(
        call, [without(dims, [dim])], [dims[:dim] + dims[dim + 1 :]] * len(call.results), linear=linear_args(call, (0,))
    )


@register(aten.constant_pad_nd.default)
def constant_pad_nd(call: OpCall) -> Rule:
    pad, ndim = call.args[1], len(call.results[0].shape)  # (before, after) a dim, the last dim first
    padded = [ndim - 1 - i // 2 for i, n in enumerate(pad) if n]
    return dim_by_dim(call, padded, linear=linear_args(call, (0,)) if call.argument(2, "value", 0) == 0 else ())


@register(aten.flip.default)
def flip(call: OpCall) -> Rule:
    ndim = len(call.results[0].shape)
    return dim_by_dim(call, [d % ndim for d in call.args[1]], linear=linear_args(call, (0,)))


@register(aten.roll.default)
def roll(call: OpCall) -> Rule:
    """Without dims, all are rolled as one."""
    unsplit = normalized(call.argument(2, "dims"), len(call.results[0].shape))
    return dim_by_dim(call, unsplit, linear=linear_args(call, (0,)))


@register(aten.tril.default, aten.triu.default)
def triangle(call: OpCall) -> Rule:
    ndim = len(call.results[0].shape)
    return dim_by_dim(call, [ndim - 2, ndim - 1], linear=linear_args(call, (0,)))
