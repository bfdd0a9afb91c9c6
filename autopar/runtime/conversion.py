"""A piece of a tensor that is computed from others, out of only those pieces of the sources that it is made of.

Checkpoints name and shape weights differently from models: experts one by one instead of stacked, query, key and value
fused or apart, matrices transposed. Such a conversion is traced to a graph, and a region of its result is followed back
through the graph. Operators without a rule here (one that computes) are run on whole inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import FakeTensorMode
from autopar.sharding.layout import TensorSpec

aten = torch.ops.aten

#: A box of a tensor: (first, last + 1) of every dim.
Region = tuple[tuple[int, int], ...]
#: Reads a region of the source of a name.
Read = Callable[[str, Region], Tensor]


class Conversion:
    """``convert`` traced: it takes tensors by source name (their ``specs``) and returns tensors by target name."""

    def __init__(self, convert: Callable[[dict[str, Tensor]], dict[str, Tensor]], specs: Mapping[str, TensorSpec]):
        from torch.fx.experimental.proxy_tensor import make_fx

        self.sources = tuple(specs)
        targets: list[str] = []

        def traced(*tensors: Tensor) -> list[Tensor]:
            converted = convert(dict(zip(self.sources, tensors, strict=True)))
            targets.extend(converted)
            return list(converted.values())

        with FakeTensorMode():
            given = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs.values()]
        graph = make_fx(traced)(*given).graph
        placeholders = graph.find_nodes(op="placeholder")
        self._names = dict(zip(placeholders, self.sources, strict=True))
        outputs: Any = graph.output_node().args[0]
        self._results: dict[str, Any] = dict(zip(targets, outputs, strict=True))

    @property
    def targets(self) -> dict[str, TensorSpec]:
        """Names, shapes and dtypes of the results."""
        values = {name: node.meta["val"] for name, node in self._results.items()}
        return {name: TensorSpec(tuple(val.shape), val.dtype) for name, val in values.items()}

    def piece(self, target: str, region: Region, read: Read) -> Tensor:
        """A region of one result."""
        return self._pull(self._results[target], region, read)

    def _pull(self, node: fx.Node, region: Region, read: Read) -> Tensor:
        if node in self._names:
            return read(self._names[node], region)
        rule = _rule(node)
        if rule is None:
            return _crop(self._whole(node, read), region)
        found: Tensor = rule(node, region, lambda source, part: self._pull(source, part, read))
        return found

    def _whole(self, node: fx.Node, read: Read) -> Any:
        """The whole value of a node, by running its operator."""
        if node in self._names or _rule(node) is not None:
            val = node.meta["val"]
            found = self._pull(node, whole(val.shape), read)
            if found.stride() == val.stride():
                return found
            # what runs on it, a view for instance, may need it to lie in memory as it did when it was traced
            return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype).copy_(found)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: self._whole(source, read))
        target: Any = node.target
        return target(*args, **kwargs)


def whole(shape: Sequence[int]) -> Region:
    """The region that is the whole of a tensor."""
    return tuple((0, size) for size in shape)


def _crop(tensor: Tensor, region: Region) -> Tensor:
    return tensor[tuple(slice(a, b) for a, b in region)]


# ---- rules: (node, region of its result, pull(source node, region of it)) -> that region ----


def _dim(node: Any, position: int, default: int = 0) -> int:
    """A dim argument, counted from the front of the input."""
    dim = node.args[position] if len(node.args) > position else default
    return int(dim % node.args[0].meta["val"].dim())


def _changed(region: Region, dim: int, *span: tuple[int, int], drop: int = 1) -> Region:
    """A region with another span in ``dim``; with none, or ``drop`` of 0, one of fewer or more dims."""
    return (*region[:dim], *span, *region[dim + drop :])


def _same(node: Any, region: Region, pull: Any) -> Any:
    return pull(node.args[0], region)


def _cast(node: Any, region: Region, pull: Any) -> Any:
    return pull(node.args[0], region).to(node.meta["val"].dtype)


def _cat(node: Any, region: Region, pull: Any) -> Any:
    dim = node.args[1] % len(region) if len(node.args) > 1 else 0
    parts, begin, (first, last) = [], 0, region[dim]
    for source in node.args[0]:
        end = begin + source.meta["val"].shape[dim]
        if first < end and begin < last:
            parts.append(pull(source, _changed(region, dim, (max(first, begin) - begin, min(last, end) - begin))))
        begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _stack(node: Any, region: Region, pull: Any) -> Any:
    dim = node.args[1] % len(region) if len(node.args) > 1 else 0
    inner = _changed(region, dim)
    return torch.stack([pull(source, inner) for source in node.args[0][slice(*region[dim])]], dim)


def _taken(node: Any, region: Region, pull: Any) -> Any:
    """One result of a split."""
    split, index = node.args
    dim, sizes = _dim(split, 2), split.args[1]
    begin = sum(sizes[:index]) if isinstance(sizes, list | tuple) else index * sizes
    return pull(split.args[0], _changed(region, dim, (region[dim][0] + begin, region[dim][1] + begin)))


def _slice(node: Any, region: Region, pull: Any) -> Any:
    dim = _dim(node, 1)
    asked = slice(*(*node.args[2:5], *(None,) * (3 - len(node.args[2:5]))))
    begin, _, step = asked.indices(node.args[0].meta["val"].shape[dim])
    first, last = region[dim]
    found = pull(node.args[0], _changed(region, dim, (begin + first * step, begin + (last - 1) * step + 1)))
    return found[(slice(None),) * dim + (slice(None, None, step),)]


def _select(node: Any, region: Region, pull: Any) -> Any:
    dim = _dim(node, 1)
    index = node.args[2] % node.args[0].meta["val"].shape[dim]
    return pull(node.args[0], _changed(region, dim, (index, index + 1), drop=0)).squeeze(dim)


def _transpose(node: Any, region: Region, pull: Any) -> Any:
    a, b = _dim(node, 1, 0), _dim(node, 2, 1)  # aten.t has no dims: those of a matrix
    inner = list(region)
    inner[a], inner[b] = inner[b], inner[a]
    return pull(node.args[0], tuple(inner)).transpose(a, b)


def _permute(node: Any, region: Region, pull: Any) -> Any:
    order = [d % len(region) for d in node.args[1]]
    return pull(node.args[0], tuple(region[order.index(d)] for d in range(len(region)))).permute(order)


def _unsqueeze(node: Any, region: Region, pull: Any) -> Any:
    dim = node.args[1] % len(region)
    return pull(node.args[0], _changed(region, dim)).unsqueeze(dim)


def _squeeze(node: Any, region: Region, pull: Any) -> Any:
    dim = _dim(node, 1)
    if node.args[0].meta["val"].shape[dim] != 1:
        return pull(node.args[0], region)
    return pull(node.args[0], _changed(region, dim, (0, 1), drop=0)).squeeze(dim)


_RULES: dict[Any, Callable[[Any, Region, Any], Any]] = {
    aten._to_copy.default: _cast,
    aten.alias.default: _same,
    aten.cat.default: _cat,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.permute.default: _permute,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.squeeze.dim: _squeeze,
    aten.stack.default: _stack,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _unsqueeze,
}
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def _rule(node: fx.Node) -> Callable[[Any, Region, Any], Any] | None:
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and source.target in _SPLITS:
        return _taken
    return _RULES.get(node.target)
