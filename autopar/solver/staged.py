"""What an assignment costs in a pipeline: each rank's own stages, and the order in which the schedule runs them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.cost_model.bubble import most_held, simulate
from autopar.cost_model.communication import collective_seconds, wire_bytes
from autopar.plan import Collective
from autopar.schedule import order, stage_ranks
from autopar.sharding.assignment import result_layouts
from autopar.sharding.operators import Operators, Value
from autopar.sharding.recompute import Kept, kept, made_again
from autopar.sharding.stages import homes, stage_of
from autopar.sharding.zero import Keeping, Zero
from autopar.solver.collectives import collectives
from autopar.solver.costs import Prices
from autopar.solver.pipeline import Pipeline
from autopar.solver.spmd import Solved, keepings, memory_of, seconds_of


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
    solved: Solved,
    captured: Captured,
    operators: Operators,
    cluster: Cluster,
    optimizer: str,
    recompute: str,
    zero: Zero,
    micro_batches: int,
    pipeline: Pipeline,
) -> Solved:
    """``solved``, an account of the whole model on the mesh of one stage, as that of a pipeline.

    Seconds are those of the busiest rank, bytes those of the fullest; collectives, which are spread evenly over the
    work of their stage, are the busiest rank's. The bubble is what the schedule leaves that rank to wait.
    """
    prices, count = Prices(cluster, solved.mesh), len(pipeline.stages)
    held = kept(operators, solved.assignment, made_again(operators, recompute))
    keep = keepings(captured, solved.assignment, zero)
    at = _located(captured, operators, pipeline)
    stages = [_stage(s, solved, captured, operators, prices, held, keep, micro_batches, at) for s in range(count)]
    rows = order(pipeline.schedule, pipeline.pp, count, micro_batches)
    ranks = stage_ranks(pipeline.schedule, pipeline.pp, count)
    group = cluster.group(solved.mesh.size, pipeline.pp)
    transfers = [float(collective_seconds("p2p", s.sent / micro_batches, group, cluster.device)) for s in stages[:-1]]
    crosses = [t for s, t in enumerate(transfers) if ranks[s] != ranks[s + 1]]

    def seconds(stage: int, kind: str) -> float:
        own = stages[stage]
        work = own.seconds["I"] + own.seconds["W"] if kind == "B" else own.seconds[kind]
        return work * (1 + (own.each / own.total if own.total else 0.0)) / micro_batches

    time = simulate(rows, count, seconds, max(crosses, default=0.0))
    by_rank = [[stages[s] for s in range(count) if ranks[s] == r] for r in range(pipeline.pp)]
    busiest = max(range(pipeline.pp), key=lambda r: time.busy[r])
    compute = sum(s.total for s in by_rank[busiest])
    exposed = sum(s.each + s.last for s in by_rank[busiest])
    end = time.makespan + max(sum(s.last for s in own) for own in by_rank)
    breakdown = {"compute": compute, "exposed communication": exposed, "bubble": end - compute - exposed}
    flops = sum(s.flops for s in stages)
    share = max(sum(s.flops for s in own) for own in by_rank) / flops if flops else 1.0
    memory = [
        _memory(r, solved, captured, operators, optimizer, held, keep, micro_batches, pipeline, most_held(
            rows[r], lambda s: stages[s].activations / micro_batches))
        for r in range(pipeline.pp)
    ]  # fmt: skip
    sent = _p2p(by_rank[busiest], micro_batches, sum(transfers[s] for s in range(count - 1) if ranks[s] == busiest))
    return replace(
        solved,
        breakdown=breakdown,
        memory=max(memory, key=lambda kinds: sum(kinds.values())),
        collectives=(*_joined(by_rank[busiest]), *sent),
        bound=min(solved.bound / pipeline.pp, sum(breakdown.values())),
        flops_share=solved.flops_share * share,
    )


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


def _stage(
    s: int,
    solved: Solved,
    captured: Captured,
    operators: Operators,
    prices: Prices,
    held: Kept,
    keep: Mapping[str, Keeping],
    micro_batches: int,
    at: Mapping[fx.Node, int],
) -> _Stage:
    assignment = solved.assignment
    alone = _of_one_gradient(captured, operators)
    calls = [op for op in operators if at[op.node] == s]
    again = [operators.by_node[node] for node in held.operators if at[node] == s]
    seconds = dict.fromkeys("FIW", 0.0)
    for op, took in zip([*calls, *again], seconds_of([*calls, *again], operators, assignment, prices), strict=True):
        seconds["F" if not op.backward else "W" if op.node in alone else "I"] += float(took)
    redone = float(seconds_of(again, operators, assignment, prices).sum()) if again else 0.0
    seconds["F"], seconds["I"] = seconds["F"] - redone, seconds["I"] + redone
    issued = collectives(
        captured, operators, assignment, prices, held, keep, micro_batches, lambda t: at.get(t.value.node, 0) == s
    )
    activations = sum(
        layout.local_bytes(assignment.mesh, operators.specs[v]) for v, layout in held.saved if at[v.node] == s
    )
    crossing = _crossing(s, captured, operators, at)
    layouts = result_layouts(operators, assignment)
    sent = sum(layouts[v].local_bytes(assignment.mesh, operators.specs[v]) for v in crossing)
    return _Stage(seconds, issued, activations, sum(op.flops for op in calls), sent, len(crossing))


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


def _crossing(s: int, captured: Captured, operators: Operators, at: Mapping[fx.Node, int]) -> list[Value]:
    """The forward values that go from stage ``s`` to the next: made of parameters and the batch, and read later."""
    made = {p.placeholder for p in captured.parameters}
    for op in operators:
        if any(value.node in made for value in op.operands):
            made.add(op.node)
    return [
        value
        for value, users in operators.consumers.items()
        if value.node in made
        and value.node in operators.by_node
        and not operators.by_node[value.node].backward
        and operators.batch_dims[value]
        and at[value.node] <= s < max((at[n] for n, _ in users if not operators.by_node[n].backward), default=-1)
    ]


def _memory(
    rank: int,
    solved: Solved,
    captured: Captured,
    operators: Operators,
    optimizer: str,
    held: Kept,
    keep: Mapping[str, Keeping],
    micro_batches: int,
    pipeline: Pipeline,
    activations: float,
) -> dict[str, int]:
    """Bytes a device of one rank of the pipeline, by kind."""
    ranks = stage_ranks(pipeline.schedule, pipeline.pp, len(pipeline.stages))
    own = [
        p for p in captured.parameters if any(ranks[s] == rank for s in homes((p.name, *p.aliases), pipeline.stages))
    ]
    nothing = replace(held, saved={})
    part = replace(captured, parameters=tuple(own))
    found = memory_of(part, operators, solved.assignment, optimizer, nothing, keep, micro_batches)
    return {**found, "activations": int(activations)}


def _joined(stages: list[_Stage]) -> tuple[Collective, ...]:
    """The collectives of several stages, those of one kind, axis and purpose as one."""
    found: dict[tuple[str, str, str], Collective] = {}
    for c in (c for stage in stages for c in stage.collectives):
        key = (c.kind, c.axis, c.purpose)
        old = found.get(key, Collective(*key, 0, 0, 0, 0.0))
        counts = old.count + c.count, old.bytes + c.bytes, old.wire_bytes + c.wire_bytes
        found[key] = Collective(*key, *counts, old.seconds + c.seconds)
    return tuple(found[key] for key in sorted(found))


def _p2p(stages: list[_Stage], micro_batches: int, seconds: float) -> tuple[Collective, ...]:
    """What a rank's stages send to the next ones; what they send back is as much."""
    count, nbytes = micro_batches * sum(s.tensors for s in stages), sum(s.sent for s in stages)
    if not count:
        return ()
    return (Collective("p2p", "pp", "activations", count, nbytes, int(wire_bytes("p2p", nbytes, 2)), seconds),)
