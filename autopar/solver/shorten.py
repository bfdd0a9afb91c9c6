"""A deep graph with only a few of its equal blocks, each saying how many it stands for.

Blocks of a class that take the same decisions are alike. In a row of them what is alive at a moment of a block grows or
falls linearly from block to block, forward (with what is saved) and backward (gradients come, what was saved goes). So
it is most at an end of the row. Two blocks are kept at either end, since a collective starts one block ahead, and one
between them, which stands for all others: what it leaves counts as often, its own moments do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
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
    """Blocks of a class that are left out, and the one before them that stands for them too; None if they are those of
    whole pipeline stages, for which another stage stands."""

    blocks: BlockClass
    gone: range
    middle: int | None

    @property
    def key(self) -> tuple[str, range, int | None]:
        """What tells it from other rows of a graph."""
        return self.blocks.paths[0], self.gone, self.middle


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
    captured: Captured,
    assignment: Assignment,
    kind: Callable[[str], Hashable] = lambda block: None,
    stage: Callable[[str], int] = lambda block: 0,
    skipped: Collection[int] = (),
) -> tuple[Row, ...]:
    """The rows of equal blocks that are worth shortening. Blocks of one row have the same ``kind`` and ``stage``, both
    by path; of ``skipped`` stages all blocks are left out."""
    found = []
    parameters = _parameters(captured, assignment)
    for blocks in captured.blocks:

        def alike(i: int, blocks: BlockClass = blocks) -> tuple[object, ...]:
            path = blocks.paths[i]
            if stage(path) in skipped:
                return ()
            chosen = tuple([assignment.strategies.get(node) for node in blocks.nodes[i]])
            return (kind(path), stage(path), chosen, tuple(parameters.get(path, ())))

        for decisions, group in groupby(range(len(blocks.paths)), alike):
            places = list(group)
            gone = range(places[0] + _ENDS + 1, places[-1] - _ENDS + 1)
            if not decisions:
                found.append(Row(blocks, range(places[0], places[-1] + 1), None))
            elif len(gone):
                found.append(Row(blocks, gone, gone[0] - 1))
    return tuple(found)


def _parameters(captured: Captured, assignment: Assignment) -> dict[str, list[object]]:
    """How the parameters of every block rest, by its path."""
    found: dict[str, list[object]] = {}
    for p in captured.parameters:
        if (path := block_path(p.name)) is not None:
            found.setdefault(path, []).append((assignment.sources[p.placeholder], p.spec))
    return found


def alike_stages(
    captured: Captured, assignment: Assignment, kind: Callable[[str], Hashable], stages: Sequence[Sequence[str]]
) -> list[int]:
    """For every pipeline stage the first one that is like it: of as many blocks of one class, with the same decisions
    and ``kind``, and nothing else; itself where there is none before it, and where it begins or ends its class, since
    what is around a class reads its first and its last block."""
    place = {path: (c, i) for c, blocks in enumerate(captured.blocks) for i, path in enumerate(blocks.paths)}
    ends = {path for blocks in captured.blocks for path in (blocks.paths[0], blocks.paths[-1])}
    parameters = _parameters(captured, assignment)
    numbers: dict[object, int] = {}

    def decisions(path: str) -> int:
        c, i = place[path]
        chosen = tuple([assignment.strategies.get(node) for node in captured.blocks[c].nodes[i]])
        return numbers.setdefault((c, kind(path), chosen, tuple(parameters.get(path, ()))), len(numbers))

    first: dict[tuple[int, ...], int] = {}
    found = []
    for s, names in enumerate(stages):
        inner = all(name in place and name not in ends for name in names)
        found.append(first.setdefault(tuple(map(decisions, names)), s) if inner else s)
    return found


#: What `shorten` has found already: most assignments of a search have the same rows.
_KNOWN: WeakKeyDictionary[Operators, dict[tuple[tuple[str, range, int | None], ...], Short]] = WeakKeyDictionary()


def shorten(captured: Captured, operators: Operators, found: tuple[Row, ...]) -> Short:
    """The graph without what the ``found`` rows leave out."""
    known = _KNOWN.setdefault(operators, {})
    key = tuple(row.key for row in found)
    if key not in known:
        known[key] = _Shortener(captured, operators, found).short()
    return known[key]


class _Shortener:
    """Leaves out blocks, and lets those who read of them read of their counterparts."""

    def __init__(self, captured: Captured, operators: Operators, found: tuple[Row, ...]) -> None:
        self.captured, self.operators, self.rows = captured, operators, found
        self.stands: dict[fx.Node, fx.Node] = {}
        for row in found:
            before, after = row.gone[0] - 1, row.gone[-1] + 1
            for i in row.gone:
                for k, node in enumerate(row.blocks.nodes[i]):
                    self.stands[node] = row.blocks.nodes[after if node.meta["backward"] else before][k]
        self.gone = {row.blocks.paths[i] for row in found for i in row.gone}

    def short(self) -> Short:
        """What is left."""
        operators, aliases = self._operators()
        parameters = tuple(p for p in self.captured.parameters if block_path(p.name) not in self.gone)
        times, by_name = dict[fx.Node, int](), dict[str, int]()
        for row in self.rows:
            if row.middle is None:
                continue
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
