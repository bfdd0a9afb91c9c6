"""`Plan.with_hints` asks again by what is known of the model: its graph, and what has been solved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist.small_models import llama, mlp, tokens

import autopar
from autopar import Hints, Plan, seen
from autopar.solver import ahead, estimates, outer


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for every graph that is captured."""
    found: list[str] = []
    original = seen.capture_batch

    def counted(model: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(type(model).__name__)
        return original(model, *args, **kwargs)

    monkeypatch.setattr(seen, "capture_batch", counted)
    return found


def planned(model: Any, hints: Hints) -> Plan:
    return autopar.plan(model, "h100-sxm:1x4", hints=hints, example_inputs=torch.zeros(8, 16))


def test_a_graph_is_captured_once(captures: list[str]) -> None:
    """And the plan is that which a new call finds; a new call captures anew."""
    model = mlp()
    plan = planned(model, Hints())
    again = plan.with_hints(Hints(tp=2)).with_hints(Hints(zero=0))
    assert captures == ["Sequential"] and again.hints == {"tp": 2, "zero": 0}
    fresh = planned(model, Hints(tp=2, zero=0))
    assert captures == ["Sequential"] * 2
    assert again.to_dict() == fresh.to_dict()


def test_a_model_that_has_changed_is_captured_anew(captures: list[str]) -> None:
    model = mlp()
    plan = planned(model, Hints(dp=4, zero=0))
    model[0].requires_grad_(False)
    frozen = plan.with_hints(Hints(recompute="none"))
    assert len(captures) == 2 and frozen.memory["gradients"] < plan.memory["gradients"]
    other = planned(mlp(), Hints(dp=4))
    plan.with_hints(Hints(tp=1))
    assert len(captures) == 4 and other.degrees["dp"] == 4


def test_what_was_solved_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under hints that leave replicas as they are none is solved again, and of the candidates those alone that were not
    solved before. The plan is that of a new call."""
    monkeypatch.setenv(ahead.VARIABLE, "1")  # so that all is counted here
    replicas, attempts = [], []
    made, attempted = estimates.Replica, outer.attempt
    monkeypatch.setattr(estimates, "Replica", lambda *args: replicas.append(args) or made(*args))
    monkeypatch.setattr(outer, "attempt", lambda *args: attempts.append(args) or attempted(*args))
    model, batch = llama(), tokens()
    plan = autopar.plan(model, "cpu:2", hints=Hints(pp=1), example_inputs=batch)
    replicas.clear(), attempts.clear()
    limited = plan.with_hints(Hints(memory_limit=plan.peak_memory))
    whole = plan.with_hints(Hints(recompute="none"))
    few = len(attempts)
    assert not replicas
    for found in (limited, whole):
        hints = Hints.from_dict(found.hints)
        assert found.to_dict() == autopar.plan(model, "cpu:2", hints=hints, example_inputs=batch).to_dict()
    assert few < len(attempts) - few
