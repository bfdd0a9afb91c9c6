"""The scan of state space models: batch, heads by groups, and the channels of a head; never the sequence."""

from __future__ import annotations

import torch

import autopar.ops.scan  # noqa: F401  defines the operators
from autopar.sharding.rule import OpCall, Rule, rule
from autopar.sharding.rules.registry import register

_INPUTS = "b _ (g r) p, b _ (g r), (g r), b _ g _, b _ g _"


@register(torch.ops.autopar.scan.default)
def scan(call: OpCall) -> Rule:
    return rule(call, f"{_INPUTS} -> b _ (g r) p", sizes={"g": call.operands[3].shape[2]})


@register(torch.ops.autopar.scan_backward.default)
def scan_backward(call: OpCall) -> Rule:
    return rule(
        call,
        f"b _ (g r) p, {_INPUTS} -> {_INPUTS}",
        sizes={"g": call.operands[4].shape[2]},
        reduced=dict.fromkeys(("b", "r", "p"), "sum"),
    )
