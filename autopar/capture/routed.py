"""Which tensors are rows of experts (`autopar.ops.experts`), whether all done to them may be done to rows, and which
weights and gradients have their experts in dim 0."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.ops.rows import MAKE_ROWS, TAKE_ROWS
from autopar.sharding.operators import BY_EXPERT, ROUTED

aten = torch.ops.aten

#: Besides pointwise operators: those that look at the last dim alone, given the dim's place among their arguments.
_ALONG = {aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.cat.default: 1, aten.slice.Tensor: 1}
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_SAME = frozenset({aten.clone.default, aten.detach.default, aten.alias.default})
ops = torch.ops.autopar
_POINTWISE = _SAME | {aten._to_copy.default, ops.put_into_zeros.default}
#: Operators that read the weights of experts, as their second argument, and those that make the gradients of them.
_READ_WEIGHTS = frozenset({ops.grouped_mm.default, ops.grouped_bias.default, ops.gated_mm.default})
_MAKE_GRADIENTS = frozenset({ops.grouped_outer.default, ops.grouped_sum.default, ops.gated_outer.default})


def mark_routed(graph: fx.Graph) -> None:
    """Note in ``meta`` which nodes are rows of experts.

    Rows are declared with a mean shape, so an operator that is given a size of their first two dims, that depends on
    how many there are, or that combines them with something by expert or with rows of another router, would be wrong:
    those raise CaptureError.
    """
    rows: dict[fx.Node, fx.Node] = {}  # with the index by which they were made
    for node in graph.nodes:
        given = [arg for arg in node.all_input_nodes if arg in rows]
        routers = {rows[arg] for arg in given}
        if node.target in MAKE_ROWS | TAKE_ROWS:
            routers.add(_index(node))
        elif given:
            _forget_sizes(node)
            others = [arg for arg in node.all_input_nodes if arg not in rows]
            if node.op == "output" or not _keeps(node) or not all(map(_fits, others)):
                raise _refused(node, str(node.target))
        if len(routers) > 1:
            raise _refused(node, f"{node.target} of rows that two routers made")
        if routers and node.target not in TAKE_ROWS:
            (rows[node],) = routers
    for node in rows:
        node.meta[ROUTED] = True


def _forget_sizes(node: fx.Node) -> None:
    """Let the gradient of a slice of the last dim ask for no other dim's size."""
    if node.target is aten.slice_backward.default:
        grad, sizes, dim, *bounds = node.args
        if dim in (-1, len(sizes) - 1):  # type: ignore[arg-type]
            node.target, node.args = ops.put_into_zeros.default, (grad, sizes[-1], *bounds)  # type: ignore[index]


def _refused(node: fx.Node, found: str) -> CaptureError:
    return CaptureError(
        f"{node.meta.get('module') or 'the model'} does something to the rows of its experts that depends on how many "
        "there are, or on which",
        expected="pointwise operators, and splits of the last dim, between the products of the experts",
        found=found,
        change="give the experts another activation or gate: this one cannot be captured yet",
    )


def _index(node: fx.Node) -> fx.Node:
    """The index of an operator on rows: its one operand of integers; the same tensor for forward and backward."""
    index = next(arg for arg in node.all_input_nodes if not arg.meta["val"].dtype.is_floating_point)
    while index.target in _SAME:
        index = index.all_input_nodes[0]
    return index


def _keeps(node: fx.Node) -> bool:
    """Whether an operator treats every row alike, however many there are."""
    target = node.target
    if target is operator.getitem or target in _POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ()):
        return True
    if target not in _ALONG:
        return False
    place = _ALONG[target]
    dim = node.args[place] if len(node.args) > place else 0
    return isinstance(dim, int) and dim in (2, -1)


def _fits(other: fx.Node) -> bool:
    """Whether a tensor is the same for all rows that it is combined with."""
    return all(size == 1 for size in other.meta["val"].shape[:-1])


def mark_by_expert(graph: fx.Graph) -> None:
    """Note in ``meta`` which parameters have their experts in dim 0, and what is made of them and of their gradients
    that has them there too."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in _READ_WEIGHTS:
            weight = node.args[1]
            while weight.op != "placeholder" and _keeps_experts(weight):
                weight = weight.args[0]
            if weight.op == "placeholder" or (weight.target is aten.stack.default and not weight.args[1:]):
                found.add(weight)
    for node in graph.nodes:
        made = node.target in _MAKE_GRADIENTS or (_keeps_experts(node) and found.issuperset(node.all_input_nodes))
        if made and node.op == "call_function":
            found.add(node)
    for node in found:
        node.meta[BY_EXPERT] = True


def _keeps_experts(node: fx.Node) -> bool:
    """Whether dim 0 of what an operator makes is that of its operands."""
    if node.op != "call_function":
        return False
    if node.target is aten.transpose.int:
        ndim = node.meta["val"].dim()
        return all(dim % ndim for dim in node.args[1:])
    if node.target in _VIEWS:
        return bool(node.meta["val"].shape[0] == node.all_input_nodes[0].meta["val"].shape[0])
    return node.target in _POINTWISE or node.target is aten.add.Tensor
