"""Seconds and bytes of every option of a `Space`, by the cost model."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import sympy
import torch
from torch import fx

from autopar.capture.graph import Captured
from autopar.cluster import Cluster, Group
from autopar.cost_model.communication import collective_seconds
from autopar.cost_model.compute import Work, work_seconds
from autopar.cost_model.memory import SYMBOLS as STATE_SYMBOLS
from autopar.cost_model.memory import state_formulas
from autopar.sharding.axes import is_of_tokens
from autopar.sharding.buckets import BUCKET_BYTES, block_of, goes_by_block
from autopar.sharding.layout import Layout, Mesh, TensorSpec
from autopar.sharding.operators import Operator, Operators, Value
from autopar.sharding.recompute import made_again, needed
from autopar.sharding.redistribute import LOCAL, Step, redistribution, whole_bytes
from autopar.sharding.rule import Passing, layouts
from autopar.solver.fusion import Fusion, fusion_of
from autopar.solver.program import Edge, Floats, Program
from autopar.solver.space import Flow, Space
from autopar.solver.work import local_work


@functools.cache
def _state_functions(optimizer: str) -> dict[str, Callable[[int, int], float]]:
    return {what: sympy.lambdify(STATE_SYMBOLS, formula, "math") for what, formula in state_formulas(optimizer).items()}


def state_bytes(numel: int, dtype: torch.dtype, optimizer: str, trained: bool = True) -> dict[str, float]:
    """Bytes of a (piece of a) parameter, its gradient and its optimizer state, cost_model.memory's formulas."""
    found = {what: float(f(numel, dtype.itemsize)) for what, f in _state_functions(optimizer).items()}
    return found if trained else {"parameters": found["parameters"], "gradients": 0.0, "optimizer": 0.0}


@dataclass(frozen=True)
class Share:
    """How many times its own bytes a parameter's collectives on the axes of the tokens move, together with the others
    of a bucket: with its block, or an all-reduce that does not go by blocks with the gradients that come before and
    after. On other axes too few go the same way to count on a bucket.

    A collective of X bytes takes f(X) seconds with f(X) / X falling, so f(m X) / m bounds a piece's part from below
    for every m that no bucket exceeds; where a whole block goes the same way it is that part, but for what goes with
    a block and lies in none.
    """

    block: float
    whole: float

    def times(self, kind: str, axis: str) -> float:
        """The factor of one kind of collective on one axis, or several taken together."""
        if not is_of_tokens(axis) or kind not in ("all_gather", "reduce_scatter", "all_reduce"):
            return 1.0
        return self.block if goes_by_block(kind, axis) else self.whole


def bucket_shares(space: Space, captured: Captured) -> dict[int, Share]:
    """The shares of all parameters, by their decision; of tied blocks that of the first."""
    sizes: dict[str | None, list[int]] = defaultdict(list)
    for p in captured.parameters:
        sizes[block_of(p.name)].append(p.spec.bytes)

    def bucket(held: list[int]) -> int:
        return min(sum(held), BUCKET_BYTES + max(held))

    # no smaller than a block, or gathers would seem cheaper than the all-reduce that they stand beside
    whole = max(bucket([n for held in sizes.values() for n in held]), *(sum(held) for held in sizes.values()))
    outside = sizes.pop(None, [])
    small = min(sum(n for n in outside if n < BUCKET_BYTES), BUCKET_BYTES)  # the most that goes with a block
    largest = small + max((sum(held) for held in sizes.values()), default=0)
    found: dict[int, Share] = {}
    for p in captured.parameters:
        block = block_of(p.name)
        if block is not None:
            together = sum(sizes[block]) + small
        else:
            together = max(bucket(outside), largest if p.spec.bytes < BUCKET_BYTES else 0)
        own = max(p.spec.bytes, 1)
        found.setdefault(space.of_source[p.placeholder][0], Share(together / own, whole / own))
    return found


@dataclass
class _Known:
    """Prices on one mesh that have been asked for."""

    groups: dict[str, Group] = field(default_factory=dict)
    collectives: dict[tuple[str, str, float], float] = field(default_factory=dict)
    redistributions: dict[tuple[TensorSpec, Share | None], dict[tuple[Layout, Layout], float]] = field(
        default_factory=lambda: defaultdict(dict)
    )


@functools.lru_cache(maxsize=64)
def _known(cluster: Cluster, mesh: Mesh) -> _Known:
    """What is known of a mesh: candidates of a search that differ in other things share it."""
    return _Known()


@dataclass(frozen=True)
class Prices:
    """The price of work and of redistributions on one mesh of one cluster."""

    cluster: Cluster
    mesh: Mesh

    @functools.cached_property
    def _known(self) -> _Known:
        return _known(self.cluster, self.mesh)

    def step_seconds(self, step: Step, spec: TensorSpec, share: Share | None = None) -> float:
        """Seconds of one elementary move of a redistribution; local ones are free. With ``share``, its part of the
        seconds of a bucket."""
        if step.kind in LOCAL:
            return 0.0
        nbytes = whole_bytes(step, self.mesh, spec)
        times = share.times(step.kind, step.axis) if share is not None else 1.0
        return self.collective_seconds(step.kind, step.axis, nbytes * times) / times

    def collective_seconds(self, kind: str, axis: str, nbytes: float) -> float:
        """Seconds of one collective over an axis on a whole tensor of ``nbytes``."""
        known = self._known
        if (found := known.collectives.get((kind, axis, nbytes))) is None:
            if axis not in known.groups:
                known.groups[axis] = self.cluster.group(self.mesh.stride(axis), self.mesh.degree(axis))
            found = float(collective_seconds(kind, nbytes, known.groups[axis], self.cluster.device))
            known.collectives[kind, axis, nbytes] = found
        return found

    def redistribution_seconds(
        self, source: Layout, target: Layout, spec: TensorSpec, share: Share | None = None
    ) -> float:
        """Seconds of a redistribution, inf where there is no way."""
        known = self._known.redistributions[spec, share]
        if (found := known.get((source, target))) is None:
            steps = redistribution(source, target, self.mesh, spec.shape, spec.dtype.itemsize, spec.fixed)
            found = math.inf if steps is None else sum(self.step_seconds(step, spec, share) for step in steps)
            known[source, target] = found
        return found

    def flow_matrix(self, flow: Flow, share: Share | None = None) -> Edge:
        """The edge of a flow, by distinct layouts on both sides."""
        rows, columns = sorted(set(flow.offered)), sorted(set(flow.wanted))
        cost = np.array([[self.redistribution_seconds(r, c, flow.spec, share) for c in columns] for r in rows])
        return Edge(
            flow.source,
            flow.target,
            np.array([rows.index(x) for x in flow.offered]),
            np.array([columns.index(x) for x in flow.wanted]),
            cost,
        )

    def passing_seconds(self, passing: Passing, seconds: float, parts: int) -> float:
        """What sending adds to the ``seconds`` of an operator, of one of so many ``parts`` of the batch. What travels
        beside compute slows that down as long as it takes, as `cost_model.simulate` has it."""
        alone, beside = 0.0, [0.0] * passing.parts
        for hop in passing.hops:
            took = self.collective_seconds(hop.kind, hop.axis, hop.nbytes // parts)
            if hop.beside is None:
                alone += took
            else:
                beside[hop.beside] += took
        own, rate = seconds / passing.parts, self.cluster.device.overlap_rate
        return alone + sum(max(took * (1.0 - rate), took - own) for took in beside if took)

    def work_seconds(self, work: Sequence[Work]) -> Floats:
        """Seconds of local operators."""
        return work_seconds(work, self.cluster.device)


def _operator_seconds(
    space: Space,
    operators: Operators,
    prices: Prices,
    again: Iterable[fx.Node],
    micro_batches: int,
    fusion: Fusion | None,
) -> list[Floats]:
    """Seconds of the operators of every decision, by option, blocks that are tied counted as often as they occur, and
    those that are made ``again`` once more."""
    counts: dict[fx.Node, int] = defaultdict(int)
    for node in (*operators.by_node, *again):
        counts[space.canon.get(node, node)] += 1
    where: list[tuple[int, int, int, Passing | None]] = []
    work = []
    for node, count in counts.items():
        op = operators.by_node[node]
        d, chosen = space.of_node[node]
        for k, strategy in enumerate(chosen):
            where.append((d, k, count, op.rule.passing(strategy, space.mesh)))
            work.append(local_work(op, operators, space.mesh, strategy, micro_batches, fusion))
    seconds = [np.zeros(decision.size) for decision in space.decisions]
    for (d, k, count, passing), w, t in zip(where, work, prices.work_seconds(work), strict=True):
        sent = 0.0 if passing is None else w.times * prices.passing_seconds(passing, t / w.times, w.times)
        seconds[d][k] += count * (t + sent)
    return seconds


def _follows(space: Space, operators: Operators, view: Operator) -> bool:
    source = view.operands[0].node
    return source in operators.by_node and space.of_node[source][0] == space.of_node[view.node][0]


def memory_by_option(
    space: Space, captured: Captured, operators: Operators, optimizer: str, saved: Iterable[Value], parts: float = 1.0
) -> list[Floats]:
    """Bytes that every option of every decision keeps on a device: parameter state, and activations that are ``saved``
    for the backward, of one of so many ``parts`` of the batch."""
    memory = [np.zeros(decision.size) for decision in space.decisions]
    for p in captured.parameters:
        d, chosen = space.of_source[p.placeholder]
        for k, layout in enumerate(chosen):
            local = layout.local_numel(space.mesh, p.spec.shape)
            memory[d][k] += sum(state_bytes(local, p.storage_dtype, optimizer, p.gradient is not None).values())
    counts = Counter(Value(space.canon.get(value.node, value.node), value.index) for value in saved)
    for value, count in counts.items():
        op, share = operators.by_node[value.node], parts if operators.batch_dims[value] else 1.0
        d, strategies = space.of_node[value.node]
        for k, strategy in enumerate(strategies):
            out = layouts(op.rule, strategy, space.mesh)[1][value.index]
            memory[d][k] += count * out.local_bytes(space.mesh, operators.specs[value]) / share
    return memory


def _merged(edges: Iterable[tuple[Edge, int]]) -> list[Edge]:
    """Scale edges by how often they occur."""
    return [Edge(e.source, e.target, e.source_class, e.target_class, e.cost * count) for e, count in edges]


def price(
    space: Space,
    captured: Captured,
    operators: Operators,
    prices: Prices,
    optimizer: str,
    budget: float,
    recompute: str = "none",
    micro_batches: int = 1,
    compiled: bool = False,
    in_flight: float = 1.0,
) -> Program:
    """The integer program of a space, for a step of so many ``micro_batches``, of which activations are held
    ``in_flight`` at once, whose graphs are ``compiled`` or run operator by operator. Redistributions that are made
    again are left out: the backward may share them."""
    # A view that follows its operand reads it as it is; one that decides for itself may have it redistributed.
    follows = {op.node for op in operators if op.is_view and _follows(space, operators, op)}
    again = made_again(operators, recompute)
    kept = needed(operators, again, follows)
    fusion = fusion_of(operators, again) if compiled else None
    seconds = _operator_seconds(space, operators, prices, kept.operators, micro_batches, fusion)
    seconds = [np.where(d.allowed, s, np.inf) for d, s in zip(space.decisions, seconds, strict=True)]
    saved = [value for value, _ in kept.saved]
    memory = memory_by_option(space, captured, operators, optimizer, saved, micro_batches / in_flight)
    shares = bucket_shares(space, captured)
    edges = _merged(
        (prices.flow_matrix(flow, shares.get(flow.source, shares.get(flow.target))), count)
        for flow, count in space.flows.items()
    )
    return Program(seconds, memory, edges, budget)
