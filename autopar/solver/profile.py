"""What the units of a model (`solver.pipeline`) cost on one rank of a replica, for the outer search.

A replica is cp x tp ranks without data parallelism and pipeline, times those of dp over which experts are spread. The
integer program is solved once for it; what a micro-batch of any size then costs, unit by unit, is a few sums.
Pipelines, data parallelism, ZeRO and recomputation are put together from these sums (`solver.estimate`) for thousands
of candidates in the time that one program takes.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopar.capture.graph import Captured
from autopar.sharding.assignment import Assignment, Transfer, transfers, used_axes
from autopar.sharding.axes import NOWHERE, ExpertRanks, make_mesh
from autopar.sharding.buckets import Pieces
from autopar.sharding.operators import Operator, Operators, Value
from autopar.sharding.recompute import Kept, blocks_made_again, forward_blocks, kept, made_again
from autopar.sharding.redistribute import LOCAL, whole_bytes
from autopar.solver.costs import Prices, state_bytes
from autopar.solver.fusion import fusion_of
from autopar.solver.memory import cached_bytes
from autopar.solver.pins import Pins
from autopar.solver.pipeline import units
from autopar.solver.program import Floats, Program, solve
from autopar.solver.setting import Setting
from autopar.solver.space import Space, output_values
from autopar.solver.spmd import make_program
from autopar.solver.staged import different, located, of_one_gradient, same_for_all, saved_bytes, sent_on
from autopar.solver.work import local_work

#: What a tenth of the memory is worth to a lean replica, as a fraction of the time.
LEAN = 0.01

#: What has been found of a replica and takes long to find again.
_FINDINGS = frozenset({"states", "leaner", "_profiles"})

#: What does not depend on how its program is solved.
_OF_PROGRAM = frozenset({"prices", "at", "_solved_in"})

#: Ways to recompute of which every unit's cost is known; others are made of these, block by block.
MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class State:
    """Bytes of parameters by unit on a rank of a replica, of those that are split in use over ``spread`` ranks of the
    tokens (1 but for experts): of the ``parameters`` that rest and of those that are
    ``trained``, of ``gradients`` and ``optimizer`` state as they rest, of the copies in which parameters are ``used``,
    of gradients as they are ``reduced``; ``cast`` is True where a copy differs from what rests in its dtype."""

    parameters: Floats
    trained: Floats
    gradients: Floats
    optimizer: Floats
    used: Floats
    reduced: Floats
    cast: bool
    spread: int = 1

    @property
    def rest(self) -> Floats:
        """Bytes that ZeRO splits in all of its kinds."""
        return self.parameters + self.optimizer


@dataclass(frozen=True)
class Profile:
    """Costs by unit of one micro-batch on one rank, collectives over cp and tp included: seconds ``forward``, of the
    backward of ``inputs`` and of ``weights``, by way to recompute those ``again``, and those that are ``early``: of the
    forward, but once a step, the same for all micro-batches; bytes ``saved`` from a forward to its backward by way to
    recompute, those ``constant`` that all micro-batches share, those ``left`` by a backward of inputs for that of
    weights where these run apart, and ``sent`` by all units but the last to the next one."""

    forward: Floats
    inputs: Floats
    weights: Floats
    again: dict[str, Floats]
    early: Floats
    saved: dict[str, Floats]
    constant: dict[str, Floats]
    left: Floats
    sent: Floats

    @property
    def seconds(self) -> Floats:
        """Seconds of a micro-batch without recomputation."""
        return self.forward + self.inputs + self.weights


@dataclass
class _Sorted:
    """Things in a row: the place of each among those that differ, its unit, and its kind."""

    place: list[int] = field(default_factory=list)
    unit: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)

    def by_unit(self, seconds: Floats, units: int, kinds: int) -> list[Floats]:
        """Sums by unit, one array a kind, of the ``seconds`` of those that differ."""
        if not self.place:
            return [np.zeros(units) for _ in range(kinds)]
        where = np.array(self.kind) * units + np.array(self.unit)
        return list(np.bincount(where, seconds[self.place], kinds * units).reshape(kinds, units))


@dataclass
class _Calls(_Sorted):
    """Operators; of those that differ in their call or strategy the ``first``."""

    first: list[Operator] = field(default_factory=list)


@dataclass
class _Moves(_Sorted):
    """Collectives; ``unique`` by kind, axis, bytes of the whole tensor, and whether that carries the batch."""

    unique: dict[tuple[str, str, int, bool], int] = field(default_factory=dict)


class Replica:
    """The solved program of one replica on cp x tp ranks; `profile` prices a micro-batch of it."""

    def __init__(
        self, setting: Setting, cp: int, tp: int, pins: Pins, batch: int, samples: int, experts: ExpertRanks = NOWHERE
    ) -> None:
        """Solve for micro-batches of ``samples`` a rank of dp of a global ``batch``, the largest of the search: seconds
        a sample fall with their number, so that the bound holds for all smaller ones. ``experts`` are the ranks over
        which experts are spread; those of dp belong to the replica."""
        self.setting, self.batch, self.experts = setting, batch, experts
        self.mesh = make_mesh(experts.dp, cp, tp, None, experts)
        self.pins = pins
        self.parts = self._parts(samples)
        self.row = units(self.captured, self.operators) or ("",)
        blocks = set(forward_blocks(self.operators))
        #: Places in the row of the repeated blocks.
        self.blocks = np.array([i for i, unit in enumerate(self.row) if unit in blocks], dtype=np.int64)
        self.solution = solve(self._solved_in[1])
        self.possible = self.solution is not None
        #: Least seconds of a sample over the program's space, times the ranks of dp.
        self.bound = math.inf if self.solution is None else self.solution.bound / batch * experts.dp

    def __getstate__(self) -> dict[str, object]:
        """What another process needs of it; the rest can be made again."""
        return {name: value for name, value in self.__dict__.items() if name in _FINDINGS or name not in _LATER}

    @property
    def captured(self) -> Captured:
        """The graph."""
        return self.setting.captured

    @property
    def operators(self) -> Operators:
        """The operators of the graph."""
        return self.setting.operators

    @functools.cached_property
    def prices(self) -> Prices:
        """The prices on the replica's mesh."""
        return Prices(self.setting.cluster, self.mesh)

    @functools.cached_property
    def at(self) -> dict[fx.Node, int]:
        """The place in the row of every operator's and every parameter's unit."""
        return located(self.captured, self.operators, tuple((unit,) for unit in self.row))

    @functools.cached_property
    def _solved_in(self) -> tuple[Space, Program]:
        """The program of the replica."""
        return make_program(self.setting, self.mesh, replace(self.pins, zero=0, micro_batches=self.parts))

    @functools.cached_property
    def assignment(self) -> Assignment:
        """What was found, of a replica that is possible."""
        assert self.solution is not None
        return self._solved_in[0].assignment(self.solution.options)

    def _parts(self, samples: int) -> int:
        """Into how many micro-batches the batch is cut."""
        return max(1, self.batch // (samples * self.experts.dp))

    @functools.cached_property
    def leaner(self) -> Replica:
        """The same replica solved so that a tenth of the memory is worth `LEAN` of the time: norms and what is around
        them are then split along the sequence, as Megatron's sequence parallelism does. Itself if nothing changes."""
        assert self.solution is not None
        price = 10 * LEAN * self.solution.value / max(self.solution.memory, 1.0)
        program = self._solved_in[1]
        seconds = [s + price * m for s, m in zip(program.seconds, program.memory, strict=True)]
        solution = solve(replace(program, seconds=seconds))
        if solution is None or (solution.options == self.solution.options).all():
            return self
        found = Replica.__new__(Replica)
        kept = {name: value for name, value in self.__dict__.items() if name in _OF_PROGRAM or name not in _LATER}
        found.__dict__.update(kept, solution=solution)
        return found

    @functools.cached_property
    def states(self) -> tuple[State, ...]:
        """The parameters, those alike that are split in use over as many ranks of the tokens."""
        kinds = ("parameters", "trained", "gradients", "optimizer", "used", "reduced")
        every: dict[int, dict[str, Floats]] = defaultdict(lambda: {name: np.zeros(len(self.row)) for name in kinds})
        for p in self.captured.parameters:
            over = used_axes(self.operators, self.assignment, p.placeholder)
            found = every[math.prod(map(self.mesh.degree, over))]
            numel = self.assignment.sources[p.placeholder].local_numel(self.mesh, p.spec.shape)
            unit = self.at[p.placeholder]
            rest = state_bytes(numel, p.storage_dtype, self.setting.optimizer, p.gradient is not None)
            for kind, nbytes in rest.items():
                found[kind][unit] += nbytes
            found["used"][unit] += numel * p.spec.dtype.itemsize
            if p.gradient is not None:
                found["trained"][unit] += rest["parameters"]
                found["reduced"][unit] += numel * p.gradient.meta["val"].dtype.itemsize
        cast = any(p.master is not None for p in self.captured.parameters)
        return tuple(State(**found, cast=cast, spread=spread) for spread, found in sorted(every.items()))

    def chosen(self, by_mode: Mapping[str, Floats], recompute: str) -> Floats:
        """Values by unit under any way to recompute, of those under `MODES`."""
        if recompute in by_mode:
            return by_mode[recompute]
        again = np.zeros(len(self.row), dtype=bool)
        again[self.blocks[: blocks_made_again(recompute)]] = True
        return np.where(again, by_mode["full"], by_mode["none"])

    @functools.cached_property
    def _held(self) -> dict[str, Kept]:
        return {mode: kept(self.operators, self.assignment, made_again(self.operators, mode)) for mode in MODES}

    @functools.cached_property
    def _issued(self) -> dict[str, _Moves]:
        """The redistributions within the replica that are issued every micro-batch, and those that every way to
        recompute adds to them; what parameters and their gradients take is left out: little, and once a step."""
        every = transfers(self.operators, output_values(self.captured), self.assignment)
        again = {mode: self._moves(held.transfers.values()) for mode, held in self._held.items()}
        return {"": self._moves(every), **again}

    def _moves(self, every: Iterable[Transfer]) -> _Moves:
        named = [(p.name, p.placeholder, p.gradient) for p in self.captured.parameters]
        reader, found = Pieces(self.operators, self.mesh, named), _Moves()
        for transfer in every:
            if transfer.value in reader.parameters or any(reader.of(transfer)):
                continue
            for step in transfer.steps:
                if step.kind not in LOCAL:
                    whole = whole_bytes(step, self.mesh, transfer.spec)
                    key = (step.kind, step.axis, whole, bool(self.operators.batch_dims[transfer.value]))
                    found.place.append(found.unique.setdefault(key, len(found.unique)))
                    found.unit.append(self.at.get(transfer.value.node, 0))
                    found.kind.append(int(transfer.backward))
        return found

    def _moved(self, moves: _Moves, micro_batches: int) -> tuple[Floats, Floats]:
        """Seconds by unit of redistributions of a micro-batch in the forward and in the backward."""
        seconds = [
            self.prices.collective_seconds(kind, axis, whole // (micro_batches if carries else 1))
            for kind, axis, whole, carries in moves.unique
        ]
        forward, backward = moves.by_unit(np.array(seconds), len(self.row), 2)
        return forward, backward

    @functools.cached_property
    def _calls(self) -> dict[str, _Calls]:
        """All operators, as forward, backward of inputs and of weights, and as early; and those that every way to
        recompute makes again."""
        of_weights, early = of_one_gradient(self.captured, self.operators), same_for_all(self.operators)

        def kind(op: Operator) -> int:
            return (3 if op.node in early else 0) if not op.backward else 2 if op.node in of_weights else 1

        repeated = {mode: [self.operators.by_node[n] for n in held.operators] for mode, held in self._held.items()}
        found = {"": self._called([(op, kind(op)) for op in self.operators])}
        return found | {mode: self._called([(op, 0) for op in ops]) for mode, ops in repeated.items()}

    def _called(self, every: Sequence[tuple[Operator, int]]) -> _Calls:
        calls, kinds = [op for op, _ in every], [kind for _, kind in every]
        first, places = different(calls, self.assignment)
        return _Calls(places, [self.at[op.node] for op in calls], kinds, first)

    def _worked(self, calls: _Calls, micro_batches: int, mode: str) -> list[Floats]:
        """Seconds by unit of calls, by kind, each run once: on a micro-batch what carries the batch."""
        again = made_again(self.operators, mode)
        fusion = fusion_of(self.operators, again) if self.setting.compiled else None
        work = [
            local_work(op, self.operators, self.mesh, self.assignment.strategies[op.node], micro_batches, fusion)
            for op in calls.first
        ]
        seconds = self.prices.work_seconds(work) / [w.times for w in work] if work else np.zeros(0)
        for i, op in enumerate(calls.first):
            passing = op.rule.passing(self.assignment.strategies[op.node], self.mesh)
            if passing is not None:
                seconds[i] += self.prices.passing_seconds(passing, float(seconds[i]), work[i].times)
        return calls.by_unit(seconds, len(self.row), 4)

    def profile(self, samples: int) -> Profile:
        """What the units cost in micro-batches of ``samples``."""
        if samples not in self._profiles:
            self._profiles[samples] = self._profile(samples)
        return self._profiles[samples]

    @functools.cached_property
    def _profiles(self) -> dict[int, Profile]:
        return {}

    def _profile(self, samples: int) -> Profile:
        parts = self._parts(samples)
        forward, inputs, weights, early = self._worked(self._calls[""], parts, MODES[0])
        moved = self._moved(self._issued[""], parts)
        again = {
            mode: self._worked(self._calls[mode], parts, mode)[0] + sum(self._moved(self._issued[mode], parts))
            for mode in self._held
        }
        saved = {mode: each / parts for mode, (each, _) in self._saved.items()}
        constant = {mode: once for mode, (_, once) in self._saved.items()}
        sent = self._sent / parts
        left = self._left / parts
        return Profile(forward + moved[0], inputs + moved[1], weights, again, early, saved, constant, left, sent)

    @functools.cached_property
    def _saved(self) -> dict[str, tuple[Floats, Floats]]:
        units = len(self.row)
        found = {
            mode: saved_bytes(held, self.operators, self.mesh, self.at, units) for mode, held in self._held.items()
        }
        for each, _ in found.values():  # what a generation keeps is of the batch too, and of no unit: there is no pp
            each[0] += cached_bytes(self.setting, self.assignment)
        return found

    @functools.cached_property
    def _left(self) -> Floats:
        """Bytes of the whole batch by unit that operators of the backward of weights read and do not make: what enters
        the products, and the gradients of what leaves them."""
        weights, found = of_one_gradient(self.captured, self.operators), np.zeros(len(self.row))
        seen = set[tuple[Value, int]]()
        for op in (op for op in self.operators if op.node in weights):
            wanted, _ = self.assignment.layouts(op)
            for value, layout in zip(op.operands, wanted, strict=True):
                base, nbytes = self.operators.base(value), layout.local_bytes(self.mesh, self.operators.specs[value])
                made = base.node in self.operators.by_node and base.node not in weights
                if made and self.operators.batch_dims[value] and (base, nbytes) not in seen:
                    seen.add((base, nbytes))
                    found[self.at[op.node]] += nbytes
        return found

    @functools.cached_property
    def _sent(self) -> Floats:
        """Bytes of the whole batch that every unit but the last sends to the next one if a stage ends with it."""
        found = sent_on(self.captured, self.operators, self.assignment, self.at, len(self.row))
        return np.array([nbytes for nbytes, _ in found], dtype=np.float64)


#: What a replica finds when it is asked.
_LATER = frozenset(name for name, kind in vars(Replica).items() if isinstance(kind, functools.cached_property))
