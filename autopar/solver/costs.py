"""Seconds and bytes of every option of a `Space`, by the cost model."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import sympy
import torch
from torch import fx

from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.cost_model.communication import collective_seconds
from autopar.cost_model.compute import operator_seconds
from autopar.cost_model.memory import SYMBOLS as STATE_SYMBOLS
from autopar.cost_model.memory import state_formulas
from autopar.sharding.layout import Layout, Mesh, TensorSpec
from autopar.sharding.operators import Operator, Operators, Value
from autopar.sharding.redistribute import LOCAL, Step, redistribution, whole_elements
from autopar.sharding.rule import Strategy, layouts, work_share
from autopar.solver.program import Edge, Floats, Program
from autopar.solver.space import Flow, Space


@functools.cache
def _state_functions(optimizer: str) -> dict[str, Callable[[int, int], float]]:
    return {what: sympy.lambdify(STATE_SYMBOLS, formula, "math") for what, formula in state_formulas(optimizer).items()}


def state_bytes(numel: int, dtype: torch.dtype, optimizer: str, trained: bool = True) -> dict[str, float]:
    """Bytes of a (piece of a) parameter, its gradient and its optimizer state, cost_model.memory's formulas."""
    found = {what: float(f(numel, dtype.itemsize)) for what, f in _state_functions(optimizer).items()}
    return found if trained else {"parameters": found["parameters"], "gradients": 0.0, "optimizer": 0.0}


@dataclass(frozen=True)
class Prices:
    """The price of work and of redistributions on one mesh of one cluster."""

    cluster: Cluster
    mesh: Mesh

    def step_seconds(self, step: Step, spec: TensorSpec) -> float:
        """Seconds of one elementary move of a redistribution; local ones are free."""
        if step.kind in LOCAL:
            return 0.0
        return self._collective(step.kind, step.axis, whole_elements(step, self.mesh, spec.shape) * spec.dtype.itemsize)

    @functools.cache  # noqa: B019  frozen, and as short-lived as the solve
    def _collective(self, kind: str, axis: str, nbytes: int) -> float:
        group = self.cluster.group(self.mesh.stride(axis), self.mesh.degree(axis))
        return float(collective_seconds(kind, nbytes, group, self.cluster.device))

    @functools.cache  # noqa: B019
    def redistribution_seconds(self, source: Layout, target: Layout, spec: TensorSpec) -> float:
        """Seconds of a redistribution, inf where there is no way."""
        steps = redistribution(source, target, self.mesh, spec.shape, spec.dtype.itemsize)
        return float("inf") if steps is None else sum(self.step_seconds(step, spec) for step in steps)

    def flow_matrix(self, flow: Flow) -> Edge:
        """The edge of a flow, by distinct layouts on both sides."""
        rows, columns = sorted(set(flow.offered)), sorted(set(flow.wanted))
        cost = np.array([[self.redistribution_seconds(r, c, flow.spec) for c in columns] for r in rows])
        return Edge(
            flow.source,
            flow.target,
            np.array([rows.index(x) for x in flow.offered]),
            np.array([columns.index(x) for x in flow.wanted]),
            cost,
        )

    def work_seconds(self, work: list[tuple[float, float, torch.dtype]]) -> Floats:
        """Seconds of local operators given as (FLOPs, bytes moved, dtype)."""
        found = np.zeros(len(work))
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for i, (_, _, dtype) in enumerate(work):
            by_dtype[dtype].append(i)
        for dtype, rows in by_dtype.items():
            flops, moved = (np.array([work[i][k] for i in rows], dtype=np.float64) for k in (0, 1))
            found[rows] = np.where(flops + moved > 0, operator_seconds(flops, moved, dtype, self.cluster.device), 0.0)
        return found


def local_work(op: Operator, operators: Operators, mesh: Mesh, strategy: Strategy) -> tuple[float, float, torch.dtype]:
    """FLOPs, bytes moved and dtype of one rank's part of an operator; a view moves nothing."""
    dtype = op.call.results[0].dtype if op.call.results else torch.float32
    if op.is_view:
        return 0.0, 0.0, dtype
    ins, outs = layouts(op.rule, strategy, mesh)
    moved = sum(layout.local_bytes(mesh, spec) for layout, spec in zip(ins, op.call.operands, strict=True))
    moved += sum(layout.local_bytes(mesh, spec) for layout, spec in zip(outs, op.call.results, strict=True))
    return op.flops * work_share(op.rule, strategy, mesh), float(moved), dtype


def read_by_backward(operators: Operators) -> list[Value]:
    """The results of forward operators that the backward reads."""
    by_node = operators.by_node
    return [
        value
        for value, users in operators.consumers.items()
        if value.node in by_node and not by_node[value.node].backward and any(by_node[n].backward for n, _ in users)
    ]


def saved_values(operators: Operators, in_place: Callable[[Operator], bool]) -> list[Value]:
    """The forward values kept for the backward, each storage once: a view shares the storage of its operand if that is
    read ``in_place``, not redistributed first. Placeholders are kept anyway."""
    saved: dict[Value, None] = {}
    for value in read_by_backward(operators):
        while (op := operators.by_node.get(value.node)) is not None and op.is_view and in_place(op):
            value = op.operands[0]
        if value.node in operators.by_node:
            saved[value] = None
    return list(saved)


def _operator_seconds(space: Space, operators: Operators, prices: Prices) -> list[Floats]:
    """Seconds of the operators of every decision, by option, blocks that are tied counted as often as they occur."""
    counts: dict[fx.Node, int] = defaultdict(int)
    for op in operators:
        counts[space.canon.get(op.node, op.node)] += 1
    where: list[tuple[int, int, int]] = []
    work = []
    for node, count in counts.items():
        op = operators.by_node[node]
        d, chosen = space.of_node[node]
        for k, strategy in enumerate(chosen):
            where.append((d, k, count))
            work.append(local_work(op, operators, space.mesh, strategy))
    seconds = [np.zeros(decision.size) for decision in space.decisions]
    for (d, k, count), t in zip(where, prices.work_seconds(work), strict=True):
        seconds[d][k] += count * t
    return seconds


def _follows(space: Space, operators: Operators, view: Operator) -> bool:
    source = view.operands[0].node
    return source in operators.by_node and space.of_node[source][0] == space.of_node[view.node][0]


def memory_by_option(space: Space, captured: Captured, operators: Operators, optimizer: str) -> list[Floats]:
    """Bytes that every option of every decision keeps on a device: parameter state, and activations saved for the
    backward."""
    memory = [np.zeros(decision.size) for decision in space.decisions]
    for p in captured.parameters:
        d, chosen = space.of_source[p.placeholder]
        for k, layout in enumerate(chosen):
            local = layout.local_bytes(space.mesh, p.spec) // p.spec.dtype.itemsize
            memory[d][k] += sum(state_bytes(local, p.spec.dtype, optimizer, p.gradient is not None).values())
    # A view that follows its operand reads it as it is; one that decides for itself may have it redistributed.
    for value in saved_values(operators, lambda view: _follows(space, operators, view)):
        op = operators.by_node[value.node]
        d, strategies = space.of_node[value.node]
        for k, strategy in enumerate(strategies):
            out = layouts(op.rule, strategy, space.mesh)[1][value.index]
            memory[d][k] += out.local_bytes(space.mesh, operators.specs[value])
    return memory


def _merged(edges: Iterable[tuple[Edge, int]]) -> list[Edge]:
    """Scale edges by how often they occur."""
    return [Edge(e.source, e.target, e.source_class, e.target_class, e.cost * count) for e, count in edges]


def price(
    space: Space, captured: Captured, operators: Operators, prices: Prices, optimizer: str, budget: float
) -> Program:
    """The integer program of a space."""
    seconds = _operator_seconds(space, operators, prices)
    seconds = [np.where(d.allowed, s, np.inf) for d, s in zip(space.decisions, seconds, strict=True)]
    memory = memory_by_option(space, captured, operators, optimizer)
    edges = _merged((prices.flow_matrix(flow), count) for flow, count in space.flows.items())
    return Program(seconds, memory, edges, budget)
