"""Which operands and results of an operator really move when the graph is compiled.

Inductor computes chains of elementwise operators, casts, reductions and lookups in one kernel, within what is compiled
together: one block, one direction (`passes.segments`). A result that is read only inside its kernel is not written, an
operand that is made inside is not read, and an operand that several operators of a kernel read is read once. Matrix
products, attention and operators of our own are kernels by themselves; an operator that needs both a value and a
product of it comes after that product, hence in another kernel.

Reductions along the last dim keep their row at hand (a norm is one kernel each direction), unless it is longer than
`LONG_ROW`: then what is computed from the reduced value reads the row again (softmax over a vocabulary). Reductions
along other dims (the gradient of a norm's weight) read their operand once more, in a kernel of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import networkx as nx
import torch
from torch import fx

from autopar.sharding.operators import Operator, Operators, Value, of_graph, value_of
from autopar.sharding.recompute import MadeAgain

aten = torch.ops.aten

#: Operators that Inductor computes inside of other kernels besides those that torch tags as elementwise or reductions.
_INLINED = frozenset(
    {
        aten._to_copy.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.embedding.default,
        aten.full.default,
        aten.full_like.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.ones.default,
        aten.ones_like.default,
        aten.scalar_tensor.default,
        aten.select_backward.default,
        aten.slice_backward.default,
        aten.zeros.default,
        aten.zeros_like.default,
    }
)
#: Elements of a row that a kernel holds: 16,384 in fp32 are 64 KiB of a streaming multiprocessor's registers.
LONG_ROW = 16384


@dataclass(frozen=True)
class Fusion:
    """How often an operator reads each operand (none: not at all), which results it writes, and how many kernels it
    starts. Operators that do not appear are kernels by themselves."""

    reads: dict[fx.Node, dict[int, int]] = field(default_factory=dict)
    writes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    kernels: dict[fx.Node, int] = field(default_factory=dict)


@of_graph
def fusion_of(operators: Operators, again: MadeAgain) -> Fusion:
    """The kernels of a compiled graph. What the backward makes ``again`` is not written for it."""
    groups = _groups(operators)
    found = Fusion()
    seen: dict[tuple[int, Value], int] = defaultdict(int)
    started: set[int] = set()
    for op in operators:
        if op.node not in groups or op.is_view:
            continue
        group = groups[op.node]
        found.reads[op.node] = _reads(op, operators, groups, group, seen)
        found.writes[op.node] = frozenset(
            i for i in range(len(op.call.results)) if _leaves(Value(op.node, i), operators, groups, group, again)
        )
        apart = _crosses(op)
        found.kernels[op.node] = int(apart or group not in started)
        started.add(group)
    return found


def _is_inlined(op: Operator) -> bool:
    tags = getattr(op.call.target, "tags", ())
    return not op.is_heavy and (
        op.is_view or op.call.target in _INLINED or torch.Tag.pointwise in tags or torch.Tag.reduction in tags
    )


def _groups(operators: Operators) -> dict[fx.Node, int]:
    """The kernel of every inlined operator: those that are connected, in one block and direction, and after the same
    number of kernels of other kinds."""
    inlined = {op.node for op in operators if _is_inlined(op)}
    depth = _depths(operators, inlined)
    graph: nx.Graph = nx.Graph()
    for op in operators:
        if op.node not in inlined:
            continue
        graph.add_node(op.node)
        for value in op.operands:
            near = value.node in inlined and _place(operators.by_node[value.node]) == _place(op)
            if near and depth[value.node] == depth[op.node]:
                graph.add_edge(value.node, op.node)
    return {node: i for i, nodes in enumerate(nx.connected_components(graph)) for node in nodes}


def _depths(operators: Operators, inlined: set[fx.Node]) -> dict[fx.Node, int]:
    """How many kernels of other kinds come before an operator; for one that only inlined operators of its own block and
    direction read, before the first of these: it is computed where it is needed."""
    depth: dict[fx.Node, int] = {}
    for op in operators:
        producers = [v.node for v in op.operands if v.node in operators.by_node]
        depth[op.node] = max((depth[p] + (not {p, op.node} <= inlined) for p in producers), default=0)
    for op in reversed(list(operators)):
        values = [Value(op.node, i) for i in range(len(op.call.results))]
        readers = [node for value in values for node, _ in operators.consumers.get(value, ())]
        near = all(node in inlined and _place(operators.by_node[node]) == _place(op) for node in readers)
        if op.node in inlined and readers and near:
            depth[op.node] = min(depth[node] for node in readers)
    return depth


def _place(op: Operator) -> tuple[str | None, bool]:
    return op.block, op.backward


def _reads(
    op: Operator,
    operators: Operators,
    groups: dict[fx.Node, int],
    group: int,
    seen: dict[tuple[int, Value], int],
) -> dict[int, int]:
    """How often each operand is read that its kernel has not read yet."""
    found: dict[int, int] = {}
    for i, operand in enumerate(op.operands):
        base = operators.base(operand)
        inside = groups.get(base.node) == group
        if _crosses(op):
            found[i] = 1
        elif not inside:
            wanted = 2 if _reads_row_again(op, operators, groups, group) else 1
            found[i] = max(0, wanted - seen[group, base])
            seen[group, base] = max(wanted, seen[group, base])
    return {i: times for i, times in found.items() if times}


def _reads_row_again(op: Operator, operators: Operators, groups: dict[fx.Node, int], group: int) -> bool:
    """Whether another operand is reduced from a long row inside the same kernel."""
    for operand in op.operands:
        source = operators.by_node.get(operators.base(operand).node)
        while source is not None and groups.get(source.node) == group:
            if torch.Tag.reduction in getattr(source.call.target, "tags", ()):
                return source.call.operands[0].shape[-1:] > (LONG_ROW,)
            source = operators.by_node.get(operators.base(source.operands[0]).node) if source.operands else None
    return False


def _crosses(op: Operator) -> bool:
    """Whether it reduces other dims than the last."""
    if torch.Tag.reduction not in getattr(op.call.target, "tags", ()) or not op.call.operands:
        return False
    rank = len(op.call.operands[0].shape)
    dims = op.call.argument(1, "dim")
    if not isinstance(dims, int | list | tuple) or not rank:
        return False  # everything is reduced: a scalar that each kernel adds to
    reduced = {d % rank for d in ([dims] if isinstance(dims, int) else dims)} or set(range(rank))
    return rank - 1 not in reduced


def _leaves(
    value: Value, operators: Operators, groups: dict[fx.Node, int], group: int, again: MadeAgain
) -> bool:
    """Whether a result is read outside of its kernel, seen through views, or is an output of the graph."""
    if any(user.op == "output" for user in _users(value)):
        return True
    made_again = value.node in again.operators
    for node, _ in operators.consumers.get(value, ()):
        reader = operators.by_node[node]
        backward = operators.by_node[value.node].backward
        if reader.backward and not backward and made_again:
            continue
        if reader.is_view:
            if _leaves(Value(node), operators, groups, group, again):
                return True
        elif groups.get(node) != group:
            return True
    return False


def _users(value: Value) -> Collection[fx.Node]:
    """The nodes that read a result; parts of a tuple are read through getitem."""
    parts = [user for user in value.node.users if value_of(user) != Value(user)]
    return [user for part in parts if value_of(part) == value for user in part.users] if parts else value.node.users
