"""What a step of an assignment takes, stage by stage: their programs, the schedule that runs them, and the account."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import fx

from autopar.capture.graph import Captured, Parameter
from autopar.cluster import Group
from autopar.cost_model.bubble import most_held, script
from autopar.cost_model.communication import collective_seconds, wire_bytes
from autopar.cost_model.compute import Work
from autopar.cost_model.step import Program, Simulated, Timing, simulate_step
from autopar.plan import Collective
from autopar.schedule import SPLIT_BACKWARD
from autopar.sharding.assignment import Assignment, result_layouts
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operator, Operators, Value, of_graph
from autopar.sharding.recompute import Kept, kept, made_again
from autopar.sharding.stages import homes, stage_of
from autopar.solver.actions import StageWork, accumulated_bytes, again_of, label, optimizer_time, programs
from autopar.solver.collectives import Issue, issued, totals
from autopar.solver.costs import Prices
from autopar.solver.fusion import Fusion, fusion_of
from autopar.solver.memory import memory_of
from autopar.solver.pipeline import Pipeline
from autopar.solver.pipeline import Stages as Modules
from autopar.solver.program import Floats
from autopar.solver.setting import Setting, keepings
from autopar.solver.work import local_work


@dataclass(frozen=True)
class Priced:
    """A step of an assignment: what it is simulated from, the simulation, the collectives of the slowest rank, bytes by
    kind of the fullest, and the FLOPs of the rank with most of them over those of the whole model on one replica."""

    timing: Timing
    simulated: Simulated
    collectives: tuple[Collective, ...]
    memory: dict[str, int]
    share: float


class Stages:
    """The stages of one assignment, each priced by itself: `work` and `programs` of a stage are what its actions do.

    Everything is read off the graph in one pass, when it is asked for; equal blocks are priced once.
    """

    def __init__(
        self, setting: Setting, assignment: Assignment, micro_batches: int = 1, pipeline: Pipeline | None = None
    ) -> None:
        captured, operators = setting.captured, setting.operators
        self.setting, self.assignment, self.operators = setting, assignment, operators
        self.micro_batches, self.pipeline = micro_batches, pipeline
        self.pp = pipeline.pp if pipeline else 1
        self.schedule: str | None = pipeline.schedule if pipeline else None
        self.count = len(pipeline.stages) if pipeline else 1
        self.prices = Prices(setting.cluster, assignment.mesh)
        self.held = kept(operators, assignment, made_again(operators, setting.recompute))
        self.keep = keepings(setting, assignment)
        self.at = located(captured, operators, pipeline.stages) if pipeline else {}
        self.trained = any(op.backward for op in operators)
        self.split = self.schedule in SPLIT_BACKWARD
        first = setting.forwards_first
        self.script = script(self.schedule, self.pp, self.count, micro_batches, self.trained, first)
        self.of_rank = self.script.of_rank
        self.homes = {p.name: self._homes(p) for p in captured.parameters}
        self._written: dict[tuple[object, ...], dict[str, Program]] = {}

    def _homes(self, p: Parameter) -> frozenset[int]:
        """The stages that hold a parameter."""
        return homes((p.name, *p.aliases), self.pipeline.stages) if self.pipeline else frozenset((0,))

    def stage(self, node: fx.Node) -> int:
        """The stage of an operator or a parameter."""
        return self.at.get(node, 0)

    def priced(self) -> Priced:
        """The whole step."""
        timing = self.timing()
        simulated = simulate_step(timing, self.script)
        flops = [sum(op.flops for s in own for op in self.operators_of[s]) for own in self.of_rank]
        whole = sum(flops)
        share = max(flops) / whole if whole else 1.0
        return Priced(timing, simulated, self.collectives(simulated.rank), self.fullest, share)

    # -- what belongs to a stage --------------------------------------------------------------------------------------

    @cached_property
    def once(self) -> dict[fx.Node, float]:
        """Seconds of every operator when it runs."""
        again = made_again(self.operators, self.setting.recompute)
        fusion = fusion_of(self.operators, again) if self.setting.compiled else None
        work, found = priced_once(list(self.operators), self.operators, self.assignment, self.micro_batches, fusion)
        seconds = self.prices.work_seconds(work) / [w.times for w in work]
        return {op.node: float(seconds[i]) for op, i in zip(self.operators, found, strict=True)}

    @property
    def early(self) -> frozenset[fx.Node]:
        """The operators that run once for all micro-batches."""
        return frozenset() if self.micro_batches == 1 else same_for_all(self.operators)

    @cached_property
    def operators_of(self) -> list[list[Operator]]:
        """The operators of every stage, in graph order."""
        found: list[list[Operator]] = [[] for _ in range(self.count)]
        for op in self.operators:
            found[self.stage(op.node)].append(op)
        return found

    @cached_property
    def parameters_of(self) -> list[list[str]]:
        """The parameters that every stage holds, by name."""
        found: list[list[str]] = [[] for _ in range(self.count)]
        for p in self.setting.captured.parameters:
            for s in self.homes[p.name]:
                found[s].append(p.name)
        return found

    @cached_property
    def work(self) -> list[StageWork]:
        """What every stage does."""
        every = issued(
            self.setting.captured, self.operators, self.assignment, self.held, self.keep, self.micro_batches, self.stage
        )
        issues: list[list[Issue]] = [[] for _ in range(self.count)]
        for issue in every:
            issues[issue.stage].append(issue)
        place = {op.node: i for i, op in enumerate(self.operators)}
        again: list[list[Operator]] = [[] for _ in range(self.count)]
        for op in again_of(self.held, self.operators.by_node, place):
            again[self.stage(op.node)].append(op)
        weights = of_one_gradient(self.setting.captured, self.operators) if self.split else frozenset()
        added = [
            accumulated_bytes(self.setting, self.assignment, self.keep, names, self.micro_batches)
            for names in self.parameters_of
        ]
        parts = zip(self.operators_of, again, issues, added, strict=True)
        return [StageWork(ops, a, self.once, self.early, weights, i, n) for ops, a, i, n in parts]

    # -- seconds ------------------------------------------------------------------------------------------------------

    def programs(self, stage: int) -> dict[str, Program]:
        """The programs of one stage by kind of action; stages that do the same share theirs."""
        own = self._does(stage)
        if own not in self._written:
            kinds = {kind for _, kind in self.script.kinds}
            self._written[own] = programs(self.work[stage], self.prices, kinds)
        return self._written[own]

    def _does(self, stage: int) -> tuple[object, ...]:
        """All that the programs of a stage are written from, its operators by their places."""
        work = self.work[stage]
        place = {op.node: i for i, op in enumerate(work.operators)}
        blocks: dict[str | None, tuple[int, str]] = {}

        def at(node: fx.Node | None) -> int | None:
            return None if node is None else place.get(node, -1)

        return (
            tuple(
                (work.once[op.node], op.is_view, op.backward, op.node in work.early, op.node in work.of_weights,
                 blocks.setdefault(op.block, (len(blocks), label(op.block))))
                for op in work.operators
            ),
            tuple(place[op.node] for op in work.again),
            tuple(
                (i.kind, i.axis, i.purpose, i.nbytes, i.phase, at(i.reader), i.again, at(i.ready), i.depth, i.part)
                for i in work.issues
            ),
            work.accumulated,
        )  # fmt: skip

    def timing(self) -> Timing:
        """What a step is simulated from."""
        places: dict[Program, int] = {}
        actions: dict[str, list[int]] = defaultdict(list)
        known: dict[int, dict[str, int]] = {}
        for s in range(self.count):
            own = self.programs(s)
            if id(own) not in known:
                known[id(own)] = {kind: places.setdefault(program, len(places)) for kind, program in own.items()}
            for kind, place in known[id(own)].items():
                actions[kind].append(place)
        travels = self.transfers
        optimizer = [
            optimizer_time(self.setting, self.assignment, {n for s in own for n in self.parameters_of[s]})
            for own in self.of_rank
        ]
        return Timing(
            tuple(places),
            {kind: tuple(found) for kind, found in actions.items()},
            (*travels, 0.0),
            (0.0, *travels),
            tuple(c.seconds if c else 0.0 for c in self.shared),
            tuple(optimizer),
            self.setting.cluster.device.overlap_rate,
        )

    @cached_property
    def sent(self) -> list[tuple[int, int]]:
        """Of a whole batch the bytes that every stage but the last sends to the next one, and in how many tensors."""
        return sent_on(self.setting.captured, self.operators, self.assignment, self.at, self.count)

    @cached_property
    def transfers(self) -> list[float]:
        """Seconds that what a micro-batch sends from every stage to the next travels; its gradient takes as long."""
        if self.pipeline is None:
            return []
        device, group = self.setting.cluster.device, self._group()
        return [
            float(collective_seconds("p2p", nbytes / self.micro_batches, group, device))
            if self.script.ranks[s] != self.script.ranks[s + 1]
            else 0.0
            for s, (nbytes, _) in enumerate(self.sent)
        ]

    def _group(self) -> Group:
        """The ranks of a pipeline."""
        return self.setting.cluster.group(self.assignment.mesh.size, self.pp)

    @cached_property
    def shared(self) -> list[Collective | None]:
        """By rank the sums of the gradients that its stages share with those of others, once a step; None without."""
        held = {p.name: {self.script.ranks[s] for s in self.homes[p.name]} for p in self.setting.captured.parameters}
        several = [p for p in self.setting.captured.parameters if p.gradient is not None and len(held[p.name]) > 1]
        return [self._sum([p for p in several if rank in held[p.name]], held) for rank in range(self.pp)]

    def _sum(self, parameters: Sequence[Parameter], held: Mapping[str, set[int]]) -> Collective | None:
        total, seconds, wire = 0, 0.0, 0
        for p in parameters:
            assert p.gradient is not None
            numel = self.assignment.sources[p.placeholder].local_numel(self.assignment.mesh, p.spec.shape)
            nbytes = numel * p.gradient.meta["val"].dtype.itemsize
            every, n = self._group(), len(held[p.name])
            group = Group(n, min(n, every.hosts), -(-n // every.hosts), every.intra, every.inter)
            seconds += float(collective_seconds("all_reduce", nbytes, group, self.setting.cluster.device))
            total, wire = total + nbytes, wire + int(wire_bytes("all_reduce", nbytes, n))
        count = len(parameters)
        return Collective("all_reduce", "pp", "gradients", count, total, wire, seconds) if count else None

    # -- collectives and bytes ----------------------------------------------------------------------------------------

    def collectives(self, rank: int) -> tuple[Collective, ...]:
        """All collectives of a step of one rank of the pipeline."""
        own = totals([issue for s in self.of_rank[rank] for issue in self.work[s].issues], self.prices)
        sends = [s for s in range(self.count - 1) if self.script.ranks[s] == rank != self.script.ranks[s + 1]]
        count = self.micro_batches * sum(self.sent[s][1] for s in sends)
        found = list(own)
        if (shared := self.shared[rank]) is not None:
            found.append(shared)
        if count:  # what the next stages send back is as much
            nbytes, seconds = sum(self.sent[s][0] for s in sends), sum(self.transfers[s] for s in sends)
            wire = int(wire_bytes("p2p", nbytes, 2))
            found.append(Collective("p2p", "pp", "activations", count, nbytes, wire, self.micro_batches * seconds))
        return tuple(found)

    @cached_property
    def fullest(self) -> dict[str, int]:
        """Bytes by kind of the rank that keeps most."""
        return max(map(self.memory, range(self.pp)), key=lambda kinds: sum(kinds.values()))

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes a device of one rank of the pipeline, by kind."""
        if self.pipeline is None:
            return memory_of(self.setting, self.assignment, self.held, self.keep, self.micro_batches)
        names = {name for s in self.of_rank[rank] for name in self.parameters_of[s]}
        own = tuple(p for p in self.setting.captured.parameters if p.name in names)
        part = replace(self.setting, captured=replace(self.setting.captured, parameters=own))
        found = memory_of(part, self.assignment, replace(self.held, saved={}), self.keep, self.micro_batches)
        each, once = self.saved
        activations = most_held(self.script.rows[rank], lambda s: float(each[s]) / self.micro_batches)
        return {**found, "activations": int(activations + once[self.of_rank[rank]].sum())}

    @cached_property
    def saved(self) -> tuple[Floats, Floats]:
        """`saved_bytes` by stage."""
        return saved_bytes(self.held, self.operators, self.assignment.mesh, self.at, self.count)


@of_graph
def same_for_all(operators: Operators) -> frozenset[fx.Node]:
    """The operators of the forward that neither carry the batch nor read what is made of it."""
    varying: set[fx.Node] = set()
    for op in operators:
        if operators.batch_factors[op.node] or any(value.node in varying for value in op.operands):
            varying.add(op.node)
    return frozenset(op.node for op in operators if not op.backward and op.node not in varying)


def saved_bytes(
    held: Kept, operators: Operators, mesh: Mesh, at: Mapping[fx.Node, int], count: int
) -> tuple[Floats, Floats]:
    """Bytes of a whole batch that each of ``count`` stages saves for its backward: of what carries the batch, so that a
    micro-batch has a part of it, and of what all micro-batches share. ``at`` are the stages of nodes, 0 if not there.
    """
    found = np.zeros((2, count))
    for value, layout in held.saved:
        shared = 0 if operators.batch_dims[value] else 1
        found[shared, at.get(value.node, 0)] += layout.local_bytes(mesh, operators.specs[value])
    return found[0], found[1]


def priced_once(
    calls: Sequence[Operator],
    operators: Operators,
    assignment: Assignment,
    micro_batches: int = 1,
    fusion: Fusion | None = None,
) -> tuple[list[Work], list[int]]:
    """The work of ``calls`` and the place of each call's. Counterparts in equal blocks share their call and their
    strategy: their work is written once."""
    first, places = different(calls, assignment)
    mesh, strategies = assignment.mesh, assignment.strategies
    work = [local_work(op, operators, mesh, strategies[op.node], micro_batches, fusion) for op in first]
    return work, places


def different(calls: Sequence[Operator], assignment: Assignment) -> tuple[list[Operator], list[int]]:
    """Of calls that share their call and their strategy the first, and for every call the place of its own."""
    first: list[Operator] = []
    known: dict[tuple[int, int], int] = {}
    places = []
    for op in calls:
        key = (id(op.call), id(assignment.strategies[op.node]))
        if key not in known:
            known[key] = len(first)
            first.append(op)
        places.append(known[key])
    return first, places


def located(captured: Captured, operators: Operators, stages: Modules) -> dict[fx.Node, int]:
    """The stage of every operator, of ``stages`` by module path: that of its module, else in the forward that of
    the operator before it, in the backward the last one's."""
    found: dict[fx.Node, int] = {}
    known = functools.cache(lambda module: stage_of(module, stages))
    last = 0
    for op in operators:
        own = known(op.node.meta["module"])
        if op.backward:
            found[op.node] = len(stages) - 1 if own is None else own
        else:
            last = max(last, own or 0)
            found[op.node] = last
    for p in captured.parameters:
        found[p.placeholder] = min(homes((p.name, *p.aliases), stages))
    return found


@of_graph
def of_one_gradient(captured: Captured, operators: Operators) -> set[fx.Node]:
    """The operators of the backward that the gradient of only one parameter is made of: those of weights."""
    reach: dict[fx.Node, int] = defaultdict(int)
    for i, p in enumerate(captured.parameters):
        if p.gradient is not None:
            reach[p.gradient] |= 1 << i
    for node in reversed(captured.graph.nodes):
        for arg in node.all_input_nodes:
            reach[arg] |= reach[node]
    return {op.node for op in operators if op.backward and reach[op.node].bit_count() == 1}


def sent_on(
    captured: Captured, operators: Operators, assignment: Assignment, at: Mapping[fx.Node, int], count: int
) -> list[tuple[int, int]]:
    """Of a whole batch the bytes that each of ``count`` stages but the last sends to the next, and in how many tensors;
    ``at`` are the stages of nodes."""
    found = [(0, 0)] * (count - 1)
    if count == 1:
        return found
    produced = result_layouts(operators, assignment)
    for value, (first, last) in crossing(captured, operators, at).items():
        nbytes = produced[value].local_bytes(assignment.mesh, operators.specs[value])
        for s in range(first, last):
            found[s] = (found[s][0] + nbytes, found[s][1] + 1)
    return found


def crossing(captured: Captured, operators: Operators, at: Mapping[fx.Node, int]) -> dict[Value, tuple[int, int]]:
    """The forward values that go from stage to stage, made of parameters and the batch: from which, and up to which."""
    made = {p.placeholder for p in captured.parameters}
    for op in operators:
        if any(value.node in made for value in op.operands):
            made.add(op.node)
    found = {}
    for value, users in operators.consumers.items():
        op_of = operators.by_node.get(value.node)
        if op_of is None or op_of.backward or value.node not in made or not operators.batch_dims[value]:
            continue
        last = max((at[n] for n, _ in users if not operators.by_node[n].backward), default=-1)
        if at[value.node] < last:
            found[value] = (at[value.node], last)
    return found
