"""Scans, of state space models and of delta rules: batch, heads by groups, and the channels of a head; never the
sequence."""

from __future__ import annotations

import torch

import autopar.ops.delta
import autopar.ops.scan  # noqa: F401  these two define the operators
from autopar.sharding.rule import OpCall, Rule, rule
from autopar.sharding.rules.registry import register

#: The operators of these rules.
SCANS = frozenset(
    {
        torch.ops.autopar.delta_rule.default,
        torch.ops.autopar.delta_rule_backward.default,
        torch.ops.autopar.scan.default,
        torch.ops.autopar.scan_backward.default,
    }
)
_INPUTS = "b _ (g r) p, b _ (g r), (g r), b _ g _, b _ g _"
_DELTA = "b _ g _, b _ g _, b _ (g r) p, b _ (g r), b _ (g r)"


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


@register(torch.ops.autopar.delta_rule.default)
def delta_rule(call: OpCall) -> Rule:
    return rule(call, f"{_DELTA} -> b _ (g r) p", sizes={"g": call.operands[1].shape[2]})


@register(torch.ops.autopar.delta_rule_backward.default)
def delta_rule_backward(call: OpCall) -> Rule:
    return rule(
        call,
        f"b _ (g r) p, {_DELTA} -> {_DELTA}",
        sizes={"g": call.operands[2].shape[2]},
        reduced=dict.fromkeys(("r", "p"), "sum"),
    )
