"""Group norm: batch and groups can be split, what a group holds stays whole."""

from __future__ import annotations

from typing import Any

from autopar.sharding.rule import Arg, Dims, Local, OpCall, Rule, make_rule
from autopar.sharding.rules.common import aten, contiguous_args, linear_args
from autopar.sharding.rules.registry import register

_CHANNELS: Dims = (("g", "c"),)
_STATISTICS: Dims = (("n",), ("g",))


def _image(call: OpCall) -> Dims:
    return (("n",), ("g", "c"), *((),) * (len(call.operands[0].shape) - 2))


def _sizes(call: OpCall, channels: int, groups: int) -> dict[str, int]:
    return {"g": groups, "c": channels // groups}


def _counts(local: Local, first: int, groups: int) -> dict[str, Any]:
    """The arguments N, C, HxW and group, which begin at ``first``, of a piece. The kernels take contiguous tensors."""
    shape = local.operand_shape(0)
    pieces = local.call.operands[0].shape[1] // shape[1]
    return {f"arg{first}": shape[0], f"arg{first + 1}": shape[1], f"arg{first + 3}": groups // pieces}


@register(aten.native_group_norm.default)
def group_norm(call: OpCall) -> Rule | None:
    """(input, weight, bias, N, C, HxW, group, eps) -> output, mean and rstd [N, group]"""
    if 0 in call.operands[0].shape[1:]:
        return None
    groups, image = call.args[6], _image(call)
    return make_rule(
        call,
        [image, *[_CHANNELS] * (len(call.operands) - 1)],
        [image, _STATISTICS, _STATISTICS],
        fixed=("c",),
        sizes=_sizes(call, call.args[4], groups),
        localize=lambda local: local.default(**_counts(local, 3, groups), **contiguous_args(local, 0, 1, 2)),
    )


@register(aten.native_group_norm_backward.default)
def group_norm_backward(call: OpCall) -> Rule | None:
    """(grad, input, mean, rstd, weight, N, C, HxW, group, output_mask) -> gradients of input, weight and bias; those
    that ``output_mask`` leaves out are no results."""
    if 0 in call.operands[0].shape[1:]:
        return None
    groups, image = call.args[8], _image(call)
    weight = [_CHANNELS] if isinstance(call.args[4], Arg) else []
    return make_rule(
        call,
        [image, image, _STATISTICS, _STATISTICS, *weight],
        [dims for dims, wanted in zip((image, _CHANNELS, _CHANNELS), call.args[9], strict=True) if wanted],
        reduced={"n": "sum"},
        fixed=("c",),
        sizes=_sizes(call, call.args[6], groups),
        linear=linear_args(call, (0,)),
        localize=lambda local: local.default(**_counts(local, 5, groups), **contiguous_args(local, 0, 1, 2, 3, 4)),
    )
