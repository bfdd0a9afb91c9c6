"""Normal form of the joint graph: no copies that mean nothing, and every matrix product an einsum.

A linear layer traces as ``view - mm - view``: the view merges batch and sequence, and once the batch is split the
sequence cannot be. As ``einsum("bsk,nk->bsn")`` each is a factor of its own. The same holds for both backward products.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.graph import spec_of
from autopar.capture.indexing import factories_without_operand, resolve_counting_indices
from autopar.capture.rows import tokens_apart
from autopar.capture.strides import dims_as_they_lie

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_COPIES = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
}
#: What normal form looks through, or from one side of to the other, when it rewrites a neighbour.
SEEN_THROUGH = frozenset({*_VIEWS, aten.t.default, aten.transpose.int, aten.permute.default, aten.einsum.default})


def _shape(node: fx.Node) -> tuple[int, ...]:
    spec = spec_of(node)
    assert spec is not None, node
    return spec.shape


def _is_noop(node: fx.Node) -> bool:
    """Whether ``node`` computes its first argument: a copy, or a view or cast that changes nothing."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    source, result = spec_of(node.args[0]), spec_of(node)
    if source is None or result is None:
        return False
    if node.target in _COPIES:
        return True
    same = node.target in _VIEWS | {aten.expand.default, aten._to_copy.default}
    if node.target is aten._to_copy.default and node.kwargs.get("device") not in (None, torch.device("cpu")):
        return False
    return same and source == result


def permutation(node: fx.Node) -> list[int] | None:
    """The permutation of a ``t``, ``transpose`` or ``permute`` node: result dim i is source dim p[i]."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    ndim = len(_shape(node.args[0])) if spec_of(node.args[0]) else 0
    order = list(range(ndim))
    rest: Any = node.args[1:]
    if node.target is aten.t.default:
        return order[::-1]
    if node.target is aten.transpose.int:
        a, b = rest[0] % ndim, rest[1] % ndim
        order[a], order[b] = order[b], order[a]
        return order
    if node.target is aten.permute.default:
        return [d % ndim for d in rest[0]]
    return None


def drop_assertions(graph: fx.Graph) -> None:
    """Remove what only looks at values and raises (``F.one_hot`` wants every class to be in range): it has no result,
    and on GPUs it would stop the host."""
    for target in (aten._assert_async.msg, aten._assert_async.default, aten._assert_tensor_metadata.default):
        for node in graph.find_nodes(op="call_function", target=target):
            graph.erase_node(node)
    graph.eliminate_dead_code()


def drop_noops(graph: fx.Graph) -> None:
    """Remove copies and views that change nothing, merge chains of views, cancel permutations that undo each other."""
    for node in list(graph.nodes):
        if _is_noop(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        if node.op != "call_function":
            continue
        if node.target in _VIEWS:
            source = node.args[0]
            while source.op == "call_function" and source.target in _VIEWS:
                source = source.args[0]
            node.target, node.args = aten.view.default, (source, list(_shape(node)))
            if _is_noop(node):
                node.replace_all_uses_with(source)
                graph.erase_node(node)
        elif (outer := permutation(node)) is not None and (inner := permutation(node.args[0])) is not None:
            order = [inner[i] for i in outer]
            if order == sorted(order):
                node.replace_all_uses_with(node.args[0].args[0])
                graph.erase_node(node)
            else:
                node.target, node.args = aten.permute.default, (node.args[0].args[0], order)
    graph.eliminate_dead_code()


@dataclass(frozen=True)
class _Operand:
    """A tensor read as a matrix (or batch of matrices): ``groups[i]`` are the dims of ``source`` that make dim i."""

    source: fx.Node
    groups: tuple[tuple[int, ...], ...]

    def sizes(self, group: int) -> tuple[int, ...]:
        shape = _shape(self.source)
        return tuple(shape[d] for d in self.groups[group])


def _merged_groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[list[int]] | None:
    """Which consecutive dims of ``source`` each dim of ``target`` merges; None if the view is not a pure merge."""
    groups: list[list[int]] = []
    d = 0
    for size in target:
        group, have = [d], (source[d] if d < len(source) else 0)
        d += 1
        while have < size and d < len(source):
            have *= source[d]
            group.append(d)
            d += 1
        if have != size or group[-1] >= len(source):
            return None
        groups.append(group)
    if groups and d < len(source) and all(s == 1 for s in source[d:]):
        groups[-1] += range(d, len(source))
        d = len(source)
    return groups if d == len(source) else None


def _open(node: Any) -> _Operand:
    """See through the permutations and merging views above a matrix product's operand."""
    groups = [[d] for d in range(len(_shape(node)))]
    merged = False
    while node.op == "call_function":
        order = permutation(node)
        if order is not None:
            groups = [[order[d] for d in group] for group in groups]
        elif node.target in _VIEWS and not merged and 0 not in _shape(node):
            inner = _merged_groups(_shape(node.args[0]), _shape(node))
            if inner is None:
                break
            groups = [[e for d in group for e in inner[d]] for group in groups]
            merged = True
        else:
            break
        node = node.args[0]
    return _Operand(node, tuple(tuple(g) for g in groups))


def _closed(node: fx.Node) -> _Operand:
    return _Operand(node, tuple((d,) for d in range(len(_shape(node)))))


def _einsum(
    graph: fx.Graph,
    like: fx.Node,
    a: _Operand,
    b: _Operand,
    shared: list[tuple[int, int]],
    result: list[tuple[str, int]],
) -> fx.Node:
    """Insert the einsum of two operands. ``shared`` are pairs of groups (of a, of b) with the same factors; ``result``
    the groups of the result as ("a" or "b", group). Returns it viewed in the shape of ``like``."""
    letters = iter(string.ascii_letters)
    names_a = {d: next(letters) for group in a.groups for d in group}
    names_b: dict[int, str] = {}
    for ga, gb in shared:
        names_b.update({db: names_a[da] for da, db in zip(a.groups[ga], b.groups[gb], strict=True)})
    for group in b.groups:
        for d in group:
            if d not in names_b:
                names_b[d] = next(letters)
    left = "".join(names_a[d] for d in sorted(names_a))
    right = "".join(names_b[d] for d in sorted(names_b))
    dims = [(names_a if side == "a" else names_b)[d] for side, g in result for d in (a if side == "a" else b).groups[g]]
    shape = [
        _shape((a if side == "a" else b).source)[d] for side, g in result for d in (a if side == "a" else b).groups[g]
    ]
    node = graph.call_function(aten.einsum.default, (f"{left},{right}->{''.join(dims)}", [a.source, b.source]))
    value = like.meta["val"]
    node.meta = {**like.meta, "val": value.new_empty(shape)}
    return node


def _split(graph: fx.Graph, like: fx.Node, operand: _Operand, group: int, sizes: tuple[int, ...]) -> _Operand:
    """View the one dim of ``group`` as ``sizes``, so that its factors can be named one by one."""
    (dim,) = operand.groups[group]
    shape = list(_shape(operand.source))
    view = graph.call_function(aten.view.default, (operand.source, shape[:dim] + list(sizes) + shape[dim + 1 :]))
    view.meta = {**like.meta, "val": operand.source.meta["val"].new_empty(view.args[1])}
    more = len(sizes) - 1
    groups = [tuple(d + more if d > dim else d for d in g) for g in operand.groups]
    groups[group] = tuple(range(dim, dim + len(sizes)))
    return _Operand(view, tuple(groups))


def _match(
    graph: fx.Graph,
    like: fx.Node,
    a: _Operand,
    b: _Operand,
    shared: list[tuple[int, int]],
    originals: tuple[fx.Node, fx.Node],
) -> tuple[_Operand, _Operand]:
    """Give shared groups the same factors on both sides: a weight's dim is opened into heads and head dim where the
    activation has them apart. Where neither side is a single dim, both are taken as they are."""
    for ga, gb in shared:
        left, right = a.sizes(ga), b.sizes(gb)
        if left == right:
            continue
        if len(left) == 1:
            a = _split(graph, like, a, ga, right)
        elif len(right) == 1:
            b = _split(graph, like, b, gb, left)
        else:
            return _closed(originals[0]), _closed(originals[1])
    return a, b


def _rows_apart(graph: fx.Graph, node: fx.Node, a: _Operand) -> _Operand:
    """Where the rows enter merged and a reader of the product opens them, they are opened before the product: the
    gradient of flattened logits has lost batch and sequence, and all that follows it would go without."""
    if len(a.groups[0]) != 1:
        return a
    for user in node.users:
        if user.target in _VIEWS and (groups := _merged_groups(_shape(user), _shape(node))) and len(groups[0]) > 1:
            return _split(graph, node, a, 0, tuple(_shape(user)[d] for d in groups[0]))
    return a


def _replace_product(graph: fx.Graph, node: fx.Node) -> None:
    bias: Any = None
    operands: Any = node.args[-2:]
    if node.target is aten.addmm.default:
        if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
            return
        bias = node.args[0]
    batched = node.target is aten.bmm.default
    shared = [(0, 0), (2, 1)] if batched else [(1, 0)]
    result = [("a", 0), ("a", 1), ("b", 2)] if batched else [("a", 0), ("b", 1)]
    with graph.inserting_before(node):
        a, b = _match(graph, node, _open(operands[0]), _open(operands[1]), shared, operands)
        if not batched:
            a = _rows_apart(graph, node, a)
        product = _einsum(graph, node, a, b, shared, result)
        if bias is not None:
            # The bias is a vector over the last group; it adds before the view, where the batch is still apart.
            columns = [_shape(b.source)[d] for d in b.groups[1]]
            if len(columns) > 1 or len(_shape(bias)) != 1:
                product = _view(graph, product, node)
            value = product.meta["val"]
            product = graph.call_function(aten.add.Tensor, (product, bias))
            product.meta = {**node.meta, "val": torch.empty_like(value)}
        view = _view(graph, product, node)
    node.replace_all_uses_with(view)
    graph.erase_node(node)


def _view(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    view = graph.call_function(aten.view.default, (node, list(_shape(like))))
    view.meta = dict(like.meta)
    return view


def products_to_einsum(graph: fx.Graph) -> None:
    """Replace every ``mm``, ``addmm`` and ``bmm`` by an einsum over the dims before they were merged."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            _replace_product(graph, node)


def sums_through_views(graph: fx.Graph) -> None:
    """Sum the tensor before dims were merged, not after: a bias gradient sums over batch and sequence, two factors."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.sum.dim_IntList or 0 in _shape(node.args[0]):
            continue
        opened = _open(node.args[0])
        dims = [d % len(opened.groups) for d in node.args[1]] or list(range(len(opened.groups)))
        kept = [d for g, group in enumerate(opened.groups) if g not in dims for d in group]
        if opened.source is node.args[0] or kept != sorted(kept):
            continue
        over = sorted(d for g in dims for d in opened.groups[g])
        with graph.inserting_before(node):
            total = graph.call_function(aten.sum.dim_IntList, (opened.source, over), dict(node.kwargs))
            total.meta = {**node.meta, "val": node.meta["val"].new_empty([_shape(opened.source)[d] for d in kept])}
            view = _view(graph, total, node)
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def sums_in_float32(graph: fx.Graph) -> None:
    """Let a 16-bit gradient that is a sum (a bias's) be summed in float32 and rounded at the end: one process does so
    inside the operator, and across ranks every partial sum would be rounded as well."""
    returned: Any = graph.output_node().args[0]
    for gradient in {n for n in returned[graph.output_node().meta["plain"] :] if n is not None}:
        node: fx.Node = gradient
        while node.target in _VIEWS:
            node = node.all_input_nodes[0]
        value = node.meta["val"]
        if node.target is not aten.sum.dim_IntList or value.dtype not in (torch.bfloat16, torch.float16):
            continue
        with graph.inserting_after(node):
            rounded = graph.call_function(aten._to_copy.default, (node,), {"dtype": value.dtype})
        rounded.meta = dict(node.meta)
        for user in [user for user in node.users if user is not rounded]:
            user.replace_input_with(node, rounded)
        node.kwargs = {**node.kwargs, "dtype": torch.float32}
        node.meta["val"] = value.to(torch.float32)


def norms_without_bias(graph: fx.Graph) -> None:
    """The backward of a layer norm looks at its bias only to see whether there is one: give it the weight twice, so
    that with ZeRO-3 the bias is not gathered for nothing."""
    for node in graph.find_nodes(op="call_function", target=aten.native_layer_norm_backward.default):
        weight, bias = node.args[5:7]
        if weight is not None and bias is not None:
            node.args = (*node.args[:6], weight, *node.args[7:])


def place_before_use(graph: fx.Graph, parameters: Sequence[fx.Node]) -> None:
    """Move what no parameter enters (positions, rotary angles, masks) to just before its first use.

    Every rank traces for itself, and models make such values in loops over sets (``for kind in set(layer_types)``),
    whose order differs from process to process. What depends on parameters keeps its order. Nothing may be unused.
    """
    learned = set(parameters)
    for node in graph.nodes:
        if any(arg in learned for arg in node.all_input_nodes):
            learned.add(node)
    placed = set(graph.find_nodes(op="placeholder"))
    for node in list(graph.nodes):
        if node not in learned and node.op != "output":
            continue
        stack = [node]
        while stack:
            waiting = [arg for arg in stack[-1].all_input_nodes if arg not in placed and arg not in learned]
            if waiting:
                stack.append(waiting[0])
                continue
            done = stack.pop()
            if done is not node and done not in placed:
                node.prepend(done)
            placed.add(done)


def repeat_in_backward(graph: fx.Graph, kept_inputs: set[fx.Node]) -> None:
    """Give the backward its own copy of what follows from ``kept_inputs`` (parameters, buffers, constants) alone.

    Such values need not be kept: the backward makes them again from what rests between steps, and with ZeRO-3 gathers
    the weight again. As operators of their own they have their own layouts and are paid for. Products are not repeated.
    """
    free = set(kept_inputs)
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if node in kept_inputs:
            return node
        if node not in copies:
            inputs = {arg: copy(arg) for arg in node.all_input_nodes}
            with graph.inserting_after(node):
                copies[node] = graph.node_copy(node, lambda n: inputs[n])
            copies[node].meta = {**node.meta, "backward": True}
        return copies[node]

    for node in list(graph.nodes):
        if node.op != "call_function" or node.meta["backward"] or node.target is aten.einsum.default:
            continue
        if all(arg in free for arg in node.all_input_nodes):
            free.add(node)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.meta["backward"] and node not in copies.values():
            for arg in node.all_input_nodes:
                if arg in free and arg not in kept_inputs:
                    node.replace_input_with(arg, copy(arg))
    graph.lint()


NORMAL_FORM: tuple[Callable[[fx.Graph], None], ...] = (
    dims_as_they_lie,
    drop_noops,
    resolve_counting_indices,
    factories_without_operand,
    products_to_einsum,
    sums_through_views,
    tokens_apart,
    sums_in_float32,
    norms_without_bias,
    drop_noops,
    drop_noops,
)


def normalize(graph: fx.Graph) -> None:
    """Bring a joint graph to the normal form that the rules expect. Keeps every node's ``meta``."""
    for step in NORMAL_FORM:
        step(graph)
    graph.lint()
