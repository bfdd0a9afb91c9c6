"""Keys and values that a generation keeps: batch and heads can be split, tokens stay together."""

from __future__ import annotations

import torch

import autopar.ops.cache  # noqa: F401  defines the operator
from autopar.sharding.rule import OpCall, Rule, rule
from autopar.sharding.rules.registry import register


@register(torch.ops.autopar.cache_write.default)
def cache_write(call: OpCall) -> Rule:
    """(cache, new, start)"""
    return rule(call, "b h _ d, b h _ d,  -> b h _ d")
