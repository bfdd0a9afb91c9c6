"""Windows over a dim and diagonals: views that name some elements twice or not at all."""

from __future__ import annotations

from autopar.sharding.rule import Dims, OpCall, Rule, make_rule
from autopar.sharding.rules.common import aten, linear_args, names, without
from autopar.sharding.rules.registry import register


@register(aten.unfold.default)
def unfold(call: OpCall) -> Rule:
    """(self, dim, size, step): windows of ``size`` take the place of ``dim``, their elements a new last dim."""
    whole, windows = _windows(len(call.operands[0].shape), call.args[1])
    return make_rule(call, [whole], [windows], linear=linear_args(call, (0,)))


@register(aten.unfold_backward.default)
def unfold_backward(call: OpCall) -> Rule:
    """(grad, input_sizes, dim, size, step)"""
    whole, windows = _windows(len(call.results[0].shape), call.args[2])
    return make_rule(
        call,
        [windows],
        [whole],
        linear=linear_args(call, (0,)),
        localize=lambda local: local.default(arg1=local.result_shape()),
    )


def _windows(ndim: int, dim: int) -> tuple[Dims, Dims]:
    whole = without(names("d", ndim), [dim % ndim]) if ndim else ()
    return whole, (*whole, ())


def _diagonal(call: OpCall, ndim: int, first: int) -> tuple[Dims, Dims]:
    """Dims of the whole and of the diagonal, whose dim comes last; the arguments dim1 and dim2 begin at ``first``."""
    gone = [call.argument(first + i, name, i) % ndim for i, name in enumerate(("dim1", "dim2"))]
    dims = names("d", ndim)
    return without(dims, gone), (*(f for d, f in enumerate(dims) if d not in gone), ())


@register(aten.diagonal.default)
def diagonal(call: OpCall) -> Rule:
    """(self, offset, dim1, dim2)"""
    whole, picked = _diagonal(call, len(call.operands[0].shape), 2)
    return make_rule(call, [whole], [picked], linear=linear_args(call, (0,)))


@register(aten.diagonal_backward.default)
def diagonal_backward(call: OpCall) -> Rule:
    """(grad, input_sizes, offset, dim1, dim2)"""
    whole, picked = _diagonal(call, len(call.results[0].shape), 3)
    return make_rule(
        call,
        [picked],
        [whole],
        linear=linear_args(call, (0,)),
        localize=lambda local: local.default(arg1=local.result_shape()),
    )
