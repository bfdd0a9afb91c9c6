"""What an operator does on one rank: shapes of products, pairs that attention sees, micro-batches, fused kernels."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from dist import small_models as models
from torch import Tensor, nn

import autopar
from autopar import Hints
from autopar.capture import capture
from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.cost_model.compute import Work, work_seconds
from autopar.cost_model.hardware import load_device
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operator, Operators, Value
from autopar.sharding.recompute import made_again
from autopar.sharding.rule import REPLICATE, Choice, strategies
from autopar.solver.costs import Prices, price
from autopar.solver.fusion import Fusion, fusion_of
from autopar.solver.space import build_space
from autopar.solver.spmd import read
from autopar.solver.work import local_work

BATCH, LENGTH, HIDDEN = 4, 16, models.HIDDEN
MESH = Mesh((("dp", 2), ("tp", 2)))
aten = torch.ops.aten


@functools.cache
def llama() -> tuple[Captured, Operators]:
    captured = capture(models.llama(num_hidden_layers=2), (), models.tokens(BATCH, LENGTH))
    return captured, read(captured)


def products_of(name: str, backward: bool = False) -> list[Operator]:
    """The products that the first block computes in a module, in order."""
    return [op for op in llama()[1] if op.is_heavy and op.backward == backward and op.block == "model.layers.0"
            and op.node.meta["module"].endswith(name)]


def shape(work: Work) -> tuple[float, float, float, float]:
    return work.batch, work.m, work.n, work.k


def test_every_product_has_the_shape_of_its_flops() -> None:
    """Whatever is split, batch x m x n x k is half of the FLOPs, in whole numbers, and FLOPs are the rank's share."""
    operators, seen = llama()[1], 0
    for op in operators:
        if not op.is_heavy:
            continue
        for strategy in strategies(op.rule, MESH)[::3]:
            for count in (1, 2):
                batch = operators.batch_factors[op.node]
                if count == 2 and any(c.factor in batch for c in strategy):
                    continue  # nothing of the batch of 4 would be left to some
                work = local_work(op, operators, MESH, strategy, count)
                share = 1 / 2 ** sum(c.factor is not None for c in strategy)
                if work.kind == "matmul":
                    assert 2 * work.batch * work.m * work.n * work.k == pytest.approx(work.flops)
                    assert all(float(n).is_integer() for n in shape(work)), (op.node, strategy, work)
                    assert work.flops * work.times == pytest.approx(op.flops * share)
                    seen += 1
    assert seen > 100


def test_a_column_parallel_product_and_the_gradient_of_its_weight() -> None:
    """gate_proj [48, 32] on dp 2 x tp 2: tokens over dp, its 48 rows over tp; two micro-batches of what dp leaves."""
    operators = llama()[1]
    tokens, wide = BATCH * LENGTH, 48
    (forward,) = products_of("mlp.gate_proj")
    (rows,) = operators.batch_factors[forward.node]
    (columns,) = (f for f, n in forward.rule.sizes.items() if n == wide)
    strategy = (Choice(factor=rows), Choice(factor=columns))
    once, twice = (local_work(forward, operators, MESH, strategy, count) for count in (1, 2))
    assert shape(once) == (1, tokens / 2, wide / 2, HIDDEN)
    assert shape(twice) == (1, tokens / 4, wide / 2, HIDDEN)
    assert (once.times, twice.times, once.kernels) == (1, 2, 1)
    # the weight is read in every micro-batch, activations are cut
    assert once.bytes == 4 * (tokens / 2 * HIDDEN + wide / 2 * HIDDEN + tokens / 2 * wide / 2)
    assert twice.bytes == 4 * (tokens / 4 * HIDDEN + wide / 2 * HIDDEN + tokens / 4 * wide / 2)
    weight = next(op for op in products_of("mlp.gate_proj", True) if sorted(op.call.results[0].shape) == [HIDDEN, wide])
    (contracted,) = operators.batch_factors[weight.node]
    found = local_work(weight, operators, MESH, (Choice(factor=contracted), REPLICATE), 2)
    assert (found.m * found.n, found.k, found.times) == (wide * HIDDEN, tokens / 4, 2)


def test_the_pairs_that_attention_sees() -> None:
    """A causal half of all; a piece of the queries may be the last, which sees 1 - 1 / (2 n) of its pairs."""
    operators = llama()[1]
    op = next(op for op in operators if op.call.target is torch.ops.autopar.attention.default)
    backward = next(op for op in operators if op.call.target is torch.ops.autopar.attention_backward.default)
    heads = op.call.operands[0].shape[1]
    whole = local_work(op, operators, MESH, (REPLICATE, REPLICATE))
    full = 4 * BATCH * heads * LENGTH**2 * (HIDDEN // heads)
    assert (whole.kind, whole.causal, whole.backward, whole.flops) == ("attention", True, False, full / 2)
    assert (whole.batch, whole.m, whole.n, whole.k) == (BATCH * heads, LENGTH, LENGTH, HIDDEN // heads)
    back = local_work(backward, operators, MESH, (REPLICATE, REPLICATE))
    assert (back.backward, back.flops) == (True, 2.5 * full / 2)
    split = local_work(op, operators, MESH, (Choice(factor="b"), Choice(factor="g")), 2)
    assert (split.batch, split.flops, split.times) == (BATCH * heads / 8, full / 2 / 8, 2)
    pieces = [s for s in strategies(op.rule, MESH) if s[0].factor == op.rule.operands[0][2][0] and s[1] == REPLICATE]
    piece = local_work(op, operators, MESH, pieces[0])  # queries that know their position
    assert (piece.m, piece.n, piece.flops) == (LENGTH / 2, LENGTH, full / 2 * 3 / 4)


def test_a_lookup_reads_what_it_returns_and_a_view_nothing() -> None:
    operators = llama()[1]
    lookup = next(op for op in operators if op.call.target is aten.embedding.default)
    tokens = BATCH * LENGTH
    moved = local_work(lookup, operators, MESH, (REPLICATE, REPLICATE)).bytes
    assert moved == tokens * (8 + 2 * 4 * HIDDEN)
    view = next(op for op in operators if op.is_view)
    nothing = local_work(view, operators, MESH, (REPLICATE, REPLICATE))
    assert (nothing.bytes, nothing.flops, nothing.kernels) == (0, 0, 0)
    assert work_seconds([nothing], load_device("h100-sxm"))[0] == 0


class Gate(nn.Module):
    """A norm, a product, a gate with a chain of casts and elementwise operators, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.up = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        wide = self.up(normal)
        return self.down(torch.tanh(wide) * 2 + x)


def compiled(module: nn.Module, *shape: int) -> tuple[Operators, Fusion]:
    operators = read(capture(module, (torch.randn(*shape),), {}))
    return operators, fusion_of(operators, made_again(operators, "none"))


def moved(operators: Operators, fusion: Fusion | None, backward: bool) -> tuple[float, int]:
    """Bytes and kernels of the operators that are no products, of one direction, on one device."""
    mesh = Mesh((("dp", 1),))
    work = [local_work(op, operators, mesh, (REPLICATE,), 1, fusion) for op in operators
            if op.backward == backward and not op.is_heavy]
    return sum(w.bytes for w in work), sum(w.kernels for w in work)


def test_kernels_of_a_compiled_graph() -> None:
    """Forward: the norm reads x and the weight and writes what the product reads and x * rsqrt, which the gradient of
    the weight needs; the gate reads the product's result and x and writes what the other product reads, and tanh for
    the backward."""
    operators, fusion = compiled(Gate(), BATCH, LENGTH, HIDDEN)
    size = BATCH * LENGTH * HIDDEN * 4
    found, kernels = moved(operators, fusion, False)
    assert kernels == 2
    assert found == (size + HIDDEN * 4 + 2 * size) + (2 * size + 2 * size)
    eager, launched = moved(operators, None, False)
    assert launched == 9 and eager > 1.8 * found  # pow, mean, add, rsqrt, mul, mul; tanh, mul, add


def test_what_leaves_a_kernel_is_written_and_what_enters_is_read() -> None:
    """On every operator of a model: a result that a product reads is written, and what is not written is read by
    elementwise operators of the same block and direction alone."""
    operators = llama()[1]
    fusion = fusion_of(operators, made_again(operators, "none"))
    assert sum(fusion.kernels.values()) < 0.25 * sum(not op.is_view for op in operators)
    for op in operators:
        for value in op.operands:
            producer = operators.by_node.get(value.node)
            if op.is_heavy and producer is not None and not producer.is_view and not producer.is_heavy:
                assert value.index in fusion.writes[producer.node]
    for op in operators:
        readers = [operators.by_node[node] for node, _ in operators.consumers.get(Value(op.node), ())]
        if fusion.writes.get(op.node) == frozenset():  # nothing but elementwise operators of its own block needs it
            assert readers and all(r.node in fusion.reads or r.is_view for r in readers)
            assert all((r.block, r.backward) == (op.block, op.backward) for r in readers)


def test_what_is_made_again_is_not_written_for_the_backward() -> None:
    """Under selective recomputation tanh and the normalised input are made again: two sizes less move."""
    operators, _ = compiled(Gate(), BATCH, LENGTH, HIDDEN)
    kept = moved(operators, fusion_of(operators, made_again(operators, "none")), False)[0]
    again = moved(operators, fusion_of(operators, made_again(operators, "selective")), False)[0]
    assert kept - again == 2 * BATCH * LENGTH * HIDDEN * 4


class Heads(nn.Module):
    """A projection, and the scores of its heads with themselves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.project = heads, nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads @ heads.transpose(-1, -2)


@pytest.mark.parametrize("width", [24, 32])
def test_rows_of_heads_may_not_be_aligned(width: int) -> None:
    """In float32, 4 heads: a head of 6 numbers is 24 bytes, one of 8 is 32; the rows of the projection, 96 and 128."""
    operators, _ = compiled(Heads(width, 4), BATCH, LENGTH, width)
    work = [local_work(op, operators, MESH, (REPLICATE, REPLICATE)) for op in operators if op.is_heavy]
    projections, scores = ([w for w in work if (w.batch == 1) == one] for one in (True, False))
    assert len(projections) >= 2 and len(scores) >= 2
    assert all(w.aligned for w in projections)
    assert all(w.aligned == (width == 32) for w in scores)


def test_what_is_not_aligned_is_slow_on_tensor_cores_alone() -> None:
    """A contraction of 4096 at 0.45 of the speed is as long as one of 9102; k = 256 comes once. On a CPU nothing."""
    product = Work(2 * 4096**3, 3 * 2 * 4096**2, torch.bfloat16, "matmul", 1.0, 4096, 4096, 4096)
    device = replace(load_device("a100-80g-sxm"), matmul_ramp=0.0, kernel_overhead=0.0)
    fast, slow = work_seconds([product, replace(product, aligned=False)], device)
    assert slow / fast == pytest.approx((4096 / 0.45 + 256) / (4096 + 256), rel=1e-3)
    fast, slow = work_seconds([product, replace(product, aligned=False)], load_device("cpu"))
    assert slow == fast


class Softmax(nn.Module):
    """Logarithm of a softmax at a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(x, -1) * self.heat


@pytest.mark.parametrize("width, reads", [(64, 1), (100_000, 2)])
def test_a_long_row_is_read_again(width: int, reads: int) -> None:
    with torch.device("meta"):
        operators, fusion = compiled(Softmax(), 8, width)
    found, kernels = moved(operators, fusion, False)
    assert kernels == 1
    assert found == (reads + 2) * 8 * width * 4 + 4  # the logarithm is kept for the gradient of the temperature


def test_gradient_of_a_norms_weight_is_a_kernel_of_its_own() -> None:
    operators = llama()[1]
    fusion = fusion_of(operators, made_again(operators, "none"))
    sums = [op for op in operators if op.call.target is aten.sum.dim_IntList and op.backward
            and op.call.results[0].shape == (1, 1, HIDDEN)]
    assert len(sums) == 5  # two norms a block and the last one
    for op in sums:
        assert fusion.kernels[op.node] == 1 and fusion.reads[op.node] == {0: 1} and fusion.writes[op.node] == {0}


def test_programs_and_plans_price_what_is_compiled() -> None:
    """A compiled program is never slower, and its plan says less compute."""
    captured, operators = llama()
    cluster = Cluster.parse("h100-sxm:1x4")
    prices = Prices(cluster, MESH)
    space = build_space(captured, operators, MESH)
    eager, fused = (price(space, captured, operators, prices, "adamw", float("inf"), compiled=c) for c in (False, True))
    pairs = [(a[np.isfinite(a)], b[np.isfinite(a)]) for a, b in zip(eager.seconds, fused.seconds, strict=True)]
    assert all((b <= a * (1 + 1e-9)).all() for a, b in pairs)
    assert sum(b.sum() for _, b in pairs) < 0.7 * sum(a.sum() for a, _ in pairs)
    model, batch = models.llama(num_hidden_layers=2), models.tokens(BATCH, LENGTH)
    plans = [autopar.plan(model, cluster, hints=Hints(dp=2, tp=2), example_inputs=batch, compile=c)
             for c in (False, True)]
    assert plans[1].breakdown["compute"] < 0.7 * plans[0].breakdown["compute"]


def test_more_micro_batches_are_slower_work() -> None:
    """Weights are read, and tiles filled, in every micro-batch."""
    captured, operators = llama()
    prices = Prices(Cluster.parse("h100-sxm:1x4"), MESH)
    device = replace(prices.cluster.device, launch_overhead=0.0, kernel_overhead=0.0, matmul_ramp=0.0)
    (op,) = products_of("mlp.gate_proj")
    one, four = (local_work(op, operators, MESH, (REPLICATE, REPLICATE), count) for count in (1, 4))
    assert one.flops == 4 * four.flops
    once, often = work_seconds([one, four], device)
    assert often > 1.5 * once
    space = build_space(captured, operators, MESH)
    whole, cut = (price(space, captured, operators, prices, "adamw", float("inf"), micro_batches=m) for m in (1, 2))
    slow, fast = (sum(s[np.isfinite(s)].sum() for s in program.seconds) for program in (cut, whole))
    assert slow > fast
