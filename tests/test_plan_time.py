"""What makes planning deep models fast changes nothing: plans, programs and operators are those of every block read."""

from __future__ import annotations

import pytest
import torch
from dist import small_models as models
from torch import nn

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.hints import Hints
from autopar.sharding.operators import read_operators
from autopar.solver.search import search
from autopar.solver.spmd import read
from autopar.workload import Workload

TOKENS = models.tokens(seq_len=16)


@pytest.mark.parametrize("hints", [Hints(), Hints(dp=2, tp=2, zero=3)], ids=["free", "2x2"])
def test_plan_is_the_same_whether_blocks_are_copied_or_traced(hints: Hints) -> None:
    """Every field of the plan, for a model of which half is copied."""
    model = models.llama(num_hidden_layers=8)
    workload = Workload(global_batch=4, seq_len=16)
    copied, traced = (
        search(model, capture(model, (), TOKENS, whole=whole), Cluster.parse("h100-sxm:1x4"), workload, hints).to_dict()
        for whole in (False, True)
    )
    assert copied == traced


@pytest.mark.parametrize(
    "model", [models.gpt2(0.2, layers=6), models.llama(num_hidden_layers=6)], ids=["gpt2", "llama"]
)
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


def test_rules_do_not_grow_with_depth() -> None:
    """A deeper model has more operators and as many rules."""
    found = []
    for layers in (6, 12):
        with torch.device("meta"):
            operators = read(capture(models.llama(num_hidden_layers=layers), (), TOKENS))
        found.append((len(operators.by_node), len({id(op.rule) for op in operators})))
    assert found[1][0] > 1.8 * found[0][0] and found[1][1] == found[0][1]
