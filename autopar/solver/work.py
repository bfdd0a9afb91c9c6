"""What one operator does on one rank, for the cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.cost_model.compute import ALIGNMENT, Work
from autopar.sharding.layout import Layout, Mesh, TensorSpec
from autopar.sharding.operators import Operator, Operators, Value
from autopar.sharding.rule import Dims, Passing, Strategy, layouts, work_share
from autopar.sharding.rules.attention import ATTENTION, seen_share
from autopar.solver.fusion import Fusion

aten = torch.ops.aten

#: Products of two matrices, and which operands these are.
_PRODUCTS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.einsum.default: (0, 1),
    aten.linear.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.dot.default: (0, 1),
    torch.ops.autopar.grouped_mm.default: (0, 1),
    torch.ops.autopar.grouped_outer.default: (0, 1),
    torch.ops.autopar.gated_mm.default: (0, 1),
    torch.ops.autopar.gated_mm_backward.default: (0, 2),
    torch.ops.autopar.gated_outer.default: (0, 2),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}
#: Operators that read of their first operand no more than what they return.
_LOOKUPS = frozenset(
    {aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.index_select.default}
)


def local_work(
    op: Operator,
    operators: Operators,
    mesh: Mesh,
    strategy: Strategy,
    micro_batches: int = 1,
    fusion: Fusion | None = None,
) -> Work:
    """One rank's part of an operator in a step of so many ``micro_batches``: what carries the batch runs once for each
    of them, on its part of the batch, and reads all of the weights every time. With ``fusion`` only those operands and
    results move that leave their kernel. A view moves nothing."""
    dtype = op.call.results[0].dtype if op.call.results else torch.float32
    if op.is_view:
        return Work(0.0, 0.0, dtype, kernels=0)
    times = micro_batches if operators.batch_factors[op.node] else 1
    found = layouts(op.rule, strategy, mesh)
    moved = _moved(op, operators, mesh, found, micro_batches, fusion)
    flops = op.flops * work_share(op.rule, strategy, mesh) / times * _excess(op, found)
    kernels = 1 if fusion is None else fusion.kernels.get(op.node, 1)
    if op.call.target in ATTENTION:
        return _attention(op, mesh, strategy, flops, moved, times)
    if op.is_heavy:
        batch, m, n, k = _product(op, operators, mesh, strategy, times, flops)
        aligned = _is_aligned(op, mesh, strategy)
        return Work(
            flops, moved, _computed_in(op, dtype), "matmul", batch, m, n, k, kernels=kernels, times=times,
            aligned=aligned,
        )  # fmt: skip
    return Work(flops, moved, dtype, kernels=kernels, times=times)


def _excess(op: Operator, found: tuple[tuple[Layout, ...], tuple[Layout, ...]]) -> float:
    """The work of the busiest rank over the mean: more than 1 where ranks have rows of different experts."""
    pairs = [*zip(found[0], op.call.operands, strict=True), *zip(found[1], op.call.results, strict=True)]
    return max((layout.excess(spec) for layout, spec in pairs), default=1.0)


def _computed_in(op: Operator, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a product's operands, which decides its rate, as far as they are numbers."""
    floating = [spec.dtype for spec in op.call.operands if spec.dtype.is_floating_point]
    return floating[0] if floating else dtype


def _moved(
    op: Operator,
    operators: Operators,
    mesh: Mesh,
    found: tuple[tuple[Layout, ...], tuple[Layout, ...]],
    micro_batches: int,
    fusion: Fusion | None,
) -> float:
    """Bytes read and written in one micro-batch; an operand that occurs twice is read once."""
    ins, outs = found
    reads, writes = (None, None) if fusion is None else (fusion.reads.get(op.node), fusion.writes.get(op.node))

    def once(value: Value) -> int:
        return micro_batches if operators.batch_dims[value] else 1

    written = [
        layout.local_bytes(mesh, spec) / once(Value(op.node, i))
        for i, (layout, spec) in enumerate(zip(outs, op.call.results, strict=True))
    ]
    read: dict[Value, float] = {}
    for i, (value, layout, spec) in enumerate(zip(op.operands, ins, op.call.operands, strict=True)):
        times = 1 if reads is None else reads.get(i, 0)
        size = layout.local_bytes(mesh, spec) / once(value)
        if i == 0 and op.call.target in _LOOKUPS:
            size = min(size, sum(written))
        read[value] = max(read.get(value, 0.0), times * size)
    return sum(read.values()) + sum(size for i, size in enumerate(written) if writes is None or i in writes)


def _pieces(mesh: Mesh, strategy: Strategy) -> dict[str, int]:
    """Into how many pieces every factor is split."""
    found: dict[str, int] = {}
    for (_, degree), choice in zip(mesh.axes, strategy, strict=True):
        if choice.factor is not None:
            found[choice.factor] = found.get(choice.factor, 1) * degree
    return found


def _product(
    op: Operator, operators: Operators, mesh: Mesh, strategy: Strategy, times: int, flops: float
) -> tuple[float, float, float, float]:
    """Local (batch, m, n, k) of a product in one micro-batch. Of other operators with as many FLOPs (convolutions,
    recurrences) the product of square matrices: large ones run as fast."""
    places = _PRODUCTS.get(op.call.target)
    if places is None or len(op.rule.operands) <= places[1]:
        side = (flops / 2) ** (1 / 3)
        return 1.0, side, side, side
    first, second = (_factors(op.rule.operands[i]) for i in places)
    result = _factors(op.rule.results[0])
    pieces = _pieces(mesh, strategy)
    sizes = {f: op.rule.sizes[f] / pieces.get(f, 1) for f in (*first, *second)}
    carrying = next((f for f in sizes if f in operators.batch_factors[op.node]), None)
    if carrying is not None:
        sizes[carrying] /= times
    groups = {"batch": 1.0, "m": 1.0, "n": 1.0}
    for f, size in sizes.items():
        if f in result:
            groups["batch" if f in first and f in second else "m" if f in first else "n"] *= size
    outer = math.prod(groups.values())
    return groups["batch"], groups["m"], groups["n"], flops / (2 * outer) if outer else 0.0


def _is_aligned(op: Operator, mesh: Mesh, strategy: Strategy) -> bool:
    """Whether the rows of a product's local matrices begin at multiples of `ALIGNMENT`. A row is as long as the side
    (m, n or k) that a matrix's last dim belongs to: of a projection that gives heads, all heads; of a product a head,
    one head's."""
    places = _PRODUCTS.get(op.call.target)
    if places is None or len(op.rule.operands) <= places[1]:
        return True
    first, second = (_factors(op.rule.operands[i]) for i in places)
    result, pieces = _factors(op.rule.results[0]), _pieces(mesh, strategy)

    def side(factor: str) -> tuple[bool, bool, bool]:
        return factor in first, factor in second, factor in result

    every = dict.fromkeys((*first, *second))
    matrices = [*((op.rule.operands[i], op.call.operands[i]) for i in places), (op.rule.results[0], op.call.results[0])]
    for dims, spec in matrices:
        if dims and dims[-1]:
            of_row = [f for f in every if side(f) == side(dims[-1][0])]
            row = math.prod(op.rule.sizes[f] / pieces.get(f, 1) for f in of_row)
            if row > 1 and row * spec.dtype.itemsize % ALIGNMENT:
                return False
    return True


def _factors(dims: Dims) -> Sequence[str]:
    return [f for factors in dims for f in factors]


def _attention(op: Operator, mesh: Mesh, strategy: Strategy, flops: float, moved: float, times: int) -> Work:
    """Attention on one rank. Of causal attention and of windows only the pairs of query and key count that are seen; a
    piece of the queries may be the last one, which sees most."""
    given = dict(zip((a.name for a in op.call.target._schema.arguments), op.call.args, strict=False))
    q, keys = op.call.operands[given["q"].index], op.call.operands[given["k"].index].shape[2]
    rows, pieces = op.rule.operands[given["q"].index][2], _pieces(mesh, strategy)
    cut = math.prod(pieces.get(f, 1) for f in rows)
    heads = q.shape[0] * q.shape[1] / math.prod(pieces.get(f, 1) for f in ("b", "g", "r")) / times
    backward = "grad_out" in given
    if (passing := op.rule.passing(strategy, mesh)) is not None:
        return _ring(passing, q, heads, flops, moved, backward, times)
    return Work(
        flops * seen_share(op.call, cut), moved, q.dtype, "attention", heads, q.shape[2] / cut, keys, q.shape[3],
        causal=bool(given["causal"]), backward=backward, kernels=2 if backward else 1, times=times,
    )  # fmt: skip


def _ring(
    passing: Passing, q: TensorSpec, heads: float, flops: float, moved: float, backward: bool, times: int
) -> Work:
    """All steps of a ring on one rank. In every one the operands are read again, and the sums in fp32 read and
    written."""
    sums = 2 * heads * passing.queries * q.shape[3] * torch.float32.itemsize
    return Work(
        flops * passing.share, passing.parts * (moved + sums), q.dtype, "attention", heads, passing.keys, passing.keys,
        q.shape[3], backward=backward, kernels=passing.parts * passing.kernels, times=times,
    )  # fmt: skip
