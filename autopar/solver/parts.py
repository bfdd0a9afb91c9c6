"""Whether a training step of a graph can run in micro-batches, told from the graph before anything is solved."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.capture.graph import Captured
from autopar.errors import MicroBatchError
from autopar.sharding.assignment import Assignment, transfers
from autopar.sharding.axes import DATA_AXIS
from autopar.sharding.layout import MICRO_BATCH, Layout, Mesh
from autopar.sharding.operators import Operators, Value
from autopar.sharding.rule import REPLICATE
from autopar.sharding.zero import Keeping
from autopar.solver.microbatches import in_micro_batches, split_inputs
from autopar.solver.space import output_values


def runs_in_parts(captured: Captured, operators: Operators, batch: int) -> bool:
    """Whether the model gives one loss, whose samples do not mix, so that ``train_step`` can run a ``batch`` in parts.

    What is summed over the batch and read by every sample (the number of tokens) has to be known before the forward, so
    it must not be made by matrix products, unless the backward alone reads it (`passes.phases`, `forwards_first`).
    """
    if batch == 1 or not _has_one_loss(captured):
        return False
    try:
        why_whole(captured, operators, batch)
    except MicroBatchError:
        return False
    return True


def _has_one_loss(captured: Captured) -> bool:
    losses = [o for o in captured.outputs if o.tangent is not None]
    return len(losses) == 1 and losses[0].node.meta["val"].dim() == 0


def why_whole(captured: Captured, operators: Operators, batch: int) -> None:
    """Raise MicroBatchError if a ``batch`` of several samples cannot be run in parts because they mix."""
    found = _in_parts(captured, operators, batch)
    if (late := next(_known_late(captured, operators, found, forward=True), None)) is not None:
        raise MicroBatchError(
            f"the batch cannot run in micro-batches: a sum over the batch depends on matrix products, {late.node.name} "
            f"in {late.node.meta['module'] or 'the model'}",
            expected="sums over the batch that are cheap to know before the forward, such as the number of tokens, or "
            "that the backward alone needs",
            found="a value of the model that all samples of the batch go into",
            change="run the batch in one piece (micro_batch_size = global batch / dp)",
        )


def forwards_first(captured: Captured, operators: Operators, batch: int) -> bool:
    """Whether a ``batch`` that can run in parts must run the forwards of all before the first backward, which needs a
    sum over them: of a balancing loss, the shares of tokens that experts have."""
    found = _in_parts(captured, operators, batch)
    return next(_known_late(captured, operators, found, forward=False), None) is not None


def _in_parts(captured: Captured, operators: Operators, batch: int) -> Assignment:
    """The assignment on one rank, in as few micro-batches as there can be."""
    parts = next(n for n in range(2, batch + 1) if batch % n == 0)
    whole = _whole(captured, operators)
    kept = {p.name: Keeping() for p in captured.parameters}
    return in_micro_batches(captured, operators, whole, parts, split_inputs(captured), kept)


def _whole(captured: Captured, operators: Operators) -> Assignment:
    """The assignment on one rank."""
    specs = operators.specs
    placeholders = captured.graph.find_nodes(op="placeholder")
    return Assignment(
        Mesh(((DATA_AXIS, 1),)),
        {op.node: (REPLICATE,) for op in operators},
        {node: Layout.replicated(len(specs[Value(node)].shape)) for node in placeholders},
        tuple(Layout.replicated(len(specs[value].shape)) for value, _ in output_values(captured)),
        {},
    )


def _known_late(captured: Captured, operators: Operators, found: Assignment, *, forward: bool) -> Iterator[Value]:
    """The sums over micro-batches that a micro-batch reads, with ``forward`` in its forward, and that are made with
    products."""
    leading = set[fx.Node]()
    for op in reversed(list(operators)):
        if forward and op.backward:
            continue
        varies = found.strategies[op.node][0].factor is not None
        results = (Value(op.node, i) for i in range(len(op.call.results)))
        users = (user for value in results for user, _ in operators.consumers.get(value, ()))
        if varies or any(user in leading for user in users):
            leading.add(op.node)
    for transfer in transfers(operators, output_values(captured), found):
        sums = any(step.axis == MICRO_BATCH and step.kind == "all_reduce" for step in transfer.steps)
        read = any(user in leading for user, _ in operators.consumers.get(transfer.value, ()))
        if sums and read and not transfer.output and _has_products(operators, transfer.value):
            yield transfer.value


def _has_products(operators: Operators, value: Value) -> bool:
    """Whether a matrix product or the like goes into a value."""
    stack, seen = [value.node], set[fx.Node]()
    while stack:
        op = operators.by_node.get(stack.pop())
        if op is None or op.node in seen:
            continue
        if op.flops:
            return True
        seen.add(op.node)
        stack.extend(operand.node for operand in op.operands)
    return False
