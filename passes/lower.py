"""Rewrites a graph for a run operator by operator, where no compiler puts operators together.

An emitted graph is written so that it can be split: losses are reductions and a gather, gradients are added up one by
one, a value that two operators want in another order is laid out for each of them. Where nothing was split between
them, this pass puts in what one would write by hand: fused kernels, one copy for all, products that add, sums in place.

Invariant: the graph returns the same values up to the rounding of a kernel that computes several operators at once, and
keeps its collectives and waits in their order. What is alive at a time does not grow: an operator takes over another
one's operands only where those are no more bytes than its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar._compat import storage_key
from autopar.passes.collectives import KINDS, aten
from autopar.passes.inplace import reuse
from autopar.passes.shaped import Shaped
from autopar.passes.sums import base, is_view
from autopar.sharding.operators import VIEWS

#: Views that keep the order of elements.
_RESHAPES = frozenset({aten.reshape.default, aten.view.default, aten._unsafe_view.default})
#: Operators that do the same to every element, with numbers beside one tensor.
_POINTWISE = frozenset({aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor, aten.neg.default})
#: Operators by 1 that return what they are given.
_BY_ONE = frozenset({aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor, aten.pow.Tensor_Scalar})
#: Bytes of a result that may stay alive for another reader, whatever dies beside it: a few numbers.
_SMALL = 64


def lower(graph: fx.Graph, inputs: Sequence[Any]) -> None:
    """Rewrite ``graph`` in place, for runs on values like ``inputs``. What has to do with rows of experts, which are
    others in every step, stays as it is (`Shaped`)."""
    shaped = Shaped(graph, inputs)
    for step in _STEPS:
        step(shaped)
        graph.eliminate_dead_code()
    reuse(shaped)
    graph.lint()


def _is(value: Any, target: Any, users: int = 0) -> bool:
    """Whether an argument is the result of a call of ``target``, with so many readers (0: any number)."""
    return isinstance(value, fx.Node) and value.target is target and users in (0, len(value.users))


def _has_number(node: fx.Node) -> bool:
    """Whether a call has one tensor among its arguments, its first."""
    return len(node.all_input_nodes) == 1 and node.args[0] is node.all_input_nodes[0] and not node.kwargs


def _views(shaped: Shaped) -> None:
    """A reshape of a reshape is one, unless the first copies for others too; one that changes nothing is none."""
    for node in shaped.calls():
        if node.target not in _RESHAPES:
            continue
        source: Any = node.args[0]
        while source.target in _RESHAPES and (len(source.users) == 1 or not _copies(shaped, source)):
            source = source.args[0]
        node.args = (source, *node.args[1:])
        if shaped.alike(source, node):
            shaped.replace(node, source)


def _ones(shaped: Shaped) -> None:
    """What is multiplied or divided by 1, or taken to the power of 1."""
    alone = _stand_alone(shaped)
    for node in shaped.calls():
        if node.target not in _BY_ONE or node in alone or not _has_number(node) or not shaped.alike(node.args[0], node):
            continue
        if node.args[1] == 1:
            shaped.replace(node, node.args[0])  # type: ignore[arg-type]


def _stand_alone(shaped: Shaped) -> set[fx.Node]:
    """Calls that no other value may stand for: no two results are one tensor, and none is one that the graph is given;
    and what a collective reads is laid for it alone, and may be written over."""
    output = shaped.graph.output_node()
    returned = {base(node) for node in output.all_input_nodes}
    return returned | {node for node in shaped.graph.nodes if any(user.target in KINDS for user in node.users)}


class _Uses:
    """Until when the storages of a graph are in use, as its strides are in these runs."""

    def __init__(self, shaped: Shaped) -> None:
        self._shaped, self._readers = shaped, shaped.readers()
        self._place = {node: i for i, node in enumerate(shaped.graph.nodes)}

    def freed(self, node: fx.Node, since: int, given: bool) -> int:
        """Bytes of the operands of ``node`` that nobody else reads after place ``since``; ``given`` those as well that
        the graph has not made."""
        found = dict[int, int]()
        for arg in node.all_input_nodes:
            t = self._shaped.tensor(arg)
            if t is None or (arg.op == "placeholder" and not given):
                continue
            readers = [i for i in self._readers[storage_key(t)] if i > since]
            if not readers or readers == [self._place[node]]:
                found[storage_key(t)] = t.untyped_storage().nbytes()
        return sum(found.values())

    def place(self, node: fx.Node) -> int:
        """Where a node stood."""
        return self._place[node]


def _repeated(shaped: Shaped) -> None:
    """Calls of one operator on the same values, such as the copy by which two products read a gradient in the order of
    their weights. The first stands for all where what dies earlier for that is as large."""
    uses, alone = _Uses(shaped), _stand_alone(shaped)
    seen: dict[str, fx.Node] = {}
    for node in shaped.calls():
        schema = node.target._schema  # type: ignore[union-attr]
        if node in alone or schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
            continue
        key = f"{node.target} {node.args} {node.kwargs}"
        first = seen.setdefault(key, node)
        if first is node:
            continue
        dies = uses.freed(node, uses.place(first), given=False)
        if not _copies(shaped, node) or shaped.values[node].nbytes <= max(_SMALL, dies):
            shaped.replace(node, first)
        else:
            seen[key] = node


def _copies(shaped: Shaped, node: fx.Node) -> bool:
    """Whether a call makes a tensor of its own, as strides are here."""
    source = shaped.tensor(node.args[0]) if is_view(node) else None
    return source is None or storage_key(source) != storage_key(shaped.values[node])


def _expanded(shaped: Shaped) -> None:
    """The same done to all elements of what is a repetition of few: done to the few."""
    alone = _stand_alone(shaped)
    for node in shaped.calls():
        source: Any = node.args[0] if node.args else None
        if node.target in _POINTWISE and node not in alone and _has_number(node) and _is(source, aten.expand.default):
            few = shaped.emit(node, node.target, source.args[0], *node.args[1:])
            shaped.replace(node, shaped.emit(node, aten.expand.default, few, *source.args[1:]))


def _scaled(shaped: Shaped) -> None:
    """A product of a large tensor times a number with a small tensor: the number goes to the small one."""
    for node in shaped.calls():
        if node.target is not aten.mul.Tensor or len(node.all_input_nodes) != 2:
            continue
        pairs: Any = (node.args, node.args[::-1])
        for large, small in pairs:
            if not (_is(large, aten.mul.Scalar, 1) or (_is(large, aten.mul.Tensor, 1) and _has_number(large))):
                continue
            few = small.args[0] if _is(small, aten.expand.default) else small
            whole, part = shaped.tensor(large), shaped.tensor(few)
            if whole is not None and part is not None and part.dtype == whole.dtype and part.numel() < whole.numel():
                times = shaped.emit(node, large.target, few, large.args[1])
                shaped.replace(node, shaped.emit(node, aten.mul.Tensor, times, large.args[0]))
                break


def _put_together(shaped: Shaped) -> None:
    """The gradient of a tensor that was cut in two parts: the gradients of the parts end to end, where they were each
    laid into zeros and added up."""
    for node in shaped.calls():
        pair = node.args
        if node.target is not aten.add.Tensor or node.kwargs or len(pair) != 2:
            continue
        if not all(_is(part, aten.slice_backward.default, 1) for part in pair):
            continue
        parts: list[Any] = [part.args for part in pair]  # type: ignore[union-attr]
        (x, sizes, dim, begin, end, step), (y, *others) = sorted(parts, key=lambda args: args[3])
        if begin == 0 and step == 1 and others[:3] == [sizes, dim, end] and others[3] >= sizes[dim] and others[4] == 1:
            shaped.replace(node, shaped.emit(node, aten.cat.default, [x, y], dim))


def _log_softmax(shaped: Shaped) -> None:
    """The kernel of a log-softmax over a dim that is whole here. That of its gradient is left out: it writes anew what
    `reuse` writes over the gradient that comes in, of the size of all logits."""
    for node in shaped.calls():
        if node.target is aten.sub.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs:
            fused = _in_one(shaped, node, *node.args)
            if fused is not None:
                shaped.replace(node, fused)


def _in_one(shaped: Shaped, node: fx.Node, shifted: Any, log: Any) -> fx.Node | None:
    """``(x - amax(x)) - log(sum(exp(x - amax(x))))``"""
    if not (_is(log, aten.log.default, 1) and _is(shifted, aten.sub.Tensor, 2) and not shifted.kwargs):
        return None
    (x, most), total = shifted.args, log.args[0]
    if not (_is(most, aten.amax.default) and most.args[0] is x and _is(total, aten.sum.dim_IntList, 1)):
        return None
    dims, keeps = total.args[1], total.args[2:] == most.args[2:] == (True,)
    of_all = _is(total.args[0], aten.exp.default, 1) and total.args[0].args[0] is shifted and not total.kwargs
    if not (of_all and keeps and len(dims) == 1 and dims == most.args[1]):
        return None
    return shaped.emit(node, aten._log_softmax.default, x, dims[0], False)


def _added_products(shaped: Shaped) -> None:
    """A sum with a product, elementwise or of matrices, as one kernel."""
    uses = _Uses(shaped)
    for node in shaped.calls():
        if node.target is aten.add_.Tensor:
            _add_to_sum(shaped, node)
        if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
            continue
        for summand, product in (node.args, node.args[::-1]):
            if not shaped.alike(summand, node):
                continue
            fused = _elementwise(shaped, uses, node, summand, product) or _of_matrices(
                shaped, uses, node, summand, product
            )
            if fused is not None:
                shaped.replace(node, fused)
                break


def _elementwise(shaped: Shaped, uses: _Uses, node: fx.Node, summand: Any, product: Any) -> fx.Node | None:
    """``summand + x * y``, all of one floating point dtype."""
    if not _is(product, aten.mul.Tensor, 1) or len(product.all_input_nodes) != len(product.args):
        return None
    dtype = shaped.values[node].dtype
    if not dtype.is_floating_point or any(shaped.values[x].dtype != dtype for x in product.args):
        return None
    if not _may_wait(shaped, uses, node, product):
        return None
    return shaped.emit(node, aten.addcmul.default, summand, *product.args)


def _may_wait(shaped: Shaped, uses: _Uses, node: fx.Node, product: fx.Node) -> bool:
    """Whether ``product`` may be computed as late as ``node``, which reads it: its operands stay alive till then."""
    following = product.next
    while following.target in VIEWS:
        following = following.next
    held = uses.freed(product, uses.place(product), given=True)
    return following is node or held <= shaped.values[product].nbytes


def _product_of(shaped: Shaped, value: Any) -> fx.Node | None:
    """The product of matrices that a value is, seen in another shape and by nobody else."""
    while isinstance(value, fx.Node) and value.target in _RESHAPES and len(value.users) == 1:
        value = value.args[0]
    return value if _is(value, aten.mm.default, 1) and shaped.tensor(value) is not None else None


def _of_matrices(shaped: Shaped, uses: _Uses, node: fx.Node, summand: Any, value: Any) -> fx.Node | None:
    """``summand + x @ y`` where the summand is a product as well: that is contiguous in every run, and mostly of no use
    afterwards, so that this one is added where it lies."""
    product, first = _product_of(shaped, value), summand
    while first.target in _RESHAPES:
        first = first.args[0]
    if product is None or first.target not in (aten.mm.default, aten.addmm.default):
        return None
    if not _may_wait(shaped, uses, node, product):
        return None
    matrix = shaped.emit(node, aten.view.default, summand, list(shaped.values[product].shape))
    total = shaped.emit(node, aten.addmm.default, matrix, *product.args)
    return shaped.emit(node, aten.view.default, total, list(shaped.values[node].shape))


def _add_to_sum(shaped: Shaped, node: fx.Node) -> None:
    """The gradient of a weight added to a sum that is kept (`passes.sums`): as part of the product that it is."""
    total, value = node.args
    product, held = _product_of(shaped, value), shaped.tensor(total)
    if product is None or held is None or not held.is_contiguous() or not shaped.alike(value, node):
        return
    matrix = shaped.emit(node, aten.view.default, total, list(shaped.values[product].shape))
    shaped.emit(node, aten.addmm_.default, matrix, *product.args)
    shaped.graph.erase_node(node)


_STEPS: tuple[Callable[[Shaped], None], ...] = (
    _views,
    _repeated,
    _ones,
    _expanded,
    _scaled,
    _put_together,
    _log_softmax,
    _added_products,
)
