"""Micro-batches: the batch split over one more axis, whose pieces run one after the other.

`micro_batched` takes an assignment to that axis by following the batch from the inputs through the operators' rules:
what carries the batch is split, what is summed over it becomes partial, what is linear in partial sums hands them on.
Where an operator needs the sum itself (the number of tokens that count, the gradient of a parameter) the assignment has
an all_reduce over the axis, which the phases pass turns into a sum over the micro-batches. No operator may need more:
one that mixes samples otherwise (batch norm) is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.errors import MicroBatchError
from autopar.sharding.assignment import AliasKey, Assignment, result_layouts
from autopar.sharding.axes import REPLICATE_AXIS
from autopar.sharding.layout import MICRO_BATCH, Layout, Mesh
from autopar.sharding.operators import Operator, Operators, Value
from autopar.sharding.redistribute import with_micro_batch
from autopar.sharding.rule import REPLICATE, Choice, is_valid, layouts


@dataclass(frozen=True)
class Place:
    """Where a value lies on the micro-batch axis: whole (neither), split along ``dim``, or ``owed`` a reduction."""

    dim: int | None = None
    owed: str | None = None


WHOLE = Place()
PARTIAL = Place(owed="sum")


def _place(layout: Layout) -> Place:
    return Place(layout.dim_of(MICRO_BATCH), dict(layout.partial).get(MICRO_BATCH))


def extended(layout: Layout, place: Place) -> Layout:
    """A layout of the other axes with its place on the micro-batch axis."""
    return with_micro_batch(layout, place.dim, place.owed)


def _carried(op: Operator, places: list[Place]) -> list[str | None]:
    """The factor that every split operand carries on its split dim, None where nothing there can be split."""
    found = []
    for place, dims in zip(places, op.rule.operands, strict=True):
        if place.dim is not None:
            found.append(next((f for f in dims[place.dim] if op.rule.sizes[f] > 1), None))
    return found


def _choice(op: Operator, places: list[Place]) -> Choice:
    """What an operator does on the micro-batch axis, given where its operands lie there."""
    carried = _carried(op, places)
    if carried:
        first = carried[0]
        if first is None or first in op.rule.fixed or any(f != first for f in carried):
            raise _mixes(op)
        return Choice(factor=first)
    owing = frozenset(i for i, place in enumerate(places) if place.owed == "sum")
    if owing and len(owing) == sum(place.owed is not None for place in places):
        exact = [group for group in op.rule.linear if group == owing]
        # what is whole can be masked to one micro-batch: x + bias, with x still to be summed up
        wider = [group for group in op.rule.linear if group > owing]
        if exact or wider:
            return Choice(linear=(exact or wider)[0])
    return REPLICATE


def _mixes(op: Operator) -> MicroBatchError:
    name = getattr(op.call.target, "_opname", str(op.call.target))
    return MicroBatchError(
        f"the batch cannot run in micro-batches: {name} in {op.node.meta['module'] or 'the model'} mixes its samples",
        expected="operators that treat every sample by itself, or sum over samples",
        found=f"{name} along the batch",
        change="run the batch in one piece (micro_batch_size = global batch / dp)",
    )


def _not_divided(op: Operator, factor: str, mesh: Mesh) -> MicroBatchError:
    return MicroBatchError(
        f"{mesh.degree(MICRO_BATCH)} micro-batches do not divide the batch in {op.node.meta['module'] or 'the model'}",
        expected=f"a size that the micro-batches and {dict(mesh.without(MICRO_BATCH).axes)} divide",
        found=f"{op.rule.sizes[factor]} (factor {factor})",
        change="choose a micro_batch_size that divides global batch / dp",
    )


class _Follower:
    """Follows the batch through the operators of one assignment."""

    def __init__(self, operators: Operators, assignment: Assignment, mesh: Mesh, sources: Mapping[fx.Node, Place]):
        self.operators, self.base, self.mesh = operators, assignment, mesh
        self.places = {Value(node): sources.get(node, WHOLE) for node in assignment.sources}
        self.wanted: dict[AliasKey, list[Place]] = {}
        self.strategies = dict(assignment.strategies)

    def follow(self) -> None:
        """Settle what every operator does on the axis, and where its results lie there."""
        for op in self.operators:
            places = [self.places[value] for value in op.operands]
            choice = _choice(op, places)
            strategy = (choice, *self.base.strategies[op.node])
            if not is_valid(op.rule, strategy, self.mesh):
                if choice.factor is None:  # partial sums beside a reduction of another kind: add them up first
                    strategy = (REPLICATE, *self.base.strategies[op.node])
                else:
                    raise _not_divided(op, choice.factor, self.mesh)
            self.strategies[op.node] = strategy
            ins, outs = layouts(op.rule, strategy, self.mesh)
            for value, place, layout in zip(op.operands, places, ins, strict=True):
                # sums over the micro-batches are there after the last one: nothing that runs in each has a part of them
                summed = place.owed is not None and layout.dim_of(MICRO_BATCH) is not None
                if summed or (place.dim is not None and _place(layout) != place):
                    raise _mixes(op)
                self.wanted.setdefault(AliasKey(value, op.backward, op.block), []).append(_place(layout))
            for i, layout in enumerate(outs):
                self.places[Value(op.node, i)] = _place(layout)

    def alias(self, key: AliasKey, layout: Layout) -> Layout:
        """Where consumers share a value: as it is made, or where all of them want the same, as they want it."""
        own, wanted = self.places[key.value], self.wanted.get(key, [])
        same = bool(wanted) and all(place == wanted[0] for place in wanted)
        return extended(layout, wanted[0] if same else own)


def micro_batched(
    operators: Operators,
    assignment: Assignment,
    count: int,
    sources: Mapping[fx.Node, Place],
    outputs: Iterable[tuple[Value, Place | None]],
    reduced_each: Collection[int] = (),
) -> Assignment:
    """``assignment`` with the batch in ``count`` micro-batches, on the mesh with `MICRO_BATCH` outermost.

    ``sources`` says where placeholders lie on the new axis (left out: whole), ``outputs`` the values of the graph's
    outputs in the order of the assignment's sinks and where they are wanted there, None for as they come. An output
    owed over the new axis is added up first and redistributed over the others once, or with its position in
    ``reduced_each`` the other way round: less to keep between micro-batches, more communication; but over the groups of
    hybrid ZeRO once, since what is kept is no less for it. Raises MicroBatchError where an operator mixes samples or
    the micro-batches do not divide the batch.
    """
    mesh = Mesh(((MICRO_BATCH, count), *assignment.mesh.axes))
    follower = _Follower(operators, assignment, mesh, sources)
    follower.follow()
    produced = result_layouts(operators, assignment)
    sinks, sink_aliases = [], {}
    for i, ((value, wanted), layout) in enumerate(zip(outputs, assignment.sinks, strict=True)):
        place = follower.places[value]
        if wanted is not None and place.dim is not None and wanted != place:
            raise _mixes(operators.by_node[value.node])
        sinks.append(extended(layout, place if wanted is None else wanted))
        if i in reduced_each and place == PARTIAL and wanted == WHOLE:
            later = tuple(pair for pair in produced[value].partial if pair[0] == REPLICATE_AXIS)
            sink_aliases[i] = extended(Layout(layout.dims, later), place)
    return Assignment(
        mesh,
        follower.strategies,
        {node: extended(layout, sources.get(node, WHOLE)) for node, layout in assignment.sources.items()},
        tuple(sinks),
        {key: follower.alias(key, layout) for key, layout in assignment.aliases.items()},
        sink_aliases,
    )
