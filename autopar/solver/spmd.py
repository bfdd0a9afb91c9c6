"""One graph on one mesh: build the space, price it, solve it, and account for the answer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.capture.blocks import first_of
from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.cost_model.communication import wire_bytes
from autopar.garbage import collecting_later
from autopar.plan import Collective
from autopar.sharding.assignment import Assignment, Transfer, result_layouts, transfers
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.operators import Operators, Value, read_operators
from autopar.sharding.redistribute import LOCAL, whole_elements
from autopar.sharding.rule import layouts, work_share
from autopar.solver.costs import Prices, local_work, price, read_by_backward, state_bytes
from autopar.solver.program import Program, Solution, solve
from autopar.solver.space import DATA_AXIS, Pins, Space, build_space, output_values


@dataclass(frozen=True)
class Solved:
    """An assignment with its account: seconds by part, bytes by kind, collectives of a step, the proved lower bound on
    seconds over the space, the largest share of the FLOPs that a rank does, and ``zero``: 3 if some parameter rests
    sharded over the data axis, else 0."""

    mesh: Mesh
    assignment: Assignment
    breakdown: dict[str, float]
    memory: dict[str, int]
    collectives: tuple[Collective, ...]
    bound: float
    flops_share: float
    zero: int

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return sum(self.breakdown.values())

    @property
    def peak_memory(self) -> int:
        """Bytes a device."""
        return sum(self.memory.values())


@collecting_later()
def read(captured: Captured, dim: int = 0) -> Operators:
    """The operators of a captured graph; the batch is dim 0 of every input that has dims. With another ``dim`` its
    factors and dims are those that carry that dim of the inputs instead."""
    return read_operators(
        captured.graph,
        {node: dim for node in captured.inputs if node.meta["val"].dim() > dim},
        {o.tangent: o.node for o in captured.outputs if o.tangent is not None},
        first_of(captured.blocks),
    )


@collecting_later()
def make_program(
    captured: Captured, operators: Operators, mesh: Mesh, cluster: Cluster, optimizer: str, pins: Pins, budget: float
) -> tuple[Space, Program]:
    """The space of one mesh and its integer program."""
    space = build_space(captured, operators, mesh, pins)
    return space, price(space, captured, operators, Prices(cluster, mesh), optimizer, budget)


def solve_mesh(
    captured: Captured,
    operators: Operators,
    mesh: Mesh,
    cluster: Cluster,
    optimizer: str,
    pins: Pins,
    budget: float = float("inf"),
) -> Solved | None:
    """The fastest assignment on ``mesh`` within ``budget`` bytes a device, or None if there is none."""
    space, program = make_program(captured, operators, mesh, cluster, optimizer, pins, budget)
    solution = solve(program)
    if solution is None:
        return None
    return account(captured, operators, space.assignment(solution.options), cluster, optimizer, solution)


@collecting_later()
def account(
    captured: Captured,
    operators: Operators,
    assignment: Assignment,
    cluster: Cluster,
    optimizer: str,
    solution: Solution,
) -> Solved:
    """Price an assignment by what the shard pass will emit for it."""
    mesh = assignment.mesh
    prices = Prices(cluster, mesh)
    work = [local_work(op, operators, mesh, assignment.strategies[op.node]) for op in operators]
    collectives = _collectives(captured, operators, assignment, prices)
    breakdown = {
        "compute": float(prices.work_seconds(work).sum()),
        "exposed communication": sum(c.seconds for c in collectives),
        "bubble": 0.0,
    }
    flops = sum(op.flops for op in operators)
    local = sum(op.flops * work_share(op.rule, assignment.strategies[op.node], mesh) for op in operators)
    return Solved(
        mesh,
        assignment,
        breakdown,
        _memory(captured, operators, assignment, optimizer),
        collectives,
        min(solution.bound, sum(breakdown.values())),
        local / flops if flops else 1.0,
        3 if any(DATA_AXIS in assignment.sources[p.placeholder].split_axes for p in captured.parameters) else 0,
    )


def _purpose(transfer: Transfer, parameters: set[object]) -> str:
    if transfer.value.node in parameters:
        return "parameters"
    return (
        "gradients"
        if transfer.source.partial
        and transfer.backward
        and not transfer.target.partial
        and any(axis == DATA_AXIS for axis, _ in transfer.source.partial)
        else "activations"
    )


def _collectives(
    captured: Captured, operators: Operators, assignment: Assignment, prices: Prices
) -> tuple[Collective, ...]:
    """All collectives of a step by kind, axis and purpose."""
    parameters: set[object] = {p.placeholder for p in captured.parameters}
    totals: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for transfer in transfers(operators, output_values(captured), assignment):
        for step in transfer.steps:
            if step.kind in LOCAL:
                continue
            nbytes = whole_elements(step, assignment.mesh, transfer.spec.shape) * transfer.spec.dtype.itemsize
            total = totals[step.kind, step.axis, _purpose(transfer, parameters)]
            total[0] += 1
            total[1] += nbytes
            total[2] += float(wire_bytes(step.kind, nbytes, assignment.mesh.degree(step.axis)))
            total[3] += prices.step_seconds(step, transfer.spec)
    return tuple(
        Collective(kind, axis, purpose, int(t[0]), int(t[1]), int(t[2]), t[3])
        for (kind, axis, purpose), t in sorted(totals.items())
    )


def saved_storages(operators: Operators, assignment: Assignment) -> set[tuple[Value, Layout]]:
    """The tensors kept for the backward, each storage once: a value in the layout in which it is kept. A view keeps the
    storage of its operand, or of the redistributed copy that it reads."""
    produced = result_layouts(operators, assignment)
    saved = set()
    for value in read_by_backward(operators):
        layout = produced[value]
        while (op := operators.by_node.get(value.node)) is not None and op.is_view and layout == produced[value]:
            layout = layouts(op.rule, assignment.strategies[op.node], assignment.mesh)[0][0]
            value = op.operands[0]
        if value.node in operators.by_node or layout != produced[value]:
            saved.add((value, layout))
    return saved


def _memory(captured: Captured, operators: Operators, assignment: Assignment, optimizer: str) -> dict[str, int]:
    """Bytes a device by kind."""
    totals: dict[str, float] = {"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0}
    for p in captured.parameters:
        local = assignment.sources[p.placeholder].local_bytes(assignment.mesh, p.spec) // p.spec.dtype.itemsize
        for kind, nbytes in state_bytes(local, p.spec.dtype, optimizer, p.gradient is not None).items():
            totals[kind] += nbytes
    for value, layout in saved_storages(operators, assignment):
        totals["activations"] += layout.local_bytes(assignment.mesh, operators.specs[value])
    return {kind: int(nbytes) for kind, nbytes in totals.items()}
