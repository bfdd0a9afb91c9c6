"""Known-bad programs fail: every mutation of an emitted graph is noticed by the comparison of `autopar.verify`.

Each test changes *every* place of a program where a mutation applies, one at a time, and wants the list of those that
go unnoticed empty. All in float32, where the comparison allows most.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import LARGE_HEAD, MLP, Batch, Case, Transformer, causal_batch, llama, mlp_batch, plain_batch, seeded
from torch import Tensor, fx, nn

import autopar
from autopar import Hints
from autopar.passes.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    KINDS,
    REDUCE_SCATTER,
    WAIT,
    aten,
    axis_of,
    group_argument,
    group_of,
)
from autopar.runtime.program import Specialization
from autopar.runtime.verify import compare
from autopar.sharding.layout import Mesh
from autopar.specialize import specialize

#: One layer is enough, and keeps the number of places small. Nothing that is done to a key bias would show.
TRANSFORMER = Case(
    "transformer",
    seeded(lambda: Transformer(fused=True, dropout=0.2, hidden=16, layers=1, key_bias=False)),
    plain_batch,
)
LLAMA = Case("llama", seeded(lambda: llama(heads=4, kv_heads=2, hidden=16, ffn=32, layers=1)), causal_batch)
PERCEPTRON = Case("mlp", seeded(MLP), mlp_batch)

PROGRAMS: dict[str, tuple[Case, Hints]] = {
    "mlp-tp2": (PERCEPTRON, Hints(dp=1, tp=2)),
    "mlp-zero3-dp2-tp2": (PERCEPTRON, Hints(dp=2, tp=2, zero=3)),
    "transformer-dp2-tp2": (TRANSFORMER, Hints(dp=2, tp=2, zero=0)),
    "transformer-zero3-dp2-tp2": (TRANSFORMER, Hints(dp=2, tp=2, zero=3)),
    "llama-dp2-tp2": (LLAMA, Hints(dp=2, tp=2, zero=0)),
    "large-head-tp2": (LARGE_HEAD, Hints(dp=1, tp=2)),
}


@functools.cache
def program(name: str) -> tuple[nn.Module, Batch, Specialization]:
    """A model, its batch and its program, made once a test process and never changed."""
    case, hints = PROGRAMS[name]
    model, batch = case.make()
    ranks = (hints.dp or 1) * (hints.tp or 1)
    # Hosts of one device: where bytes are dear the loss of a large vocabulary is split, and has a maximum to reduce.
    cluster = f"cpu:{ranks}x1" if case is LARGE_HEAD else f"cpu:1x{ranks}"
    plan = autopar.plan(model, cluster, hints=hints, example_inputs=batch)
    return model, batch, specialize(model, plan, (), batch)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A copy of one of a program's two graphs, to be changed. ``split`` gives the axes that split each parameter's
    input."""

    graph: fx.Graph
    mesh: Mesh
    split: dict[str, tuple[str, ...]]

    def after(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A new node after ``node``."""
        with self.graph.inserting_after(node):
            return self.graph.call_function(target, args)

    def coordinate(self, axis: str, after: fx.Node) -> fx.Node:
        """This rank's coordinate, int64 [1], after ``after``."""
        inputs = self.graph.find_nodes(op="placeholder")
        whole = next((n for n in inputs if n.name == "coordinates"), None)
        if whole is None:
            with self.graph.inserting_after(inputs[-1]):
                whole = self.graph.placeholder("coordinates")
        i = self.mesh.names.index(axis)
        if after.op == "placeholder":
            after = self.graph.find_nodes(op="placeholder")[-1]
        return self.after(after, aten.slice.Tensor, whole, 0, i, i + 1)

    def next_one(self, coordinate: fx.Node, axis: str) -> fx.Node:
        """The coordinate of the next rank on ``axis``."""
        more = self.after(coordinate, aten.add.Scalar, coordinate, 1)
        return self.after(more, aten.remainder.Scalar, more, self.mesh.degree(axis))

    def piece(self, stacked: fx.Node, coordinate: fx.Node, axis: str) -> fx.Node:
        """The piece at ``coordinate`` of those that lie one after the other along dim 0 of ``stacked``."""
        pieces = self.after(coordinate, aten.chunk.default, stacked, self.mesh.degree(axis))
        stack = self.after(pieces, aten.stack.default, pieces)
        chosen = self.after(stack, aten.index_select.default, stack, 0, coordinate)
        return self.after(chosen, aten.squeeze.dim, chosen, 0)

    @staticmethod
    def replace(node: fx.Node, users: list[fx.Node], by: fx.Node) -> None:
        """Let ``users`` read ``by`` in place of ``node``."""
        for user in users:
            user.replace_input_with(node, by)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """``applies`` says of a node of the original whether ``change`` can be made at its copy."""

    applies: Callable[[Graph, fx.Node], bool]
    change: Callable[[Graph, fx.Node], None]


def mutants(special: Specialization, mutate: Mutation) -> Iterator[tuple[str, Specialization]]:
    """The program changed at every place where ``mutate`` applies, one place at a time, with a name for the place."""
    mesh = special.assignment.mesh
    split = {special.input_name(node): layout.split_axes for node, layout in special.assignment.sources.items()}
    parameters = {special.input_name(p.placeholder) for p in special.captured.parameters}
    split = {name: axes for name, axes in split.items() if name in parameters}
    for part in ("forward", "backward"):
        module = getattr(special.program, part)
        for index, node in enumerate(module.graph.nodes):
            if not mutate.applies(Graph(module.graph, mesh, split), node):
                continue
            graph = fx.Graph()
            graph.output(graph.graph_copy(module.graph, {}))
            copied = list(graph.nodes)[index]
            assert (copied.op, copied.target) == (node.op, node.target)
            mutate.change(Graph(graph, mesh, split), copied)
            graph.lint()
            inputs = tuple(n.target for n in graph.find_nodes(op="placeholder"))
            changed = {part: fx.GraphModule(nn.Module(), graph), f"{part}_inputs": inputs}
            sources = ", ".join(n.name for n in node.all_input_nodes)
            place = f"{part} {node.name} of {sources} ({node.meta.get('module')})"
            yield place, dataclasses.replace(special, program=dataclasses.replace(special.program, **changed))


def unnoticed(name: str, mutate: Mutation) -> tuple[int, list[str]]:
    """How many mutants there are, and which of them pass the comparison."""
    model, batch, special = program(name)
    places, passed = 0, []
    for place, mutant in mutants(special, mutate):
        places += 1
        if compare(model, mutant, (), batch).ok:
            passed.append(place)
    return places, passed


def count(name: str, *targets: Any) -> int:
    """Number of nodes with one of these targets in both graphs of a program."""
    _, _, special = program(name)
    assert special.program.backward is not None
    graphs = (special.program.forward.graph, special.program.backward.graph)
    return sum(node.target in targets for graph in graphs for node in graph.nodes)


# -- the mutations ---------------------------------------------------------------------------------------------------


def _of_collective(*targets: Any) -> Callable[[Graph, fx.Node], bool]:
    """Whether a node is the result of one of these collectives, and anything depends on it."""
    return lambda graph, node: node.target is WAIT and node.all_input_nodes[0].target in targets and not ignored(node)


def ignored(node: fx.Node) -> bool:
    """Whether only `native_layer_norm_backward` reads a value, as the bias: it asks for one and does not look at it."""
    if node.target is aten.native_layer_norm_backward.default or node.op == "output":
        return False
    return all(
        user.args.index(node) == 6 if user.target is aten.native_layer_norm_backward.default else ignored(user)
        for user in node.users
    )


def _remove(graph: Graph, node: fx.Node) -> None:
    if node.target is ALL_REDUCE:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    else:
        axis, users = axis_of(group_argument(node)), list(node.users)
        own = graph.piece(node.args[0], graph.coordinate(axis, node), axis)  # type: ignore[arg-type]
        graph.replace(node, users, own)
    graph.graph.erase_node(node)


def _double(graph: Graph, node: fx.Node) -> None:
    users = list(node.users)
    graph.replace(node, users, graph.after(node, aten.mul.Scalar, node, 2))


def _double_output(index: int, graph: Graph, node: fx.Node) -> None:
    outputs: list[Any] = list(node.args[0])  # type: ignore[arg-type]
    with graph.graph.inserting_before(node):
        outputs[index] = graph.graph.call_function(aten.mul.Scalar, (outputs[index], 2))
    node.args = (tuple(outputs),)


def _is_cut(graph: Graph, node: fx.Node) -> bool:
    if node.target is not aten.index_select.default:
        return False
    where: Any = node.args[2]
    return where.target is aten.slice.Tensor and where.args[0].name == "coordinates"


def _cut_next(graph: Graph, node: fx.Node) -> None:
    x, dim, where = node.args
    axis = graph.mesh.names[where.args[2]]  # type: ignore[union-attr,index]
    node.args = (x, dim, graph.next_one(where, axis))  # type: ignore[arg-type]


def _roll(graph: Graph, node: fx.Node) -> None:
    n = graph.mesh.degree(axis_of(group_argument(node.all_input_nodes[0])))
    users = list(node.users)
    pieces = graph.after(node, aten.chunk.default, node, n)
    stack = graph.after(pieces, aten.stack.default, pieces)
    rolled = graph.after(stack, aten.roll.default, stack, [1], [0])
    graph.replace(node, users, graph.after(rolled, aten.flatten.using_ints, rolled, 0, 1))


def _read_next(graph: Graph, node: fx.Node) -> None:
    axis, users = graph.split[node.name][0], list(node.users)
    coordinate = graph.next_one(graph.coordinate(axis, node), axis)
    gathered = graph.after(coordinate, ALL_GATHER, node, graph.mesh.degree(axis), group_of(axis))
    waited = graph.after(gathered, WAIT, gathered)
    place = graph.after(waited, aten.alias.default, coordinate)
    graph.replace(node, users, graph.piece(waited, place, axis))


#: No mutation: the copy of a program.
LEAVE_ALONE = Mutation(lambda graph, node: node.op == "output", lambda graph, node: None)
#: A reduction that does not happen: every rank goes on with its own partial result, or its own part of it.
REMOVE_REDUCTION = Mutation(lambda graph, node: node.target in (ALL_REDUCE, REDUCE_SCATTER), _remove)
#: What a collective gives, twice as large: a wrong scale. Not a maximum: log-softmax subtracts it for safety alone, and
#: any other number would do.
DOUBLE = Mutation(
    lambda graph, node: _of_collective(*KINDS)(graph, node) and "max" not in node.all_input_nodes[0].args, _double
)
#: A rank that cuts its neighbour's piece out of a whole tensor.
CUT_NEXT = Mutation(_is_cut, _cut_next)
#: A gather or an exchange that puts every piece one place too far.
ROLL_PIECES = Mutation(_of_collective(ALL_GATHER, ALL_TO_ALL), _roll)
#: A parameter of which every rank reads the shard of its neighbour, on the first axis that splits it.
READ_NEXT_SHARD = Mutation(lambda graph, node: bool(graph.split.get(node.name)) and not ignored(node), _read_next)


# -- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_copy_passes(name: str) -> None:
    """Copying a graph as the mutations do changes nothing: what they fail of is the mutation."""
    places, passed = unnoticed(name, LEAVE_ALONE)
    assert places == len(passed) == 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_removed_reductions(name: str) -> None:
    """No all-reduce and no reduce-scatter can be left out, of activations, gradients, losses or counts of labels."""
    places, passed = unnoticed(name, REMOVE_REDUCTION)
    assert places == count(name, ALL_REDUCE, REDUCE_SCATTER) >= 2
    assert not passed


@pytest.mark.parametrize("name", PROGRAMS)
def test_doubled_scales(name: str) -> None:
    """Nothing that a collective gives can be twice as large."""
    places, passed = unnoticed(name, DOUBLE)
    assert places >= count(name, ALL_REDUCE, REDUCE_SCATTER) - (name == "large-head-tp2")
    assert not passed


@pytest.mark.parametrize("name", PROGRAMS)
def test_doubled_gradients(name: str) -> None:
    """No single gradient, and no result, can be twice as large."""
    model, batch, special = program(name)
    passed, places = [], 0
    for part, outputs in (("forward", special.program.num_results), ("backward", len(special.captured.parameters))):
        for i in range(outputs):
            here = getattr(special.program, part).graph.output_node()
            mutation = Mutation(lambda graph, node, here=here: node is here, functools.partial(_double_output, i))
            (mutant,) = (mutant for _, mutant in mutants(special, mutation))
            places += 1
            if compare(model, mutant, (), batch).ok:
                passed.append(f"{part} output {i}")
    assert places >= 3
    assert not passed


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "dp2" in name])
def test_pieces_of_neighbours(name: str) -> None:
    """No rank can cut, gather or exchange the piece of its neighbour in place of its own."""
    cuts, passed = unnoticed(name, CUT_NEXT)
    moves, passed_moves = unnoticed(name, ROLL_PIECES)
    assert cuts >= 2
    assert moves >= 2
    assert not passed + passed_moves


@pytest.mark.parametrize("name", PROGRAMS)
def test_shards_of_neighbours(name: str) -> None:
    """No parameter's shard can be that of the neighbour, in the forward or in the backward."""
    places, passed = unnoticed(name, READ_NEXT_SHARD)
    assert places >= 3
    assert not passed


def three_bits(x: Tensor) -> Tensor:
    """``x`` rounded to 3 bits of mantissa, where bfloat16 has 8."""
    return x.to(torch.float8_e5m2).to(x.dtype)


def _coarse_output(graph: Graph, node: fx.Node) -> None:
    with graph.graph.inserting_before(node):
        rounded = [graph.graph.call_function(three_bits, (value,)) for value in node.all_input_nodes]
    node.args = (tuple(rounded),)


@functools.cache
def in_bfloat16() -> tuple[nn.Module, Batch, Specialization]:
    """A model in bfloat16 with its batch and the program of a rank on both axes."""
    model, batch = TRANSFORMER.make(torch.bfloat16)
    plan = autopar.plan(model, "cpu:1x4", hints=Hints(dp=2, tp=2, zero=0), example_inputs=batch)
    return model, batch, specialize(model, plan, (), batch)


@pytest.mark.slow
def test_removed_reductions_in_bfloat16() -> None:
    """Where errors are only compared with those of one process, a wrong program fails as well."""
    model, batch, special = in_bfloat16()
    wrong = [(place, compare(model, mutant, (), batch).ok) for place, mutant in mutants(special, REMOVE_REDUCTION)]
    assert len(wrong) >= 7  # a loss and its count are one
    assert not [place for place, ok in wrong if ok]


def test_too_coarse_in_bfloat16() -> None:
    """So does one that is right and too coarse, and the program itself passes."""
    model, batch, special = in_bfloat16()
    assert compare(model, special, (), batch).ok
    rounded = Mutation(lambda graph, node: node.op == "output", _coarse_output)
    (_, (_, coarse)) = mutants(special, rounded)
    report = compare(model, coarse, (), batch)
    assert not report.ok
    off = {n for n, e in report.errors.items() if n.startswith("gradient") and e > 3e-2}
    assert len(off) > 0.9 * len(special.captured.parameters)
