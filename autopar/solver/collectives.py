"""The collectives of a step, as the passes issue them: those of parameters and gradients in buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

from torch import fx

from autopar.capture.graph import Captured
from autopar.cost_model.communication import wire_bytes
from autopar.plan import Collective
from autopar.sharding.assignment import Assignment, Transfer, routed
from autopar.sharding.axes import BATCH_AXES, REPLICATE_AXIS
from autopar.sharding.buckets import Piece, Pieces, buckets, is_known_early, merged
from autopar.sharding.operators import Operator, Operators, Value
from autopar.sharding.recompute import Kept
from autopar.sharding.redistribute import LOCAL, Step, whole_bytes
from autopar.sharding.zero import Keeping
from autopar.solver.costs import Prices
from autopar.solver.space import output_values

#: The stage of a node: of an operator, of a parameter.
StageOf = Callable[[fx.Node], int]


@dataclass(frozen=True)
class Issue:
    """One collective that a stage issues ``times`` times a step, of ``nbytes`` bytes of the whole tensor.

    ``phase`` is the graph that issues it: ``once`` at the step's start, ``forward`` or ``backward`` every micro-batch,
    ``finish`` at the step's end. It is needed by the operator ``reader`` (the first of a bucket's; None: by none),
    which with ``again`` the backward runs again; or it is a reduction that starts when the operator ``ready`` is done.
    ``depth`` counts the collectives of the same tensors before it. ``part`` says of what its ``reader`` sends while it
    computes (`Passing`) which of its parts is beside it, and of how many. ``block`` is the one that a bucket goes with.
    """

    kind: str
    axis: str
    purpose: str
    nbytes: int
    times: int
    stage: int
    phase: str
    reader: fx.Node | None
    again: bool = False
    ready: fx.Node | None = None
    depth: int = 0
    part: tuple[int, int] | None = None
    block: str | None = None


def totals(issues: Iterable[Issue], prices: Prices) -> tuple[Collective, ...]:
    """Collectives by kind, axis and purpose."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for i in issues:
        total = found[i.kind, i.axis, i.purpose]
        total[0] += i.times
        total[1] += i.times * i.nbytes
        total[2] += i.times * float(wire_bytes(i.kind, i.nbytes, prices.mesh.degree(i.axis)))
        total[3] += i.times * prices.collective_seconds(i.kind, i.axis, i.nbytes)
    return tuple(
        Collective(kind, axis, purpose, int(t[0]), int(t[1]), int(t[2]), t[3])
        for (kind, axis, purpose), t in sorted(found.items())
    )


def issued(
    captured: Captured,
    operators: Operators,
    assignment: Assignment,
    held: Kept,
    keep: Mapping[str, Keeping],
    micro_batches: int = 1,
    stage: StageOf = lambda node: 0,
) -> list[Issue]:
    """Every collective of a step, those of a bucket as one. What the backward issues itself it does not make again, nor
    what is kept from the forward; collectives of parameters and gradients are issued every micro-batch or once, as
    ``keep`` has it by parameter, and so are those of what carries the batch, of a part of it each time."""
    return _Reader(captured, operators, assignment, held, keep, micro_batches, stage).read()


class _Reader:
    """Reads the collectives off the redistributions of an assignment."""

    def __init__(
        self,
        captured: Captured,
        operators: Operators,
        assignment: Assignment,
        held: Kept,
        keep: Mapping[str, Keeping],
        micro_batches: int,
        stage: StageOf,
    ) -> None:
        self.operators, self.mesh, self.keep, self.held = operators, assignment.mesh, keep, held
        self.strategies, self.micro_batches, self.stage = assignment.strategies, micro_batches, stage
        named = [(p.name, p.placeholder, p.gradient) for p in captured.parameters]
        self.pieces = Pieces(operators, assignment.mesh, named)
        self.nodes = list(operators.by_node)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.first = list(routed(operators, output_values(captured), assignment))
        self.own = {(t.value, step) for _, t in self.first if t.backward for step in t.steps}
        self.before = {(t.value, step) for _, t in self.first if not t.backward for step in t.steps}
        #: The operators made again for which the backward issues what its own operators read later.
        self.sooner: dict[tuple[Value, Step], fx.Node] = {}
        for (value, _), (transfer, op) in zip(held.transfers, self._made_again(), strict=True):
            if op is not None:
                self.sooner.update({(value, step): op.node for step in transfer.steps if (value, step) in self.own})
        #: Pieces with their readers, and whether these are made again, by stage, graph and how often they are issued.
        self.waiting: dict[tuple[int, str, int], list[tuple[Piece, fx.Node | None, bool]]] = defaultdict(list)
        self.found: list[Issue] = []

    def read(self) -> list[Issue]:
        for op, transfer in self.first:
            self._transfer(op, transfer, again=False)
        for transfer, op in self._made_again():
            self._transfer(op, transfer, again=True)
        for op in self.operators:
            self._pass(op, again=False)
        for node in self.held.operators:
            self._pass(self.operators.by_node[node], again=True)
        for (stage, phase, times), members in self.waiting.items():
            for places in buckets([piece for piece, _, _ in members]):
                self._bucket([members[i] for i in places], stage, phase, times)
        return self.found

    def _made_again(self) -> Iterator[tuple[Transfer, Operator | None]]:
        """Every redistribution that is made again, with the first operator made again that reads its value."""
        for (value, _), transfer in self.held.transfers.items():
            users = (node for node, _ in self.operators.consumers.get(value, ()) if node in self.held.operators)
            yield transfer, next((self.operators.by_node[node] for node in users), None)

    def _pass(self, op: Operator, again: bool) -> None:
        """What ranks send each other while they compute an operator."""
        passing = op.rule.passing(self.strategies[op.node], self.mesh)
        if passing is None:
            return
        times = self.micro_batches if self.operators.batch_factors[op.node] else 1
        phase, stage = "backward" if again or op.backward else "forward", self.stage(op.node)
        for hop in passing.hops:
            if hop.result is not None and not again and not self._is_read(Value(op.node, hop.result)):
                continue
            part = None if hop.beside is None else (hop.beside, passing.parts)
            nbytes = hop.nbytes // times
            self.found.append(
                Issue(hop.kind, hop.axis, "activations", nbytes, times, stage, phase, op.node, again, part=part)
            )

    def _is_read(self, value: Value) -> bool:
        """Whether what the graph makes that makes a value first is read there, or kept for the backward: if the
        backward makes it again, nobody may need it before."""
        made_again = value.node in self.held.operators
        readers = [self.operators.by_node[node] for node, _ in self.operators.consumers.get(value, ())]
        return any(not made_again or r.backward == self.operators.by_node[value.node].backward for r in readers)

    def _transfer(self, op: Operator | None, transfer: Transfer, again: bool) -> None:
        stage = self.stage(op.node if op is not None else transfer.value.node)
        for step, piece in zip(transfer.steps, self.pieces.of(transfer), strict=True):
            if step.kind in LOCAL or (again and (transfer.value, step) in self.own):
                continue
            if piece is None:
                nbytes = whole_bytes(step, self.mesh, transfer.spec)
                self._alone(op, transfer, step.kind, step.axis, nbytes, stage, again)
                continue
            kept = None if piece.purpose == "activations" else self.keep[piece.name]
            known = kept is not None and kept.copy != "use" and (transfer.value, step) in self.before
            if piece.purpose == "parameters" and known and (again or transfer.backward):
                continue  # the backward reads the forward's copy
            phase, times = self._phase_of(piece, kept, transfer, again)
            sooner = self.sooner.get((transfer.value, step)) if transfer.backward else None
            reader = sooner or (op.node if op is not None else None)
            self.waiting[stage, phase, times].append((piece, reader, again or sooner is not None))

    def _phase_of(self, piece: Piece, kept: Keeping | None, transfer: Transfer, again: bool) -> tuple[str, int]:
        """The graph that issues a piece, and how often."""
        once = self.micro_batches == 1
        direction = "backward" if again or transfer.backward else "forward"
        if kept is None:  # a number
            if once or again:
                return direction, 1
            return "once" if is_known_early(self.operators, transfer.value) else "finish", 1
        if piece.purpose == "gradients":
            late = kept.gradient == "step" or piece.axis == REPLICATE_AXIS
            return ("finish", 1) if late and not once else ("backward", self.micro_batches)
        return ("once", 1) if kept.copy == "step" else (direction, self.micro_batches)

    def _alone(
        self, op: Operator | None, transfer: Transfer, kind: str, axis: str, nbytes: int, stage: int, again: bool
    ) -> None:
        """A collective that shares no bucket."""
        direction = "backward" if again or transfer.backward else "forward"
        parts = self.micro_batches if self.operators.batch_dims[transfer.value] else 1
        if parts < self.micro_batches:  # the same for all micro-batches
            direction = "finish" if transfer.output or direction == "backward" else "once"
        reader = op.node if op is not None else None
        purpose = _purpose(transfer, self.pieces)
        ready = transfer.value.node if op is None and transfer.value.node in self.operators.by_node else None
        self.found.append(
            Issue(kind, axis, purpose, nbytes // parts, parts, stage, direction, reader, again, ready)
        )

    def _bucket(
        self, members: list[tuple[Piece, fx.Node | None, bool]], stage: int, phase: str, times: int
    ) -> None:
        whole = merged([piece for piece, _, _ in members])
        # what a block makes again comes before its backward
        readers = [(not again, self.place[node], node) for _, node, again in members if node is not None]
        late, _, reader = min(readers, key=itemgetter(0, 1), default=(True, 0, None))
        ready = self.nodes[whole.ready] if whole.purpose == "gradients" and whole.ready >= 0 else None
        self.found.append(
            Issue(
                whole.kind,
                whole.axis,
                whole.purpose,
                whole.nbytes,
                times,
                stage,
                phase,
                reader if ready is None else None,
                not late,
                ready,
                whole.depth,
                block=whole.block,
            )
        )


def _purpose(transfer: Transfer, reader: Pieces) -> str:
    """What a collective that is issued by itself is for."""
    if transfer.value in reader.parameters:
        return "parameters"
    return (
        "gradients"
        if transfer.source.partial
        and transfer.backward
        and not transfer.target.partial
        and not reader.operators.batch_dims[transfer.value]  # what carries the batch is no sum over it, but of experts
        and any(axis in BATCH_AXES for axis, _ in transfer.source.partial)
        else "activations"
    )
