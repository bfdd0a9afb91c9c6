"""Rules of the operators on routed rows: on shards, for every strategy, they compute what they compute on the whole.

Of rows a rank has those of its tokens that go to its experts, so the pieces are picked by the index and have no shape
that a layout gives: `rule_harness` cannot cut them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rule_harness import MESHES, REDUCTIONS, gather, same, scatter
from torch import Tensor, fx

from autopar.ops import experts
from autopar.ops.experts import group_of
from autopar.ops.rows import MAKE_ROWS, TAKE_ROWS
from autopar.passes.collectives import emit_exchange, emit_step
from autopar.runtime.simulate import Traffic, run_ranks
from autopar.sharding import rule as rules
from autopar.sharding.layout import Layout, Mesh, TensorSpec
from autopar.sharding.redistribute import redistribution
from autopar.sharding.rules import rule_for
from autopar.sharding.rules.common import takes_every

own = torch.ops.autopar
TOKENS, TOP_K, EXPERTS, WIDTH, OUT = 16, 2, 4, 6, 4
GROUP = group_of(TOKENS, TOP_K, EXPERTS)
#: Skewed as routers are: expert 3 has nearly everything, expert 1 nothing; token 5 is dropped.
INDEX = torch.tensor([[3, 0], [3, 2], [3, 3], [0, 3], [3, 2], [4, 4], [2, 3], [3, 0]] * 2)


def uniform(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def pairs(tokens: range, experts: range) -> list[int]:
    """The places in the whole rows of the pairs of these tokens and experts, in order."""
    flat = INDEX.reshape(-1).tolist()
    order = [p for e in range(EXPERTS) for p in range(len(flat)) if flat[p] == e]
    return [i for i, p in enumerate(order) if p // TOP_K in tokens and flat[p] in experts]


def rows(width: int) -> Tensor:
    return uniform(1, len(pairs(range(TOKENS), range(EXPERTS))), width)


def own_part(layout: Layout, mesh: Mesh, width: int, rank: int) -> tuple[list[int], slice]:
    """Which rows, and which of their elements, a rank has of rows in ``layout``."""
    declared = (EXPERTS, TOKENS // GROUP, width)
    (e, c, h), (n, m, o) = layout.starts(mesh, declared, rank), layout.local_shape(mesh, declared)
    return pairs(range(c * GROUP, (c + m) * GROUP), range(e, e + n)), slice(h, h + o)


#: Arguments of every operator; `rows` are those with three dims of which the first is 1.
SAMPLES: dict[Any, Any] = {
    own.dispatch.default: lambda: (uniform(TOKENS, WIDTH), INDEX, None, EXPERTS, GROUP),
    own.combine.default: lambda: (rows(WIDTH), INDEX, uniform(TOKENS, TOP_K), EXPERTS, GROUP),
    own.combine_weights_backward.default: lambda: (uniform(TOKENS, WIDTH), rows(WIDTH), INDEX, EXPERTS, GROUP),
    own.grouped_mm.default: lambda: (rows(WIDTH), uniform(EXPERTS, WIDTH, OUT), INDEX),
    own.grouped_outer.default: lambda: (rows(WIDTH), rows(OUT), INDEX, EXPERTS),
    own.grouped_bias.default: lambda: (rows(WIDTH), uniform(EXPERTS, WIDTH), INDEX),
    own.grouped_sum.default: lambda: (rows(WIDTH), INDEX, EXPERTS),
    own.gated_mm.default: lambda: (rows(WIDTH), uniform(EXPERTS, 2, OUT, WIDTH), INDEX),
    own.gated_mm_backward.default: lambda: (rows(OUT), rows(OUT), uniform(EXPERTS, 2, OUT, WIDTH), INDEX),
    own.gated_outer.default: lambda: (rows(OUT), rows(OUT), rows(WIDTH), INDEX, EXPERTS),
}
WEIGHTED = {
    own.dispatch.default: lambda: (uniform(TOKENS, WIDTH), INDEX, uniform(TOKENS, TOP_K), EXPERTS, GROUP),
    own.combine.default: lambda: (rows(WIDTH), INDEX, None, EXPERTS, GROUP),
}


def is_rows(tensor: Tensor) -> bool:
    return tensor.dim() == 3 and tensor.shape[0] == 1


def spec_of(leaf: Any) -> TensorSpec | None:
    if not isinstance(leaf, Tensor):
        return None
    shape = (EXPERTS, TOKENS // GROUP, leaf.shape[2]) if is_rows(leaf) else tuple(leaf.shape)
    return TensorSpec(shape, leaf.dtype, is_rows(leaf))


def cut(whole: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    if not is_rows(whole):
        return scatter(whole, layout, mesh)
    parts = scatter(whole, Layout(((), (), ()), layout.partial), mesh)
    pieces = []
    for rank, part in enumerate(parts):
        places, width = own_part(layout, mesh, whole.shape[2], rank)
        pieces.append(part[:, places, width])
    return pieces


def agrees(pieces: Sequence[Tensor], layout: Layout, mesh: Mesh, expected: Tensor) -> bool:
    """Whether the ranks' pieces are those of ``expected``, partial sums added up."""
    if not is_rows(expected):
        return same(gather(pieces, layout, mesh, expected.shape), expected)
    owed = [axis for axis, _ in layout.partial]
    for rank in range(mesh.size):
        at = dict(zip(mesh.names, mesh.coordinates(rank), strict=True))
        peers = [
            r for r in range(mesh.size)
            if all(c == at[axis] or axis in owed for axis, c in zip(mesh.names, mesh.coordinates(r), strict=True))
        ]
        places, width = own_part(layout, mesh, expected.shape[2], rank)
        if not same(REDUCTIONS["sum"](torch.stack([pieces[r] for r in peers])), expected[:, places, width]):
            return False
    return True


@pytest.mark.parametrize("inward", ["", "e"], ids=["outward", "inward"])
@pytest.mark.parametrize("samples", [SAMPLES, WEIGHTED], ids=["plain", "weighted"])
def test_shards_compute_the_whole(samples: dict[Any, Any], inward: str) -> None:
    for target, make in samples.items():
        torch.manual_seed(0)
        args = make()
        made = target(*args)
        expected = made if isinstance(made, tuple) else (made,)
        call, operands = rules.op_call(target, args, {}, [*map(spec_of, expected)], spec_of)
        found = rule_for(call)
        assert found is not None
        rule, split = replace(found, inward=frozenset(inward)), set()
        for mesh in MESHES:
            for strategy in rules.strategies(rule, mesh):
                ins, outs = rules.layouts(rule, strategy, mesh)
                given = [cut(t, layout, mesh) for t, layout in zip(operands, ins, strict=True)]
                found = [
                    rules.run_local(rule, rules.Local(
                        call, mesh, tuple(pieces[rank] for pieces in given), ins, outs,
                        emit=lambda op, *args, **kwargs: op(*args, **kwargs),
                        starts=lambda layout, shape, m=mesh, r=rank: torch.tensor(layout.starts(m, shape, r))))
                    for rank in range(mesh.size)
                ]
                parts = zip(*(piece if isinstance(piece, tuple) else (piece,) for piece in found), strict=True)
                for pieces, layout, whole in zip(parts, outs, expected, strict=True):
                    assert agrees(pieces, layout, mesh, whole), f"{target} under {[*map(str, strategy)]}"
                split |= {choice.factor for choice in strategy}
        assert {"e", "c"} <= split, f"{target} is split by experts and by tokens, not by {split}"


@pytest.mark.parametrize("to_experts", [True, False])
@pytest.mark.parametrize(("experts", "tokens"), [((), ("b",)), ((), ("a", "b")), (("a",), ("b",))], ids=str)
def test_ranks_exchange_rows(experts: tuple[str, ...], tokens: tuple[str, ...], to_experts: bool) -> None:
    """What splits the tokens comes to split the experts, and back, by one all-to-all with pieces as the router makes
    them; on a rank with one of the ends of an axis beside another that splits either."""
    mesh, shape = MESHES[2], (EXPERTS, TOKENS // GROUP, WIDTH)
    by_tokens = Layout((experts, tokens, ()))
    by_experts = Layout(((*experts, tokens[-1]), tokens[:-1], ()))
    source, target = (by_tokens, by_experts) if to_experts else (by_experts, by_tokens)
    (step,) = redistribution(source, target, mesh, shape, 8, (0, 1)) or ()
    graph = fx.Graph()
    given, coordinates, index = (graph.placeholder(name) for name in ("rows", "coordinates", "index"))

    def emit(op: Any, *args: Any) -> fx.Node:
        return graph.call_function(op, args)

    place = mesh.names.index(step.axis)
    coordinate = emit(torch.ops.aten.slice.Tensor, coordinates, 0, place, place + 1)
    starts = emit(own.starts.default, coordinates, by_tokens.start_weights(mesh, shape))
    first = emit(torch.ops.aten.select.int, starts, 0, 0)
    graph.output((emit_exchange(emit, given, step, mesh, shape, coordinate, index, first),))
    whole = rows(WIDTH)
    of_group = Layout((by_experts.dims[1], ()))
    pieces, indices = cut(whole, source, mesh), scatter(INDEX, of_group, mesh)
    inputs = [[pieces[r], torch.tensor(mesh.coordinates(r)), indices[r]] for r in range(mesh.size)]
    traffic = Traffic()
    found = run_ranks(fx.GraphModule(torch.nn.Module(), graph), inputs, mesh, traffic)
    for (piece,), expected in zip(found, cut(whole, target, mesh), strict=True):
        assert torch.equal(piece, expected)
    assert traffic.count == {("all_to_all", step.axis): 1}


def test_axes_leave_the_tokens_from_the_innermost_on() -> None:
    """Whatever splits the tokens comes to split the experts, an all-to-all an axis, if experts are nested the other way
    round; nested as in the mesh there is no way."""
    mesh, shape = Mesh((("dp", 2), ("dp_expert", 2), ("tp", 2))), (EXPERTS, 8, WIDTH)
    tokens = Layout(((), ("dp", "dp_expert", "tp"), ()))
    steps = redistribution(tokens, Layout((("tp", "dp_expert"), ("dp",), ())), mesh, shape, 8, (0, 1))
    assert steps is not None
    assert [(step.kind, step.axis) for step in steps] == [("all_to_all", "tp"), ("all_to_all", "dp_expert")]
    assert redistribution(tokens, Layout((("dp_expert", "tp"), ("dp",), ())), mesh, shape, 8, (0, 1)) is None


def test_rows_of_any_number_are_split_and_gathered_by_their_last_dim() -> None:
    """Of what is declared with its mean, [E, C, H], a rank has [1, P, H]."""
    mesh, declared, whole = MESHES[2], (EXPERTS, TOKENS // GROUP, WIDTH), rows(WIDTH)
    assert whole.shape[1] != math.prod(declared[:2])
    apart, together = Layout(((), (), ("a",))), Layout(((), (), ()))
    pieces = [[t, torch.tensor(mesh.coordinates(r))] for r, t in enumerate(cut(whole, together, mesh))]
    for source, target in ((together, apart), (apart, together)):
        graph = fx.Graph()
        given, coordinates = (graph.placeholder(name) for name in ("rows", "coordinates"))

        def emit(op: Any, *args: Any, to: fx.Graph = graph) -> fx.Node:
            return to.call_function(op, args)

        (step,) = redistribution(source, target, mesh, declared, 8, (0, 1)) or ()
        at = mesh.names.index(step.axis)
        coordinate = emit(torch.ops.aten.slice.Tensor, coordinates, 0, at, at + 1)
        graph.output((emit_step(emit, given, step, mesh, declared, lambda axis, c=coordinate: c, routed=True),))
        found = run_ranks(fx.GraphModule(torch.nn.Module(), graph), pieces, mesh, Traffic())
        for (piece,), expected in zip(found, cut(whole, target, mesh), strict=True):
            assert torch.equal(piece, expected)
        pieces = [[piece, pieces[r][1]] for r, (piece,) in enumerate(found)]


def test_rows_are_not_gathered_or_cut() -> None:
    mesh, shape = MESHES[2], (EXPERTS, TOKENS // GROUP, WIDTH)
    whole = Layout(((), (), ()))
    for split in (Layout((("a",), (), ())), Layout(((), ("a",), ()))):
        assert redistribution(split, whole, mesh, shape, 8, (0, 1)) is None
        assert redistribution(whole, split, mesh, shape, 8, (0, 1)) is None


def test_every_operator_has_a_sample() -> None:
    assert set(SAMPLES) == MAKE_ROWS | TAKE_ROWS


def test_the_whole_is_what_a_loop_over_experts_gives() -> None:
    x, weight, bias, scale = uniform(TOKENS, WIDTH), uniform(EXPERTS, WIDTH, OUT), uniform(EXPERTS, OUT), uniform(16, 2)
    tensors = [x, weight, bias, scale]
    for t in tensors:
        t.requires_grad_()
    expected = torch.zeros(TOKENS, OUT, dtype=torch.float64)
    for t in range(TOKENS):
        for k in range(TOP_K):
            if (e := int(INDEX[t, k])) < EXPERTS:
                expected = expected.index_add(0, torch.tensor([t]), (x[t] @ weight[e] + bias[e])[None] * scale[t, k])
    hidden = own.grouped_bias(own.grouped_mm(own.dispatch(x, INDEX, None, EXPERTS, GROUP), weight, INDEX), bias, INDEX)
    found = own.combine(hidden, INDEX, scale, EXPERTS, GROUP)
    assert same(found.detach(), expected.detach())
    tangent = uniform(TOKENS, OUT)
    for a, b in zip(torch.autograd.grad(found, tensors, tangent), torch.autograd.grad(expected, tensors, tangent),
                    strict=True):
        assert same(a, b)


def test_a_gate_is_two_products() -> None:
    weight, given = uniform(EXPERTS, 2, OUT, WIDTH).requires_grad_(), rows(WIDTH).requires_grad_()
    expected = [own.grouped_mm(given, weight[:, half].transpose(1, 2), INDEX) for half in range(2)]
    found, tangents = own.gated_mm(given, weight, INDEX), [torch.randn_like(t) for t in expected]
    assert all(same(a.detach(), b.detach()) for a, b in zip(found, expected, strict=True))
    pairs = [torch.autograd.grad(outs, (given, weight), tangents) for outs in (found, expected)]
    assert all(same(a, b) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize(("size", "start", "end", "step", "every"), [
    (8, 1, 2**63 - 1, 2, True), (8, 0, None, 4, True), (8, 2, None, 2, False), (9, 0, None, 2, False),
    (8, 0, 7, 2, False), (8, 0, None, 1, False),
])  # fmt: skip
def test_slices_that_take_every_so_many_th(size: int, start: int, end: int | None, step: int, every: bool) -> None:
    """Of gate and up one after the other in turn, each rank has both of its part."""
    assert takes_every(size, start, end, step) == every


@pytest.mark.parametrize(("tokens", "top_k", "experts", "group"),
                         [(64, 2, 8, 4), (64, 2, 4, 2), (60, 1, 7, 6), (7, 2, 8, 1), (16, 4, 2, 1), (3, 1, 8, 3)])
def test_tokens_of_a_slot(tokens: int, top_k: int, experts: int, group: int) -> None:
    """The largest divisor of the tokens that is at most experts / top_k."""
    assert group_of(tokens, top_k, experts) == group


def test_what_is_no_index_is_refused() -> None:
    with pytest.raises(ValueError, match=r"int64 index \[T, K\], found .* torch.int32"):
        own.dispatch(uniform(TOKENS, WIDTH), INDEX.int(), None, EXPERTS, GROUP)


def test_pairs_are_sorted_once_for_all_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of a mixture sort its index once; written to, it is sorted again."""
    sorts = []
    find = experts._sorted_pairs
    monkeypatch.setattr(experts, "_sorted_pairs", lambda *given: sorts.append(given) or find(*given))
    x, weight, index = uniform(TOKENS, WIDTH), uniform(EXPERTS, WIDTH, OUT), INDEX.clamp(max=EXPERTS - 1)
    weights = torch.rand(TOKENS, TOP_K, dtype=torch.float64)
    for tensor in (x, weight, weights):
        tensor.requires_grad_()
    rows = own.grouped_mm(own.dispatch(x, index, None, EXPERTS, GROUP), weight, index)
    own.combine(rows, index, weights, EXPERTS, GROUP).sum().backward()
    assert len(sorts) == 1
    index[0, 0] = 1
    (counts,) = own.expert_counts(index, EXPERTS).view(1, -1)
    assert len(sorts) == 2 and counts.tolist() == torch.bincount(index.flatten(), minlength=EXPERTS).tolist()
