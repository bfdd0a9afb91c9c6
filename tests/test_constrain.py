"""`autopar.constrain`: inline hints that a plan keeps, and that are nothing outside of one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

import autopar
from autopar import Hints
from autopar.errors import HintError
from autopar.plan import Plan

BATCH, LENGTH, HIDDEN, WIDE = 4, 8, 16, 64


class Mlp(nn.Module):
    """Two layers up and down, the tensor between them constrained as ``placements`` say."""

    def __init__(self, **placements: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.placements = placements

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error: x and y are [batch, sequence, hidden]."""
        between = autopar.constrain(F.relu(self.up(x)), **self.placements)
        return F.mse_loss(self.down(between), y)


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: torch.randn(BATCH, LENGTH, HIDDEN, dtype=dtype) for name in ("x", "y")}


def planned(hints: Hints, ranks: int = 2, **placements: Any) -> Plan:
    return autopar.plan(Mlp(**placements), f"cpu:1x{ranks}", hints=hints, example_inputs=batch(torch.float32))


def exchanges(plan: Plan) -> Counter[tuple[str, str]]:
    """How many collectives of a kind an axis has."""
    return Counter({(c.kind, c.axis): c.count for c in plan.collectives if not c.purpose.startswith("grad")})


def test_it_is_nothing_outside_of_a_plan() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    assert autopar.constrain(x, tp=Shard(1), dp=None) is x


@pytest.mark.slow
def test_it_is_nothing_in_what_torch_compiles() -> None:
    """One graph, and gradients go through."""
    model, data = Mlp(tp=Shard(-1)), batch(torch.float32)
    model(**data).backward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradient, model.up.weight.grad = model.up.weight.grad, None
    compiled(**data).backward()
    assert gradient is not None and torch.equal(gradient, model.up.weight.grad)


@pytest.mark.parametrize(("placements", "says"), [
    ({"pp": Shard(0)}, "unknown axis 'pp'"),
    ({"tp": 1}, "no placement on tp"),
    ({"tp": Partial()}, "no placement on tp"),
    ({"tp": Shard(2)}, "has no such dim"),
    ({"tp": Shard(-3)}, "has no such dim"),
])  # fmt: skip
def test_what_is_no_layout(placements: dict[str, Any], says: str) -> None:
    with pytest.raises(HintError, match=says):
        autopar.constrain(torch.zeros(2, 4), **placements)


def test_errors_in_a_model_come_out_of_a_plan_as_they_are() -> None:
    with pytest.raises(HintError, match="has no such dim"):
        planned(Hints(tp=2), tp=Shard(3))
    with pytest.raises(HintError, match=r"constrain\(\) in the model splits dim 1 .* in 3 pieces \(tp\)") as error:
        planned(Hints(tp=3), ranks=3, tp=Shard(1))
    assert f"{LENGTH} in the shape {(BATCH, LENGTH, WIDE)}" in str(error.value)


@pytest.mark.parametrize("placement", [
    Shard(-1), *(pytest.param(p, marks=pytest.mark.slow) for p in (Shard(1), Shard(0), Replicate(), None))
], ids=str)  # fmt: skip
def test_a_plan_keeps_it_and_computes_the_same(placement: Any) -> None:
    """Only where the tensor already lies as tp likes it best is nothing exchanged between the two layers."""
    data, hints = batch(), Hints(tp=2)
    model = Mlp(tp=placement).double()
    plan = autopar.plan(model, "cpu:1x2", hints=hints, example_inputs=data)
    report = autopar.verify(model, plan, example_inputs=data)
    assert report.ok and report.max_error < 1e-10, str(report)
    assert report.flops_share <= 0.55
    free = autopar.plan(Mlp().double(), "cpu:1x2", hints=hints, example_inputs=data)
    if placement == Shard(-1):
        assert exchanges(plan) == exchanges(free) and plan.step_time == free.step_time
    else:
        assert exchanges(plan) != exchanges(free) and plan.step_time > free.step_time


@pytest.mark.slow
def test_on_an_axis_of_one_rank_it_says_nothing() -> None:
    plan, free = planned(Hints(dp=2), tp=Shard(1)), planned(Hints(dp=2))
    assert plan.degrees["tp"] == 1 and plan.step_time == free.step_time


@pytest.mark.slow
def test_dp_may_be_kept_off_the_batch() -> None:
    """Over dp the sequence in place of the batch: exchanged before and after."""
    data, model = batch(), Mlp(dp=Shard(1)).double()
    plan = autopar.plan(model, "cpu:1x2", hints=Hints(dp=2, zero=0), example_inputs=data)
    kinds = {kind for kind, axis in exchanges(plan) if axis == "dp"}
    assert "all_to_all" in kinds, plan.collectives
    report = autopar.verify(model, plan, example_inputs=data)
    assert report.ok and report.max_error < 1e-10, str(report)
