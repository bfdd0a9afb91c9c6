"""Random operators, which draw by global element index: a piece draws what the whole would have drawn there."""

from __future__ import annotations

import torch

import autopar.ops.dropout  # noqa: F401  defines the operator
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
