"""Random modules, planned with random hints or random strategies, compute what they compute in eager mode."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from random_models import Example, example
from torch import fx, nn

import autopar
from autopar import Cluster, Hints, Workload
from autopar.runtime.program import emit
from autopar.runtime.verify import VerifyReport, compare
from autopar.sharding.layout import Mesh
from autopar.sharding.rule import Strategy
from autopar.solver.pins import Pins
from autopar.solver.program import solve
from autopar.solver.setting import Setting
from autopar.solver.spmd import make_program, read
from autopar.specialize import capture_batch

SETTINGS = settings(
    deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
#: Any axis but dp splits anything: two free axes nest in all ways.
MESHES = (Mesh((("dp", 2), ("tp", 2))), Mesh((("cp", 2), ("tp", 2))), Mesh((("dp", 1), ("tp", 4))))


def random_hints(data: st.DataObject, model: nn.Module) -> Hints:
    """Degrees for four ranks or none, what ZeRO does, and sometimes where a parameter rests."""
    dp, tp = data.draw(st.sampled_from([(None, None), (4, 1), (2, 2), (1, 4)]))
    zero = data.draw(st.sampled_from([None, 0, 3]))
    places = [(name, d) for name, p in model.named_parameters() for d, n in enumerate(p.shape) if tp and n % tp == 0]
    shard = {}
    if tp != 1 and places and data.draw(st.booleans()):
        name, dim = data.draw(st.sampled_from(places))
        shard = {name: {"tp": dim}}
    return Hints(dp=dp, tp=tp, zero=zero, shard=shard)


def with_hints(data: st.DataObject, found: Example) -> tuple[VerifyReport, object]:
    """`autopar.verify` under random hints, and the hints."""
    hints, workload = random_hints(data, found.model), Workload(optimizer="sgd")
    return autopar.verify(
        found.model, "cpu:1x4", workload=workload, hints=hints, example_inputs=(found.x,), steps=2
    ), hints


def with_strategies(data: st.DataObject, found: Example) -> tuple[VerifyReport, object]:
    """The best program among those in which about half of all strategies are closed at random: what no plan would ever
    take is met here."""
    number, mesh = data.draw(st.integers(0, 1000)), data.draw(st.sampled_from(MESHES))

    def allowed(node: fx.Node, strategy: Strategy) -> bool:
        return random.Random(f"{number} {node.name} {[*map(str, strategy)]}").random() < 0.5

    captured = capture_batch(found.model, (found.x,), {})
    operators = read(captured)
    cluster = Cluster.parse("cpu:1x4")
    setting = Setting(captured, operators, cluster, "sgd")
    for pins in (Pins(operator=allowed, strict=False), Pins()):
        space, program = make_program(setting, mesh, pins)
        if (solution := solve(program)) is not None:
            break  # else some operator is left with partial sums alone that nobody offers
    assert solution is not None
    emitted = emit(captured, operators, space.assignment(solution.options))
    return compare(found.model, emitted, (found.x,), {}, steps=2), (number, mesh)


Judge = Callable[[st.DataObject, Example], tuple[VerifyReport, object]]
JUDGES = pytest.mark.parametrize("judge", [with_hints, with_strategies], ids=["hints", "strategies"])


def run(judge: Judge, chosen: settings, start: int) -> None:
    """No wrong number in any example, and no error."""

    @seed(start)
    @settings(chosen)
    @given(st.data())
    def examples(data: st.DataObject) -> None:
        found = example(data)
        report, decided = judge(data, found)
        assert report.ok, f"{report}\n{found.model}\non {tuple(found.x.shape)} with {decided}"

    examples()


@JUDGES
def test_random_modules(judge: Judge) -> None:
    run(judge, settings(SETTINGS, max_examples=20), 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 6))
@JUDGES
def test_many_random_modules(judge: Judge, part: int) -> None:
    """Five hundred in all of each kind, a hundred at a time."""
    run(judge, settings(SETTINGS, max_examples=100, derandomize=False), part)


def test_zero3_leaves_what_a_hint_splits_already() -> None:
    """Found by fuzzing: a hint splits a bias of two over tp, nothing is left for dp, and zero=3 does without."""
    hints = Hints(dp=2, tp=2, zero=3, shard={"0.bias": {"tp": 0}})
    model, x = nn.Sequential(nn.Linear(4, 2)).double(), torch.randn(4, 4).double()
    plan = autopar.plan(model, "cpu:1x4", hints=hints, example_inputs=(x,))
    assert plan.layout("0.bias").dims == (("tp",),) and "dp" in plan.layout("0.weight").split_axes
    report = autopar.verify(model, "cpu:1x4", hints=hints, example_inputs=(x,))
    assert report.ok, report
