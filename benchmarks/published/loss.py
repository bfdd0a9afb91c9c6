"""The loss as one kernel (Apex's and FlashAttention's cross entropy): it reads the logits in the dtype of the product
that makes them, keeps them and a number a row for the backward, and writes their gradient in that dtype.

What frameworks that run operator by operator do otherwise is in the emitted graph a dozen passes over float32 values.
"""

from __future__ import annotations

from torch import fx

from autopar.sharding.operators import Operators
from autopar.sharding.recompute import MadeAgain, made_again
from autopar.solver.fusion import fusion_of
from autopar.solver.staged import Stages, priced_once


def loss_operators(operators: Operators) -> frozenset[fx.Node]:
    """The operators, forward and backward, that work on logits: those outside of the blocks that read or make something
    of the shape that a product there has made, and are no products."""
    outside = [op for op in operators if op.block is None and not op.is_view]
    logits = {op.call.results[0].shape for op in outside if op.is_heavy and not op.backward}
    return frozenset(
        op.node
        for op in outside
        if not op.is_heavy and logits & {spec.shape for spec in (*op.call.operands, *op.call.results)}
    )


def inside_loss(operators: Operators) -> frozenset[fx.Node]:
    """Those of them whose results no product reads, which therefore never leave the kernel."""
    read = {operators.base(v).node for op in operators if op.is_heavy for v in op.operands}
    return loss_operators(operators) - read


def loss_seconds(stages: Stages) -> dict[fx.Node, float]:
    """Seconds of the loss's operators as one kernel in each direction."""
    operators, nodes = stages.operators, loss_operators(stages.operators)
    again = made_again(operators, stages.setting.recompute)
    fusion = fusion_of(operators, MadeAgain(again.operators | inside_loss(operators), again.moves))
    own = [op for op in operators if op.node in nodes]
    work, places = priced_once(own, operators, stages.assignment, stages.micro_batches, fusion)
    seconds = stages.prices.work_seconds(work) / [w.times for w in work]
    return {op.node: float(seconds[i]) for op, i in zip(own, places, strict=True)}
