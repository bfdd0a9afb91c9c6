"""Tags every forward value: kept for the backward, or made again there; and puts what is made again where it is needed.

Invariant of `tag`: each forward call node has ``meta["recompute"]``, as `sharding.recompute` decides for the operators
that the nodes were emitted for, and the partitioner chooses nothing. Left alone, both of PyTorch's partitioners would
keep gathered weights, and ZeRO-3 would silently keep the whole model (DESIGN section 6).

Invariant of `in_time`: a backward computes the same, each forward node right before its first use, and what both
directions would redistribute alike is redistributed once.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.passes.collectives import aten
from autopar.passes.shard import Sharded
from autopar.sharding.operators import ROUTED, VIEWS, Operators
from autopar.sharding.recompute import made_again

#: Operators besides elementwise ones that a compiler computes in one kernel with what they read.
_REDUCTIONS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default})


def tag(sharded: Sharded, operators: Operators, mode: str = "none", compiles: bool = False) -> None:
    """Tag the forward nodes of a rank's joint graph by ``mode``, as `sharding.recompute` reads it. What depends on
    coordinates alone, and redistributed parameters and inputs, are made again in every mode; with ``compiles`` also
    what costs the kernels of a compiled backward nothing, though plans count it as kept."""
    again = made_again(operators, mode)
    constants = {sharded.coordinates}
    entered = set(sharded.module.graph.find_nodes(op="placeholder"))
    for node in sharded.module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.all_input_nodes and constants.issuperset(node.all_input_nodes):
            constants.add(node)
            node.meta["constant"] = True
        if node.meta["backward"]:
            continue
        moves, owner = "piece" in node.meta, node.meta.get("operator")  # the shard pass marks redistributions so
        if node in constants or (moves and entered.issuperset(node.all_input_nodes)):
            entered.add(node)
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        made = again.moves if moves else again.operators
        node.meta["recompute"] = node in entered or source.target in VIEWS or owner in made
    if compiles:
        for node in _made_in_kernels(sharded.module.graph):
            node.meta["recompute"] = True


def _made_in_kernels(graph: fx.Graph) -> list[fx.Node]:
    """Elementwise values that the backward can make of what it has anyway, and that are read there, in their own block,
    by what a compiler computes in one kernel with them. Kept, they would be written by the forward and read again."""
    inside = set[fx.Node]()
    for node in reversed(graph.nodes):
        if _is_forward(node) and _is_elementwise(node) and not node.meta.get(ROUTED):
            readers = _backward_readers(node, inside)
            if readers and all(_fuses(r) and r.meta.get("block") == node.meta.get("block") for r in readers):
                inside.add(node)
    there, made = _taken_over(graph), list[fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder" or (_is_forward(node) and node.meta["recompute"]):
            there |= {node} if there.issuperset(node.all_input_nodes) else set()
        elif node in inside and there.issuperset(node.all_input_nodes):
            there.add(node)
            made.append(node)
    return made


def _is_forward(node: fx.Node) -> bool:
    return node.op == "call_function" and not node.meta["backward"]


def _is_elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target is aten._to_copy.default


def _fuses(node: fx.Node) -> bool:
    return _is_elementwise(node) or node.target in _REDUCTIONS


def _backward_readers(node: fx.Node, inside: Collection[fx.Node]) -> list[fx.Node]:
    """What reads a value in the backward, in whatever view, those ``inside`` included."""
    found, stack = list[fx.Node](), list(node.users)
    while stack:
        user = stack.pop()
        if user.op == "output":
            continue
        if user.target in VIEWS and (user.meta["backward"] or user.meta["recompute"]):
            stack.extend(user.users)
        elif user.meta["backward"] or user.meta["recompute"] or user in inside:
            found.append(user)
    return found


def _taken_over(graph: fx.Graph) -> set[fx.Node]:
    """The forward values that the backward takes over as they are tagged so far."""
    found, stack = set[fx.Node](), [n for n in graph.nodes if n.op == "call_function" and n.meta["backward"]]
    seen = set(stack)
    while stack:
        for arg in stack.pop().all_input_nodes:
            if arg in seen or not _is_forward(arg):
                continue
            seen.add(arg)
            if arg.meta["recompute"]:
                stack.append(arg)
            else:
                found.add(arg)
    return found


def in_time(nodes: Iterable[fx.Node]) -> tuple[list[fx.Node], dict[fx.Node, fx.Node]]:
    """The calls of a graph in a new order: those of the backward in theirs, each after the calls of the forward that it
    needs and that were not there yet. Second, what stands for calls that are left out, because another call of the
    other direction redistributes the same value in the same way."""
    listed = list(nodes)
    if not any(node.meta["backward"] for node in listed):
        return listed, {}
    late = {node for node in listed if not node.meta["backward"]}
    order: dict[fx.Node, None] = {}
    for node in listed:
        if node not in late:
            for found in _before(node, late, order):
                order[found] = None
            order[node] = None
    return _merged([*order, *(node for node in listed if node not in order)])


def _before(node: fx.Node, late: Collection[fx.Node], placed: Collection[fx.Node]) -> list[fx.Node]:
    """What of ``late`` a node needs and is not ``placed`` yet, in the order of need."""
    found: dict[fx.Node, None] = {}
    stack = [(arg, False) for arg in reversed(node.all_input_nodes)]
    while stack:
        arg, ready = stack.pop()
        if ready:
            found[arg] = None
        elif arg in late and arg not in placed and arg not in found:
            stack.append((arg, True))
            stack.extend((other, False) for other in reversed(arg.all_input_nodes))
    return list(found)


def _merged(order: Sequence[fx.Node]) -> tuple[list[fx.Node], dict[fx.Node, fx.Node]]:
    """Leave out redistributions, and what depends on coordinates alone, that the other direction has made already."""
    first: dict[Any, fx.Node] = {}
    stands: dict[fx.Node, fx.Node] = {}
    kept = []
    for node in order:
        key = (node.target, repr(fx.node.map_arg((node.args, node.kwargs), lambda n: stands.get(n, n))))
        other = first.setdefault(key, node) if "piece" in node.meta or node.meta.get("constant") else node
        if other.meta["backward"] != node.meta["backward"]:
            stands[node] = other
        else:
            kept.append(node)
    return kept, stands
