"""Every rule by property: on shards, for every strategy, an operator computes what it computes on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import rule_samples_vision  # noqa: F401  adds its samples
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_harness import call_of, check
from rule_samples import SAMPLES, Draw

from autopar.ops.rows import MAKE_ROWS, TAKE_ROWS
from autopar.sharding.rule import rule
from autopar.sharding.rules import registered, replicated_rule, rule_for

aten = torch.ops.aten
# values are whatever was there
UNDEFINED = (
    aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default
)
ROUTED = MAKE_ROWS | TAKE_ROWS  # in test_expert_rules.py
NOTHING_TO_SPLIT = (
    aten.all.default, aten.any.default, aten.as_strided_scatter.default, aten.prod.default, aten.scalar_tensor.default
)


@pytest.mark.parametrize("target", [target for target in registered() if target not in ROUTED], ids=str)
def test_shards_compute_the_whole(target: Any) -> None:
    tried = []

    @settings(max_examples=15, deadline=None, derandomize=True, database=None,
              suppress_health_check=[HealthCheck.too_slow, HealthCheck.nested_given])
    @given(st.data())
    def run(data: st.DataObject) -> None:
        torch.manual_seed(0)
        args, kwargs = SAMPLES[target](Draw(data), target)
        tried.append(check(target, args, kwargs, values=target not in UNDEFINED))

    run()
    assert sum(tried) or target in NOTHING_TO_SPLIT, "no sample could be split"


def test_every_rule_has_samples() -> None:
    assert set(registered()) == set(SAMPLES) | ROUTED


def _mm(**changes: Any) -> Any:
    return lambda call: rule(call, "m k, k n -> m n", **{"reduced": {"k": "sum"}, **changes})


@pytest.mark.parametrize("rule_of", [_mm(reduced={"k": "max"}), _mm(linear=[(0, 1)]),
                                     lambda call: rule(call, "m _, _ n -> n m")],
                         ids=["wrong reduction", "not linear", "swapped dims"])
def test_harness_rejects_wrong_rules(rule_of: Any) -> None:
    args = (torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64))
    with pytest.raises(AssertionError):
        check(aten.mm.default, args, {}, rule_of=rule_of)


def test_harness_rejects_a_split_scan() -> None:
    with pytest.raises(AssertionError):
        check(aten.cumsum.default, (torch.ones(4), 0), {}, rule_of=lambda call: rule(call, "n -> n"))


def test_lost_factor_is_refused() -> None:
    args = (torch.randn(4, 4), torch.randn(4, 4))
    with pytest.raises(ValueError, match="in no result"):
        check(aten.mm.default, args, {}, rule_of=_mm(reduced={}))


def test_operators_without_rule_run_replicated() -> None:
    matrix = torch.eye(4, dtype=torch.float64)
    assert rule_for(call_of(aten.linalg_inv_ex.default, matrix)) is None
    assert check(aten.linalg_inv_ex.default, (matrix,), {}, rule_of=replicated_rule) == 0
