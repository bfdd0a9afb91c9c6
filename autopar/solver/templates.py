"""The nodes that the shard pass emits for an operator or a redistribution, run once on the meta device.

An estimate of memory needs of every node what it reads, and which storages it makes or looks at. Equal blocks have
equal nodes, so what one call of an operator becomes under a strategy is found once, by letting its rule write it down
on meta tensors, and used for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar._compat import pytree, storage_key
from autopar.passes.collectives import KINDS, WAIT, aten, emit_step
from autopar.passes.inplace import OVER
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.operators import VIEWS, Operator
from autopar.sharding.redistribute import Step
from autopar.sharding.rule import Local, Strategy, layouts, run_local

#: Shape, strides and dtype of a tensor: all that decides what comes of an operator on it.
Geometry = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Line:
    """One node. ``reads`` are places among the operands and, behind those, the lines before; ``storages`` those of its
    results: of operands, and behind those, new ones. ``view`` if it is one of `VIEWS`, ``reshape`` if a reshape;
    ``move`` is the collective that it starts, ``waits`` whether it waits for one. ``over`` says which of its ``reads``
    its result may be written over (`passes.inplace`)."""

    reads: tuple[int, ...]
    storages: tuple[int, ...]
    view: bool = False
    reshape: bool = False
    move: str = ""
    waits: bool = False
    over: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Template:
    """``lines`` in order, bytes of the storages that they make, and of every result: its place as `Line.reads` has it,
    its storage, and a sample of it on the meta device."""

    lines: tuple[Line, ...]
    made: tuple[int, ...]
    results: tuple[tuple[int, int, Tensor], ...]


def geometry(tensor: Tensor) -> Geometry:
    """The geometry of a tensor."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass
class _Recorder:
    """Runs operators on meta tensors and writes them down. What depends on coordinates alone, a few bytes, is not."""

    operands: Sequence[Tensor]
    places: dict[int, int] = field(init=False)
    storages: dict[int, int] = field(init=False)
    lines: list[Line] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = {id(t): i for i, t in reversed(list(enumerate(self.operands)))}
        self.storages = {storage_key(t): i for i, t in reversed(list(enumerate(self.operands)))}

    def constant(self, *shape: int) -> Tensor:
        """A small tensor of coordinates."""
        self.constants.append(torch.empty(shape, dtype=torch.int64, device="meta"))
        return self.constants[-1]

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator; its results are tensors on the meta device."""
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        in_place = target is WAIT or target is torch.ops.autopar.cache_write.default
        result = args[0] if in_place else target(*args, **kwargs)
        self.alive.append(result)  # ids and storages must not be taken by others
        found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if given and all(any(t is c for c in self.constants) for t in given):
            self.constants += found
            return result
        reads = tuple(dict.fromkeys(self.places[id(t)] for t in given if id(t) in self.places))
        over = () if kwargs or not isinstance(result, Tensor) else self._over(target, args, result, reads)
        line = Line(reads, tuple(map(self._storage, found)), target in VIEWS, target is aten.reshape.default,
                    KINDS.get(target, ""), target is WAIT, over)  # fmt: skip
        place = len(self.operands) + len(self.lines)
        self.lines.append(line)
        if isinstance(result, Tensor) and id(result) in self.places:  # it is its operand: others read it from here on
            result = result.detach()
            self.alive.append(result)
        for tensor in found if not isinstance(result, Tensor) else [result]:
            self.places[id(tensor)] = place
        return result

    def _over(self, target: Any, args: Sequence[Any], result: Tensor, reads: Sequence[int]) -> tuple[int, ...]:
        """Which of ``reads`` an operator's result may be written over: where it is exactly as large and laid out."""
        _, places = OVER.get(target, (None, ()))
        able = [args[place] for place in places if isinstance(args[place], Tensor) and id(args[place]) in self.places]
        return tuple(
            reads.index(self.places[id(x)])
            for x in able
            if geometry(x) == geometry(result) and x.untyped_storage().nbytes() == result.untyped_storage().nbytes()
        )

    def _storage(self, tensor: Tensor) -> int:
        key = storage_key(tensor)
        if key not in self.storages:
            self.storages[key] = len(self.operands) + len(self.made)
            self.made.append(tensor.untyped_storage().nbytes())
        return self.storages[key]

    def template(self, results: Sequence[Tensor], apart: bool) -> Template:
        """What was written down; with ``apart`` every result is taken out of a tuple by a line of its own."""
        found = []
        for tensor in results:
            storage, place = self._storage(tensor), self.places.get(id(tensor))
            if place is None or apart:  # made of coordinates, or taken out of a tuple
                source = () if place is None else (place,)
                view = apart and place is not None and self.lines[place - len(self.operands)].view
                self.lines.append(Line(source, (storage,), view))
                place = len(self.operands) + len(self.lines) - 1
            found.append((place, storage, tensor))
        return Template(tuple(self.lines), tuple(self.made), tuple(found))


class Templates:
    """The templates of operators and redistributions that were asked for so far."""

    def __init__(self) -> None:
        self._known: dict[Any, Template] = {}
        self._samples: dict[Geometry, Tensor] = {}

    def sample(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the meta device."""
        return self._interned(torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def _interned(self, tensor: Tensor) -> Tensor:
        return self._samples.setdefault(geometry(tensor), tensor)

    def operator(self, op: Operator, strategy: Strategy, mesh: Mesh, operands: Sequence[Tensor]) -> Template:
        """What the shard pass emits for an operator on ``operands``, which are samples."""
        key = (id(op.call), strategy, mesh, *map(id, operands))
        if key not in self._known:
            ins, outs = layouts(op.rule, strategy, mesh)

            def write(record: _Recorder, given: Sequence[Tensor]) -> Any:
                def starts(layout: Layout, shape: Sequence[int]) -> Tensor:
                    return record.constant(len(shape))

                return run_local(op.rule, Local(op.call, mesh, tuple(given), ins, outs, record.emit, starts))

            several = not isinstance(op.node.meta["val"], Tensor)
            self._known[key] = self._written(operands, write, several)
        return self._known[key]

    def step(self, step: Step, mesh: Mesh, shape: tuple[int, ...], operand: Tensor) -> Template:
        """What the shard pass emits for one step of a redistribution of a tensor of global ``shape``."""
        key = (step, mesh, shape, id(operand))
        if key not in self._known:

            def write(record: _Recorder, given: Sequence[Tensor]) -> Any:
                return emit_step(record.emit, given[0], step, mesh, shape, lambda axis: record.constant(1))

            self._known[key] = self._written([operand], write, apart=False)
        return self._known[key]

    def cast(self, operand: Tensor, dtype: torch.dtype) -> Template:
        """The cast of a master parameter."""
        key = ("cast", id(operand), dtype)
        if key not in self._known:

            def write(record: _Recorder, given: Sequence[Tensor]) -> Any:
                return record.emit(aten._to_copy.default, given[0], dtype=dtype)

            self._known[key] = self._written([operand], write, apart=False)
        return self._known[key]

    def _written(
        self, operands: Sequence[Tensor], write: Callable[[_Recorder, Sequence[Tensor]], Any], apart: bool
    ) -> Template:
        own = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in operands]
        record = _Recorder(own)
        result = write(record, own)
        apart = apart and not isinstance(result, list)
        found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        template = record.template(found, apart)
        return Template(
            template.lines, template.made, tuple((p, s, self._interned(t.detach())) for p, s, t in template.results)
        )
