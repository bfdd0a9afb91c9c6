"""Cuts the reductions of gradients over some groups off a backward graph, so that several backwards can share them.

Invariant: what is cut off is linear. With ``held`` the sums of what `Accumulation.backward` returns over several
backwards, ``finish(coordinates, *held)`` gives the sums of their gradients, as reducing every time would.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT, group_argument
from autopar.passes.shard import COORDINATES
from autopar.sharding.operators import VIEWS

aten = torch.ops.aten

#: Operators that are linear in their first argument when nothing else varies. A cast is linear up to rounding: summing
#: before it, in the wider dtype, is what one would want.
_LINEAR = VIEWS | {
    aten.contiguous.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.index_select.default,
    ALL_GATHER,
    ALL_TO_ALL,
    WAIT,
}


@dataclass(frozen=True)
class Accumulation:
    """``backward`` takes what the whole backward takes and returns the values to add up; ``finish(coordinates, *sums)``
    makes the gradients of them."""

    backward: fx.GraphModule
    finish: fx.GraphModule


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on the coordinates alone."""
    found = {node for node in graph.find_nodes(op="placeholder") if node.name == COORDINATES}
    for node in graph.nodes:
        if node.op == "call_function" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def is_linear(node: fx.Node, constants: Collection[fx.Node]) -> bool:
    """Whether a call is linear in all that varies among its arguments."""
    varying = [arg for arg in node.all_input_nodes if arg not in constants]
    if node.target is aten.add.Tensor:
        return varying == [*dict.fromkeys(node.args)]
    if node.target is aten.cat.default:
        return varying == [*dict.fromkeys(node.args[0])]  # type: ignore[arg-type]
    if node.target is aten.where.ScalarOther:  # with 0: a mask
        return varying == [node.args[1]] and bool(node.args[2] == 0)
    if node.target in (ALL_REDUCE, REDUCE_SCATTER):
        return bool(node.args[1] == "sum")
    return varying == [node.args[0]] and node.target in _LINEAR


def _cut_off(graph: fx.Graph, groups: Collection[str]) -> list[fx.Node]:
    """The calls from the last reductions over ``groups`` on, in order: those that only gradients depend on."""
    constants, output = _constants(graph), graph.output_node()
    tail: set[fx.Node] = {output}
    for node in reversed(graph.nodes):
        if node.op == "call_function" and tail.issuperset(node.users) and is_linear(node, constants):
            tail.add(node)
    late: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node not in tail or node is output:
            continue
        reduces = node.target in (ALL_REDUCE, REDUCE_SCATTER) and group_argument(node) in groups
        if reduces or any(arg in late for arg in node.all_input_nodes):
            late[node] = None
    return list(late)


def accumulation(backward: fx.GraphModule, groups: Collection[str]) -> Accumulation:
    """Cut a rank's backward graph, bound or not; ``groups`` is how it writes those whose reductions are put off."""
    graph = backward.graph
    late = dict.fromkeys(_cut_off(graph, groups))
    constants = _constants(graph)
    gradients = graph.output_node().args[0]
    assert isinstance(gradients, tuple)
    used = [arg for node in late for arg in node.all_input_nodes] + [g for g in gradients if isinstance(g, fx.Node)]
    held = [node for node in dict.fromkeys(used) if node not in late and node not in constants]

    first, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op != "output" and node not in late:
            new[node] = first.node_copy(node, new.__getitem__)
    first.output(tuple(new[node] for node in held))
    first.eliminate_dead_code()

    second = fx.Graph()
    given = {node: second.placeholder(node.name) for node in graph.nodes if node.name == COORDINATES}
    if not given:
        second.placeholder(COORDINATES)
    given |= {node: second.placeholder(node.name) for node in held}
    for node in graph.nodes:
        if node.op == "call_function" and (node in late or node in constants):
            given[node] = second.node_copy(node, given.__getitem__)
    second.output(tuple(given[g] for g in gradients))
    second.eliminate_dead_code()
    held_back = fx.GraphModule(torch.nn.Module(), first, class_name="Accumulate")
    held_back.meta.update(backward.meta)
    return Accumulation(
        held_back,
        fx.GraphModule(torch.nn.Module(), second, class_name="Finish"),
    )
