"""The collectives of a step, as the passes issue them: those of parameters and gradients in buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from autopar.capture.graph import Captured
from autopar.cost_model.communication import wire_bytes
from autopar.plan import Collective
from autopar.sharding.assignment import Assignment, Transfer, transfers
from autopar.sharding.axes import BATCH_AXES, REPLICATE_AXIS
from autopar.sharding.buckets import Piece, Pieces, buckets, is_known_early, merged
from autopar.sharding.operators import Operators
from autopar.sharding.recompute import Kept
from autopar.sharding.redistribute import LOCAL, whole_elements
from autopar.sharding.zero import Keeping
from autopar.solver.costs import Prices
from autopar.solver.space import output_values

_Issued = tuple[str, str, str, int]  # kind, axis, purpose, bytes of the whole tensor


def collectives(
    captured: Captured,
    operators: Operators,
    assignment: Assignment,
    prices: Prices,
    held: Kept,
    keep: Mapping[str, Keeping],
    micro_batches: int = 1,
    only: Callable[[Transfer], bool] = lambda transfer: True,
) -> tuple[Collective, ...]:
    """All collectives of a step by kind, axis and purpose. What the backward issues itself it does not make again, nor
    what is kept from the forward; collectives of parameters and gradients are issued every micro-batch or once, as
    ``keep`` has it by parameter, and so are those of what carries the batch, of a part of it each time. ``only`` picks
    the redistributions that count, for a part of the model."""
    totals: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    every = _issued(captured, operators, assignment, held, keep, micro_batches, only)
    for (kind, axis, purpose, nbytes), times in every:
        total = totals[kind, axis, purpose]
        total[0] += times
        total[1] += times * nbytes
        total[2] += times * float(wire_bytes(kind, nbytes, assignment.mesh.degree(axis)))
        total[3] += times * prices.collective_seconds(kind, axis, nbytes)
    return tuple(
        Collective(kind, axis, purpose, int(t[0]), int(t[1]), int(t[2]), t[3])
        for (kind, axis, purpose), t in sorted(totals.items())
    )


def _issued(
    captured: Captured,
    operators: Operators,
    assignment: Assignment,
    held: Kept,
    keep: Mapping[str, Keeping],
    micro_batches: int,
    only: Callable[[Transfer], bool],
) -> Iterable[tuple[_Issued, int]]:
    """Every collective of both directions, those of a bucket as one, and how many times it is issued."""
    named = [(p.name, p.placeholder, p.gradient) for p in captured.parameters]
    reader = Pieces(operators, assignment.mesh, named)
    first = list(transfers(operators, output_values(captured), assignment))
    own = {(transfer.value, step) for transfer in first if transfer.backward for step in transfer.steps}
    before = {(transfer.value, step) for transfer in first if not transfer.backward for step in transfer.steps}
    pieces: dict[tuple[str, int], list[Piece]] = defaultdict(list)  # by the graph that issues them, and how often
    for transfer in (*first, *held.transfers.values()):
        if not only(transfer):
            continue
        again = held.transfers.get((transfer.value, transfer.target)) is transfer
        for step, piece in zip(transfer.steps, reader.of(transfer), strict=True):
            if step.kind in LOCAL or (again and (transfer.value, step) in own):
                continue
            if piece is not None and piece.purpose == "activations":
                early = micro_batches > 1 and is_known_early(operators, transfer.value)
                pieces["once" if early else "backward" if again else "forward", 1].append(piece)
            elif piece is not None:
                backward, kept = again or transfer.backward, keep[piece.name]
                if piece.purpose == "gradients":
                    once = kept.gradient == "step" or piece.axis == REPLICATE_AXIS
                    pieces["gradients", 1 if once else micro_batches].append(piece)
                elif kept.copy == "use" or not backward or (transfer.value, step) not in before:
                    once, direction = kept.copy == "step", "backward" if backward else "forward"
                    pieces["once" if once else direction, 1 if once else micro_batches].append(piece)
            if piece is not None:
                continue
            nbytes = whole_elements(step, assignment.mesh, transfer.spec.shape) * transfer.spec.dtype.itemsize
            parts = micro_batches if operators.batch_dims[transfer.value] else 1
            yield (step.kind, step.axis, _purpose(transfer, reader), nbytes // parts), parts
    for (_, times), phase in pieces.items():
        for places in buckets(phase):
            whole = merged([phase[i] for i in places])
            yield (whole.kind, whole.axis, whole.purpose, whole.nbytes), times


def _purpose(transfer: Transfer, reader: Pieces) -> str:
    """What a collective that is issued by itself is for."""
    if transfer.value in reader.parameters:
        return "parameters"
    return (
        "gradients"
        if transfer.source.partial
        and transfer.backward
        and not transfer.target.partial
        and any(axis in BATCH_AXES for axis, _ in transfer.source.partial)
        else "activations"
    )
