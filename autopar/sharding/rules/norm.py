"""Normalisations and softmax: what they normalise over stays whole."""

from __future__ import annotations

from autopar.sharding.rule import Dims, OpCall, Rule, make_rule
from autopar.sharding.rules.common import aten, dim_by_dim, linear_args, names, normalized
from autopar.sharding.rules.registry import register


def _outer(call: OpCall, spec_index: int, normalized_shape: list[int]) -> tuple[int, Dims]:
    """Number of dims before the normalised ones, and the dims of a tensor shaped like the input."""
    ndim = len(call.operands[spec_index].shape)
    outer = ndim - len(normalized_shape)
    return outer, names("d", outer) + ((),) * (ndim - outer)


@register(aten._fused_rms_norm.default, aten.native_layer_norm.default)
def layer_norm(call: OpCall) -> Rule:
    outer, dims = _outer(call, 0, call.args[1])
    parameters = [((),) * len(spec.shape) for spec in call.operands[1:]]
    statistics = [dims[:outer] + ((),) * (len(spec.shape) - outer) for spec in call.results[1:]]
    return make_rule(call, [dims, *parameters], [dims, *statistics])


@register(aten._fused_rms_norm_backward.default, aten.native_layer_norm_backward.default)
def layer_norm_backward(call: OpCall) -> Rule:
    """(grad, input, normalized_shape, statistics..., parameters..., output_mask) -> gradients of input and parameters, those
    that ``output_mask`` leaves out being no results. The parameters' gradients are sums over the outer dims."""
    outer, dims = _outer(call, 1, call.args[2])
    statistics = 1 if call.target is aten._fused_rms_norm_backward.default else 2
    operands = [dims, dims]
    operands += [dims[:outer] + ((),) * (len(spec.shape) - outer) for spec in call.operands[2:2 + statistics]]
    operands += [((),) * len(spec.shape) for spec in call.operands[2 + statistics:]]
    wants_input = call.args[-1][0]
    results = [dims if i == 0 and wants_input else ((),) * len(spec.shape) for i, spec in enumerate(call.results)]
    return make_rule(call, operands, results, reduced={f: "sum" for (f,) in dims[:outer]}, linear=linear_args(call, (0,)))


@register(aten._log_softmax.default, aten._safe_softmax.default, aten._softmax.default)
def softmax(call: OpCall) -> Rule:
    return dim_by_dim(call, normalized(call.args[1], len(call.results[0].shape)))


@register(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default)
def softmax_backward(call: OpCall) -> Rule:
    return dim_by_dim(call, normalized(call.args[2], len(call.results[0].shape)), linear=linear_args(call, (0,)))
