"""Operators that read memory, not dims: ``as_strided`` counts elements as its tensor happens to lie.

A rank's piece lies as its collectives and products leave it, and normal form takes copies out. So such an operator gets
its tensor with its dims in the order in which they lay when it was traced, and its rule makes that contiguous: a place
in memory is then an index again, whatever the strides.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import CaptureError

aten = torch.ops.aten


def dims_as_they_lie(graph: fx.Graph) -> None:
    """Let every ``as_strided`` and ``as_strided_scatter`` count the elements of its tensor in the order of its dims.

    Raises CaptureError where it reads what is not its tensor's: other parts of a larger one, or elements that repeat.
    PyTorch itself differentiates as_strided_scatter of contiguous tensors alone.
    """
    for target in (aten.as_strided.default, aten.as_strided_scatter.default):
        for node in graph.find_nodes(op="call_function", target=target):
            _in_order(graph, node)


def _in_order(graph: fx.Graph, node: fx.Node) -> None:
    first = 1 if node.target is aten.as_strided.default else 2  # of the arguments size, stride and storage_offset
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value: Tensor = source.meta["val"]
    order = list(range(value.dim()))  # a result of as_strided_scatter lies as its tensor does
    if first == 1:
        order.sort(key=lambda d: -value.stride()[d])
    size, stride = list(node.args[first]), list(node.args[first + 1])  # type: ignore[arg-type]
    offset: Any = node.args[first + 2] if len(node.args) > first + 2 else node.kwargs.get("storage_offset")
    start = 0 if offset is None else int(offset) - value.storage_offset()
    end = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else start
    if not value.permute(order).is_contiguous() or start < 0 or end >= value.numel():
        raise _refused(node, value)
    with graph.inserting_before(node):
        lain = graph.call_function(aten.permute.default, (source, order))
    lain.meta = {**node.meta, "val": value.permute(order)}
    node.args, node.kwargs = (lain, *node.args[1:first], size, stride, start), {}


def _refused(node: fx.Node, value: Tensor) -> CaptureError:
    return CaptureError(
        f"{node.meta.get('module') or 'the model'} reads memory beside a tensor, by {node.target}",
        expected="sizes, strides and an offset within one whole tensor, whose elements do not repeat "
        f"({math.prod(value.shape)} elements here)",
        found=f"a tensor of shape {tuple(value.shape)} with strides {value.stride()} at offset "
        f"{value.storage_offset()}, read by {[*map(str, node.args[1:])]}",
        change="call .contiguous() on it first, or use slices, unfold or gather",
    )
