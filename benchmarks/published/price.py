"""Prices one pinned configuration: the planner's program, solved, with its step simulated as the framework runs it.

What a framework does otherwise than autopar's runtime is put into the timing of the plan before it is simulated:

* with tensor or context parallelism overlapped, a collective over that axis is cut into as many pieces as there are
  ranks, of which one is exposed (the others travel beside the products or the attention that make or use them, which
  they slow down, `Device.overlap_rate`);
* with data parallelism overlapped, what is gathered first and reduced last in a step hides behind the first forward and
  the last backward, but for that of the last buckets;
* parameters that are prefetched in the "forward" alone (FSDP's BACKWARD_POST) are waited for in the backward, where
  autopar gathers them one gather ahead; with "many" ahead collectives of data parallelism wait for no compute;
* without overlap between pipeline stages what travels between them is waited for after every action: what the stage
  sends, beside which it receives, or where messages go one after the other what it receives too; ranks of tp send a
  part each, also where all of them have the whole (Narayanan et al., arXiv:2104.04473, section 4.1), if a framework
  does not keep gradients whole;
* with owners every rank has whole parameters' states, and sends them to all others once a step before its forward,
  one rank after the other, where else every rank gathers its part of all;
* products of a backward may add up the gradients that they make, in the buffer's own dtype (Megatron-LM's
  gradient_accumulation_fusion): then neither their casts nor their sums are passes of their own;
* a fused optimizer passes once over its state, where torch's default makes a pass for every elementary operation;
* a fused loss is one kernel in each direction (`published.loss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.cost_model.bubble import script
from autopar.cost_model.communication import collective_seconds
from autopar.cost_model.compute import optimizer_seconds
from autopar.cost_model.simulate import COMPUTE, Task
from autopar.cost_model.step import BEGIN, END, Program, Repeated, Timing, simulate_step
from autopar.garbage import collecting_later
from autopar.hints import Hints
from autopar.sharding.axes import (
    BATCH_AXES,
    CONTEXT_AXIS,
    DATA_AXIS,
    NOWHERE,
    REPLICATE_AXIS,
    TENSOR_AXIS,
    degree_of_plan,
    make_mesh,
)
from autopar.sharding.layout import JOINT, Layout
from autopar.sharding.operators import Operators, Value
from autopar.sharding.rule import Strategy
from autopar.sharding.zero import Zero
from autopar.solver.carry import hint_pins
from autopar.solver.costs import Prices, price
from autopar.solver.pipeline import make_pipeline
from autopar.solver.program import solve
from autopar.solver.setting import Setting, keepings
from autopar.solver.space import Space, build_space
from autopar.solver.staged import Stages
from published.experts import (
    Spread,
    exchange_of,
    keep_tokens_apart,
    product_seconds,
    with_exchange,
    without_exchange,
)
from published.loss import inside_loss, loss_seconds
from published.memory import framework_peak
from published.plans import OPTIMIZER, Configuration, NotCovered

#: The share of the gradients that has no backward beside it: that of the last buckets to be filled.
LAST_BUCKETS = 0.1

#: Bytes of parameters, gradients and Adam's state of so many parameters that the time of their optimizer is that of its
#: bytes; all in float32.
MANY = (4e9, 4e9, 8e9)

#: `Task.kind` of the sums of gradients over micro-batches (`solver.actions`).
ACCUMULATE = "accumulate"

#: The axes of data parallelism, and the stream of what of it is far ahead.
DATA_AXES = frozenset(BATCH_AXES)
AHEAD = "ahead"


@dataclass(frozen=True)
class Running:
    """What a framework does: ``compiled`` kernels, Megatron's ``sequence_parallel`` (and whether what it
    gathers is ``gathered_again`` in the backward instead of kept), and whether collectives over tp,
    over cp, and those of data parallelism at the ends of a step are overlapped; what is gathered ahead
    (``prefetch``: "one", "forward" or "many"); whether what travels between pipeline stages is ("p2p": "overlapped",
    "waited for", or "in turn"), and whether ranks of tp send ``whole_gradients`` back; whether parameters have
    ``owners``; whether products add up gradients (``fused_accumulation``); a ``fused_optimizer``; and, where kernels
    are not ``compiled``, a ``fused_loss``."""

    compiled: bool
    sequence_parallel: bool
    gathered_again: bool
    tp_overlap: bool
    cp_overlap: bool
    dp_overlap: bool
    p2p: str
    owners: bool
    fused_accumulation: bool
    fused_optimizer: bool
    fused_loss: bool = False
    whole_gradients: bool = False
    prefetch: str = "one"


@dataclass(frozen=True)
class Priced:
    """``seconds`` of a step, its ``breakdown``, and bytes at the fullest moment by kind."""

    seconds: float
    breakdown: dict[str, float]
    memory: dict[str, int]


@collecting_later()
def price_configuration(
    captured: Captured,
    operators: Operators,
    cluster: Cluster,
    c: Configuration,
    hints: Hints,
    running: Running,
    spread: Spread | None = None,
) -> Priced:
    """The price of a configuration, of a mixture with its experts ``spread``. NotCovered if the model cannot be split
    so; what the planner raises for hints."""
    zero = Zero(hints.zero, hints.reshard_after_forward is not False)
    setting = Setting(captured, operators, cluster, OPTIMIZER, c.recompute, zero, running.compiled)
    mesh = make_mesh(c.dp, c.cp, c.tp, hints.zero_group_size, spread.ranks(c) if spread else NOWHERE)
    pins = replace(hint_pins(captured, hints), micro_batches=c.micro_batches)
    space = build_space(captured, operators, mesh, pins)
    if not running.sequence_parallel and c.tp > 1:
        keep_tokens_whole(space, operators)
    keep_tokens_apart(space, operators)
    prices = Prices(cluster, mesh)
    program = price(
        space, captured, operators, prices, OPTIMIZER, float("inf"), c.recompute, c.micro_batches, running.compiled
    )
    solution = solve(program)
    if solution is None:
        raise NotCovered("the model cannot be split so")
    pipeline = make_pipeline(captured, operators, cluster, hints)
    assignment = space.assignment(solution.options)
    stages = Stages(setting, assignment, c.micro_batches, pipeline)
    inside = inside_loss(operators) if running.fused_loss and not running.compiled else frozenset()
    if inside:
        stages.once.update(loss_seconds(stages))
    if spread is not None:
        _price_experts(stages, spread, running)
    if running.fused_accumulation:
        stages.once.update(dict.fromkeys(_casts_of_gradients(captured, operators), 0.0))
    timing = stages.timing()
    if spread is not None and spread.ep > 1:
        timing = with_exchange(timing, stages, exchange_of(stages, spread, cluster), spread.overlapped)
    steps = script(c.schedule, c.pp, c.pp * c.chunks, c.micro_batches)
    if running.owners:
        group = cluster.group(mesh.stride(DATA_AXIS), mesh.degree(DATA_AXIS))
        timing = _with_owners(timing, group.size * float(collective_seconds("all_gather", 0, group, cluster.device)))
    timing = as_run(timing, running, c)
    if running.fused_optimizer:
        fused, plain = (optimizer_seconds(OPTIMIZER, *MANY, cluster.device, fused=fused) for fused in (True, False))
        timing = replace(timing, optimizer=tuple(seconds * fused / plain for seconds in timing.optimizer))
    simulated = simulate_step(timing, steps)
    keep = keepings(setting, assignment)
    split = running.sequence_parallel and running.gathered_again and c.tp > 1
    memory = framework_peak(setting, assignment, keep, c.micro_batches, pipeline, running.compiled, split, inside)
    return Priced(simulated.seconds, simulated.breakdown, memory)


def _price_experts(stages: Stages, spread: Spread, running: Running) -> None:
    """Take what the program exchanges out of the stages' work, and price products that are ``apart``."""
    stages.work = [without_exchange(work, stages.operators) for work in stages.work]
    if spread.apart:
        adds_up = running.fused_accumulation and stages.micro_batches > 1
        gradients = [p.gradient for p in stages.setting.captured.parameters if p.gradient is not None]
        stages.once.update(product_seconds(stages, gradients[0].meta["val"].dtype.itemsize if adds_up else 0))


def _casts_of_gradients(captured: Captured, operators: Operators) -> list[fx.Node]:
    """The operators that cast gradients to the dtype in which they are added up."""
    found = [operators.base(Value(p.gradient)).node for p in captured.parameters if p.gradient is not None]
    return [node for node in found if node.target is torch.ops.aten._to_copy.default and node in operators.by_node]


def keep_tokens_whole(space: Space, operators: Operators) -> None:
    """Forbid what splits batch or sequence over tp, as Megatron without sequence parallelism does not."""
    at, sequence = space.mesh.names.index(TENSOR_AXIS), operators.sequence

    def forbid(decision: int, option: int) -> None:
        allowed = space.decisions[decision].allowed
        if allowed.sum() > 1:
            allowed[option] = False

    def splits(strategy: Strategy, of: frozenset[str]) -> bool:
        return strategy[at].factor in of

    def cuts(layout: Layout, of: frozenset[int]) -> bool:
        return any(TENSOR_AXIS in layout.dims[dim] for dim in of)

    for node, (decision, strategies) in space.of_node.items():
        for k, strategy in enumerate(strategies):
            if splits(strategy, operators.batch_factors[node] | sequence.factors[node]):
                forbid(decision, k)
    for key, (decision, options) in space.of_alias.items():
        for k, layout in enumerate(options):
            if cuts(layout, operators.batch_dims.get(key.value, frozenset()) | sequence.dims[key.value]):
                forbid(decision, k)


def as_run(timing: Timing, running: Running, c: Configuration) -> Timing:
    """The timing with a framework's overlap; see the module."""
    programs = list(timing.programs)
    cut = {TENSOR_AXIS: c.tp if running.tp_overlap else 1, CONTEXT_AXIS: c.cp if running.cp_overlap else 1}
    slowed = 1 - timing.overlap_rate
    programs = [_scaled(p, lambda task: _felt(1 / cut.get(_degree(task), 1), slowed)) for p in programs]
    if running.fused_accumulation:
        programs = [_scaled(p, lambda task: float(task.kind != ACCUMULATE)) for p in programs]
    if running.dp_overlap:
        for kind, beside in ((END, "B"),) if running.owners else ((BEGIN, "F"), (END, "B")):
            for stage, place in enumerate(timing.actions.get(kind, ())):
                hidden = _compute(programs[timing.actions[beside if beside in timing.actions else "I"][stage]])
                programs[place] = _hidden(programs[place], hidden * c.chunks, slowed)
        for place in dict.fromkeys(timing.actions.get("B", ())):  # hybrid ZeRO reduces across its groups block by block
            programs[place] = _hidden(programs[place], _compute(programs[place]), slowed, frozenset((REPLICATE_AXIS,)))
    change = _far_ahead if running.prefetch == "many" else _gathered_after
    for kind in {"one": (), "forward": ("B",), "many": ("F", "B")}[running.prefetch]:
        for place in dict.fromkeys(timing.actions.get(kind, ())):
            programs[place] = change(programs[place])
    parts = 1 if running.sequence_parallel else c.tp
    up = tuple(seconds / parts for seconds in timing.up)
    down = timing.down if running.whole_gradients else tuple(seconds / parts for seconds in timing.down)
    timing = replace(timing, programs=tuple(programs), up=up, down=down)
    return timing if running.p2p == "overlapped" or c.pp == 1 else _waiting(timing, running.p2p == "in turn")


def _gathered_after(program: Program) -> Program:
    """A program that waits for every gather of parameters."""

    def waited_for(task: Task) -> bool:
        return _is_of_data(task) and task.kind == "all_gather"

    seconds = sum(r.count * t.seconds for r in program for t in r.tasks if waited_for(t))
    if not seconds:
        return program
    gather = Task(DATA_AXIS, seconds, kind="all_gather")
    rest = _scaled(program, lambda task: float(not waited_for(task)))
    return (Repeated(1, (gather, Task(COMPUTE, 0.0, after=(1,)))), *rest)


def _far_ahead(program: Program) -> Program:
    """A program whose collectives of data parallelism run one after the other, and wait for nothing else."""
    seconds = sum(r.count * t.seconds for r in program for t in r.tasks if _is_of_data(t))
    if not seconds:
        return program
    rest = _scaled(program, lambda task: float(not _is_of_data(task)))
    return (Repeated(1, (Task(AHEAD, seconds),)), *rest)


def _with_owners(timing: Timing, latencies: float) -> Timing:
    """The timing with the ``latencies`` of as many messages as there are owners, in seconds, in what is gathered first
    in a step: each goes round the ring of all ranks."""
    programs = list(timing.programs)
    for place in dict.fromkeys(timing.actions[BEGIN]):
        programs[place] = (*programs[place], Repeated(1, (Task(DATA_AXIS, latencies),)))
    return replace(timing, programs=tuple(programs))


def _waiting(timing: Timing, in_turn: bool) -> Timing:
    """The timing with what an action sends, and ``in_turn`` with what it receives, as its own last task, which nobody
    has to wait for any more."""
    programs, actions = list(timing.programs), dict(timing.actions)
    up, down = timing.up, timing.down
    if in_turn:
        up = tuple(a + b for a, b in zip(up, (0.0, *up[:-1]), strict=True))
        down = tuple(a + b for a, b in zip(down, (*down[1:], 0.0), strict=True))
    for kind, sent in (("F", up), ("B", down), ("I", down)):
        if kind in actions:
            places = []
            for place, seconds in zip(actions[kind], sent, strict=True):
                done = Task(COMPUTE, 0.0, after=(1,) if programs[place] else ())
                last = (done, Task("pp", seconds, after=(1,)))
                programs.append((*programs[place], Repeated(1, last)))
                places.append(len(programs) - 1)
            actions[kind] = tuple(places)
    nothing = tuple(0.0 for _ in timing.up)
    return replace(timing, programs=tuple(programs), actions=actions, up=nothing, down=nothing)


def _scaled(program: Program, share: Callable[[Task], float]) -> Program:
    return tuple(
        Repeated(r.count, tuple(replace(t, seconds=t.seconds * share(t)) for t in r.tasks)) for r in program
    )


def _compute(program: Program) -> float:
    """Seconds of a program's kernels."""
    return sum(r.count * t.seconds for r in program for t in r.tasks if t.stream == COMPUTE)


def _felt(share: float, slowed: float) -> float:
    """What a collective takes of the time, of which a ``share`` is exposed and the rest slows compute down by so
    much."""
    return share + (1 - share) * slowed


def _degree(task: Task) -> str:
    """Which degree of the plan a collective goes over; what goes over parts of several is of none."""
    over = {degree_of_plan(axis) for axis in task.stream.split(JOINT)}
    return over.pop() if len(over) == 1 else task.stream


def _is_of_data(task: Task, axes: frozenset[str] = DATA_AXES) -> bool:
    """Whether a collective goes over an axis of data parallelism, alone or with others."""
    return not axes.isdisjoint(task.stream.split(JOINT))


def _hidden(program: Program, beside: float, slowed: float, axes: frozenset[str] = DATA_AXES) -> Program:
    """A program whose collectives over ``axes`` have ``beside`` seconds of compute to hide behind, which they slow
    down; those of the last buckets have not."""
    total = sum(r.count * t.seconds for r in program for t in r.tasks if _is_of_data(t, axes))
    share = _felt(max(1 - beside / total, LAST_BUCKETS) if total > 0 else 1.0, slowed)
    return _scaled(program, lambda task: share if _is_of_data(task, axes) else 1.0)
