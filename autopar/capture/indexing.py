"""Normal form of indexing and of tensors made from nothing, so that the batch can be followed through both.

``hidden[arange(batch), last]`` takes one row of every sample, yet as an `index` it could be taking any: the samples
look mixed. An index that counts through a whole dim is therefore resolved: what is left is a `gather` or an `index`
along the other dims. A factory such as ``x.new_zeros(shape)`` wants of ``x`` its dtype and device only. It keeps ``x``
where that tells how the result lies, and is otherwise made without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.graph import spec_of
from autopar.sharding.layout import TensorSpec

aten = torch.ops.aten

_INDEX = {aten.index.Tensor, aten._unsafe_index.Tensor}
_PUT = {aten.index_put.default, aten._unsafe_index_put.default}
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
}
_COUNTS = {aten.arange.default, aten.arange.start, aten.arange.start_step}
#: Factories with an operand, and those without that make the same.
_FACTORIES = {
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_full.default: aten.full.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.empty_like.default: aten.empty.memory_format,
    aten.full_like.default: aten.full.default,
    aten.ones_like.default: aten.ones.default,
    aten.zeros_like.default: aten.zeros.default,
}
_FULL = {aten.new_full.default: 2, aten.full_like.default: 1}


def _spec(node: Any) -> TensorSpec:
    spec = spec_of(node)
    assert spec is not None, node
    return spec


def _counting_dim(node: Any) -> int | None:
    """The dim along which ``node`` is 0, 1, 2, ..., constant along all others; None if there is none."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if node.target in _COUNTS:
        first = 0 if node.target is aten.arange.default else node.args[0]
        step = 1 if len(node.args) < 3 else node.args[2]
        return 0 if (first, step) == (0, 1) and not _spec(node).dtype.is_floating_point else None
    if not node.all_input_nodes or (found := _counting_dim(node.args[0])) is None:
        return None
    source, result = _spec(node.args[0]), _spec(node)
    if node.target is aten.expand.default:
        return found + len(result.shape) - len(source.shape)
    if node.target in _RESHAPES and math.prod(source.shape) == source.shape[found] > 1:
        return result.shape.index(source.shape[found]) if source.shape[found] in result.shape else None
    same = node.target is aten._to_copy.default and result.dtype in (torch.int64, torch.int32)
    moved = node.target in (aten.add.Tensor, aten.sub.Tensor) and node.args[1] == 0
    return found if same or moved else None


@dataclass(frozen=True)
class _Lookup:
    """``table[indices]``, where the indices of some dims count. ``positions`` is the shape that the indices have
    together, ``counted`` gives the position along which a dim of the table counts, ``picked`` is the dim that has the
    one index which does not, and ``order`` says what each dim of the selection is: a position, or a dim of the table
    (numbered from ``len(positions)``)."""

    table: tuple[int, ...]
    positions: tuple[int, ...]
    counted: dict[int, int]
    picked: int | None
    order: tuple[int, ...]

    @property
    def free(self) -> list[int]:
        """The positions along which nothing counts."""
        return [p for p in range(len(self.positions)) if p not in self.counted.values()]

    @property
    def aligned(self) -> list[int]:
        """What ``order`` lists, in the order of the table's dims; the free positions are in the place of ``picked``."""
        found: list[int] = []
        for d in range(len(self.table)):
            if d == self.picked:
                found += self.free
            else:
                found.append(self.counted.get(d, len(self.positions) + d))
        return found

    def size(self, place: int) -> int:
        """The size of one of ``order``."""
        count = len(self.positions)
        return self.positions[place] if place < count else self.table[place - count]


def _lookup(node: fx.Node) -> _Lookup | None:
    """``node`` read as a `_Lookup`; None if it is another kind of indexing."""
    given: Any = node.args[1]
    at = [d for d, index in enumerate(given) if index is not None]
    specs = {d: _spec(given[d]) for d in at}
    table = _spec(node.args[0]).shape
    if 0 in table or any(spec.dtype not in (torch.int64, torch.int32) for spec in specs.values()):
        return None
    positions = torch.broadcast_shapes(*(spec.shape for spec in specs.values()))
    counted: dict[int, int] = {}
    for d in at:
        if (dim := _counting_dim(given[d])) is None or specs[d].shape[dim] != table[d] or table[d] == 1:
            continue
        position = dim + len(positions) - len(specs[d].shape)
        if position not in counted.values():
            counted[d] = position
    others = [d for d in at if d not in counted]
    if not counted or len(others) > 1:
        return None
    rest = [len(positions) + d for d in range(len(table)) if d not in at]
    # adjacent indices put their dims where they stand, others in front
    front = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    order = (*rest[:front], *range(len(positions)), *rest[front:])
    found = _Lookup(table, tuple(positions), counted, others[0] if others else None, order)
    return found if others or all(positions[p] == 1 for p in found.free) else None


class _Writer:
    """Adds nodes before ``node``, as part of it."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def emit(self, target: Any, shape: Sequence[int], dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> fx.Node:
        added = self.graph.call_function(target, args, kwargs)
        added.meta = {**self.node.meta, "val": self.node.meta["val"].new_empty(shape, dtype=dtype)}
        return added

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        return self.emit(aten.view.default, shape, _spec(x).dtype, x, list(shape))

    def expand(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        return self.emit(aten.expand.default, shape, _spec(x).dtype, x, list(shape))

    def permute(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        spec = _spec(x)
        return self.emit(aten.permute.default, [spec.shape[d] for d in order], spec.dtype, x, list(order))

    def not_negative(self, index: fx.Node, size: int) -> fx.Node:
        """An index that may count from the end as one that does not, in int64."""
        shape, dtype = _spec(index).shape, _spec(index).dtype
        if dtype != torch.int64:
            index = self.emit(aten._to_copy.default, shape, torch.int64, index, dtype=torch.int64)
        below = self.emit(aten.lt.Scalar, shape, torch.bool, index, 0)
        wrapped = self.emit(aten.add.Tensor, shape, torch.int64, index, size)
        return self.emit(aten.where.self, shape, torch.int64, below, wrapped, index)

    def pick(self, found: _Lookup, index: fx.Node) -> tuple[fx.Node, bool]:
        """The one index that does not count: as it is along the free positions, or where it differs along others,
        aligned to the table for a `gather` (and True)."""
        assert found.picked is not None
        shape = _spec(index).shape
        own = [1] * (len(found.positions) - len(shape)) + list(shape)
        free = [found.positions[p] for p in found.free]
        if all(own[p] == 1 for p in found.counted.values()):
            return self.expand(self.view(index, [own[p] for p in found.free]), free), False
        index = self.not_negative(self.view(index, own), found.table[found.picked])
        index = self.expand(index, [found.positions[p] if p in found.free else n for p, n in enumerate(own)])
        index = self.permute(index, [place for place in found.aligned if place < len(own)])
        aligned = [own[found.counted[d]] if d in found.counted else 1 for d in range(len(found.table))]
        aligned[found.picked] = math.prod(free)
        whole = [math.prod(free) if d == found.picked else n for d, n in enumerate(found.table)]
        return self.expand(self.view(index, aligned), whole), True

    def look_up(self, found: _Lookup, table: fx.Node, indices: Sequence[Any]) -> fx.Node:
        """What the indexing selects."""
        dtype, shape, selected = _spec(table).dtype, [found.size(p) for p in found.aligned], table
        if found.picked is not None:
            index, aligned = self.pick(found, indices[found.picked])
            if aligned:
                selected = self.emit(aten.gather.default, _spec(index).shape, dtype, table, found.picked, index)
                selected = self.view(selected, shape)
            else:
                selected = self.emit(aten.index.Tensor, shape, dtype, table, [*[None] * found.picked, index])
        selected = self.permute(selected, [found.aligned.index(p) for p in found.order if p in found.aligned])
        return self.view(selected, [found.size(p) for p in found.order])

    def put(self, found: _Lookup, table: fx.Node, indices: Sequence[Any], values: fx.Node, add: bool) -> fx.Node:
        """The table with ``values`` put, or added, where the indexing points."""
        dtype, zeros = _spec(table).dtype, table.target is aten.new_zeros.default
        values = self.expand(values, [found.size(p) for p in found.order])
        absent = [p for p in found.free if found.picked is None]  # of size 1
        values = self.permute(values, [found.order.index(p) for p in (*found.aligned, *absent)])
        values = self.view(values, [found.size(p) for p in found.aligned])
        if found.picked is None:
            return values if zeros or not add else self.emit(aten.add.Tensor, found.table, dtype, table, values)
        index, aligned = self.pick(found, indices[found.picked])
        if aligned:
            values = self.view(values, _spec(index).shape)
        if zeros:  # laid out as what is put into it
            table = self.emit(aten.new_zeros.default, found.table, dtype, values, list(found.table))
        if aligned:
            target = aten.scatter_add.default if add else aten.scatter.src
            return self.emit(target, found.table, dtype, table, found.picked, index, values)
        places = [*[None] * found.picked, index]
        return self.emit(aten.index_put.default, found.table, dtype, table, places, values, add)


def resolve_counting_indices(graph: fx.Graph) -> None:
    """Replace every lookup, and every put, that counts through whole dims of its table by one along the other dims."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _INDEX | _PUT or (found := _lookup(node)) is None:
            continue
        arguments: Any = node.args
        with graph.inserting_before(node):
            writer = _Writer(graph, node)
            if node.target in _INDEX:
                result = writer.look_up(found, *arguments)
            else:
                table, indices, values, *rest = arguments
                add = rest[0] if rest else node.kwargs.get("accumulate", False)
                result = writer.put(found, table, indices, values, bool(add))
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _looks_up_first_dim(user: fx.Node) -> bool:
    """Whether an operator finds places in the first dim of its first operand by an index."""
    rest: Any = user.args[1:]
    if user.target in _PUT | _INDEX:
        return rest[0][0] is not None
    scatters = (aten.index_add.default, aten.scatter_add.default, aten.scatter.src, aten.scatter.value)
    return user.target in scatters and rest[0] % len(_spec(user.args[0]).shape) == 0


def factories_without_operand(graph: fx.Graph) -> None:
    """Make a factory without its operand, unless the two have the first dim in common: the batch, which the result is
    then split along as the operand is. A table whose first dim is looked up has no batch there."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.new_empty_strided.default:  # nothing relies on the strides
            node.target, node.args = aten.new_empty.default, node.args[:2]
        if node.target not in _FACTORIES:
            continue
        operand, result = _spec(node.args[0]), _spec(node)
        in_common = operand.shape and result.shape and operand.shape[0] == result.shape[0]
        if in_common and not any(map(_looks_up_first_dim, node.users)):
            continue
        value = [node.args[_FULL[node.target]]] if node.target in _FULL else []
        node.args = (list(result.shape), *value)
        node.kwargs = {"dtype": result.dtype, "device": node.meta["val"].device}
        node.target = _FACTORIES[node.target]
