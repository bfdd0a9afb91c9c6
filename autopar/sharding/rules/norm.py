"""Normalisations and softmax: what they normalise over stays whole."""

from __future__ import annotations

from autopar.sharding.rule import Dims, OpCall, Rule, make_rule
from autopar.sharding.rules.common import aten, contiguous_args, dim_by_dim, linear_args, names, normalized
from autopar.sharding.rules.registry import register


def _outer(call: OpCall, normalized_shape: list[int]) -> Dims:
    """Dims of the input and of the statistics, which have size 1 in place of the normalised dims."""
    outer = len(call.operands[0].shape) - len(normalized_shape)
    return names("d", outer) + ((),) * len(normalized_shape)


@register(aten._fused_rms_norm.default, aten.native_layer_norm.default)
def layer_norm(call: OpCall) -> Rule:
    dims = _outer(call, call.args[1])
    parameters = [((),) * len(spec.shape) for spec in call.operands[1:]]
    return make_rule(call, [dims, *parameters], [dims] * len(call.results))


@register(aten.native_layer_norm_backward.default)
def layer_norm_backward(call: OpCall) -> Rule:
    """(grad, input, normalized_shape, mean, rstd, weight, bias, output_mask) -> gradients of input, weight and bias.

    Those that ``output_mask`` leaves out are no results. The parameters' gradients are sums over the outer dims.
    """
    dims = _outer(call, call.args[2])
    parameters = [((),) * len(spec.shape) for spec in call.operands[4:]]
    operands = [dims] * 4 + parameters
    wants_input = call.args[7][0]
    results = [dims if i == 0 and wants_input else ((),) * len(spec.shape) for i, spec in enumerate(call.results)]
    reduced = {f: "sum" for factors in dims for f in factors}

    return make_rule(
        call, operands, results, reduced=reduced, linear=linear_args(call, (0,)),
        localize=lambda local: local.default(**contiguous_args(local, 3, 4)),
    )  # fmt: skip


@register(aten._log_softmax.default, aten._safe_softmax.default, aten._softmax.default)
def softmax(call: OpCall) -> Rule:
    return dim_by_dim(call, normalized(call.args[1], len(call.results[0].shape)))


@register(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default)
def softmax_backward(call: OpCall) -> Rule:
    return dim_by_dim(call, normalized(call.args[2], len(call.results[0].shape)), linear=linear_args(call, (0,)))
