"""The identity that an inline hint leaves in the graph: any layout, of which the hint leaves some."""

from __future__ import annotations

import torch

from autopar.sharding.rule import Local, OpCall, Rule
from autopar.sharding.rules.common import dim_by_dim, linear_args
from autopar.sharding.rules.registry import register

CONSTRAIN = torch.ops.autopar.constrain.default


@register(CONSTRAIN)
def constrain(call: OpCall) -> Rule:
    return dim_by_dim(call, linear=linear_args(call, (0,)), localize=_itself)


def _itself(local: Local) -> object:
    """A rank reads what it would have copied."""
    return local.operands[0]
