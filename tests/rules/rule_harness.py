"""Runs an operator rank by rank under every strategy of its rule, and compares with the operator on the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.runtime import simulate
from autopar.sharding import rule as rules
from autopar.sharding.layout import Layout, Mesh, TensorSpec
from autopar.sharding.rules import rule_for

MESHES = (Mesh((("a", 2),)), Mesh((("a", 4),)), Mesh((("a", 2), ("b", 2))))
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda pieces: pieces.sum(0, dtype=pieces.dtype), "max": lambda pieces: pieces.amax(0),
    "min": lambda pieces: pieces.amin(0)}


def spec_of(leaf: Any) -> TensorSpec | None:
    return TensorSpec(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def call_of(target: Any, *args: Any, **kwargs: Any) -> rules.OpCall:
    """The call, with the results of running it."""
    results = [TensorSpec(tuple(t.shape), t.dtype) for t in tensors(target(*args, **kwargs))]
    return rules.op_call(target, args, kwargs, results, spec_of)[0]


def scatter(whole: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """One piece a rank. Where they are to be summed, random pieces with that sum."""
    assert all(op == "sum" for _, op in layout.partial), "only sums pass through operators"
    axes = [axis for axis, _ in layout.partial]
    where = list(itertools.product(*(range(mesh.degree(axis)) for axis in axes)))
    parts = {at: torch.randn(whole.shape, dtype=whole.dtype) for at in where[1:]}
    parts[where[0]] = whole - sum(parts.values()) if parts else whole
    pieces = []
    for rank in range(mesh.size):
        at = dict(zip(mesh.names, mesh.coordinates(rank), strict=True))
        pieces.append(layout.local_slice(mesh, parts[tuple(at[axis] for axis in axes)], rank))
    return pieces


def gather(pieces: Sequence[Tensor], layout: Layout, mesh: Mesh, shape: Sequence[int]) -> Tensor:
    """The whole tensor. Replicas have to agree."""
    partial = {axis for axis, _ in layout.partial}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        at = tuple(c for axis, c in zip(mesh.names, mesh.coordinates(rank), strict=True) if axis not in partial)
        groups.setdefault(at, []).append(rank)
    whole, written = torch.zeros(shape, dtype=pieces[0].dtype), torch.zeros(shape, dtype=torch.bool)
    for ranks in groups.values():
        value = pieces[ranks[0]]
        if partial:
            value = REDUCTIONS[layout.partial[0][1]](torch.stack([pieces[rank] for rank in ranks]))
        begin, extent = layout.starts(mesh, shape, ranks[0]), layout.local_shape(mesh, shape)
        place = tuple(slice(b, b + e) for b, e in zip(begin, extent, strict=True))
        assert not bool(written[place].any()) or same(whole[place], value), "replicas disagree"
        whole[place], written[place] = value, True
    assert bool(written.all()), "the pieces leave gaps"
    return whole


def same(a: Tensor, b: Tensor, bound: float = 1e-10) -> bool:
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=bound, atol=bound, equal_nan=True)


def run_ranks(rule: rules.Rule, call: rules.OpCall, operands: Sequence[Tensor], strategy: rules.Strategy,
              mesh: Mesh, values: bool = True) -> list[Tensor]:
    """The whole results, put together from those of the ranks (or, without ``values``, from zeros of their shapes)."""
    ins, outs = rules.layouts(rule, strategy, mesh)
    for layout, spec in itertools.chain(zip(ins, call.operands, strict=True), zip(outs, call.results, strict=True)):
        assert layout.divides(mesh, spec.shape), f"{layout} cuts {spec.shape} into unequal pieces"
    by_operand = [scatter(t, layout, mesh) for t, layout in zip(operands, ins, strict=True)]
    if rule.passing(strategy, mesh) is not None:
        found = emitted(rule, call, strategy, mesh, by_operand)
        return [gather([values[i] for values in found], outs[i], mesh, spec.shape)
                for i, spec in enumerate(call.results)]
    by_rank = []
    for rank in range(mesh.size):
        local = rules.Local(
            call, mesh, tuple(pieces[rank] for pieces in by_operand), ins, outs,
            emit=lambda target, *args, **kwargs: target(*args, **kwargs),
            starts=lambda layout, shape, rank=rank: torch.tensor(layout.starts(mesh, shape, rank), dtype=torch.int64))
        found = tensors(rules.run_local(rule, local))
        by_rank.append(found if values else [torch.zeros_like(t) for t in found])
        assert [tuple(t.shape) for t in by_rank[-1]] == [
            o.local_shape(mesh, s.shape) for o, s in zip(outs, call.results, strict=True)], "local shapes"
    return [gather([found[i] for found in by_rank], outs[i], mesh, spec.shape) for i, spec in enumerate(call.results)]


def emitted(rule: rules.Rule, call: rules.OpCall, strategy: rules.Strategy, mesh: Mesh,
            by_operand: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """What every rank has of the results where ranks send each other something: as a graph, in lockstep. It sends the
    messages that the rule says, in that order but for when they start and end."""
    ins, outs = rules.layouts(rule, strategy, mesh)
    graph, begins = fx.Graph(), list[tuple[Layout, tuple[int, ...]]]()

    def starts(layout: Layout, shape: Sequence[int]) -> fx.Node:
        begins.append((layout, tuple(shape)))
        return graph.placeholder(f"starts_{len(begins)}")

    inputs = [graph.placeholder(f"operand_{i}") for i in range(len(ins))]

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(target, args, kwargs)

    result = rules.run_local(rule, rules.Local(call, mesh, tuple(inputs), ins, outs, emit, starts))
    assert isinstance(result, list)
    graph.output(tuple(result))
    for node in reversed(graph.find_nodes(op="placeholder")):  # in front, as they are asked for on the way
        next(iter(graph.nodes)).prepend(node)
    traffic = simulate.Traffic()
    given = [[*(pieces[rank] for pieces in by_operand),
              *(torch.tensor(layout.starts(mesh, shape, rank)) for layout, shape in begins)]
             for rank in range(mesh.size)]
    found = simulate.run_ranks(fx.GraphModule(torch.nn.Module(), graph), given, mesh, traffic)
    passing = rule.passing(strategy, mesh)
    assert passing is not None
    told = {(hop.kind, hop.axis) for hop in passing.hops}
    assert told == set(traffic.count)
    for kind, axis in told:
        sent = [hop.nbytes for hop in passing.hops if (hop.kind, hop.axis) == (kind, axis)]
        assert (traffic.count[kind, axis], traffic.bytes[kind, axis]) == (len(sent), sum(sent)), (kind, axis, sent)
    return found


def check(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, values: bool = True,
          rule_of: Callable[[rules.OpCall], rules.Rule | None] = rule_for) -> int:
    """Compare all strategies of one call with the whole (unless ``values``, shapes only); returns how many split it."""
    expected = tensors(target(*args, **kwargs))
    results = [TensorSpec(tuple(t.shape), t.dtype) for t in expected]
    call, operands = rules.op_call(target, args, kwargs, results, spec_of)
    rule = rule_of(call)
    if rule is None:
        return 0
    tried, bound = 0, 1e-6 if any(t.dtype == torch.float32 for t in [*operands, *expected]) else 1e-10
    for mesh in MESHES:
        for strategy in rules.strategies(rule, mesh):
            found = run_ranks(rule, call, operands, strategy, mesh, values)
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                what = f"{target} {[tuple(t.shape) for t in operands]} result {i} under {[*map(str, strategy)]}"
                assert a.dtype == b.dtype and (not values or same(a, b, bound)), f"{what}:\n{a}\nis not\n{b}"
            tried += any(choice != rules.REPLICATE for choice in strategy)
    return tried
