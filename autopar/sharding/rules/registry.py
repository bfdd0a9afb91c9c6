"""Which rule belongs to which operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.sharding.rule import OpCall, Rule, make_rule

RuleFunction = Callable[[OpCall], "Rule | None"]

_RULES: dict[Any, RuleFunction] = {}


def register(*targets: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Make the decorated function the rule of ``targets``. It returns None for calls that it does not cover."""

    def decorate(function: RuleFunction) -> RuleFunction:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"{target} has a rule already")
            _RULES[target] = function
        return function

    return decorate


def registered() -> list[Any]:
    """Every operator that has a rule, by name."""
    return sorted(_RULES, key=str)


def rule_for(call: OpCall) -> Rule | None:
    """The rule of ``call``, or None: no rule covers it, and it has to run replicated (`replicated_rule`)."""
    function = _RULES.get(call.target)
    return None if function is None else function(call)


def replicated_rule(call: OpCall) -> Rule:
    """The rule that splits nothing, for operators without one: whole operands in, whole results out, on every rank."""
    return make_rule(
        call, [((),) * len(spec.shape) for spec in call.operands], [((),) * len(spec.shape) for spec in call.results]
    )
