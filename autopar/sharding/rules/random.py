"""Random operators, which draw by global element index: a piece draws what the whole would have drawn there."""

from __future__ import annotations

import torch

import autopar.ops.dropout
import autopar.ops.uniform  # noqa: F401  these two define the operators
from autopar.sharding.rule import OpCall, Rule, make_rule
from autopar.sharding.rules.common import linear_args, names
from autopar.sharding.rules.registry import register


@register(torch.ops.autopar.dropout.default)
def dropout(call: OpCall) -> Rule:
    """(x, seed, starts, p, stream, extent)"""
    shape = call.operands[0].shape
    dims = names("d", len(shape))
    return make_rule(
        call,
        [dims, ((),), ((),)],
        [dims],
        linear=linear_args(call, (0,)),
        localize=lambda local: local.default(arg2=local.starts(local.operand_layouts[0], shape)),
    )


@register(torch.ops.autopar.uniform.default)
def uniform(call: OpCall) -> Rule:
    """(x, seed, starts, stream, extent)"""
    shape = call.operands[0].shape
    dims = names("d", len(shape))
    return make_rule(
        call,
        [dims, ((),), ((),)],
        [dims],
        localize=lambda local: local.default(arg2=local.starts(local.operand_layouts[0], shape)),
    )
