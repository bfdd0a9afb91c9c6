"""Convolutions: batch, groups and channels can be split; positions see their neighbours and stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.sharding.layout import TensorSpec
from autopar.sharding.rule import Arg, Dims, Local, OpCall, Rule, make_rule
from autopar.sharding.rules.common import aten, linear_args, once
from autopar.sharding.rules.registry import register


@dataclass(frozen=True)
class _Terms:
    """Dims of the tensors of a convolution, and the sizes of their factors: groups ``g``, input channels ``i`` and
    output channels ``o`` of a group."""

    x: Dims
    weight: Dims
    bias: Dims
    out: Dims
    sizes: dict[str, int]


def _terms(weight: TensorSpec, transposed: bool, groups: int) -> _Terms:
    """A transposed convolution's weight has its channels the other way round."""
    positions: Dims = ((),) * (len(weight.shape) - 2)
    outer, inner = ("i", "o") if transposed else ("o", "i")
    return _Terms(
        (("n",), ("g", "i"), *positions),
        (("g", outer), (inner,), *positions),
        (("g", "o"),),
        (("n",), ("g", "o"), *positions),
        {"g": groups, outer: weight.shape[0] // groups, inner: weight.shape[1]},
    )


def _local_groups(x: Sequence[int], weight: Sequence[int], out: Sequence[int], transposed: bool) -> int:
    """Groups of a piece, by local shapes: how often the channels of one group go into all."""
    return (out if transposed else x)[1] // weight[1]


@register(aten.convolution.default)
def convolution(call: OpCall) -> Rule | None:
    """(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)"""
    if 0 in call.operands[1].shape:
        return None
    transposed, groups = call.args[6], call.args[8]
    terms = _terms(call.operands[1], transposed, groups)
    with_bias = isinstance(call.args[2], Arg)

    def localize(local: Local) -> Any:
        shapes = local.operand_shape(0), local.operand_shape(1), local.result_shape()
        changed: dict[str, Any] = {"arg8": _local_groups(*shapes, transposed)}
        if with_bias:
            changed["arg2"] = once(local, 2)
        return local.default(**changed)

    return make_rule(
        call,
        [terms.x, terms.weight, terms.bias][: len(call.operands)],
        [terms.out],
        reduced={"i": "sum"},
        sizes=terms.sizes,
        linear=linear_args(call, (0, 2), (1, 2)) if with_bias else linear_args(call, (0,), (1,)),
        localize=localize,
    )


@register(aten.convolution_backward.default)
def convolution_backward(call: OpCall) -> Rule | None:
    """(grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask) ->
    gradients of input, weight and bias; those that ``output_mask`` leaves out are no results."""
    if 0 in call.operands[2].shape:
        return None
    transposed, groups, mask = call.args[7], call.args[9], call.args[10]
    terms = _terms(call.operands[2], transposed, groups)

    def localize(local: Local) -> Any:
        out, x, weight = (local.operand_shape(i) for i in range(3))
        return local.default(arg3=[out[1]], arg9=_local_groups(x, weight, out, transposed))

    return make_rule(
        call,
        [terms.out, terms.x, terms.weight],
        [dims for dims, wanted in zip((terms.x, terms.weight, terms.bias), mask, strict=True) if wanted],
        reduced={"n": "sum", "o": "sum"},
        # the bias's gradient alone knows nothing of the input
        fixed=() if mask[0] or mask[1] else ("i",),
        sizes=terms.sizes,
        linear=linear_args(call, (0,)),
        localize=localize,
    )
