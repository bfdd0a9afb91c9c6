"""Operators that work element by element, with broadcasting: every dim can be split, and some are linear."""

from __future__ import annotations

from typing import Any

import torch

from autopar.sharding.rule import OpCall, Rule, make_rule
from autopar.sharding.rules.common import aligned, aten, linear_args, names
from autopar.sharding.rules.registry import register

# Linear in none of their operands.
_POINTWISE = (
    aten.abs.default,
    aten.acos.default,
    aten.add.Scalar,
    aten.asin.default,
    aten.atan.default,
    aten.atan2.default,
    aten.bitwise_and.Scalar,
    aten.bitwise_and.Tensor,
    aten.bitwise_not.default,
    aten.bitwise_or.Scalar,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Scalar,
    aten.bitwise_xor.Tensor,
    aten.ceil.default,
    aten.clamp.Tensor,
    aten.clamp.default,
    aten.clamp_max.Tensor,
    aten.clamp_max.default,
    aten.clamp_min.Tensor,
    aten.clamp_min.default,
    aten.cos.default,
    aten.cosh.default,
    aten.div.Scalar_mode,
    aten.div.Tensor_mode,
    aten.elu.default,
    aten.eq.Scalar,
    aten.eq.Tensor,
    aten.erf.default,
    aten.exp.default,
    aten.exp2.default,
    aten.expm1.default,
    aten.fill.Scalar,
    aten.floor.default,
    aten.floor_divide.default,
    aten.fmod.Scalar,
    aten.fmod.Tensor,
    aten.ge.Scalar,
    aten.ge.Tensor,
    aten.gelu.default,
    aten.gt.Scalar,
    aten.gt.Tensor,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    aten.hardtanh.default,
    aten.isfinite.default,
    aten.isinf.default,
    aten.isnan.default,
    aten.le.Scalar,
    aten.le.Tensor,
    aten.leaky_relu.default,
    aten.log.default,
    aten.log10.default,
    aten.log1p.default,
    aten.log2.default,
    aten.logical_and.default,
    aten.logical_not.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.lt.Scalar,
    aten.lt.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.mish.default,
    aten.ne.Scalar,
    aten.ne.Tensor,
    aten.pow.Scalar,
    aten.pow.Tensor_Scalar,
    aten.pow.Tensor_Tensor,
    aten.reciprocal.default,
    aten.relu.default,
    aten.remainder.Scalar,
    aten.remainder.Tensor,
    aten.round.default,
    aten.rsqrt.default,
    aten.rsub.Scalar,
    aten.sgn.default,
    aten.sigmoid.default,
    aten.sign.default,
    aten.silu.default,
    aten.sin.default,
    aten.sinh.default,
    aten.softplus.default,
    aten.sqrt.default,
    aten.square.default,
    aten.sub.Scalar,
    aten.tan.default,
    aten.tanh.default,
    aten.trunc.default,
)

# The argument positions in which an operator is linear: jointly within a group, with all others held.
_LINEAR: dict[Any, tuple[tuple[int, ...], ...]] = {
    aten.add.Tensor: ((0, 1),),
    aten.addcdiv.default: ((0, 1),),
    aten.addcmul.default: ((0, 1), (0, 2)),
    aten.alias.default: ((0,),),
    aten.clone.default: ((0,),),
    aten.copy.default: ((1,),),
    aten.detach.default: ((0,),),
    aten.div.Scalar: ((0,),),
    aten.div.Tensor: ((0,),),
    aten.elu_backward.default: ((0,),),
    aten.gelu_backward.default: ((0,),),
    aten.hardsigmoid_backward.default: ((0,),),
    aten.hardswish_backward.default: ((0,),),
    aten.hardtanh_backward.default: ((0,),),
    aten.leaky_relu_backward.default: ((0,),),
    aten.lerp.Scalar: ((0, 1),),
    aten.lift_fresh_copy.default: ((0,),),
    aten.mul.Scalar: ((0,),),
    aten.mul.Tensor: ((0,), (1,)),
    aten.neg.default: ((0,),),
    aten.rsub.Tensor: ((0, 1),),
    aten.sigmoid_backward.default: ((0,),),
    aten.silu_backward.default: ((0,),),
    aten.softplus_backward.default: ((0,),),
    aten.sub.Tensor: ((0, 1),),
    aten.tanh_backward.default: ((0,),),
    aten.threshold_backward.default: ((0,),),
    aten.where.self: ((1, 2),),
}

# Those of which the operand is not the first argument or the result counts twice are linear if a number is zero:
# (position of the tensor, position of the number).
_LINEAR_IF_ZERO: dict[Any, tuple[int, int]] = {
    aten.masked_fill.Scalar: (0, 2),
    aten.where.ScalarOther: (1, 2),
    aten.where.ScalarSelf: (2, 1),
}


def _pointwise(call: OpCall, *groups: tuple[int, ...]) -> Rule:
    result = names("d", len(call.results[0].shape))
    operands = [aligned(spec, result, call.results[0].shape) for spec in call.operands]
    return make_rule(call, operands, [result] * len(call.results), linear=linear_args(call, *groups))


@register(*_POINTWISE)
def pointwise(call: OpCall) -> Rule:
    return _pointwise(call)


@register(*_LINEAR)
def linear_pointwise(call: OpCall) -> Rule:
    return _pointwise(call, *_LINEAR[call.target])


@register(aten._to_copy.default, aten.to.dtype)
def cast(call: OpCall) -> Rule:
    """Partial sums are cast to a wider dtype only: a sum is rounded once, not piece by piece."""
    return _pointwise(call, *([(0,)] if _holds(call.results[0].dtype, call.operands[0].dtype) else []))


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of ``narrow`` is one of ``wide``."""
    return torch.promote_types(wide, narrow) == wide and not (wide.is_floating_point and not narrow.is_floating_point)


@register(*_LINEAR_IF_ZERO)
def linear_if_zero(call: OpCall) -> Rule:
    tensor, number = _LINEAR_IF_ZERO[call.target]
    return _pointwise(call, *([(tensor,)] if call.args[number] == 0 else []))


@register(aten.fill.Tensor, aten.masked_fill.Tensor)
def linear_fill(call: OpCall) -> Rule:
    return _pointwise(call, (1,) if call.target is aten.fill.Tensor else (0, 2))
