"""Which collectives of parameters and gradients are issued as one.

The shard pass writes down a `Piece` for every collective of a parameter or a gradient, the bucket pass merges those
that `buckets` puts together, and the solver prices the same buckets: what is paid for is what runs. The grouping is
FSDP2's for parameters that rest sharded (one gather and one reduce-scatter a block) and DDP's for gradients that are
all-reduced (in the order in which the backward makes them, a bucket closed once it holds `BUCKET_BYTES`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.sharding.assignment import Transfer
from autopar.sharding.layout import MICRO_BATCH, Mesh
from autopar.sharding.operators import Operators, Value, value_of
from autopar.sharding.redistribute import LOCAL, Step, whole_elements

#: DDP's ``bucket_cap_mb``. What lies in no block is gathered in buckets of that size too.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Piece:
    """One collective of the parameter ``name``, or of its gradient, that may be issued together with others.

    ``purpose`` is ``parameters`` or ``gradients``, ``depth`` the number of collectives before it on the same tensor,
    ``block`` the block of the parameter (None outside of blocks), ``ready`` the place among the operators of the one
    that makes the tensor. ``nbytes`` are those of the whole tensor (cost_model.communication's X), ``before`` and
    ``after`` the shapes of a rank's piece.
    """

    name: str
    kind: str
    axis: str
    purpose: str
    dtype: torch.dtype
    op: str | None
    depth: int
    block: str | None
    ready: int
    nbytes: int
    before: tuple[int, ...]
    after: tuple[int, ...]


def block_of(name: str) -> str | None:
    """The block that a parameter is gathered with: its path up to the first number ("model.layers.3"), or None where
    nothing but the layer itself is numbered ("0.weight" of a sequence of layers)."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if place is None or len(parts) - place <= 2 else ".".join(parts[: place + 1])


@dataclass
class Pieces:
    """Reads the pieces off redistributions. ``named`` are the parameters: name, placeholder, gradient (None if there is
    none)."""

    operators: Operators
    mesh: Mesh
    named: Sequence[tuple[str, fx.Node, fx.Node | None]]
    parameters: dict[Value, str] = field(init=False)
    gradients: dict[Value, str] = field(init=False)

    def __post_init__(self) -> None:
        self._place = {node: i for i, node in enumerate(self.operators.by_node)}
        self.parameters = {Value(placeholder): name for name, placeholder, _ in self.named}
        self.gradients = {value_of(gradient): name for name, _, gradient in self.named if gradient is not None}
        self._earlier = {v: name for gradient, name in self.gradients.items() for v in self._made_of(gradient)}

    def _made_of(self, gradient: Value) -> Iterator[Value]:
        """The values that become a gradient by views and casts alone: a sum that is reduced before it is rounded."""
        while (op := self.operators.by_node.get(gradient.node)) is not None:
            if not op.is_view and op.call.target is not torch.ops.aten._to_copy.default:
                return
            gradient = op.operands[0]
            if len(self.operators.consumers[gradient]) > 1:
                return
            yield gradient

    def of(self, transfer: Transfer) -> list[Piece | None]:
        """For every step of a redistribution its piece: gathers of a parameter, and reductions of a gradient on its way
        out of the graph. None for all others."""
        gathers = transfer.value in self.parameters
        reduced = self.gradients.get(transfer.value) if transfer.output else self._earlier.get(transfer.value)
        found: list[Piece | None] = []
        depth = 0
        for step in transfer.steps:
            communicates = step.kind not in LOCAL and step.axis != MICRO_BATCH
            name = None
            if gathers and step.kind == "all_gather":
                name = self.parameters[transfer.value]
            elif step.kind in ("all_reduce", "reduce_scatter"):
                name = reduced
            found.append(self._piece(transfer, step, name, depth) if name is not None and communicates else None)
            depth += communicates
        return found

    def _piece(self, transfer: Transfer, step: Step, name: str, depth: int) -> Piece:
        spec = transfer.spec
        return Piece(
            name,
            step.kind,
            step.axis,
            "parameters" if step.kind == "all_gather" else "gradients",
            spec.dtype,
            step.op,
            depth,
            block_of(name),
            self._place.get(transfer.value.node, -1),
            whole_elements(step, self.mesh, spec.shape) * spec.dtype.itemsize,
            step.before.local_shape(self.mesh, spec.shape),
            step.after.local_shape(self.mesh, spec.shape),
        )


def buckets(pieces: Sequence[Piece]) -> list[list[int]]:
    """The places of ``pieces`` (in graph order, of one direction) that are issued together, each list in order.

    Pieces of one bucket depend on no other's result: they have the same number of collectives before them.
    """
    found: list[list[int]] = []
    filling: dict[object, tuple[list[int], int]] = {}
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i].ready, i))
    for i in order:
        p = pieces[i]
        block = p.block if p.kind != "all_reduce" else None
        key = (p.kind, p.axis, p.purpose, p.dtype, p.op, p.depth, block)
        bucket, held = filling.get(key, ([], 0))
        if not bucket:
            found.append(bucket)
        bucket.append(i)
        held += p.nbytes
        if block is None and held >= BUCKET_BYTES:
            filling.pop(key, None)
        else:
            filling[key] = (bucket, held)
    return found


def merged(pieces: Sequence[Piece]) -> Piece:
    """The collective that stands for all ``pieces`` of a bucket; its shapes are those of flat tensors."""
    first = pieces[0]
    return Piece(
        first.name,
        first.kind,
        first.axis,
        first.purpose,
        first.dtype,
        first.op,
        first.depth,
        first.block,
        max(p.ready for p in pieces),
        sum(p.nbytes for p in pieces),
        (sum(math.prod(p.before) for p in pieces),),
        (sum(math.prod(p.after) for p in pieces),),
    )
