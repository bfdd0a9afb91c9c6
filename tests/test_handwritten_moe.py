"""Mixtures of experts written in plain PyTorch (`handwritten`): recognised by what they do to the rows they select, and
computed as transformers' own are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from handwritten import DISPATCH, EXPERTS, LOOPS, WIDTH, Mixture, Network, Stacked, Where, token_batch
from models import Case, planned_and_compared, seeded
from torch import Tensor, nn

import autopar
from autopar import Hints
from autopar.errors import CaptureError
from autopar.ops.rows import MAKE_ROWS, TAKE_ROWS
from autopar.runtime.reference import exact_float64
from autopar.runtime.verify import compare
from autopar.sharding.rule import layouts
from autopar.specialize import capture_batch, specialize

ops = torch.ops.autopar
#: Forms that a default run has; the others are slow.
OFTEN = ("Masked",)


def verified(model: nn.Module, batch: dict[str, Any], ranks: int, hints: Hints) -> tuple[autopar.Plan, Any, Any]:
    with exact_float64():
        plan = autopar.plan(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
        special = specialize(model, plan, (), batch)
        report = compare(model, special, (), batch)
    assert report.ok and report.max_error < 1e-10, report
    return plan, special, report


def weight_pieces(special: Any) -> set[int]:
    """In how many pieces the weights of experts are where rows are multiplied by them."""
    found = set()
    for op in special.operators:
        if op.call.target is ops.grouped_mm.default:
            ins, _ = layouts(op.rule, special.assignment.strategies[op.node], special.assignment.mesh)
            found.add(ins[1].pieces(special.assignment.mesh))
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.name not in OFTEN)) for c in LOOPS]
)
def test_loops_over_experts(case: Case) -> None:
    """Whatever the spelling, the graph has the rows that a router chose, no selection by value, and half of all work on
    each of two ranks."""
    model, batch = case.make(torch.float64)
    _, special, report = verified(model, batch, 2, Hints(tp=2, pp=1))
    targets = [node.target for node in special.captured.graph.nodes]
    assert targets.count(ops.combine.default) >= 2 and torch.ops.aten.nonzero.default not in targets
    assert all(op.has_rule for op in special.operators if op.call.target in MAKE_ROWS | TAKE_ROWS)
    assert weight_pieces(special) == {2} and 0.4 < report.flops_share < 0.6, report


def test_loops_keep_the_names_of_parameters() -> None:
    """Experts that are modules of their own rest as they are, each with its gradient."""
    model, batch = LOOPS[0].make()
    captured = capture_batch(model, (), batch)
    assert [p.name for p in captured.parameters] == [name for name, _ in model.named_parameters()]
    assert all(p.gradient is not None for p in captured.parameters)
    products = [n for n in captured.graph.nodes if n.target is ops.grouped_mm.default and not n.meta["backward"]]
    assert len(products) == 3 * 2, "w1, w3 and w2, of all experts at once, in both layers"
    assert len([n for n in captured.graph.nodes if n.target is ops.dispatch.default and not n.meta["backward"]]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hints"), [
    (2, Hints(dp=2, pp=1, zero=3)),
    (2, Hints(dp=2, ep=2, pp=1)),
    (2, Hints(cp=2, ep=2, pp=1)),
    (4, Hints(dp=2, tp=2, pp=1, zero=1)),
    (4, Hints(tp=4, pp=1)),
])  # fmt: skip
@pytest.mark.parametrize("case", [c for c in LOOPS if c.name in ("Where", "Masked", "Single")], ids=lambda c: c.name)
def test_loops_under_other_plans(case: Case, ranks: int, hints: Hints) -> None:
    """With ``ep`` a rank has half of the stacked experts in use; at rest they are modules of their own."""
    plan, special, report = verified(*case.make(torch.float64), ranks, hints)
    assert plan.degrees["ep"] == (hints.ep or 1) or hints.tp
    assert hints.ep is None or weight_pieces(special) == {2}
    assert report.flops_share < (1.3 if hints.ep else 1.1) / ranks, report


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hints"), [
    (4, Hints(pp=2, tp=2, micro_batch_size=2)),
    (4, Hints(pp=2, dp=2, zero=1, micro_batch_size=1)),
    (2, Hints(dp=2, pp=1, zero=3, micro_batch_size=1, recompute="full")),
])  # fmt: skip
def test_loops_in_a_whole_step(ranks: int, hints: Hints) -> None:
    model, batch = Case("deep", seeded(lambda: Network(Where, layers=6)), token_batch).make(torch.float64)
    with exact_float64():
        _, report = planned_and_compared(model, batch, f"cpu:{ranks}", hints, steps=2)
    assert report.ok and report.max_error < 1e-10, report


@pytest.mark.slow
def test_experts_of_one_parameter_are_spread() -> None:
    """Parts of one parameter are that parameter: over dp each rank has half of the experts, and half of their bytes."""
    model, batch = Case("Stacked", seeded(lambda: Network(Stacked)), token_batch).make(torch.float64)
    plan, special, _ = verified(model, batch, 2, Hints(dp=2, ep=2, pp=1))
    assert not special.captured.graph.find_nodes(op="call_function", target=torch.ops.aten.stack.default)
    stored = plan.parameters["layers.0.w1"].storage
    assert stored.local_shape(plan.mesh, (EXPERTS, WIDTH, 24))[0] == EXPERTS // 2


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0, 2])
def test_skewed_routing(busy: int) -> None:
    """All tokens go to one expert and to the first of the others: two have none, and no gradient but zeros."""
    model, batch = LOOPS[1].make(torch.float64)
    with torch.no_grad():
        for norm, layer in zip(model.norms, model.layers, strict=True):
            layer.gate.weight.zero_()
            layer.gate.weight[:, 0] = -0.1 * torch.arange(EXPERTS)
            layer.gate.weight[busy, 0] = 1.0
            norm.weight[0], norm.bias[0] = 0.0, 1.0  # what the router looks at is 1 for all tokens
    verified(model, batch, 2, Hints(dp=2, pp=1))
    model(**batch)["loss"].backward()
    other = 1 if busy == 0 else 0
    idle = [e for e in range(EXPERTS) if e not in (busy, other)]
    assert all(model.layers[0].experts[e].w1.weight.grad is None for e in idle)
    assert all(model.layers[0].experts[e].w1.weight.grad is not None for e in (busy, other))


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_choices_of_a_token(top_k: int) -> None:
    class Some(Where):
        def __init__(self) -> None:
            super().__init__(top_k=top_k)

    verified(*Case("k", seeded(lambda: Network(Some)), token_batch).make(torch.float64), 2, Hints(tp=2, pp=1))


# -- one-hot dispatch --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dims", [
    {"layers.*.w1": {"tp": 0}, "layers.*.w2": {"tp": 0}},
    {"layers.*.w1": {"tp": 2}, "layers.*.w2": {"tp": 1}},
], ids=["experts", "inside"])  # fmt: skip
def test_einsum_dispatch(dims: dict[str, dict[str, int]]) -> None:
    """Ordinary einsums: of their experts, or of the hidden dim of every expert, a rank has half; and of their work."""
    plan, special, report = verified(*DISPATCH.make(torch.float64), 2, Hints(tp=2, pp=1, shard=dims))
    (dim,) = dims["layers.*.w1"].values()
    assert plan.parameters["layers.0.w1"].storage.splits(plan.mesh, dim) == 2
    weights = [p.placeholder for p in special.captured.parameters if p.name.endswith("w1")]
    products = [op for op in special.operators if op.is_heavy and not op.backward
                and any(special.operators.base(v).node in weights for v in op.operands)]  # fmt: skip
    assert len(products) == 2, "one in either layer"
    for op in products:
        ins, _ = layouts(op.rule, special.assignment.strategies[op.node], special.assignment.mesh)
        place = next(i for i, v in enumerate(op.operands) if special.operators.base(v).node in weights)
        assert ins[place].pieces(special.assignment.mesh) == 2
    assert report.flops_share < 0.55, report


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hints"), [(2, Hints(dp=2, pp=1)), (4, Hints(dp=2, tp=2, pp=1, zero=3))])
def test_einsum_dispatch_under_other_plans(ranks: int, hints: Hints) -> None:
    _, _, report = verified(*DISPATCH.make(torch.float64), ranks, hints)
    assert report.flops_share < 1.1 / ranks, report


# -- what is refused ---------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """An expert that norms its rows, and not each by itself."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(0)


class Dropping(nn.Module):
    """An expert that drops of its rows, whose places in the whole nobody knows."""

    def forward(self, rows: Tensor) -> Tensor:
        return F.dropout(rows, 0.1)


def mixture_of(expert: type[nn.Module]) -> type[nn.Module]:
    """`Where`, with experts that do one thing more."""

    class More(Where):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(own, expert()) for own in self.experts)

    return More


class Branching(Mixture):
    """Makes something where an expert has tokens that it uses whether or not."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        weights, chosen = self.route(flat)
        out, used = torch.zeros_like(flat), weights.new_zeros(())
        for e, expert in enumerate(self.experts):
            token, k = torch.where(chosen == e)
            if token.numel() > 0:
                used = used + 1
                out.index_add_(0, token, expert(flat[token]) * weights[token, k, None])
        return out.view(x.shape) * used


class Special(Mixture):
    """Does something else where a token is there."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        if (chosen == 3).any():
            x = x + 1
        return x * weights.sum(-1, keepdim=True)


class Own(Mixture):
    """Reads rows of what it writes rows to."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.view(-1, WIDTH).clone()
        weights, chosen = self.route(out)
        for e, expert in enumerate(self.experts):
            token, k = torch.where(chosen == e)
            out.index_add_(0, token, expert(out[token]) * weights[token, k, None])
        return out.view(x.shape)


@pytest.mark.parametrize(("kind", "found"), [
    (mixture_of(Normed), "mean of selected rows"),
    (Branching, "a value that is made only where an expert has tokens"),
    (Special, "a branch on whether there are any tokens, without a use of them, at "),
    (Own, "rows of a tensor to which rows are being written"),
    (mixture_of(Dropping), "dropout of selected rows"),
])  # fmt: skip
def test_what_is_not_understood_is_refused(kind: type[nn.Module], found: str) -> None:
    """Never computed as something else: the error names the line and says what of it."""
    with pytest.raises(CaptureError, match="selects by the values of a tensor, in ") as caught:
        capture_batch(Network(kind), (), token_batch())
    assert found in caught.value.found and "test_handwritten_moe.py:" in str(caught.value)
