"""What a search is for, and what searches of one model under different hints share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from autopar.cluster import Cluster
from autopar.hint_checks import DEGREES
from autopar.hints import Hints
from autopar.plan import Prefill
from autopar.sharding.axes import STATE_AXES, ExpertRanks
from autopar.sharding.operators import Operators
from autopar.sharding.recompute import forward_blocks
from autopar.solver.ahead import Crew
from autopar.solver.candidates import Degrees, Limits
from autopar.solver.carry import hint_pins
from autopar.solver.costs import state_bytes
from autopar.solver.pins import Pins
from autopar.solver.setting import Setting
from autopar.solver.spmd import Solved

if TYPE_CHECKING:
    from autopar.solver.attempt import Attempt
    from autopar.solver.estimate import Estimator

#: Ways to recompute, by the seconds that they take.
RECOMPUTE = ("none", "selective", "full")

#: Hints that say which candidates there are, and nothing of how one of them is solved.
_OF_CANDIDATES = frozenset({
    *DEGREES, "zero", "recompute", "micro_batch_size", "schedule", "memory_limit", "within_host", "require", "forbid",
})  # fmt: skip

#: Hints that say nothing of how the operators of a replica are split, nor of what it costs.
_NOT_OF_REPLICAS = _OF_CANDIDATES | {"zero_group_size", "stages"}


@dataclass(eq=False)
class Known:
    """What is asked about one model on one cluster under different hints shares: its ``operators``, the ``estimators``
    of replicas, and what has come of candidates that were solved, each by all that it depends on."""

    operators: Operators | None = None
    estimators: dict[tuple[object, ...], Estimator] = field(default_factory=dict)
    attempts: dict[tuple[object, ...], Attempt] = field(default_factory=dict)


class Prompts(Protocol):
    """What the forward of a generation's prompts takes under what was solved for the tokens after them."""

    def trace(self) -> None: ...
    def under(self, setting: Setting, solved: Solved, dispatch: str | None) -> Prefill: ...


@dataclass(frozen=True)
class Frame:
    """What a search is for: ``pins`` are the hints', ``budget`` bytes a device, ``crew`` who works on it. Of a
    generation, whose step is one token, ``prompts`` are what it starts from, which have to fit too."""

    setting: Setting
    hints: Hints
    pins: Pins
    limits: Limits
    budget: float
    known: Known = field(default_factory=Known)
    crew: Crew = field(default_factory=Crew)
    prompts: Prompts | None = None

    @functools.cached_property
    def state(self) -> float:
        """Bytes of all parameters, gradients and optimizer state, each once."""
        found = 0.0
        for p in self.setting.captured.parameters:
            kinds = state_bytes(p.spec.numel, p.storage_dtype, self.setting.optimizer, p.gradient is not None)
            found += sum(kinds.values())
        return found

    @functools.cached_property
    def replica_pins(self) -> Pins:
        """The pins of a replica, where nothing is split over the ranks of the data."""
        shard = {pattern: {a: d for a, d in dims.items() if a not in STATE_AXES}
                 for pattern, dims in (self.hints.shard or {}).items()}  # fmt: skip
        pins = hint_pins(self.setting.captured, Hints(shard={pattern: dims for pattern, dims in shard.items() if dims}))
        return replace(
            pins, attention=self.hints.attention, experts=self.hints.ep, inside_experts=self.hints.etp,
            dispatch=self.hints.dispatch,
        )  # fmt: skip

    @functools.cached_property
    def replica_setting(self) -> Setting:
        """The setting of a replica: its operators are split alike however much of it is made again."""
        return replace(self.setting, recompute="none")

    def of_replica(self, cp: int, tp: int, experts: ExpertRanks, samples: int) -> tuple[object, ...]:
        """All that a replica, solved for micro-batches of so many ``samples``, and its estimates depend on."""
        return cp, tp, experts, samples, *self._of_replicas

    @functools.cached_property
    def _of_replicas(self) -> tuple[object, ...]:
        return self.setting.zero.reshard_after_forward, self._without(_NOT_OF_REPLICAS)

    @functools.cached_property
    def of_attempts(self) -> tuple[object, ...]:
        """What comes of a candidate depends on this, of all that hints say."""
        return self.setting.zero.reshard_after_forward, self._without(_OF_CANDIDATES)

    def _without(self, names: frozenset[str]) -> str:
        return repr({name: value for name, value in self.hints.to_dict().items() if name not in names})

    def shared(self) -> Iterator[object]:
        """What is the same in all processes that work on a search, once it is complete."""
        if self.prompts is not None:
            self.prompts.trace()
        setting, operators = self.setting, self.setting.operators
        yield from (setting, self.replica_setting, setting.captured, operators, setting.cluster, self.replica_pins)
        yield from (estimator.replica.pins for estimator in self.known.estimators.values())
        yield from setting.captured.graph.nodes
        for op in operators:
            yield from (op, op.rule, op.call)

    @property
    def cluster(self) -> Cluster:
        """The cluster of the setting."""
        return self.setting.cluster

    @functools.cached_property
    def modes(self) -> tuple[str, ...]:
        """Ways to recompute that the hints allow."""
        if self.hints.recompute is not None:
            return (self.hints.recompute,)
        if all(p.gradient is None for p in self.setting.captured.parameters):
            return RECOMPUTE[:1]
        return RECOMPUTE if forward_blocks(self.setting.operators) else RECOMPUTE[:2]


def keeps_shards(degrees: Degrees, hints: Hints) -> bool:
    """Whether the axes that hints split parameters over have more than one rank, and groups of ZeRO divide dp."""
    table = degrees.table()
    split = {axis for dims in (hints.shard or {}).values() for axis in dims}
    group = hints.zero_group_size
    grouped = degrees.dp % (group or 1) == 0 and (group or degrees.dp) % degrees.experts.dp == 0
    return grouped and all(table[axis] > 1 for axis in split)
