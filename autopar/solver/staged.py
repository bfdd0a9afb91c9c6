"""What an assignment costs in a pipeline: each rank's own stages, and the order in which the schedule runs them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.capture.graph import Captured
from autopar.cost_model.bubble import most_held, simulate
from autopar.cost_model.communication import collective_seconds, wire_bytes
from autopar.plan import Collective
from autopar.schedule import order, stage_ranks
from autopar.sharding.assignment import result_layouts
from autopar.sharding.layout import Layout
from autopar.sharding.operators import Operators, Value
from autopar.sharding.recompute import kept, made_again
from autopar.sharding.stages import homes, stage_of
from autopar.solver.collectives import collectives
from autopar.solver.costs import Prices
from autopar.solver.memory import memory_of
from autopar.solver.pipeline import Pipeline
from autopar.solver.setting import Setting, keepings
from autopar.solver.spmd import Solved, seconds_of


@dataclass(frozen=True)
class _Stage:
    """One stage over a whole step: seconds of forward, of the backward of inputs and of weights; its collectives; bytes
    of activations of all micro-batches; FLOPs; and bytes that it sends to the next stage, with how many tensors."""

    seconds: dict[str, float]
    collectives: tuple[Collective, ...]
    activations: float
    flops: float
    sent: int
    tensors: int

    @property
    def each(self) -> float:
        """Seconds of the collectives that are issued while micro-batches run."""
        return sum(c.seconds for c in self.collectives if c.purpose != "gradients")

    @property
    def last(self) -> float:
        """Seconds of the collectives of gradients, at the end of the step."""
        return sum(c.seconds for c in self.collectives if c.purpose == "gradients")

    @property
    def total(self) -> float:
        """Seconds of compute."""
        return sum(self.seconds.values())


def staged(
    solved: Solved, setting: Setting, micro_batches: int, pipeline: Pipeline
) -> Solved:
    """``solved``, an account of the whole model on the mesh of one stage, as that of a pipeline.

    Seconds are those of the busiest rank, bytes those of the fullest; collectives, which are spread evenly over the
    work of their stage, are the busiest rank's. The bubble is what the schedule leaves that rank to wait.
    """
    found = _Account(solved, setting, micro_batches, pipeline)
    busiest = max(range(pipeline.pp), key=lambda r: found.time.busy[r])
    own = found.of_rank(busiest)
    compute, exposed = sum(s.total for s in own), sum(s.each + s.last for s in own)
    end = found.time.makespan + max(sum(s.last for s in found.of_rank(r)) for r in range(pipeline.pp))
    breakdown = {"compute": compute, "exposed communication": exposed, "bubble": end - compute - exposed}
    flops = sum(s.flops for s in found.stages)
    most = max(sum(s.flops for s in found.of_rank(r)) for r in range(pipeline.pp))
    return replace(
        solved,
        breakdown=breakdown,
        memory=max(map(found.memory, range(pipeline.pp)), key=lambda kinds: sum(kinds.values())),
        collectives=(*_joined(own), *found.sent(busiest)),
        bound=min(solved.bound / pipeline.pp, sum(breakdown.values())),
        flops_share=solved.flops_share * (most / flops if flops else 1.0),
    )


class _Account:
    """The stages of one assignment, and the schedule that runs them."""

    def __init__(self, solved: Solved, setting: Setting, micro_batches: int, pipeline: Pipeline) -> None:
        captured, operators, cluster = setting.captured, setting.operators, setting.cluster
        self.assignment, self.setting, self.operators = solved.assignment, setting, operators
        self.micro_batches, self.pipeline = micro_batches, pipeline
        self.prices, self.count = Prices(cluster, solved.mesh), len(pipeline.stages)
        self.held = kept(operators, solved.assignment, made_again(operators, setting.recompute))
        self.keep = keepings(captured, solved.assignment, setting.zero)
        self.at = _located(captured, operators, pipeline)
        self.of_weights = _of_one_gradient(captured, operators)
        self.layouts = result_layouts(operators, solved.assignment)
        self.crossing = _crossing(captured, operators, self.at)
        self.ranks = stage_ranks(pipeline.schedule, pipeline.pp, self.count)
        self.rows = order(pipeline.schedule, pipeline.pp, self.count, micro_batches)
        self.stages = [self._stage(s) for s in range(self.count)]
        group = cluster.group(solved.mesh.size, pipeline.pp)
        self.transfers = [
            float(collective_seconds("p2p", self.stages[s].sent / micro_batches, group, cluster.device))
            if self.ranks[s] != self.ranks[s + 1]
            else 0.0
            for s in range(self.count - 1)
        ]
        self.time = simulate(self.rows, self.count, self._seconds, max(self.transfers, default=0.0))

    def of_rank(self, rank: int) -> list[_Stage]:
        """The stages of one rank of the pipeline."""
        return [stage for s, stage in enumerate(self.stages) if self.ranks[s] == rank]

    def _seconds(self, stage: int, kind: str) -> float:
        """Seconds of one action, with its share of the collectives that are issued every micro-batch."""
        own = self.stages[stage]
        work = own.seconds["I"] + own.seconds["W"] if kind == "B" else own.seconds[kind]
        return work * (1 + (own.each / own.total if own.total else 0.0)) / self.micro_batches

    def _stage(self, s: int) -> _Stage:
        calls = [op for op in self.operators if self.at[op.node] == s]
        again = [self.operators.by_node[node] for node in self.held.operators if self.at[node] == s]
        seconds = dict.fromkeys("FIW", 0.0)
        kinds = ["F" if not op.backward else "W" if op.node in self.of_weights else "I" for op in calls]
        every = [*calls, *again]
        if every:
            took = seconds_of(every, self.operators, self.assignment, self.prices)
            for kind, one in zip([*kinds, *("I" for _ in again)], took, strict=True):
                seconds[kind] += float(one)
        issued = collectives(
            self.setting.captured,
            self.operators,
            self.assignment,
            self.prices,
            self.held,
            self.keep,
            self.micro_batches,
            lambda transfer: self.at.get(transfer.value.node, 0) == s,
        )
        saved = [(v, layout) for v, layout in self.held.saved if self.at[v.node] == s]
        sent = [v for v, (first, last) in self.crossing.items() if first <= s < last]
        return _Stage(
            seconds,
            issued,
            sum(self._bytes(v, layout) for v, layout in saved),
            sum(op.flops for op in calls),
            sum(self._bytes(v, self.layouts[v]) for v in sent),
            len(sent),
        )

    def _bytes(self, value: Value, layout: Layout) -> int:
        return layout.local_bytes(self.assignment.mesh, self.operators.specs[value])

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes a device of one rank of the pipeline, by kind."""
        own = [
            p
            for p in self.setting.captured.parameters
            if rank in {self.ranks[s] for s in homes((p.name, *p.aliases), self.pipeline.stages)}
        ]
        part = replace(self.setting, captured=replace(self.setting.captured, parameters=tuple(own)))
        found = memory_of(part, self.assignment, replace(self.held, saved={}), self.keep, self.micro_batches)
        activations = most_held(self.rows[rank], lambda s: self.stages[s].activations / self.micro_batches)
        return {**found, "activations": int(activations)}

    def sent(self, rank: int) -> tuple[Collective, ...]:
        """What a rank's stages send to the next ones; what they send back is as much."""
        own = [s for s in range(self.count - 1) if self.ranks[s] == rank != self.ranks[s + 1]]
        count = self.micro_batches * sum(self.stages[s].tensors for s in own)
        if not count:
            return ()
        nbytes, seconds = sum(self.stages[s].sent for s in own), sum(self.transfers[s] for s in own)
        wire = int(wire_bytes("p2p", nbytes, 2))
        return (Collective("p2p", "pp", "activations", count, nbytes, wire, self.micro_batches * seconds),)


def _located(captured: Captured, operators: Operators, pipeline: Pipeline) -> dict[fx.Node, int]:
    """The stage of every operator: that of its module, else in the forward that of the operator before it, in the
    backward the last one's."""
    found: dict[fx.Node, int] = {}
    known = functools.cache(lambda module: stage_of(module, pipeline.stages))
    last = 0
    for op in operators:
        own = known(op.node.meta["module"])
        if op.backward:
            found[op.node] = len(pipeline.stages) - 1 if own is None else own
        else:
            last = max(last, own or 0)
            found[op.node] = last
    for p in captured.parameters:
        found[p.placeholder] = min(homes((p.name, *p.aliases), pipeline.stages))
    return found


def _of_one_gradient(captured: Captured, operators: Operators) -> set[fx.Node]:
    """The operators of the backward that the gradient of only one parameter is made of: those of weights."""
    reach: dict[fx.Node, int] = defaultdict(int)
    for i, p in enumerate(captured.parameters):
        if p.gradient is not None:
            reach[p.gradient] |= 1 << i
    for node in reversed(captured.graph.nodes):
        for arg in node.all_input_nodes:
            reach[arg] |= reach[node]
    return {op.node for op in operators if op.backward and reach[op.node].bit_count() == 1}


def _crossing(captured: Captured, operators: Operators, at: Mapping[fx.Node, int]) -> dict[Value, tuple[int, int]]:
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


def _joined(stages: list[_Stage]) -> tuple[Collective, ...]:
    """The collectives of several stages, those of one kind, axis and purpose as one."""
    found: dict[tuple[str, str, str], Collective] = {}
    for c in (c for stage in stages for c in stage.collectives):
        key = (c.kind, c.axis, c.purpose)
        old = found.get(key, Collective(*key, 0, 0, 0, 0.0))
        counts = old.count + c.count, old.bytes + c.bytes, old.wire_bytes + c.wire_bytes
        found[key] = Collective(*key, *counts, old.seconds + c.seconds)
    return tuple(found[key] for key in sorted(found))
