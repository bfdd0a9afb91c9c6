"""Reductions and scans over dims."""

from __future__ import annotations

import math
from typing import Any

from autopar.sharding.rule import Dims, Local, Localize, OpCall, Rule, make_rule
from autopar.sharding.rules.common import aten, dim_by_dim, linear_args, names, normalized, without
from autopar.sharding.rules.registry import register

# These take no dims: they reduce over all.
_OVER_ALL = (
    aten.all.default,
    aten.any.default,
    aten.max.default,
    aten.mean.default,
    aten.min.default,
    aten.prod.default,
    aten.sum.default,
)
_DIM_POSITION = {
    aten.linalg_vector_norm.default: 2,
    aten.norm.ScalarOpt_dim: 2,
}  # of the others it is the second argument


def _reduced_dims(call: OpCall) -> tuple[int, ...]:
    dims = None if call.target in _OVER_ALL else call.argument(_DIM_POSITION.get(call.target, 1), "dim")
    return normalized(dims, len(call.operands[0].shape))


def _reduction(call: OpCall, operation: str | None, *, linear: bool = False, localize: Localize | None = None) -> Rule:
    """Over some dims, kept with size 1 or dropped; without ``operation`` these cannot be split."""
    ndim, over = len(call.operands[0].shape), _reduced_dims(call)
    dims = names("d", ndim)
    keep = len(call.results[0].shape) == ndim
    result: Dims = tuple(() if d in over else dims[d] for d in range(ndim) if keep or d not in over)
    return make_rule(
        call,
        [dims if operation else without(dims, over)],
        [result] * len(call.results),
        reduced={f"d{d}": operation for d in over} if operation else None,
        linear=linear_args(call, (0,)) if linear else (),
        localize=localize,
    )


@register(
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.argmax.default,
    aten.argmin.default,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
    aten.max.dim,
    aten.min.dim,
    aten.norm.ScalarOpt_dim,
    aten.prod.default,
    aten.prod.dim_int,
    aten.std.correction,
    aten.var.correction,
    aten.var_mean.correction,
)
def unsplit_reduction(call: OpCall) -> Rule:
    return _reduction(call, None)


@register(aten.amax.default, aten.max.default)
def maximum_over(call: OpCall) -> Rule:
    return _reduction(call, "max")


@register(aten.amin.default, aten.min.default)
def minimum_over(call: OpCall) -> Rule:
    return _reduction(call, "min")


@register(aten.mean.default, aten.mean.dim)
def mean(call: OpCall) -> Rule:
    over = _reduced_dims(call)

    def localize(local: Local) -> Any:
        # the pieces are equal, so the mean is the mean of their means; a sum could overflow where a mean does not
        pieces = math.prod(local.operand_layouts[0].splits(local.mesh, d) for d in over)
        return local.default() if pieces == 1 else local.emit(aten.div.Scalar, local.default(), pieces)

    return _reduction(call, "sum", linear=True, localize=localize)


@register(aten.sum.default, aten.sum.dim_IntList)
def total(call: OpCall) -> Rule:
    return _reduction(call, "sum", linear=True)


@register(aten.cumsum.default)
def scan(call: OpCall) -> Rule:
    return dim_by_dim(call, normalized(call.args[1], len(call.results[0].shape)), linear=linear_args(call, (0,)))


@register(
    aten.cummax.default,
    aten.cummin.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
)
def along_dim(call: OpCall) -> Rule:
    """Sorting and the like: along one dim, which stays whole."""
    position = {aten.topk.default: 2, aten.sort.stable: 2}.get(call.target, 1)
    dim = call.argument(position, "dim", -1)
    return dim_by_dim(call, normalized(dim, len(call.results[0].shape)))
