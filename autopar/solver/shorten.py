"""A deep graph with only a few of its equal blocks, each saying how many it stands for.

Blocks of a class that take the same decisions are alike. In a row of them what is alive at a moment of a block grows or
falls linearly from block to block, forward (with what is saved) and backward (gradients come, what was saved goes). So
it is most at an end of the row. Two blocks are kept at either end, since a collective starts one block ahead, and one
between them, which stands for all others: what it leaves counts as often, its own moments do not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from weakref import WeakKeyDictionary

from torch import fx

from autopar.capture.blocks import block_path
from autopar.capture.graph import BlockClass, Captured
from autopar.sharding.assignment import AliasKey, Assignment
from autopar.sharding.operators import Operators, Value
from autopar.solver.space import output_values

#: Blocks that are kept at either end of a row.
_ENDS = 2


@dataclass(frozen=True)
class Row:
    """Blocks ``first`` to ``last`` of a class, alike and one after the other."""

    blocks: BlockClass
    first: int
    last: int

    @property
    def middle(self) -> int:
        """The block that stands for all between the ends."""
        return self.first + _ENDS

    @property
    def gone(self) -> range:
        """The blocks that are left out."""
        return range(self.middle + 1, self.last - _ENDS + 1)


@dataclass(frozen=True)
class Short:
    """``captured`` and ``operators`` without the blocks that are left out; ``times`` says of the nodes of a block that
    stands for others how many it is, and so does it of their parameters by name. ``aliases`` are the keys of an
    assignment's aliases that have another name here, ``kept`` the places of the captured outputs that are still there
    and ``gone`` the nodes that are not."""

    captured: Captured
    operators: Operators
    times: dict[fx.Node, int]
    parameters: dict[str, int]
    aliases: dict[AliasKey, AliasKey]
    kept: tuple[int, ...]
    gone: frozenset[fx.Node]

    def assignment(self, whole: Assignment) -> Assignment:
        """``whole``, an assignment of the whole graph, of what is left of it."""
        aliases = {key: layout for key, layout in whole.aliases.items() if key.value.node not in self.gone}
        aliases.update({new: whole.aliases[old] for new, old in self.aliases.items() if old in whole.aliases})
        place = {old: new for new, old in enumerate(self.kept)}
        sink_aliases = {place[i]: layout for i, layout in whole.sink_aliases.items() if i in place}
        sinks = tuple(whole.sinks[i] for i in self.kept)
        return Assignment(whole.mesh, whole.strategies, whole.sources, sinks, aliases, sink_aliases)


def rows(
    captured: Captured, assignment: Assignment, kind: Callable[[str], Hashable] = lambda block: None
) -> tuple[Row, ...]:
    """The rows of equal blocks that are worth shortening. Blocks of one row have the same ``kind``, by path."""
    found = []
    parameters: dict[str, list[object]] = {}
    for p in captured.parameters:
        if (path := block_path(p.name)) is not None:
            parameters.setdefault(path, []).append((assignment.sources[p.placeholder], p.spec))
    for blocks in captured.blocks:

        def decisions(i: int, blocks: BlockClass = blocks) -> tuple[object, ...]:
            chosen = tuple([assignment.strategies.get(node) for node in blocks.nodes[i]])
            return (kind(blocks.paths[i]), chosen, tuple(parameters.get(blocks.paths[i], ())))

        for _, group in groupby(range(len(blocks.paths)), decisions):
            places = list(group)
            row = Row(blocks, places[0], places[-1])
            if len(row.gone):
                found.append(row)
    return tuple(found)


#: What `shorten` has found already: most assignments of a search have the same rows.
_KNOWN: WeakKeyDictionary[Operators, dict[tuple[tuple[str, int, int], ...], Short]] = WeakKeyDictionary()


def shorten(captured: Captured, operators: Operators, found: tuple[Row, ...]) -> Short:
    """The graph without what the ``found`` rows leave out."""
    known = _KNOWN.setdefault(operators, {})
    key = tuple((row.blocks.paths[0], row.first, row.last) for row in found)
    if key not in known:
        known[key] = _Shortener(captured, operators, found).short()
    return known[key]


class _Shortener:
    """Leaves out blocks, and lets those who read of them read of their counterparts."""

    def __init__(self, captured: Captured, operators: Operators, found: tuple[Row, ...]) -> None:
        self.captured, self.operators, self.rows = captured, operators, found
        self.stands: dict[fx.Node, fx.Node] = {}
        for row in found:
            for i in row.gone:
                for k, node in enumerate(row.blocks.nodes[i]):
                    end = row.last - _ENDS + 1 if node.meta["backward"] else row.middle
                    self.stands[node] = row.blocks.nodes[end][k]
        self.gone = {row.blocks.paths[i] for row in found for i in row.gone}

    def short(self) -> Short:
        """What is left."""
        operators, aliases = self._operators()
        parameters = tuple(p for p in self.captured.parameters if block_path(p.name) not in self.gone)
        times, by_name = dict[fx.Node, int](), dict[str, int]()
        for row in self.rows:
            times.update(dict.fromkeys(row.blocks.nodes[row.middle], len(row.gone) + 1))
            path = row.blocks.paths[row.middle]
            by_name.update({p.name: len(row.gone) + 1 for p in parameters if block_path(p.name) == path})
        captured = replace(self.captured, parameters=parameters)
        return Short(captured, operators, times, by_name, aliases, tuple(self._kept()), frozenset(self.stands))

    def _operators(self) -> tuple[Operators, dict[AliasKey, AliasKey]]:
        whole, by_node, aliases = self.operators, {}, dict[AliasKey, AliasKey]()
        consumers: dict[Value, list[tuple[fx.Node, int]]] = {}
        for node, op in whole.by_node.items():
            if node in self.stands:
                continue
            operands = tuple([Value(self.stands.get(v.node, v.node), v.index) for v in op.operands])
            if operands != op.operands:
                for old, new in zip(op.operands, operands, strict=True):
                    if old != new:
                        aliases[AliasKey(new, op.backward, op.block)] = AliasKey(old, op.backward, op.block)
                op = replace(op, operands=operands)
            by_node[node] = op
            for i, value in enumerate(operands):
                consumers.setdefault(value, []).append((node, i))
        read = {value: tuple(users) for value, users in consumers.items()}
        return replace(whole, by_node=by_node, consumers=read), aliases

    def _kept(self) -> Iterator[int]:
        """The places of the captured outputs that are still there: results, and gradients of parameters that are."""
        results = len(self.captured.outputs)
        trained = [p for p in self.captured.parameters if p.gradient is not None]
        for i, _ in enumerate(output_values(self.captured)):
            if i < results or block_path(trained[i - results].name) not in self.gone:
                yield i
