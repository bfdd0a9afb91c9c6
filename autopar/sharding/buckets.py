"""Which collectives of parameters and gradients are issued as one.

The shard pass writes down a `Piece` for every collective of a parameter or a gradient, the bucket pass merges those
that `buckets` puts together, and the solver prices the same buckets: what is paid for is what runs. The grouping is
FSDP2's for parameters that rest sharded (one gather and one reduce-scatter a block, and with hybrid ZeRO one all-reduce
of its shards across the groups) and DDP's for gradients that are all-reduced otherwise (in the order in which the
backward makes them, a bucket closed once it holds `BUCKET_BYTES`).

What lies in no block and is small goes with a block where no product with a parameter comes between the two, as none
does between the lookup of an embedding and the first block: nothing could hide a collective of its own, which would
take another latency. Parameters do so if all that reads them is there, gradients, which nobody waits for, if the last
of them is; `BUCKET_BYTES` bound what is held besides a block.

Numbers that the forward sums up over ranks, such as the loss and how many tokens count in it, are pieces too. A mean is
the quotient of two of them, and reducing the quotient of a part by a number that all ranks have is dividing the reduced
part: so both travel together, though the quotient is made of one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import fx

from autopar.sharding.assignment import Transfer
from autopar.sharding.axes import REPLICATE_AXIS
from autopar.sharding.layout import MICRO_BATCH, Mesh
from autopar.sharding.operators import Operators, Value, of_graph, value_of
from autopar.sharding.redistribute import LOCAL, Step, whole_elements

#: DDP's ``bucket_cap_mb``. What lies in no block is gathered in buckets of that size too.
BUCKET_BYTES = 25 * 2**20


def is_overwritten(node: fx.Node) -> bool:
    """Whether a node of an emitted graph is an all-reduce of a bucket. That was laid for it alone, so when the graph
    runs the sum is written over it; functional, the collective would begin with a copy of all gradients."""
    if node.target is not torch.ops._c10d_functional.all_reduce.default:
        return False
    (sent,) = node.all_input_nodes
    return sent.target is torch.ops.aten.cat.default and len(sent.users) == 1


@dataclass(frozen=True)
class Piece:
    """One collective of the parameter ``name``, or of its gradient, that may be issued together with others.

    ``purpose`` is ``parameters``, ``gradients``, or for a number ``activations``; ``depth`` counts the collectives
    before it on the same tensor, and for a number those that it may depend on. ``block`` is the block of the parameter
    (None outside of blocks), ``neighbour`` outside of them the block from which no product with a parameter separates
    it, ``ready`` the place among the operators of the one that makes the tensor. ``nbytes`` are those of the whole
    tensor (cost_model.communication's X), ``before`` and ``after`` the shapes of a rank's piece.
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
    neighbour: str | None = None

    @property
    def own_block(self) -> str | None:
        """The block with which it is issued; None where blocks share buckets."""
        return self.block if goes_by_block(self.kind, self.axis) else None


def goes_by_block(kind: str, axis: str) -> bool:
    """Whether a collective of parameters or gradients is issued block by block."""
    return kind != "all_reduce" or axis == REPLICATE_AXIS


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
        self._levels = _levels(self.operators)
        self._products = _products(self.operators, tuple(placeholder for _, placeholder, _ in self.named))
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
        """For every step of a redistribution its piece: gathers of a parameter, reductions of a gradient on its way out
        of the graph, and sums of a number of the forward. None for all others."""
        if not transfer.spec.shape and not transfer.backward:
            return [self._number(transfer, step, i) for i, step in enumerate(transfer.steps)]
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

    def _number(self, transfer: Transfer, step: Step, place: int) -> Piece | None:
        """The piece of step ``place`` of a number's redistribution; levels are as far apart as there can be steps."""
        if step.kind != "all_reduce" or step.op != "sum" or step.axis == MICRO_BATCH:
            return None
        value = numerator(self.operators, transfer.value) or transfer.value
        return self._piece(transfer, step, "", self._levels[value] * (len(self.mesh.names) + 1) + place, "activations")

    def _piece(self, transfer: Transfer, step: Step, name: str, depth: int, purpose: str = "") -> Piece:
        spec, block = transfer.spec, block_of(name)
        return Piece(
            name,
            step.kind,
            step.axis,
            purpose or ("parameters" if step.kind == "all_gather" else "gradients"),
            spec.dtype,
            step.op,
            depth,
            block,
            self._place.get(transfer.value.node, -1),
            whole_elements(step, self.mesh, spec.shape) * spec.dtype.itemsize,
            step.before.local_shape(self.mesh, spec.shape),
            step.after.local_shape(self.mesh, spec.shape),
            self._neighbour(transfer.value) if block is None else None,
        )

    def _neighbour(self, value: Value) -> str | None:
        """The block from which no product with a parameter separates all that reads the parameter ``value``, or what
        makes the gradient ``value``."""
        near = [value.node] if value not in self.parameters else [n for n, _ in self.operators.consumers[value]]
        found = {self._products.block_near(self._place[n], n.meta["backward"]) for n in near if n in self._place}
        return found.pop() if len(found) == 1 else None


class _Products(NamedTuple):
    """The products with parameters of the ``forward`` and of the ``backward``, each by its place and with its block."""

    forward: list[tuple[int, str | None]]
    backward: list[tuple[int, str | None]]

    def block_near(self, place: int, backward: bool) -> str | None:
        """The block of the first product from a place of the forward on, or of the last up to one of the backward."""
        if backward:
            i = bisect_right(self.backward, place, key=itemgetter(0)) - 1
            return self.backward[i][1] if i >= 0 else None
        i = bisect_left(self.forward, place, key=itemgetter(0))
        return self.forward[i][1] if i < len(self.forward) else None


@of_graph
def _products(operators: Operators, parameters: tuple[fx.Node, ...]) -> _Products:
    """The operators with FLOPs that read a parameter, cast or seen through views."""
    found, made = _Products([], []), {Value(p) for p in parameters}
    for place, op in enumerate(operators):
        if made.isdisjoint(op.operands):
            continue
        if op.is_heavy:
            module = op.node.meta["module"] or ""
            (found.backward if op.backward else found.forward).append((place, block_of(f"{module}.weight")))
        elif op.is_view or op.call.target is torch.ops.aten._to_copy.default:
            made.update(Value(op.node, i) for i in range(len(op.call.results)))
    return found


def numerator(operators: Operators, value: Value) -> Value | None:
    """The number that a number is the quotient of, by another number; None if it is none."""
    op = operators.by_node.get(value.node)
    if op is None or op.call.target is not torch.ops.aten.div.Tensor or len(op.operands) != 2:
        return None
    return op.operands[0] if not any(operators.specs[operand].shape for operand in op.operands) else None


@of_graph
def _levels(operators: Operators) -> dict[Value, int]:
    """Of how many numbers, made one of the other, every value is made at most; numbers of one level depend on none of
    the others. Constants are no such numbers, and made of none."""
    found: dict[Value, int] = {}
    for op in operators:
        levels = [found[o] + (not operators.specs[o].shape) for o in op.operands if o in found]
        if op.operands:
            found.update({Value(op.node, i): max(levels, default=0) for i in range(len(op.call.results))})
    return found


def is_known_early(operators: Operators, number: Value) -> bool:
    """Whether a number of all micro-batches goes into what differs between them, such as the number of tokens into the
    gradients: it is summed up before them. Others are at the end of the step."""
    stack = [number]
    while stack:
        for node, _ in operators.consumers.get(stack.pop(), ()):
            results = [Value(node, i) for i in range(len(operators.by_node[node].call.results))]
            if any(operators.batch_dims[result] for result in results):
                return True
            stack.extend(results)
    return False


def buckets(pieces: Sequence[Piece]) -> list[list[int]]:
    """The places of ``pieces`` (in graph order, of one direction) that are issued together, each list in order.

    Pieces of one bucket depend on no other's result: they have the same number of collectives before them.
    """
    found: list[list[int]] = []
    filling: dict[_Key, tuple[list[int], int]] = {}
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i].ready, i))
    for i in order:
        p = pieces[i]
        key = _Key.of(p)
        bucket, held = filling.get(key, ([], 0))
        if not bucket:
            found.append(bucket)
        bucket.append(i)
        held += p.nbytes
        if key.block is None and held >= BUCKET_BYTES:
            filling.pop(key, None)
        else:
            filling[key] = (bucket, held)
    for key, (bucket, _) in filling.items():
        block = pieces[bucket[-1]].neighbour
        if key.block is None and block is not None and (other := filling.get(key.beside(block))) is not None:
            other[0].extend(bucket)
            found.remove(bucket)
    return [sorted(bucket, key=lambda i: (pieces[i].ready, i)) for bucket in found]


class _Key(NamedTuple):
    """What pieces of a bucket have in common. Parameters outside of blocks share one if they are needed in the same
    place, so that none is gathered long before it is used; ``place`` is None for gradients."""

    kind: str
    axis: str
    purpose: str
    dtype: torch.dtype
    op: str | None
    depth: int
    block: str | None
    place: str | None

    @classmethod
    def of(cls, p: Piece) -> _Key:
        """The key of a piece."""
        place = p.neighbour if p.purpose == "parameters" else None
        return cls(p.kind, p.axis, p.purpose, p.dtype, p.op, p.depth, p.own_block, place)

    def beside(self, block: str) -> _Key:
        """The key of the same of a block."""
        return self._replace(block=block, place=None)


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
        next((p.block for p in pieces if p.block is not None), None),
        max(p.ready for p in pieces),
        sum(p.nbytes for p in pieces),
        (sum(math.prod(p.before) for p in pieces),),
        (sum(math.prod(p.after) for p in pieces),),
    )
