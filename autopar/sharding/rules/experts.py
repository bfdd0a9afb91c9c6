"""Mixtures of experts: experts and tokens.

Routed rows (`autopar.ops.experts`) have a slot for every expert ``e`` and token. The tokens [T] are ``(c g)``: ``c`` is
what a declared slot counts and what is split, ``g`` the tokens that share one. Split by experts, a rank has the rows of
its experts, and what is combined from them is a partial sum; split by tokens, those of its tokens.
"""

from __future__ import annotations

from typing import Any

import torch

import autopar.ops.experts  # noqa: F401  defines the operators
from autopar.sharding.layout import Layout
from autopar.sharding.rule import Arg, Local, OpCall, Rule, rule
from autopar.sharding.rules.common import aten, linear_args, once, start_of
from autopar.sharding.rules.registry import register


def _localized(local: Local, rows: Layout, shape: tuple[int, ...], index: int, **replaced: Any) -> Any:
    """The operator with the index of experts counted from this rank's first one: those of others are then outside.
    ``rows`` is the layout of a tensor of ``shape`` whose dim 0 are the experts, ``index`` the place of the argument."""
    if not rows.dims[0]:
        return local.default(**replaced)
    found = local.substitute(local.call.args[index])
    own = local.emit(aten.sub.Tensor, found, start_of(local, rows, shape, 0))
    return local.default(**{f"arg{index}": own, **replaced})


def _weighted(call: OpCall) -> bool:
    return isinstance(call.args[2], Arg)


@register(torch.ops.autopar.dispatch.default)
def dispatch(call: OpCall) -> Rule:
    shape = call.results[0].shape

    def localize(local: Local) -> Any:
        return _localized(local, local.result_layouts[0], shape, 1, arg3=local.result_shape()[0])

    weights = ", (c g) _" if _weighted(call) else ""
    return rule(
        call,
        f"(c g) h, (c g) _{weights} -> e c h",
        fixed=("g",),
        linear=linear_args(call, (0,)),
        localize=localize,
    )


@register(torch.ops.autopar.combine.default)
def combine(call: OpCall) -> Rule:
    def localize(local: Local) -> Any:
        return _localized(local, local.operand_layouts[0], call.operands[0].shape, 1, arg3=local.operand_shape(0)[0])

    weights = ", (c g) _" if _weighted(call) else ""
    return rule(
        call,
        f"e c h, (c g) _{weights} -> (c g) h",
        reduced={"e": "sum"},
        fixed=("g",),
        linear=linear_args(call, (0,)),
        localize=localize,
    )


@register(torch.ops.autopar.combine_weights_backward.default)
def combine_weights_backward(call: OpCall) -> Rule:
    def localize(local: Local) -> Any:
        return _localized(local, local.operand_layouts[1], call.operands[1].shape, 2, arg3=local.operand_shape(1)[0])

    return rule(
        call,
        "(c g) h, e c h, (c g) _ -> (c g) _",
        reduced={"e": "sum", "h": "sum"},
        fixed=("g",),
        linear=linear_args(call, (0,), (1,)),
        localize=localize,
    )


@register(torch.ops.autopar.grouped_mm.default)
def grouped_mm(call: OpCall) -> Rule:
    return rule(
        call,
        "e c i, e i o, (c g) _ -> e c o",
        reduced={"i": "sum"},
        fixed=("g",),
        linear=linear_args(call, (0,), (1,)),
        localize=lambda local: _localized(local, local.operand_layouts[1], call.operands[1].shape, 2),
    )


@register(torch.ops.autopar.grouped_outer.default)
def grouped_outer(call: OpCall) -> Rule:
    shape = call.results[0].shape

    def localize(local: Local) -> Any:
        return _localized(local, local.result_layouts[0], shape, 2, arg3=local.result_shape()[0])

    return rule(
        call,
        "e c i, e c o, (c g) _ -> e i o",
        reduced={"c": "sum"},
        fixed=("g",),
        linear=linear_args(call, (0,), (1,)),
        localize=localize,
    )


@register(torch.ops.autopar.grouped_bias.default)
def grouped_bias(call: OpCall) -> Rule:
    def localize(local: Local) -> Any:
        layout, shape = local.operand_layouts[1], call.operands[1].shape
        return _localized(local, layout, shape, 2, arg1=once(local, 1))

    return rule(
        call,
        "e c o, e o, (c g) _ -> e c o",
        fixed=("g",),
        linear=linear_args(call, (0, 1)),
        localize=localize,
    )


@register(torch.ops.autopar.grouped_sum.default)
def grouped_sum(call: OpCall) -> Rule:
    shape = call.results[0].shape

    def localize(local: Local) -> Any:
        return _localized(local, local.result_layouts[0], shape, 1, arg2=local.result_shape()[0])

    return rule(
        call,
        "e c o, (c g) _ -> e o",
        reduced={"c": "sum"},
        fixed=("g",),
        linear=linear_args(call, (0,)),
        localize=localize,
    )
