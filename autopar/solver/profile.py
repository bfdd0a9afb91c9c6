"""What the units of a model (`solver.pipeline`) cost on one rank of a replica, for the outer search.

A replica is cp x tp ranks without data parallelism and pipeline. The integer program is solved once for it; what a
micro-batch of any size then costs, unit by unit, is a few sums. Pipelines, data parallelism, ZeRO and recomputation are
put together from these sums (`solver.estimate`) for thousands of candidates in the time that one program takes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.sharding.assignment import Transfer, result_layouts, transfers
from autopar.sharding.axes import make_mesh
from autopar.sharding.buckets import Pieces
from autopar.sharding.operators import Operator
from autopar.sharding.recompute import Kept, blocks_made_again, forward_blocks, kept, made_again
from autopar.sharding.redistribute import LOCAL, whole_elements
from autopar.solver.costs import Prices, state_bytes
from autopar.solver.fusion import fusion_of
from autopar.solver.pipeline import Pipeline, units
from autopar.solver.program import Floats, solve
from autopar.solver.setting import Setting
from autopar.solver.space import Pins, output_values
from autopar.solver.spmd import make_program
from autopar.solver.staged import crossing, located, of_one_gradient, priced_once

#: What a tenth of the memory is worth to a lean replica, as a fraction of the time.
LEAN = 0.01

#: Ways to recompute of which every unit's cost is known; others are made of these, block by block.
MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class State:
    """Bytes of parameters by unit on a rank of a replica: of the ``parameters`` that rest, of ``gradients`` and
    ``optimizer`` state as they rest, of the copies in which parameters are ``used``, of gradients as they are
    ``reduced``; ``cast`` is True where a copy differs from what rests in its dtype."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    used: Floats
    reduced: Floats
    cast: bool


@dataclass(frozen=True)
class Profile:
    """Costs by unit of one micro-batch on one rank, collectives over cp and tp included: seconds ``forward``, of the
    backward of ``inputs`` and of ``weights``, and by way to recompute those ``again``; bytes ``saved`` from a forward
    to its backward by way to recompute, and ``sent`` to the next unit."""

    forward: Floats
    inputs: Floats
    weights: Floats
    again: dict[str, Floats]
    saved: dict[str, Floats]
    sent: Floats

    @property
    def seconds(self) -> Floats:
        """Seconds of a micro-batch without recomputation."""
        return self.forward + self.inputs + self.weights


class Replica:
    """The solved program of one replica on cp x tp ranks; `profile` prices a micro-batch of it."""

    def __init__(self, setting: Setting, cp: int, tp: int, pins: Pins, batch: int, samples: int) -> None:
        """Solve for micro-batches of ``samples`` of a global ``batch``, the largest of the search: seconds a sample
        fall with their number, so that the bound holds for all smaller ones."""
        self.setting, self.mesh, self.batch = setting, make_mesh(1, cp, tp), batch
        self.captured, self.operators = setting.captured, setting.operators
        self.prices = Prices(setting.cluster, self.mesh)
        self.row = units(self.captured, self.operators) or ("",)
        blocks = set(forward_blocks(self.operators))
        #: Places in the row of the repeated blocks.
        self.blocks = np.array([i for i, unit in enumerate(self.row) if unit in blocks], dtype=np.int64)
        self.at = located(self.captured, self.operators, Pipeline(1, "gpipe", tuple((unit,) for unit in self.row)))
        space, program = make_program(setting, self.mesh, replace(pins, zero=0, micro_batches=batch // samples))
        self.space, self.program, self.solution = space, program, solve(program)
        self.possible = self.solution is not None
        if self.solution is not None:
            #: Least seconds of a sample over the program's space.
            self.bound = self.solution.bound / batch
            self.assignment = space.assignment(self.solution.options)

    def leaner(self) -> Replica:
        """The same replica solved so that a tenth of the memory is worth `LEAN` of the time: norms and what is around
        them are then split along the sequence, as Megatron's sequence parallelism does. Itself if nothing changes."""
        assert self.solution is not None
        price = 10 * LEAN * self.solution.value / max(self.solution.memory, 1.0)
        seconds = [s + price * m for s, m in zip(self.program.seconds, self.program.memory, strict=True)]
        solution = solve(replace(self.program, seconds=seconds))
        if solution is None or (solution.options == self.solution.options).all():
            return self
        found = copy.copy(self)
        for name in ("state", "_held", "_issued", "_sent"):
            found.__dict__.pop(name, None)
        found.solution, found.assignment = solution, self.space.assignment(solution.options)
        return found

    @functools.cached_property
    def state(self) -> State:
        """The parameters."""
        found = {name: np.zeros(len(self.row)) for name in ("parameters", "gradients", "optimizer", "used", "reduced")}
        for p in self.captured.parameters:
            numel = self.assignment.sources[p.placeholder].local_bytes(self.mesh, p.spec) // p.spec.dtype.itemsize
            unit = self.at[p.placeholder]
            rest = state_bytes(numel, p.storage_dtype, self.setting.optimizer, p.gradient is not None)
            for kind, nbytes in rest.items():
                found[kind][unit] += nbytes
            found["used"][unit] += numel * p.spec.dtype.itemsize
            if p.gradient is not None:
                found["reduced"][unit] += numel * p.gradient.meta["val"].dtype.itemsize
        return State(**found, cast=any(p.master is not None for p in self.captured.parameters))

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
    def _issued(self) -> list[tuple[Transfer, bool]]:
        """The redistributions within the replica that are issued every micro-batch, with their direction; those of
        parameters and of their gradients are left out: few, and once a step."""
        return self._inner(transfers(self.operators, output_values(self.captured), self.assignment))

    def _inner(self, every: Iterable[Transfer]) -> list[tuple[Transfer, bool]]:
        named = [(p.name, p.placeholder, p.gradient) for p in self.captured.parameters]
        reader = Pieces(self.operators, self.mesh, named)
        return [
            (t, t.backward) for t in every if t.value not in reader.parameters and not any(reader.of(t))
        ]

    def _moved(self, every: Iterable[tuple[Transfer, bool]], micro_batches: int) -> tuple[Floats, Floats]:
        """Seconds by unit of redistributions of a micro-batch in the forward and in the backward."""
        found = np.zeros((2, len(self.row)))
        for transfer, backward in every:
            parts = micro_batches if self.operators.batch_dims[transfer.value] else 1
            unit = self.at.get(transfer.value.node, 0)
            for step in transfer.steps:
                if step.kind not in LOCAL:
                    whole = whole_elements(step, self.mesh, transfer.spec.shape) * transfer.spec.dtype.itemsize
                    found[int(backward), unit] += self.prices.collective_seconds(step.kind, step.axis, whole // parts)
        return found[0], found[1]

    def _worked(self, calls: Sequence[Operator], micro_batches: int, mode: str) -> Floats:
        """Seconds of every call on a micro-batch; what runs once a step counts for one of them."""
        if not calls:
            return np.zeros(0)
        again = made_again(self.operators, mode)
        fusion = fusion_of(self.operators, again) if self.setting.compiled else None
        work, found = priced_once(calls, self.operators, self.assignment, micro_batches, fusion)
        return self.prices.work_seconds(work)[found] / micro_batches

    def _by_unit(self, calls: Sequence[Operator], seconds: Floats) -> Floats:
        where = np.array([self.at[op.node] for op in calls], dtype=np.int64)
        return np.bincount(where, seconds, len(self.row)).astype(np.float64)  # without calls it counts whole numbers

    @functools.cache  # noqa: B019  as short-lived as the search
    def profile(self, samples: int) -> Profile:
        """What the units cost in micro-batches of ``samples``."""
        parts = self.batch // samples
        calls = list(self.operators)
        seconds = self._worked(calls, parts, MODES[0])
        of_weights = of_one_gradient(self.captured, self.operators)
        kinds = np.array([0 if not op.backward else 2 if op.node in of_weights else 1 for op in calls])
        forward, inputs, weights = (self._by_unit(calls, np.where(kinds == k, seconds, 0.0)) for k in range(3))
        moved = self._moved(self._issued, parts)
        again, saved = {}, {}
        for mode, held in self._held.items():
            repeated = [self.operators.by_node[node] for node in held.operators]
            again[mode] = self._by_unit(repeated, self._worked(repeated, parts, mode))
            again[mode] += sum(self._moved(self._inner(held.transfers.values()), parts))
            saved[mode] = self._saved(held) / parts
        return Profile(forward + moved[0], inputs + moved[1], weights, again, saved, self._sent / parts)

    def _saved(self, held: Kept) -> Floats:
        found = np.zeros(len(self.row))
        for value, layout in held.saved:
            found[self.at[value.node]] += layout.local_bytes(self.mesh, self.operators.specs[value])
        return found

    @functools.cached_property
    def _sent(self) -> Floats:
        """Bytes of the whole batch that every unit sends to the next one if a stage ends with it."""
        found, produced = np.zeros(len(self.row)), result_layouts(self.operators, self.assignment)
        for value, (first, last) in crossing(self.captured, self.operators, self.at).items():
            found[first:last] += produced[value].local_bytes(self.mesh, self.operators.specs[value])
        return found
