"""A rank's joint program as a tape: every node that the passes would emit, by what it reads and what it makes.

The tape follows `passes.shard`, `passes.recompute.tag` and `passes.zero.keep` node by node, without writing a graph, so
that the bytes of a plan can be known before it is emitted. tests/test_peak.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from autopar.capture.graph import Parameter
from autopar.sharding.assignment import AliasKey, Assignment, Router, Transfer, direction, result_layouts
from autopar.sharding.buckets import Piece, Pieces
from autopar.sharding.layout import MICRO_BATCH, Layout
from autopar.sharding.operators import Operator, Value
from autopar.sharding.recompute import MadeAgain
from autopar.sharding.rule import layouts
from autopar.solver.shorten import Short
from autopar.solver.space import output_values
from autopar.solver.templates import Line, Template, Templates


@dataclass(slots=True)
class Entry:
    """One node: the entries that it reads and the storages of its results.

    ``owner`` is the node that it was emitted for, ``times`` for how many blocks it stands (`solver.shorten`). ``again``
    if the backward makes it again, ``key`` is what a redistribution has in common with an equal one. ``piece`` is that
    of a collective which may share a bucket, ``move`` the kind of the one that starts here; ``sums`` says that it
    stands for a sum over micro-batches, ``parameter`` names the parameter that it is a copy of, and ``once`` that the
    copy is kept for the step. ``view`` if it looks at what it reads, ``over`` are the places of ``args`` that its
    result may be written over; ``call`` is False for placeholders."""

    args: tuple[int, ...]
    storages: tuple[int, ...]
    backward: bool
    owner: fx.Node | None = None
    times: int = 1
    again: bool = False
    key: Any = None
    piece: Piece | None = None
    move: str = ""
    sums: bool = False
    reshape: bool = False
    view: bool = False
    over: tuple[int, ...] = ()
    parameter: str | None = None
    once: bool = False
    call: bool = True


@dataclass
class Tape:
    """Entries in the order in which they are emitted, bytes by storage, the entries of placeholders, and those that the
    captured outputs and gradients end with. ``times`` says by name for how many a parameter stands, ``copied`` which
    kinds of collectives do not hold what they read until they are waited for, ``heavy`` are the operators with FLOPs,
    ``routed`` those that take or give rows of experts."""

    entries: list[Entry] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    inputs: dict[fx.Node, int] = field(default_factory=dict)
    results: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    times: Mapping[str, int] = field(default_factory=dict)
    copied: frozenset[str] = frozenset()
    heavy: frozenset[fx.Node] = frozenset()
    routed: frozenset[fx.Node] = frozenset()

    def storage(self, nbytes: int) -> int:
        """A new storage."""
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1

    def kinds(self, entries: Iterable[int], kind: str | None) -> dict[int, str | None]:
        """``kind`` for every storage of some entries."""
        return {storage: kind for i in entries for storage in self.entries[i].storages}

    def times_of(self, entries: Iterable[int]) -> dict[int, int]:
        """How many every storage of some entries stands for."""
        return {storage: self.entries[i].times for i in entries for storage in self.entries[i].storages}

    def bytes(self, entries: Iterable[int]) -> int:
        """Bytes of all that the storages of some entries stand for; those of placeholders are not counted."""
        given = {storage for i in self.inputs.values() for storage in self.entries[i].storages}
        found = self.times_of(entries).items()
        return sum(times * self.nbytes[storage] for storage, times in found if storage not in given)

    def append(self, entry: Entry) -> int:
        """Add an entry; returns its number."""
        self.entries.append(entry)
        return len(self.entries) - 1


@dataclass(frozen=True, slots=True)
class _Made:
    """Where a value is: the entry, the storage, and a sample of its geometry."""

    entry: int
    storage: int
    sample: Tensor


class _Writer:
    """Writes a tape operator by operator, as the shard pass emits a graph."""

    def __init__(self, short: Short, assignment: Assignment, again: MadeAgain, templates: Templates) -> None:
        captured, operators = short.captured, short.operators
        self.captured, self.operators, self.times = captured, operators, short.times
        self.assignment, self.again, self.mesh = assignment, again, assignment.mesh
        heavy = frozenset(op.node for op in operators if op.flops)
        specs = {op.node: (*op.call.operands, *op.call.results) for op in operators}
        routed = frozenset(node for node, both in specs.items() if any(spec.routed for spec in both))
        self.templates, self.tape = templates, Tape(times=short.parameters, heavy=heavy, routed=routed)
        self.produced = result_layouts(operators, assignment)
        self.router = Router(self.mesh)
        named = [(p.name, p.placeholder, p.gradient) for p in captured.parameters]
        self.pieces = Pieces(operators, self.mesh, named)
        self.made: dict[tuple[Value, bool | None, Layout], _Made] = {}

    def write(self) -> Tape:
        """The whole tape."""
        self._inputs()
        for op in self.operators:
            self._operator(op)
        sinks = zip(output_values(self.captured), self.assignment.sinks, strict=True)
        for i, ((value, backward), layout) in enumerate(sinks):
            alias = self.assignment.sink_aliases.get(i)
            end = self._read(value, backward, alias, layout, value.node, output=True).entry
            (self.tape.results if i < len(self.captured.outputs) else self.tape.gradients).append(end)
        return self.tape

    def _inputs(self) -> None:
        masters = {p.placeholder: p for p in self.captured.parameters if p.master is not None}
        names = {p.placeholder: p.name for p in self.captured.parameters}
        casts = []
        for node, layout in self.assignment.sources.items():
            spec = self.operators.specs.get(Value(node))
            if spec is None:
                continue
            p = masters.get(node)
            shape = layout.local_shape(self.mesh, spec.shape)
            sample = self.templates.sample(shape, spec.dtype if p is None else p.storage_dtype)
            storage = self.tape.storage(sample.untyped_storage().nbytes())
            entry = Entry((), (storage,), bool(node.meta["backward"]), parameter=names.get(node), call=False)
            made = _Made(self.tape.append(entry), storage, sample)
            self.tape.inputs[node] = made.entry
            self.made[Value(node), None, layout] = made
            if p is not None:
                casts.append((node, layout, made, p))
        for node, layout, made, p in casts:  # before anything moves them
            self.made[Value(node), None, layout] = self._cast(made, p)

    def _cast(self, made: _Made, p: Parameter) -> _Made:
        template = self.templates.cast(made.sample, p.spec.dtype)
        node, key = p.placeholder, ("cast", p.spec.dtype)
        (found,) = self._add(template, [made], False, node, lambda line: True, key, p.name)
        return found

    def _operator(self, op: Operator) -> None:
        strategy = self.assignment.strategies[op.node]
        ins, outs = layouts(op.rule, strategy, self.mesh)
        operands = []
        for value, layout in zip(op.operands, ins, strict=True):
            alias = self.assignment.aliases.get(AliasKey(value, op.backward, op.block))
            operands.append(self._read(value, op.backward, alias, layout, op.node))
        template = self.templates.operator(op, strategy, self.mesh, [made.sample for made in operands])
        again = op.node in self.again.operators
        results = self._add(template, operands, op.backward, op.node, lambda line: again or line.view)
        for i, made in enumerate(results):
            self.made[Value(op.node, i), None, outs[i]] = made

    def _read(
        self,
        value: Value,
        backward: bool,
        alias: Layout | None,
        wanted: Layout,
        owner: fx.Node,
        output: bool = False,
    ) -> _Made:
        """``value`` in layout ``wanted``, redistributed for ``owner`` where needed."""
        own, spec = self.produced[value], self.operators.specs[value]
        if wanted == own and alias in (None, own):
            return self.made[value, None, own]
        backward = direction(value, spec, backward)
        for transfer in self.router.route(value, spec, backward, own, alias, wanted):
            self.made[value, backward, transfer.target] = self._move(transfer, backward, owner, output)
        return self._in(value, backward, wanted)

    def _in(self, value: Value, backward: bool, layout: Layout) -> _Made:
        return self.made[(value, None, layout) if layout == self.produced[value] else (value, backward, layout)]

    def _move(self, transfer: Transfer, backward: bool, owner: fx.Node, output: bool) -> _Made:
        transfer = replace(transfer, output=output)
        made = self._in(transfer.value, backward, transfer.source)
        name = self.pieces.parameters.get(transfer.value)
        entered = transfer.value.node.op == "placeholder" and not transfer.value.node.meta["backward"]
        again = entered or (not output and owner in self.again.moves)
        for step, piece in zip(transfer.steps, self.pieces.of(transfer), strict=True):
            template = self.templates.step(step, self.mesh, tuple(transfer.spec.shape), made.sample)
            own_piece = piece if piece is not None and piece.purpose != "activations" else None
            (made,) = self._add(
                template, [made], backward, owner, lambda line: again or line.view, step, name, own_piece
            )
            if step.axis == MICRO_BATCH and step.kind == "all_reduce":
                self.tape.entries[made.entry].sums = True
        return made

    def _add(
        self,
        template: Template,
        operands: list[_Made],
        backward: bool,
        owner: fx.Node,
        again: Callable[[Line], bool],
        key: Any = None,
        parameter: str | None = None,
        piece: Piece | None = None,
    ) -> list[_Made]:
        """The entries of a template on ``operands``; returns its results."""
        places = [made.entry for made in operands]
        storages = [made.storage for made in operands]
        storages += [self.tape.storage(n) for n in template.made]
        times = self.times.get(owner, 1)
        for i, line in enumerate(template.lines):
            entry = Entry(
                tuple([places[p] for p in line.reads]),
                tuple([storages[s] for s in line.storages]),
                backward,
                owner,
                times,
                not backward and again(line),
                None if key is None else (key, i),
                piece,
                line.move,
                reshape=line.reshape,
                view=line.view,
                over=line.over,
                parameter=parameter,
            )
            places.append(self.tape.append(entry))
        return [_Made(places[place], storages[storage], sample) for place, storage, sample in template.results]


def keep(tape: Tape, copies: Mapping[str, str]) -> None:
    """Keep copies of parameters as `passes.zero.keep` does, by how long they live."""
    first: dict[Any, int] = {}
    stands: dict[int, int] = {}
    kept = {name for name, life in copies.items() if life != "use"}
    for i, entry in enumerate(tape.entries):
        if stands:
            entry.args = tuple([stands.get(arg, arg) for arg in entry.args])
        if entry.call and entry.parameter in kept:
            other = first.setdefault((entry.key, entry.args), i)
            if other != i:
                stands[i] = other
    for i, entry in enumerate(tape.entries):
        if entry.parameter is None and i not in stands:
            for arg in entry.args:
                source = tape.entries[arg]
                if source.call and source.parameter in kept:
                    source.again, source.once = False, copies[source.parameter] == "step"


def write(short: Short, assignment: Assignment, again: MadeAgain, templates: Templates) -> Tape:
    """The tape of ``assignment``, forward and backward, as the shard pass would emit it and `recompute.tag` mark it."""
    return _Writer(short, assignment, again, templates).write()
