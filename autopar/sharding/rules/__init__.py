"""One small file per operator family, each registering the sharding rules of its operators."""

from autopar.sharding.rules import (  # noqa: F401  importing a family registers its rules
    attention,
    cache,
    complex,
    constrain,
    convolution,
    experts,
    factory,
    group_norm,
    index,
    matmul,
    norm,
    pointwise,
    random,
    recurrent,
    reduction,
    scan,
    spatial,
    view,
    vocabulary,
    window,
)
from autopar.sharding.rules.registry import register, registered, replicated_rule, rule_for

__all__ = ["register", "registered", "replicated_rule", "rule_for"]
