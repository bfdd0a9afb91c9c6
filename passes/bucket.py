"""Merges the collectives of parameters, gradients and numbers into one a bucket, as `sharding.buckets` groups them.

Invariant: the graph computes the same values, element by element: pieces are laid side by side, moved by one collective
of the same kind, group, dtype and reduction, and taken apart again. Gathered pieces are taken out of the bucket where
each of them was waited for, so that at most one of them is there twice. A quotient of numbers is reduced as its
numerator and divided after.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from autopar.passes.collectives import ALL_GATHER, ALL_REDUCE, KINDS, WAIT, aten, operand
from autopar.passes.order import reorder
from autopar.sharding.buckets import Piece, buckets, merged


def piece_of(node: fx.Node) -> Piece | None:
    """What the shard pass wrote down of a collective that may share a bucket; None for all other nodes."""
    return node.meta.get("piece") if node.target in KINDS else None


def bucket(graph: fx.Graph) -> None:
    """Merge the collectives of a forward, backward or other graph of one direction, in place."""
    collectives = [node for node in graph.nodes if piece_of(node) is not None]
    pieces = [piece for node in collectives if (piece := piece_of(node)) is not None]
    merger = _Merger(graph)
    for places in buckets(pieces):
        if len(places) > 1:
            merger.merge([collectives[i] for i in places], [pieces[i] for i in places])
    if merger.changed:
        reorder(graph, merger.place)
        graph.eliminate_dead_code()


class _Merger:
    """Writes the nodes of merged collectives; ``place`` is where every node of the graph is wanted."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.place: dict[fx.Node, tuple[float, ...]] = {node: (i, 0) for i, node in enumerate(graph.nodes)}
        self.changed = False

    def merge(self, members: list[fx.Node], pieces: list[Piece]) -> None:
        """One collective in the place of ``members``."""
        self.changed = True
        for member in members:
            self._divide_late(member)
        waits = [next(iter(member.users)) for member in members]
        assert all(len(m.users) == 1 and w.target is WAIT for m, w in zip(members, waits, strict=True))
        gathers = pieces[0].kind == "all_gather"
        first = min if gathers else max  # gathered for the first that needs it, reduced when the last is there
        start, wait = (first(self.place[node] for node in nodes) for nodes in (members, waits))
        whole = merged(pieces)
        meta = {**members[0].meta, "piece": whole}
        n = self._ranks(members[0])
        parts = [operand(member) for member in members]
        packed = self._pack(parts, pieces, n, start, meta)
        args = (packed, *members[0].args[1:])
        moved = self._emit(members[0].target, args, start, meta)
        done = self._emit(WAIT, (moved,), wait, meta)
        if gathers:
            self._want_before(packed, start)
            done = self._emit(aten.reshape.default, (done, [n, whole.before[0]]), wait, meta)
        else:
            done = self._emit(aten.reshape.default, (done, [-1]), wait, meta)
        self._unpack(done, waits, pieces, n if gathers else 1, wait, meta)
        for node in (*waits, *members):
            self.graph.erase_node(node)
            del self.place[node]

    def _divide_late(self, member: fx.Node) -> None:
        """Let the reduction of a number that is a quotient reduce the numerator, and divide what comes of it: the
        divisor may travel with it then. Nothing for all others."""
        quotient, (wait,) = operand(member), member.users
        if quotient.target is not aten.div.Tensor or piece_of(member).before:  # type: ignore[union-attr]
            return
        divided = self._emit(aten.div.Tensor, (wait, quotient.args[1]), self.place[wait], quotient.meta)
        wait.replace_all_uses_with(divided, delete_user_cb=lambda user: user is not divided)
        member.args = (quotient.args[0], *member.args[1:])

    def _ranks(self, member: fx.Node) -> int:
        """Into how many rows a rank's bucket is cut before, or was put together of after, the collective."""
        if member.target is ALL_REDUCE:
            return 1
        n = member.args[1 if member.target is ALL_GATHER else 2]
        assert isinstance(n, int)
        return n

    def _emit(self, target: Any, args: tuple[Any, ...], place: tuple[float, ...], meta: dict[str, Any]) -> fx.Node:
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(target, args)
        node.meta = dict(meta)
        self.place[node] = place
        return node

    def _pack(
        self, parts: list[fx.Node], pieces: list[Piece], n: int, place: tuple[float, ...], meta: dict[str, Any]
    ) -> fx.Node:
        """The operand of the merged collective: flat tensors end to end, for a reduce-scatter a row for every rank."""
        rows = n if pieces[0].kind == "reduce_scatter" else 0
        shape = [rows, -1] if rows else [-1]
        flat = [self._emit(aten.reshape.default, (part, shape), place, meta) for part in parts]
        return self._emit(aten.cat.default, (flat, len(shape) - 1), place, meta)

    def _unpack(
        self, done: fx.Node, waits: list[fx.Node], pieces: list[Piece], n: int, place: tuple[float, ...], meta: Any
    ) -> None:
        """Replace what was waited for, each by its part of the bucket. ``done`` is flat, or has a row a rank."""
        gathers = pieces[0].kind == "all_gather"
        begin = 0
        for wait, piece in zip(waits, pieces, strict=True):
            shape = piece.before if gathers else piece.after
            end = begin + math.prod(shape)
            own = self.place[wait] if gathers else place
            part = self._emit(aten.slice.Tensor, (done, 1 if gathers else 0, begin, end), own, meta)
            begin = end
            cut = [user for user in wait.users if user.target is aten.reshape.default]
            if gathers and len(cut) == len(wait.users):
                wait.replace_all_uses_with(part)  # a reshape of a reshape is one, and here it copies nothing
            else:
                whole = [n * shape[0], *shape[1:]] if gathers else list(shape)
                wait.replace_all_uses_with(self._emit(aten.reshape.default, (part, whole), own, meta))

    def _want_before(self, node: fx.Node, place: tuple[float, ...]) -> None:
        """Want all that ``node`` is made of at ``place`` at the latest."""
        for arg in node.all_input_nodes:
            if arg.op == "call_function" and self.place[arg] > place:
                self.place[arg] = place
                self._want_before(arg, place)
