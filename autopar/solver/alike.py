"""What is alike in a captured graph whatever the mesh: found once, and used by the space of every mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.capture.blocks import block_path
from autopar.capture.graph import Captured
from autopar.sharding.assignment import AliasKey
from autopar.sharding.operators import Operator, Operators, Value, of_graph

_Readers = dict[AliasKey, list[tuple[fx.Node, int]]]


@dataclass(frozen=True)
class Alike:
    """``first`` gives every node (and parameter) of a repeated block its counterpart in the first block of the class,
    ``readers`` for what consumers may share the operator and operand of each, in graph order.

    ``kinds`` are operators with how many there are of their kind. Those of a kind are counterparts, read what
    counterparts make, and share it with counterparts: whatever decisions are taken, the same flows into each.
    """

    first: dict[fx.Node, fx.Node]
    readers: _Readers
    kinds: list[tuple[Operator, int]]


@of_graph
def alike(captured: Captured, operators: Operators) -> Alike:
    """What is alike among the operators of a captured graph."""
    first, readers = _first(captured, operators), _readers(operators)
    return Alike(first, readers, _kinds(operators, first, readers))


def _first(captured: Captured, operators: Operators) -> dict[fx.Node, fx.Node]:
    """Every node (and parameter) of a repeated block -> its counterpart in the first block of the class."""
    parameter_of = {p.placeholder: p for p in captured.parameters}
    found: dict[fx.Node, fx.Node] = {}
    for block in captured.blocks:
        for path, nodes in zip(block.paths[1:], block.nodes[1:], strict=True):
            for node, first in zip(nodes, block.nodes[0], strict=True):
                found[node] = first
                if node not in operators.by_node:
                    continue
                pairs = zip(operators.by_node[node].operands, operators.by_node[first].operands, strict=True)
                for value, counterpart in pairs:
                    p = parameter_of.get(value.node)
                    if p is not None and counterpart.node in parameter_of and block_path(p.name) == path:
                        found[value.node] = counterpart.node
    return found


def _readers(operators: Operators) -> _Readers:
    found: _Readers = {}
    for op in operators:
        backward, block = op.backward, op.block
        for i, value in enumerate(op.operands):
            found.setdefault(AliasKey(value, backward, block), []).append((op.node, i))
    return found


def _kinds(
    operators: Operators, first: Mapping[fx.Node, fx.Node], readers: _Readers
) -> list[tuple[Operator, int]]:
    """The first operator of every kind, in graph order."""
    counts: dict[tuple[object, ...], int] = {}
    representatives: dict[tuple[object, ...], Operator] = {}
    for op in operators:
        backward, block = op.backward, op.block
        kind: list[object] = [first.get(op.node, op.node)]
        for i, value in enumerate(op.operands):
            kind.append(Value(first.get(value.node, value.node), value.index))
            sharing = readers[AliasKey(value, backward, block)]
            if len(sharing) > 1:
                node, place = sharing[0]
                kind += [first.get(node, node), place, (node, place) == (op.node, i)]
        key = tuple(kind)
        representatives.setdefault(key, op)
        counts[key] = counts.get(key, 0) + 1
    return [(op, counts[key]) for key, op in representatives.items()]
