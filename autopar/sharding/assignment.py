"""An assignment: a strategy for every operator and a layout for everything that enters or leaves the graph.

The solver makes one, the shard pass emits it, the cost model prices it. All three follow `Router`, which says, in graph
order, what is redistributed: each redistribution once a direction (`direction`), so what is priced is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import fx

from autopar.sharding.axes import STATE_AXES, state_axes
from autopar.sharding.layout import Layout, Mesh, TensorSpec
from autopar.sharding.operators import Operator, Operators, Value, of_graph
from autopar.sharding.redistribute import Step, redistribution
from autopar.sharding.rule import Rule, Strategy, layouts


class AliasKey(NamedTuple):
    """What a value's consumers in one direction and block share: they read it in one layout, paid for once."""

    value: Value
    backward: bool
    block: str | None


#: For every redistributed copy of a value the operator for which it is made first, and the layout it is made from.
Moves = dict[tuple[Value, Layout], tuple[Operator, Layout]]


@dataclass(frozen=True)
class Assignment:
    """``sources`` are the layouts of placeholders (parameters: their storage layout), ``sinks`` those that the graph's
    outputs must have, by position; ``aliases`` the layouts that shared consumers read, ``sink_aliases`` those through
    which outputs come to their own."""

    mesh: Mesh
    strategies: dict[fx.Node, Strategy]
    sources: dict[fx.Node, Layout]
    sinks: tuple[Layout, ...]
    aliases: dict[AliasKey, Layout]
    sink_aliases: dict[int, Layout] = field(default_factory=dict)
    #: What `result_layouts` has found already, and for which operators.
    known: list[tuple[Operators, dict[Value, Layout]]] = field(
        default_factory=list, init=False, compare=False, repr=False
    )
    #: The same of `forward_moves`.
    known_moves: list[tuple[Operators, Moves]] = field(default_factory=list, init=False, compare=False, repr=False)
    #: What `layouts` has found already, by the identity of rule and strategy, which equal blocks share, and of which.
    _layouts: dict[tuple[int, int], tuple[Rule, Strategy, tuple[tuple[Layout, ...], tuple[Layout, ...]]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __reduce__(self) -> tuple[object, ...]:
        """A copy, as from another process, knows nothing yet: here is what goes by the identity of things."""
        given = (self.mesh, self.strategies, self.sources, self.sinks, self.aliases, self.sink_aliases)
        return Assignment, given

    def layouts(self, op: Operator) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The layouts of the operands and of the results of an operator."""
        rule, strategy = op.rule, self.strategies[op.node]
        key = (id(rule), id(strategy))
        if (found := self._layouts.get(key)) is None:
            found = self._layouts[key] = (rule, strategy, layouts(rule, strategy, self.mesh))
        return found[2]


@dataclass(frozen=True)
class Transfer:
    """One redistribution of a value in one direction; ``output`` if the graph's output, no operator, asks for it."""

    value: Value
    spec: TensorSpec
    backward: bool
    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    output: bool = False


def direction(value: Value, spec: TensorSpec, backward: bool) -> bool:
    """Whether the copy of ``value`` that a consumer (``backward`` or not) asks for belongs to the backward. A number is
    redistributed once for both directions: to keep it takes a few bytes, to move it again a latency."""
    return backward if spec.shape else bool(value.node.meta["backward"])


@dataclass
class Router:
    """Decides where a consumer gets a value from; remembers what already exists in each `direction`."""

    mesh: Mesh
    have: dict[tuple[Value, bool], list[Layout]] = field(default_factory=dict)

    def route(
        self, value: Value, spec: TensorSpec, backward: bool, own: Layout, alias: Layout | None, wanted: Layout
    ) -> list[Transfer]:
        """The redistributions needed so that ``value``, produced in layout ``own``, exists in layout ``wanted``."""
        backward = direction(value, spec, backward)
        have = self.have.setdefault((value, backward), [own])
        transfers = []
        for target in (alias, wanted) if alias is not None else (wanted,):
            if target in have:
                continue
            source = alias if target is wanted and alias is not None else own
            steps = redistribution(source, target, self.mesh, spec.shape, spec.dtype.itemsize, spec.fixed)
            if steps is None:
                raise ValueError(f"no redistribution of {value} from {source} to {target}")
            transfers.append(Transfer(value, spec, backward, source, target, steps))
            have.append(target)
        return transfers


def result_layouts(operators: Operators, assignment: Assignment) -> dict[Value, Layout]:
    """The layout in which every value is produced; not to be changed."""
    for known, found in assignment.known:
        if known is operators:
            return found
    found = {Value(node): layout for node, layout in assignment.sources.items()}
    for op in operators:
        _, outs = assignment.layouts(op)
        for i, layout in enumerate(outs):
            found[Value(op.node, i)] = layout
    assignment.known.append((operators, found))
    return found


def used_axes(operators: Operators, assignment: Assignment, parameter: fx.Node) -> tuple[str, ...]:
    """The axes of ZeRO that split a parameter of experts where it is used: those over which the experts are spread. All
    that reads it has it so, or gathers it."""
    value = Value(parameter)
    readers = operators.consumers.get(value, ()) if operators.specs[value].by_expert else ()
    if not readers:
        return ()
    read = [assignment.layouts(operators.by_node[node])[0][i].split_axes for node, i in readers]
    return tuple(axis for axis in STATE_AXES if all(axis in axes for axes in read))


def zero_axes(operators: Operators, assignment: Assignment, parameter: fx.Node) -> tuple[str, ...]:
    """The axes over which ZeRO splits a parameter: those that split it where it rests and not where it is used."""
    return state_axes(assignment.sources[parameter], used_axes(operators, assignment, parameter))


def zero_ranks(operators: Operators, assignment: Assignment, parameter: fx.Node) -> int:
    """Over how many ranks ZeRO splits a parameter."""
    return math.prod(map(assignment.mesh.degree, zero_axes(operators, assignment, parameter)))


def ranks_of_experts(operators: Operators, assignment: Assignment) -> int | None:
    """Over how many ranks experts are spread, the fewest where mixtures differ; None if the graph has none."""
    mesh, found = assignment.mesh, []
    for op in operators:
        if op.is_heavy and op.rule.inward:
            pairs = zip(mesh.sizes, assignment.strategies[op.node], strict=True)
            found.append(math.prod(n for n, choice in pairs if choice.factor in op.rule.inward))
    return min(found, default=None)


def forward_moves(operators: Operators, assignment: Assignment) -> Moves:
    """The redistributed copies in the forward, what `Router` decides; not to be changed. A copy for both directions
    counts as one in the forward."""
    for known, moves in assignment.known_moves:
        if known is operators:
            return moves
    produced = result_layouts(operators, assignment)
    found: Moves = {}
    for op, keys in _keys(operators):
        wanted, _ = assignment.layouts(op)
        for value, key, layout in zip(op.operands, keys, wanted, strict=True):
            own, alias = produced[value], assignment.aliases.get(key)
            if alias in (None, own) and layout == own:
                continue
            if direction(value, operators.specs[value], op.backward):
                continue
            if alias is not None and alias != own:
                found.setdefault((value, alias), (op, own))
            if layout != own:
                found.setdefault((value, layout), (op, own if alias is None else alias))
    assignment.known_moves.append((operators, found))
    return found


@of_graph
def _keys(operators: Operators) -> list[tuple[Operator, tuple[AliasKey, ...]]]:
    """Every operator with what its operands may share with others."""
    return [(op, tuple(AliasKey(value, op.backward, op.block) for value in op.operands)) for op in operators]


def transfers(operators: Operators, outputs: list[tuple[Value, bool]], assignment: Assignment) -> Iterator[Transfer]:
    """Every redistribution of an assignment, in the order in which the shard pass emits it. ``outputs`` are the values
    of the graph's outputs with their direction."""
    return (transfer for _, transfer in routed(operators, outputs, assignment))


def routed(
    operators: Operators, outputs: list[tuple[Value, bool]], assignment: Assignment
) -> Iterator[tuple[Operator | None, Transfer]]:
    """`transfers` with the operator for which each is made first; None for the graph's outputs."""
    produced = result_layouts(operators, assignment)
    router = Router(assignment.mesh)
    for op, keys in _keys(operators):
        wanted, _ = assignment.layouts(op)
        backward = op.backward
        for value, key, layout in zip(op.operands, keys, wanted, strict=True):
            own, alias = produced[value], assignment.aliases.get(key)
            if layout != own or (alias is not None and alias != own):
                for transfer in router.route(value, operators.specs[value], backward, own, alias, layout):
                    yield op, transfer
    for i, ((value, backward), layout) in enumerate(zip(outputs, assignment.sinks, strict=True)):
        alias = assignment.sink_aliases.get(i)
        for transfer in router.route(value, operators.specs[value], backward, produced[value], alias, layout):
            yield None, replace(transfer, output=True)
