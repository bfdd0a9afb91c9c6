"""The hint ``activations``: results of modules lie as their own code could have said, in plans and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import llama
from test_constrain import HIDDEN, WIDE, batch, exchanges
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import autopar
from autopar import Hints
from autopar.errors import HintError


class Mlp(nn.Module):
    """Two layers; with ``inline`` the first one's result is constrained in the code."""

    def __init__(self, **inline: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.inline = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN), inline

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x and y are [batch, sequence, hidden]."""
        return F.mse_loss(self.down(autopar.constrain(self.up(x), **self.inline).relu()), y)


@pytest.mark.parametrize(("dim", "placement"), [
    (1, Shard(1)), pytest.param(None, Replicate(), marks=pytest.mark.slow),
    pytest.param(-1, Shard(2), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_plan_keeps_it_as_it_keeps_code(dim: int | None, placement: Any) -> None:
    data, hints = batch(), Hints(tp=2, activations={"up": {"tp": dim}})
    plan = autopar.plan(Mlp().double(), "cpu:1x2", hints=hints, example_inputs=data)
    inline = autopar.plan(Mlp(tp=placement).double(), "cpu:1x2", hints=Hints(tp=2), example_inputs=data)
    free = autopar.plan(Mlp().double(), "cpu:1x2", hints=Hints(tp=2), example_inputs=data)
    assert (exchanges(plan), plan.step_time) == (exchanges(inline), inline.step_time)
    assert (exchanges(plan) == exchanges(free)) == (dim == -1)
    assert plan.hints == {"tp": 2, "activations": {"up": {"tp": dim}}}
    report = autopar.verify(Mlp().double(), plan, example_inputs=data)
    assert report.ok and report.max_error < 1e-10 and report.flops_share < 0.55, report
    traffic = autopar.verify(Mlp(tp=placement).double(), inline, example_inputs=data).traffic
    assert report.traffic == traffic, "what runs has the same collectives"


@pytest.mark.slow
def test_a_pattern_may_mean_one_block_of_many() -> None:
    """Whole over tp in one of four layers: one gather forward, and less than twice that of all four."""
    workload = autopar.Workload(global_batch=2, seq_len=16)

    def moved(pattern: str | None) -> float:
        activations = {pattern: {"tp": None}} if pattern else None
        hints = Hints(tp=2, pp=1, activations=activations)
        plan = autopar.plan(llama(layers=4), "cpu:1x2", workload=workload, hints=hints)
        report = autopar.verify(llama(layers=4), plan, workload=workload)
        assert report.ok, report
        return sum(c.bytes for c in plan.collectives)

    free, one, every = (moved(p) for p in (None, "model.layers.2.mlp.gate_proj", "model.layers.*.mlp.gate_proj"))
    assert every - free == pytest.approx(4 * (one - free)) and one > free


@pytest.mark.parametrize(("activations", "says"), [
    ({"upp": {"tp": 1}}, "matches no module"),
    ({"up": {"tp": 3}}, r"activations\['up'\] cannot be kept: .* has no such dim"),
    ({"": {"tp": 1}}, "matches no module"),
])  # fmt: skip
def test_what_a_model_cannot_keep(activations: dict[str, dict[str, int]], says: str) -> None:
    with pytest.raises(HintError, match=says):
        autopar.plan(Mlp(), "cpu:1x2", hints=Hints(tp=2, activations=activations), example_inputs=batch(torch.float32))


class Idle(Mlp):
    """Has a layer that its forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


def test_a_module_that_is_never_called_keeps_nothing() -> None:
    with pytest.raises(HintError, match="matches no module that the forward calls"):
        hints = Hints(tp=2, activations={"idle": {"tp": 1}})
        autopar.plan(Idle(), "cpu:1x2", hints=hints, example_inputs=batch(torch.float32))


@pytest.mark.parametrize("value", [3, {"up": 1}, {"up": {}}, {"up": {"pp": 1}}, {"up": {"tp": True}}, {1: {"tp": 1}}])
def test_what_is_malformed(value: Any) -> None:
    with pytest.raises(HintError, match="activations is malformed"):
        Hints(activations=value)


def test_it_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "hints.yaml").write_text("activations:\n  model.layers.*.mlp: {tp: 1, cp: null}\n", "utf-8")
    assert Hints.load(tmp_path / "hints.yaml") == Hints(activations={"model.layers.*.mlp": {"tp": 1, "cp": None}})
