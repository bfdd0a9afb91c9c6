"""Redistribution: the collectives that take a tensor from one layout to another.

The same step list is priced by the solver and emitted by the shard pass, so what is paid for is what runs. It is the
cheapest path over the elementary moves below, by bytes on the wire plus a fixed charge a collective.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.sharding.axes import joint_axes
from autopar.sharding.layout import JOINT, MICRO_BATCH, Layout, Mesh, TensorSpec

#: Charge for starting one collective, in bytes on the wire: what a 10 us start costs on a 25 GB/s link. It only decides
#: between paths of nearly equal volume (fewer collectives win); seconds come from the cost model.
START_BYTES = 256 * 1024
#: Moves without communication: every rank drops what is not its own.
LOCAL = frozenset({"chunk", "mask"})
#: Charge of a local move, so that a path never makes one without need.
LOCAL_BYTES = 1


@dataclass(frozen=True)
class Step:
    """One elementary move on one axis, or on several taken together (`sharding.axes.joint_axes`).

    ``kind`` is ``chunk`` or ``mask`` (local: keep one piece, or make all replicas but the first zero, so that they add
    up), ``all_gather``, ``all_to_all``, ``reduce_scatter`` or ``all_reduce``; ``source`` is the dim that is gathered,
    ``target`` the dim that is cut, ``op`` the reduction. ``before`` and ``after`` are layouts.
    """

    kind: str
    axis: str
    before: Layout
    after: Layout
    source: int | None = None
    target: int | None = None
    op: str | None = None


def _with_dim(layout: Layout, dim: int, axes: tuple[str, ...]) -> Layout:
    return Layout((*layout.dims[:dim], axes, *layout.dims[dim + 1 :]), layout.partial)


@dataclass(frozen=True)
class _Rules:
    """Which moves there are, whatever the tensor's size and the mesh's degrees: on axes with these ``names``, of which
    one collective can go over several as `joint_axes` says, those on the axes ``over``. Over the axes ``scattered``
    partial sums are to end up scattered; what splits a dim of ``fixed`` stays, or goes to another of them."""

    names: tuple[str, ...]
    joint: tuple[tuple[str, ...], ...]
    scattered: tuple[str, ...]
    over: frozenset[str]
    fixed: tuple[int, ...]


def _moves(layout: Layout, rules: _Rules) -> Iterator[Step]:
    """Every elementary move from ``layout``, where dims divide (`_divides`). Only the innermost axis of a dim can leave
    it, and an axis can only enter innermost: pieces stay contiguous."""
    over, fixed = rules.over, rules.fixed
    used = set(layout.split_axes) | {axis for axis, _ in layout.partial}
    free = [d for d in range(len(layout.dims)) if d not in fixed]
    for axis, op in [pair for pair in layout.partial if pair[0] in over]:
        reduced = Layout(layout.dims, tuple(pair for pair in layout.partial if pair[0] != axis))
        yield Step("all_reduce", axis, layout, reduced, op=op)
        if op == "sum":
            for d in free:
                after = _with_dim(reduced, d, (*layout.dims[d], axis))
                yield Step("reduce_scatter", axis, layout, after, target=d, op=op)
    for axes in rules.joint:
        if over.issuperset(axes):
            yield from _joint_moves(layout, axes, free, rules)
    for d, axes in enumerate(layout.dims):
        if axes and axes[-1] in over:
            gathered = _with_dim(layout, d, axes[:-1])
            if d not in fixed:
                yield Step("all_gather", axes[-1], layout, gathered, source=d)
            for e in fixed if d in fixed else free:
                if e != d:
                    after = _with_dim(gathered, e, layout.dims[e] + (axes[-1],))
                    yield Step("all_to_all", axes[-1], layout, after, source=d, target=e)
    for axis in rules.names:
        if axis in over and axis not in used:
            owed = tuple(sorted((*layout.partial, (axis, "sum"))))
            if all(op == "sum" for _, op in owed):
                yield Step("mask", axis, layout, Layout(layout.dims, owed), op="sum")
            for d in free:
                yield Step("chunk", axis, layout, _with_dim(layout, d, (*layout.dims[d], axis)), target=d)


def _joint_moves(layout: Layout, axes: tuple[str, ...], free: Sequence[int], rules: _Rules) -> Iterator[Step]:
    """The moves from ``layout`` that take several ``axes`` at once, each one collective instead of several. What is to
    be scattered over an axis is not all-reduced over it and others and cut: for a small tensor that is one start less,
    but a gradient is in a bucket and starts nothing by itself."""
    owed = dict(layout.partial)
    joint, ops = JOINT.join(axes), {owed.get(axis) for axis in axes}
    if len(ops) == 1 and (op := ops.pop()) is not None:
        reduced = Layout(layout.dims, tuple(pair for pair in layout.partial if pair[0] not in axes))
        if not any(axis in rules.scattered for axis in axes):
            yield Step("all_reduce", joint, layout, reduced, op=op)
        for d in free if op == "sum" else ():
            after = _with_dim(reduced, d, (*layout.dims[d], *axes))
            yield Step("reduce_scatter", joint, layout, after, target=d, op=op)
    for d in free:
        if layout.dims[d][-len(axes) :] == axes:
            yield Step("all_gather", joint, layout, _with_dim(layout, d, layout.dims[d][: -len(axes)]), source=d)


def _divides(step: Step, mesh: Mesh, shape: tuple[int, ...]) -> bool:
    """Whether the dim that a move cuts is left in equal pieces."""
    d = step.target
    return d is None or (shape[d] > 0 and shape[d] % step.after.splits(mesh, d) == 0)


def whole_elements(step: Step, mesh: Mesh, shape: tuple[int, ...]) -> int:
    """Elements of the whole tensor X of a collective, as cost_model.communication counts it: what every rank holds
    after a gather or before a reduction; for an all-to-all the elements of all ranks of the group together."""
    before, after = step.before.local_numel(mesh, shape), step.after.local_numel(mesh, shape)
    return before * mesh.degree(step.axis) if step.kind == "all_to_all" else max(before, after)


def whole_bytes(step: Step, mesh: Mesh, spec: TensorSpec) -> int:
    """`whole_elements` in bytes, as the rank with most of them has it."""
    nbytes = whole_elements(step, mesh, spec.shape) * spec.dtype.itemsize
    return int(nbytes * max(step.before.excess(spec), step.after.excess(spec)))


def _charge(step: Step, mesh: Mesh, shape: tuple[int, ...], itemsize: int) -> float:
    if step.kind in LOCAL:
        return LOCAL_BYTES
    n = mesh.degree(step.axis)
    volume = (n - 1) / n * whole_elements(step, mesh, shape) * itemsize
    return START_BYTES + {"all_reduce": 2.0, "all_to_all": 1.0 / n}.get(step.kind, 1.0) * volume


def _moving(source: Layout, target: Layout, mesh: Mesh) -> frozenset[str]:
    """The axes of more than one rank, and those that the layouts name all the same."""
    named = (*source.split_axes, *target.split_axes, *(axis for axis, _ in (*source.partial, *target.partial)))
    return frozenset((*(axis for axis, n in mesh.axes if n > 1), *named))


def _involved(source: Layout, target: Layout, mesh: Mesh) -> frozenset[str]:
    """The axes on which a path is sought. On three and more there are thousands of layouts on the way, so then those
    that split a dim which differs, or over which something else is owed: a detour by any other moves as many bytes."""
    if sum(n > 1 for n in mesh.sizes) < 3:
        return _moving(source, target, mesh)
    split = [axis for a, b in zip(source.dims, target.dims, strict=True) if a != b for axis in (*a, *b)]
    return frozenset((*split, *(axis for axis, _ in set(source.partial) ^ set(target.partial))))


class _Ways:
    """The moves that rules allow, found as they are asked for."""

    #: Numbers of the kinds of moves, of all rules: what a charge depends on besides the mesh and the tensor. And a move
    #: of every kind.
    kinds: ClassVar[dict[tuple[object, ...], int]] = {}
    samples: ClassVar[list[Step]] = []

    def __init__(self, rules: _Rules) -> None:
        self.rules = rules
        self.layouts: list[Layout] = []
        self.places: dict[Layout, int] = {}
        self._moves: list[list[tuple[int, int, Step]] | None] = []

    def place(self, layout: Layout) -> int:
        """The place of a layout among ``layouts``."""
        if (found := self.places.get(layout)) is None:
            found = self.places[layout] = len(self.layouts)
            self.layouts.append(layout)
            self._moves.append(None)
        return found

    def moves(self, place: int) -> list[tuple[int, int, Step]]:
        """The moves from a layout, with the place that each leads to, and its kind."""
        if (found := self._moves[place]) is None:
            every = _moves(self.layouts[place], self.rules)
            found = self._moves[place] = [(self.place(step.after), self._kind(step), step) for step in every]
        return found

    def _kind(self, step: Step) -> int:
        before, after = step.before, step.after
        cut = None if step.target is None else (step.target, frozenset(after.dims[step.target]))
        key = (step.kind, step.axis, cut, frozenset(before.split_axes), frozenset(after.split_axes))
        if (found := self.kinds.get(key)) is None:
            found = self.kinds[key] = len(self.samples)
            self.samples.append(step)
        return found


class _Paths:
    """Dijkstra from one layout, gone on with as far as it is asked for. Of layouts equally far the least comes first.
    """

    def __init__(self, source: Layout, ways: _Ways, charge: Callable[[Step], float], charges: dict[int, float]) -> None:
        """``charge`` is the charge of a move, inf if it cannot be made; ``charges`` those that are known, by kind."""
        self.ways, self.charge, self.charges = ways, charge, charges
        start = ways.place(source)
        self.best: dict[int, float] = {start: 0.0}
        #: The last move to every layout that has been reached.
        self.last: dict[int, Step] = {}
        self.queue: list[tuple[float, object, object, int]] = [(0.0, source.dims, source.partial, start)]
        self.done: set[int] = set()

    def to(self, target: Layout) -> tuple[Step, ...] | None:
        """The cheapest moves to a layout; None if there are none."""
        goal = self.ways.place(target)
        while goal not in self.done and self.queue:
            charge, _, _, place = heapq.heappop(self.queue)
            if place not in self.done:
                self.done.add(place)
                self._go_on(place, charge)
        if goal not in self.done:
            return None
        steps: list[Step] = []
        while (step := self.last.get(goal)) is not None:
            steps.append(step)
            goal = self.ways.places[step.before]
        return tuple(reversed(steps))

    def _go_on(self, place: int, so_far: float) -> None:
        """Take every move from a layout."""
        best, charges = self.best, self.charges
        for after, kind, step in self.ways.moves(place):
            if (charge := charges.get(kind)) is None:
                charge = charges[kind] = self.charge(_Ways.samples[kind])
            total = so_far + charge
            if total < best.get(after, math.inf):
                best[after], self.last[after] = total, step
                heapq.heappush(self.queue, (total, step.after.dims, step.after.partial, after))


#: The moves by rules: all shapes and all meshes with the same axes share them.
_ways = functools.cache(_Ways)


@functools.lru_cache(maxsize=10_000)
def _charges(mesh: Mesh, shape: tuple[int, ...], itemsize: int) -> tuple[Callable[[Step], float], dict[int, float]]:
    """What a move of a tensor is charged, and room for those that have been asked for by kind."""
    return lambda step: _charge(step, mesh, shape, itemsize) if _divides(step, mesh, shape) else math.inf, {}


@functools.lru_cache(maxsize=20_000)
def _paths_from(source: Layout, mesh: Mesh, shape: tuple[int, ...], itemsize: int, rules: _Rules) -> _Paths:
    """The cheapest paths from a layout."""
    return _Paths(source, _ways(rules), *_charges(mesh, shape, itemsize))


def redistribution(
    source: Layout, target: Layout, mesh: Mesh, shape: tuple[int, ...], itemsize: int, fixed: tuple[int, ...] = ()
) -> tuple[Step, ...] | None:
    """The cheapest steps from ``source`` to ``target`` for a tensor of global ``shape``; () if they are equal, None if
    there is no way (pieces must have equal shapes, only sums can be owed on purpose, and dims of ``fixed`` are neither
    cut nor gathered, but what splits one may come to split another).

    Micro-batches run one after the other, so between them only partial results can be added up, and that comes first:
    what is added up once needs its other collectives once."""
    if source == target:
        return ()
    if MICRO_BATCH in mesh.names:
        return _beside_micro_batches(source, target, mesh, tuple(shape), itemsize, fixed)
    joint = joint_axes(mesh)
    scattered = tuple(axis for axis, _ in source.partial if axis in target.split_axes) if joint else ()
    rules = _Rules(mesh.names, joint, scattered, _involved(source, target, mesh), fixed)
    found = _paths_from(source, mesh, tuple(shape), itemsize, rules).to(target)
    if found is None and (every := _moving(source, target, mesh)) != rules.over:
        found = _paths_from(source, mesh, tuple(shape), itemsize, replace(rules, over=every)).to(target)
    return found


def _split_off(layout: Layout) -> tuple[Layout, int | None, str | None]:
    """A layout without the micro-batch axis, the dim that it splits, and the reduction that is owed over it."""
    dims = tuple(tuple(axis for axis in axes if axis != MICRO_BATCH) for axes in layout.dims)
    rest = Layout(dims, tuple(pair for pair in layout.partial if pair[0] != MICRO_BATCH))
    return rest, layout.dim_of(MICRO_BATCH), dict(layout.partial).get(MICRO_BATCH)


def with_micro_batch(layout: Layout, dim: int | None, op: str | None) -> Layout:
    """A layout with the micro-batch axis: outermost in dim ``dim``, or owing the reduction ``op`` over it."""
    if dim is not None:
        return _with_dim(layout, dim, (MICRO_BATCH, *layout.dims[dim]))
    if op is not None:
        return Layout(layout.dims, tuple(sorted((*layout.partial, (MICRO_BATCH, op)))))
    return layout


def _beside_micro_batches(
    source: Layout, target: Layout, mesh: Mesh, shape: tuple[int, ...], itemsize: int, fixed: tuple[int, ...]
) -> tuple[Step, ...] | None:
    """The steps on the micro-batch axis, then the cheapest ones on all others."""
    (own, dim, owed), (other, new_dim, new_owed) = _split_off(source), _split_off(target)
    between: list[Step] = []
    if (dim, owed) != (new_dim, new_owed):
        if dim in fixed or new_dim in fixed:
            return None
        after = with_micro_batch(own, new_dim, new_owed)
        if dim is None and owed is not None and new_dim is None and new_owed is None:
            between = [Step("all_reduce", MICRO_BATCH, source, after, op=owed)]
        elif dim is None and owed is None and new_owed == "sum":
            between = [Step("mask", MICRO_BATCH, source, after, op="sum")]
        elif dim is None and owed is None and new_dim is not None and not own.dims[new_dim]:
            between = [Step("chunk", MICRO_BATCH, source, after, target=new_dim)]
        else:
            return None
    n = mesh.degree(MICRO_BATCH)
    local = tuple(size // n if d == new_dim else size for d, size in enumerate(shape))
    rest = redistribution(own, other, mesh.without(MICRO_BATCH), local, itemsize, fixed)
    if rest is None:
        return None

    def beside(layout: Layout) -> Layout:
        return with_micro_batch(layout, new_dim, new_owed)

    return (*between, *(replace(step, before=beside(step.before), after=beside(step.after)) for step in rest))
