"""What makes planning deep models fast changes nothing: plans, programs and operators are those of every block read."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from dist import small_models as models
from torch import nn

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.hints import Hints
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import read_operators
from autopar.solver.alike import alike
from autopar.solver.costs import Prices, price
from autopar.solver.program import solve
from autopar.solver.search import search
from autopar.solver.setting import Setting
from autopar.solver.space import build_space
from autopar.solver.spmd import account, read
from autopar.solver.staged import Stages
from autopar.solver.work import local_work
from autopar.workload import Workload

TOKENS = models.tokens(seq_len=16)
DEEP = {"gpt2": models.gpt2(0.2, layers=6), "llama": models.llama(num_hidden_layers=6)}


@pytest.mark.parametrize("hints", [
    pytest.param(Hints(), id="free", marks=pytest.mark.slow), pytest.param(Hints(dp=2, tp=2, zero=3), id="2x2"),
])  # fmt: skip
def test_plan_is_the_same_whether_blocks_are_copied_or_traced(hints: Hints) -> None:
    """Every field of the plan, for a model of which half is copied."""
    model = models.llama(num_hidden_layers=8)
    workload = Workload(global_batch=4, seq_len=16)
    copied, traced = (
        search(model, capture(model, (), TOKENS, whole=whole), Cluster.parse("h100-sxm:1x4"), workload, hints).to_dict()
        for whole in (False, True)
    )
    assert copied == traced


@pytest.mark.parametrize("model", DEEP.values(), ids=DEEP)
def test_operators_of_equal_blocks_share_rules_and_nothing_else(model: nn.Module) -> None:
    """Reading the first block of a class for all gives what reading every node gives."""
    captured = capture(model, (), TOKENS)
    shared = read(captured)
    alone = read_operators(captured.graph, dict.fromkeys(captured.inputs, 0), {})
    assert list(shared.by_node) == list(alone.by_node)
    for a, b in zip(shared, alone, strict=True):
        assert (a.call, a.rule, a.operands, a.has_rule, a.flops) == (b.call, b.rule, b.operands, b.has_rule, b.flops)
    assert (shared.specs, shared.consumers) == (alone.specs, alone.consumers)
    assert (shared.batch_factors, shared.batch_dims) == (alone.batch_factors, alone.batch_dims)


@pytest.mark.parametrize("model", DEEP.values(), ids=DEEP)
def test_counted_by_kind_is_counted_one_by_one(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flows, seconds and bytes of all blocks, of which the first and the last have other neighbours."""
    captured = capture(model, (), TOKENS)
    operators, mesh = read(captured), Mesh((("dp", 2), ("tp", 2)))
    cluster = Cluster.parse("h100-sxm:1x4")
    prices, known = Prices(cluster, mesh), alike(captured, operators)
    assert len(known.kinds) < 0.75 * len(operators.by_node)
    assert sum(count for _, count in known.kinds) == len(operators.by_node)
    by_kind = build_space(captured, operators, mesh)
    program = price(by_kind, captured, operators, prices, "adamw", float("inf"))
    single = replace(known, kinds=[(op, 1) for op in operators])
    monkeypatch.setattr(sys.modules[build_space.__module__], "alike", lambda *given: single)
    one_by_one = build_space(captured, operators, mesh)
    one_by_one.canon = {}
    assert list(by_kind.flows.items()) == list(one_by_one.flows.items())
    assert by_kind.of_alias == one_by_one.of_alias
    other = price(one_by_one, captured, operators, prices, "adamw", float("inf"))
    for found, truth in ((program.seconds, other.seconds), (program.memory, other.memory)):
        np.testing.assert_allclose(np.concatenate(found), np.concatenate(truth), rtol=1e-12)
    solution = solve(program)
    assert solution is not None
    assignment = by_kind.assignment(solution.options)
    work = [local_work(op, operators, mesh, assignment.strategies[op.node]) for op in operators]
    solved = account(Stages(Setting(captured, operators, cluster, "adamw"), assignment))
    assert solved.breakdown["compute"] == pytest.approx(prices.work_seconds(work).sum(), rel=1e-12)


def test_rules_do_not_grow_with_depth() -> None:
    """A deeper model has more operators and as many rules."""
    found = []
    for layers in (6, 12):
        with torch.device("meta"):
            operators = read(capture(models.llama(num_hidden_layers=layers), (), TOKENS))
        found.append((len(operators.by_node), len({id(op.rule) for op in operators})))
    assert found[1][0] > 1.8 * found[0][0] and found[1][1] == found[0][1]
