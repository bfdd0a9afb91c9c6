"""An assignment over micro-batches: what of the batch is cut, and what is summed up over them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.capture.graph import Captured
from autopar.errors import InputError
from autopar.sharding.assignment import Assignment
from autopar.sharding.microbatch import WHOLE, Place, micro_batched
from autopar.sharding.operators import Operators
from autopar.sharding.zero import Keeping
from autopar.solver.space import output_values


def rows(captured: Captured) -> dict[fx.Node, int]:
    """The inputs that have a batch dim, and their size there."""
    return {n: int(n.meta["val"].shape[0]) for n in captured.inputs if n.meta["val"].dim() > 0}


def split_inputs(captured: Captured) -> frozenset[fx.Node]:
    """The inputs of which every micro-batch has a part: those with as many rows as any has."""
    sizes = rows(captured)
    return frozenset(node for node, size in sizes.items() if size == max(sizes.values()))


def in_micro_batches(
    captured: Captured,
    operators: Operators,
    assignment: Assignment,
    count: int,
    split: frozenset[fx.Node],
    kept: Mapping[str, Keeping],
) -> Assignment:
    """``assignment`` over ``count`` micro-batches, which sum up gradients, numbers and changes of buffers."""
    gradients = [p for p in captured.parameters if p.gradient is not None]
    each = [i for i, p in enumerate(gradients) if kept[p.name].gradient == "micro-batch"]
    outputs = output_values(captured)
    whole = {i for i, output in enumerate(captured.outputs) if output.buffer is not None}
    whole |= {i for i, (value, backward) in enumerate(outputs) if backward or not operators.specs[value].shape}
    return micro_batched(
        operators,
        assignment,
        count,
        {node: Place(dim=0) for node in captured.inputs if node in split},
        [(value, WHOLE if i in whole else None) for i, (value, _) in enumerate(outputs)],
        reduced_each=[len(captured.outputs) + i for i in each],
    )


def loss_place(captured: Captured) -> int:
    """The place of the one output that carries a gradient; InputError unless that is a number."""
    found = [i for i, o in enumerate(captured.outputs) if o.tangent is not None]
    if len(found) == 1 and captured.outputs[found[0]].node.meta["val"].dim() == 0:
        return found[0]
    shapes = [str(tuple(captured.outputs[i].node.meta["val"].shape)) for i in found]
    raise InputError(
        "train_step needs a model that returns its loss",
        expected="a scalar called loss, or one scalar with a gradient and nothing else with one",
        found=f"gradients of outputs of shapes {', '.join(shapes)}" if shapes else "no output with a gradient",
        change="pass labels in the batch, or take the loss outside: model(**batch), loss.backward()",
    )
