"""Collectives of parameters and gradients in buckets, and their order: each pass alone, on emitted graphs."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.small_models import llama, mlp, tokens
from torch import fx

import autopar
from autopar import Cluster, Hints, Workload
from autopar.capture.graph import Captured
from autopar.passes import partition as partition_pass
from autopar.passes.bucket import bucket, piece_of
from autopar.passes.collectives import ALL_REDUCE, KINDS, REDUCE_SCATTER, WAIT, aten, axis_of, group_argument
from autopar.passes.order import reorder
from autopar.passes.overlap import overlap
from autopar.passes.partition import partition
from autopar.runtime import reference
from autopar.runtime.program import Specialization
from autopar.runtime.simulate import run_ranks
from autopar.sharding import buckets as buckets_module
from autopar.sharding.buckets import Piece, block_of, buckets
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import VIEWS
from autopar.solver.search import search
from autopar.specialize import capture_batch, specialize

LAYERS = 3
ZERO3, ZERO3_TP, DDP = Hints(dp=4, zero=3), Hints(dp=2, tp=2, zero=3), Hints(dp=4, zero=0)
HYBRID = Hints(dp=4, tp=1, zero=3, zero_group_size=2)


@functools.cache
def sharded_llama(hints: Hints, tied: bool = True) -> tuple[torch.nn.Module, dict[str, Any], Specialization]:
    """A Llama of three layers, its batch, and its program on four ranks."""
    model, batch, captured = captured_llama(tied)
    plan = search(model, captured, Cluster.parse("cpu:4"), Workload(global_batch=8), hints)
    return model, batch, specialize(model, plan, (), batch, captured=captured)


@functools.cache
def captured_llama(tied: bool = True) -> tuple[torch.nn.Module, dict[str, Any], Captured]:
    """The model, its batch and its graph."""
    model, batch = llama(num_hidden_layers=LAYERS, tie_word_embeddings=tied), tokens(8, 8)
    return model, batch, capture_batch(model, (), batch)


def without_passes(special: Specialization) -> Any:
    """The two graphs as they are before collectives are merged and moved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_pass, "bucket", lambda graph: None)
        patch.setattr(partition_pass, "overlap", lambda graph: None)
        return partition(special.sharded)


def calls(graph: fx.Graph, axis: str, purpose: str | None = None) -> list[fx.Node]:
    """The collectives of a graph on an axis, in order; with ``purpose`` those of parameters or of gradients."""
    found = [n for n in graph.nodes if n.target in KINDS and axis_of(group_argument(n)) == axis]
    return [n for n in found if purpose is None or ((p := piece_of(n)) is not None and p.purpose == purpose)]


def wait_of(node: fx.Node) -> fx.Node:
    """The one node that waits for a collective."""
    (wait,) = node.users
    assert wait.target is WAIT
    return wait


@pytest.mark.parametrize(
    "hints", [ZERO3_TP, *(pytest.param(h, marks=pytest.mark.slow) for h in (ZERO3, DDP, HYBRID))], ids=str
)
def test_merged_and_moved_collectives_give_the_same_values(hints: Hints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of every rank, bit for bit, with fewer collectives. The loss, a quotient of reduced numbers
    instead of a reduced quotient, may be rounded otherwise."""
    model, batch, special = sharded_llama(hints)
    plain = without_passes(special)
    pairs = {special.program.forward: plain.forward, special.program.backward: plain.backward}
    seen = []

    def check(module: fx.GraphModule, inputs: Any, mesh: Any, traffic: Any = None) -> Any:
        found, truth = run_ranks(module, inputs, mesh, traffic), run_ranks(pairs[module], inputs, mesh)
        for mine, theirs in zip(found, truth, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=0.0 if a.dim() else 3e-7, atol=0.0)
        fewer = [len([n for n in g.graph.nodes if n.target in KINDS]) for g in (module, pairs[module])]
        seen.append(fewer)
        return found

    monkeypatch.setattr(reference, "run_ranks", check)
    reference.run_sharded(model, special, reference.Batch((), batch, 1, "sgd"))
    assert len(seen) == 2 and seen[1][0] < seen[1][1]
    assert plain.forward_inputs == special.program.forward_inputs and plain.saved == special.program.saved


@pytest.mark.parametrize("tied", [True, False])
def test_zero3_issues_one_collective_fewer_than_fsdp2(tied: bool) -> None:
    """FSDP2 with `fully_shard` on every layer and on the model: each direction gathers every layer and the root once,
    and the backward reduce-scatters as often. Here the gradients of the root, the last of which is the embedding's, go
    with the first layer's: one less, which pays for the loss. The same bytes, but the embedding is not gathered for a
    backward that does not read it; float32."""
    model, _, special = sharded_llama(ZERO3, tied)
    nbytes = sum(p.nbytes for p in model.parameters())
    read = nbytes if tied else nbytes - model.get_input_embeddings().weight.nbytes
    backward = special.program.backward
    assert backward is not None
    for graph, wanted in ((special.program.forward.graph, nbytes), (backward.graph, read)):
        gathers = calls(graph, "dp", "parameters")
        assert len(gathers) == LAYERS + 1
        assert sum(piece_of(n).nbytes for n in gathers) == wanted  # type: ignore[union-attr]
    scatters = calls(backward.graph, "dp", "gradients")
    assert [n.target for n in scatters] == [REDUCE_SCATTER] * LAYERS
    assert sum(piece_of(n).nbytes for n in scatters) == nbytes  # type: ignore[union-attr]


def test_parameters_are_gathered_where_they_are_needed() -> None:
    """The embedding with the first layer, between which there is no product; the last norm and the head, which would
    be held through the forward, when they are needed. A tied embedding is needed at both ends."""
    model, _, special = sharded_llama(ZERO3, tied=False)
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    layer = sum(n for name, n in sizes.items() if name.startswith("model.layers.0."))
    ends = [sizes["model.embed_tokens.weight"], sizes["model.norm.weight"] + sizes["lm_head.weight"]]
    assert special.program.backward is not None
    forward, backward = (
        [piece_of(n).nbytes for n in calls(module.graph, "dp", "parameters")]  # type: ignore[union-attr]
        for module in (special.program.forward, special.program.backward)
    )
    assert forward == [ends[0] + layer, *[layer] * (LAYERS - 1), ends[1]]
    assert backward == [ends[1], *[layer] * LAYERS]

    model, _, special = sharded_llama(ZERO3)
    found = [piece_of(n).nbytes for n in calls(special.program.forward.graph, "dp", "parameters")]  # type: ignore[union-attr]
    assert found == [ends[0] + sizes["model.norm.weight"], *[layer] * LAYERS]


def test_what_is_large_goes_with_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the embedding fills a bucket nothing more is held than one block ahead: it moves by itself."""
    _, _, special = sharded_llama(ZERO3, tied=False)
    monkeypatch.setattr(buckets_module, "BUCKET_BYTES", 64)
    program = partition(special.sharded)
    assert program.backward is not None
    found = [piece_of(n) for n in calls(program.forward.graph, "dp", "parameters")]
    blocks = [f"model.layers.{i}" for i in range(LAYERS)]
    assert [p.block for p in found if p is not None] == [None, *blocks, None, None]
    assert len(calls(program.backward.graph, "dp", "gradients")) == LAYERS + 3


@pytest.mark.parametrize("limit", [1, 4000, 20000, 2**30])
def test_gradients_share_all_reduces_as_ddp_has_them(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many all-reduces as DDP makes of the gradients in the order in which the backward makes them, and the same
    bytes; the last layers first."""
    model, _, special = sharded_llama(DDP)  # which others share, so with the limit that there is
    monkeypatch.setattr(buckets_module, "BUCKET_BYTES", limit)
    program = partition(special.sharded)
    assert program.backward is not None
    found = [piece_of(n) for n in calls(program.backward.graph, "dp", "gradients")]
    plain = without_passes(special).backward.graph
    ready = sorted((piece_of(n) for n in calls(plain, "dp", "gradients")), key=lambda p: p.ready)  # type: ignore[union-attr]
    tensors = [torch.empty(p.before) for p in ready if p is not None]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [limit])
    assert len(found) == len(theirs)
    sizes = [sum(tensors[i].nbytes for i in places) for places in theirs]
    assert sorted(p.nbytes for p in found if p is not None) == sorted(sizes)
    assert sum(sizes) == sum(p.nbytes for p in model.parameters())
    if limit == 1:
        blocks = [p.block for p in ready if p is not None and p.block is not None]
        assert list(dict.fromkeys(blocks)) == [f"model.layers.{i}" for i in reversed(range(LAYERS))]


def test_gathers_start_one_block_ahead() -> None:
    """While a block computes its successor's parameters are on their way, and no more than that: of all blocks at most
    two are there, gathered or on the way."""
    _, _, special = sharded_llama(ZERO3)
    assert special.program.backward is not None
    for module in (special.program.forward, special.program.backward):
        nodes = list(module.graph.nodes)
        place = {node: i for i, node in enumerate(nodes)}
        heavy = [n for n in nodes if n.target is aten.mm.default]
        gathers = sorted(calls(module.graph, "dp", "parameters"), key=lambda n: place[wait_of(n)])
        for before, gather in itertools.pairwise(gathers):
            between = [n for n in heavy if place[wait_of(before)] < place[n] < place[gather]]
            assert place[wait_of(before)] < place[gather] and not between
        inside = [g for g in gathers if (p := piece_of(g)) is not None and p.block is not None]
        alive = Counter(i for g in inside for i in range(place[g], _last_use(wait_of(g), place) + 1))
        assert max(alive.values()) == 2
        overlapped = sum(any(place[g] < place[n] < place[wait_of(g)] for n in heavy) for g in inside)
        assert overlapped >= LAYERS - 1  # the first of a forward has nothing but the embedding before it


def _last_use(wait: fx.Node, place: dict[fx.Node, int]) -> int:
    """The place of the last node that reads a gathered bucket, through views."""
    last, stack = place[wait], [wait]
    while stack:
        for user in stack.pop().users:
            last = max(last, place[user])
            if user.target in VIEWS:
                stack.append(user)
    return last


def test_reductions_start_early_and_are_waited_for_late() -> None:
    """A block's reduce-scatter starts before the block before it is computed, and is waited for when the next one
    starts; all-reduces are waited for after the last computation."""
    _, _, special = sharded_llama(ZERO3)
    assert special.program.backward is not None
    graph = special.program.backward.graph
    place = {node: i for i, node in enumerate(graph.nodes)}
    heavy = [place[n] for n in graph.nodes if n.target is aten.mm.default]
    scatters = calls(graph, "dp", "gradients")
    flying = Counter(i for n in scatters for i in range(place[n], place[wait_of(n)]))
    assert max(flying.values()) == 1
    beside = [sum(place[n] < h < place[wait_of(n)] for h in heavy) for n in scatters]
    assert len([count for count in beside if count > 0]) == LAYERS - 1  # all but the first layer's and the embedding's

    _, _, special = sharded_llama(DDP)
    assert special.program.backward is not None
    graph = special.program.backward.graph
    place = {node: i for i, node in enumerate(graph.nodes)}
    heavy = [place[n] for n in graph.nodes if n.target is aten.mm.default]
    assert all(place[wait_of(n)] > max(heavy) for n in calls(graph, "dp", "gradients"))


@pytest.mark.parametrize("limit", [64, 2**30])
def test_hybrid_zero_all_reduces_the_shards_of_a_block_behind_the_backward(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 on a mesh of two axes: every block, whatever its size, is all-reduced across groups once, half of its
    bytes, when its reduce-scatter is done; the rest goes with the first one, or fills a bucket. The third block's when
    the second has been computed, so that the first is computed beside its all-reduce; after that there is nothing left
    to compute."""
    model, _, special = sharded_llama(HYBRID)
    monkeypatch.setattr(buckets_module, "BUCKET_BYTES", limit)
    backward = partition(special.sharded).backward
    assert backward is not None
    place = {node: i for i, node in enumerate(backward.graph.nodes)}
    heavy = [place[n] for n in backward.graph.nodes if n.target is aten.mm.default]
    scatters, across = (calls(backward.graph, axis, "gradients") for axis in ("dp", "dp_replicate"))
    in_blocks = [[n for n in found if piece_of(n).block is not None] for found in (scatters, across)]  # type: ignore[union-attr]
    assert [piece_of(n).block for n in in_blocks[1]] == [f"model.layers.{i}" for i in reversed(range(LAYERS))]  # type: ignore[union-attr]
    assert [n.target for n in across] == [ALL_REDUCE] * len(across)
    assert len(across) - LAYERS == (0 if limit > 64 else 2)  # the norm and the tied embedding are in no block
    assert sum(piece_of(n).nbytes for n in across) == sum(p.nbytes for p in model.parameters()) // 2  # type: ignore[union-attr]
    for scatter, reduction, following in zip(*in_blocks, [*in_blocks[0][1:], None], strict=True):
        assert place[wait_of(scatter)] < place[reduction]
        assert following is None or place[reduction] < place[following]
    beside = [sum(place[n] < h < place[wait_of(n)] for h in heavy) for n in in_blocks[1]]
    assert beside[0] > 0 and beside[1:] == [0] * (LAYERS - 1)


def test_layers_outside_of_blocks_share_buckets_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of layers is no sequence of blocks: its four parameters are gathered together while they are small,
    and apart where a bucket is full."""
    assert block_of("0.weight") is None and block_of("lm_head.weight") is None
    assert block_of("model.layers.3.mlp.down_proj.weight") == "model.layers.3"
    model, batch = mlp(), {"input": torch.linspace(-1, 1, 128).view(8, 16)}
    plan = autopar.plan(model, "cpu:2", hints=Hints(dp=2, zero=3), example_inputs=batch)
    special = specialize(model, plan, (), batch)
    assert len(calls(special.program.forward.graph, "dp", "parameters")) == 1
    monkeypatch.setattr(buckets_module, "BUCKET_BYTES", 16 * 24 * 4)  # the first weight fills it
    found = [piece_of(n) for n in calls(partition(special.sharded).forward.graph, "dp", "parameters")]
    assert [p.nbytes for p in found if p is not None] == [16 * 24 * 4, (24 + 24 * 8 + 8) * 4]


def _piece(**changes: Any) -> Piece:
    base = dict(name="b.w", kind="all_gather", axis="dp", purpose="parameters", dtype=torch.float32, op=None, depth=0,
                block="b", ready=-1, nbytes=8, before=(1,), after=(2,))  # fmt: skip
    return Piece(**{**base, **changes})


@pytest.mark.parametrize("apart", [{"axis": "tp"}, {"dtype": torch.bfloat16}, {"depth": 1}, {"block": "c"},
                                   {"kind": "reduce_scatter", "op": "sum"}], ids=str)  # fmt: skip
def test_what_differs_is_not_merged(apart: dict[str, Any]) -> None:
    """Another axis, dtype, kind or block, or one that may depend on the other's result."""
    assert buckets([_piece(), _piece(**apart), _piece()]) == [[0, 2], [1]]


@pytest.mark.parametrize(("kind", "purpose", "neighbours", "found"), [
    ("all_gather", "parameters", ("b", None), [[0, 1], [2]]),
    ("all_gather", "parameters", (None, "b"), [[0, 2], [1]]),
    ("reduce_scatter", "gradients", (None, "b"), [[0, 1, 2]]),
    ("reduce_scatter", "gradients", ("b", None), [[0], [1, 2]]),
    ("all_reduce", "gradients", ("b", "b"), [[0, 1, 2]]),  # as DDP has them
], ids=str)  # fmt: skip
def test_what_lies_in_no_block_goes_with_its_neighbour(
    kind: str, purpose: str, neighbours: tuple[str | None, ...], found: list[list[int]]
) -> None:
    """A parameter if it is needed there, gradients if the last of them is made there."""
    base = {"kind": kind, "purpose": purpose}
    outside = [_piece(block=None, neighbour=near, **base) for near in neighbours]
    assert sorted(buckets([_piece(**base), *outside])) == found


def test_a_bucket_keeps_the_dtype_and_the_reduction() -> None:
    """Hand-written graph: two tensors reduce-scattered by one collective of two rows, and taken apart."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    outs = []
    for x, shape in ((a, (2, 3)), (b, (1,))):
        piece = _piece(kind="reduce_scatter", purpose="gradients", op="sum", before=shape, after=shape)
        node = graph.call_function(REDUCE_SCATTER, (x, "sum", 2, "axis:dp"))
        wait = graph.call_function(WAIT, (node,))
        node.meta, wait.meta = {"piece": piece}, {"piece": piece}
        outs.append(wait)
    graph.output(tuple(outs))
    bucket(graph)
    overlap(graph)
    module = fx.GraphModule(torch.nn.Module(), graph)
    (merged,) = calls(graph, "dp")
    assert merged.args[1:] == ("sum", 2, "axis:dp") and merged.target is REDUCE_SCATTER
    mesh = Mesh((("dp", 2),))
    inputs = [[torch.arange(12.0).view(4, 3) * (r + 1), torch.tensor([1.0, 2.0]) + r] for r in range(2)]
    found = run_ranks(module, inputs, mesh)
    whole = [sum(x[i] for x in inputs) for i in range(2)]
    for rank in range(2):
        assert torch.equal(found[rank][0], whole[0][2 * rank : 2 * rank + 2])
        assert torch.equal(found[rank][1], whole[1][rank : rank + 1])


@pytest.mark.parametrize("hints", [DDP, ZERO3, ZERO3_TP], ids=str)
def test_a_loss_and_its_count_travel_together(hints: Hints) -> None:
    """A step has one collective of numbers over dp: two of them, before the forward ends. The backward reads the count
    that the forward has."""
    _, _, special = sharded_llama(hints)
    assert special.program.backward is not None
    (both,) = [n for n in calls(special.program.forward.graph, "dp") if n.target is ALL_REDUCE]
    piece = piece_of(both)
    assert piece is not None and piece.nbytes == 8 and piece.before == (2,)
    others = [n for n in calls(special.program.backward.graph, "dp") if n.target is ALL_REDUCE]
    assert all(p is not None and p.purpose == "gradients" for p in map(piece_of, others))
    plain = without_passes(special)
    assert len([n for n in calls(plain.forward.graph, "dp") if n.target is ALL_REDUCE]) == 2


class Standardized(torch.nn.Module):
    """Numbers that are made of one another: a mean over the batch, and a variance about it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 4] -> a number."""
        y = self.linear(x)
        mean = y.sum() / (x > 0).sum()
        return (y - mean).square().sum() / (x < 1).sum()


def test_numbers_made_of_one_another_are_summed_one_after_the_other() -> None:
    """Both counts, which are integers, travel together; the sum of the variance needs the mean, and comes after it."""
    batch = {"x": torch.linspace(-1, 2, 32).view(8, 4)}
    model = Standardized()
    report = autopar.verify(model, "cpu:2", hints=Hints(dp=2), example_inputs=batch)
    plan = autopar.plan(model, "cpu:2", hints=Hints(dp=2), example_inputs=batch)
    assert report.ok, str(report)
    special = specialize(model, plan, (), batch)
    pieces = [p for n in calls(special.program.forward.graph, "dp") if (p := piece_of(n)) is not None]
    assert [(p.before, p.dtype) for p in pieces] == [((2,), torch.int64), ((), torch.float32), ((), torch.float32)]
    told = Counter[tuple[str, str]]()
    for c in plan.collectives:
        told[c.kind, c.axis] += c.count
    assert told == {key: n for key, n in report.traffic.count.items() if n}


def test_what_depends_on_a_number_is_divided_after_it_has_come() -> None:
    """Hand-written graph: a number, and the quotient of another by it, in one collective."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    outs = []
    for x in (b, a):
        sent = graph.call_function(aten.div.Tensor, (x, outs[0])) if outs else x
        piece = _piece(kind="all_reduce", purpose="activations", op="sum", block=None, before=(), after=(), nbytes=4)
        node = graph.call_function(ALL_REDUCE, (sent, "sum", "axis:dp"))
        wait = graph.call_function(WAIT, (node,))
        node.meta, wait.meta = {"piece": piece}, {"piece": piece}
        outs.append(wait)
    graph.output(tuple(outs))
    bucket(graph)
    graph.lint()
    assert len(calls(graph, "dp")) == 1
    module = fx.GraphModule(torch.nn.Module(), graph)
    inputs = [[torch.tensor(3.0 + r), torch.tensor(1.0 + r)] for r in range(2)]
    for found in run_ranks(module, inputs, Mesh((("dp", 2),))):
        assert torch.equal(found[0], torch.tensor(3.0)) and torch.equal(found[1], torch.tensor(7.0) / 3.0)


def test_reordering_keeps_dependencies() -> None:
    """A node wanted first comes as early as what it needs, and no earlier."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(aten.neg.default, (x,), name=f"n{i}") for i in range(3)]
    last = graph.call_function(aten.neg.default, (nodes[1],), name="last")
    graph.output((nodes[0], nodes[2], last))
    places = {node: (float(i),) for i, node in enumerate(graph.nodes)}
    reorder(graph, {**places, last: (-1.0,)})
    graph.lint()
    assert [n.name for n in graph.nodes if n.op == "call_function"] == ["n0", "n1", "last", "n2"]
