"""What the rules of several families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from autopar.sharding.layout import Layout, TensorSpec
from autopar.sharding.rule import Arg, Dims, Local, Localize, OpCall, Rule, make_rule

aten = torch.ops.aten


def names(prefix: str, count: int) -> Dims:
    """``count`` dims of one factor each."""
    return tuple((f"{prefix}{i}",) for i in range(count))


def without(dims: Dims, unsplit: Collection[int]) -> Dims:
    """``dims`` with the numbered ones made unsplittable."""
    return tuple(() if d in unsplit else factors for d, factors in enumerate(dims))


def aligned(spec: TensorSpec, dims: Dims, shape: Sequence[int]) -> Dims:
    """The dims of an operand that is broadcast to ``shape``, whose factors are ``dims``."""
    skip = len(shape) - len(spec.shape)
    return tuple(dims[skip + d] if size == shape[skip + d] else () for d, size in enumerate(spec.shape))


def normalized(dims: int | Iterable[int] | None, ndim: int) -> tuple[int, ...]:
    """A dim argument as non-negative dims; None and an empty list mean all of them."""
    given = [dims] if isinstance(dims, int) else list(dims or ())
    return tuple(d % ndim for d in given) if given and ndim else tuple(range(ndim))


def contiguous_args(local: Local, *positions: int) -> dict[str, Any]:
    """The tensors at ``positions`` of an operator's arguments as `Local.default` takes them, with the elements of a
    rank's piece in the order of its dims: some kernels take no other, or read it as if it was so (torch 2.13)."""
    given = {p: local.call.args[p] for p in positions if isinstance(local.call.args[p], Arg)}
    return {f"arg{p}": local.emit(aten.contiguous.default, local.substitute(a)) for p, a in given.items()}


def linear_args(call: OpCall, *groups: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups of argument positions as groups of operands. Only floating tensors can be `Partial`: a group that holds
    anything else (``x + 1`` is not linear in x), or whose result is not floating, is dropped."""
    if not all(spec.dtype.is_floating_point for spec in call.results):
        return []
    found = []
    for group in groups:
        args = [call.args[p] if p < len(call.args) else None for p in group]
        indices = tuple(a.index for a in args if isinstance(a, Arg))
        if len(indices) == len(group) and all(call.operands[i].dtype.is_floating_point for i in indices):
            found.append(indices)
    return found


def dim_by_dim(
    call: OpCall,
    unsplit: Collection[int] = (),
    *,
    linear: Sequence[Sequence[int]] = (),
    localize: Localize | None = None,
) -> Rule:
    """Dim i of every operand and result is one factor, except for the ``unsplit`` dims."""

    def terms(spec: TensorSpec) -> Dims:
        return without(names("d", len(spec.shape)), unsplit)

    return make_rule(
        call, [terms(s) for s in call.operands], [terms(s) for s in call.results], linear=linear, localize=localize
    )


def with_local_shape(argument: int) -> Callable[[Local], Any]:
    """A ``localize`` whose call differs only in the ``argument``-th argument: the local shape of the result."""
    return lambda local: local.default(**{f"arg{argument}": local.result_shape()})


def start_of(local: Local, layout: Layout, shape: Sequence[int], dim: int) -> Any:
    """Global index, an int64 scalar tensor, at which this rank's piece begins in ``dim``."""
    return local.emit(aten.select.int, local.starts(layout, shape), 0, dim)


def own_indices(local: Local, index: Any, layout: Layout, shape: Sequence[int], dim: int) -> tuple[Any, Any]:
    """Global ``index`` into a split ``dim`` as (index into this rank's piece, whether it lies outside of it).

    Those outside are clamped, so that they may be used and the outcome be masked.
    """
    emit, size = local.emit, layout.local_shape(local.mesh, shape)[dim]
    shifted = emit(aten.sub.Tensor, index, start_of(local, layout, shape, dim))
    outside = emit(aten.logical_or.default, emit(aten.lt.Scalar, shifted, 0), emit(aten.ge.Scalar, shifted, size))
    return emit(aten.clamp.default, shifted, 0, size - 1), outside


def zero_where(local: Local, value: Any, mask: Any) -> Any:
    """``value`` with zeros where ``mask`` (broadcast) holds."""
    return local.emit(aten.masked_fill.Scalar, value, mask, 0)


def once(local: Local, operand: int) -> Any:
    """An operand that is added to a `Partial` result: kept by the first rank, zero on the others. Axes over which it is
    itself `Partial` do not count."""
    own = local.operand_layouts[operand].partial
    axes = tuple(pair[0] for pair in local.result_layouts[0].partial if pair not in own)
    if not axes:
        return local.operands[operand]
    pieces = math.prod(local.mesh.degree(axis) for axis in axes)
    rank = start_of(local, Layout((axes,)), (pieces,), 0)  # a dim with one element a rank: its start is the rank
    return zero_where(local, local.operands[operand], local.emit(aten.ne.Scalar, rank, 0))


def takes_every(size: int, start: int, end: int | None, step: int) -> bool:
    """Whether a slice of a dim of ``size`` takes one of every ``step`` elements, more than one, from all of it."""
    return step > 1 and size % step == 0 and 0 <= start < step and (end is None or end >= size)
