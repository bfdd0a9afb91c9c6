"""The dtype in which gradients leave the graph, which is the one in which they are added up over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.capture.graph import Parameter
from autopar.sharding.operators import VIEWS

aten = torch.ops.aten


def cast_gradients(graph: fx.Graph, parameters: Sequence[Parameter], dtype: torch.dtype) -> tuple[Parameter, ...]:
    """Let the gradients of a graph in normal form come out in ``dtype``; returns the parameters with the new ones.

    What was computed in ``dtype`` and rounded at the end (a sum in float32) is taken as it was before.
    """
    output = graph.output_node()
    plain = list(output.args[0][: output.meta["plain"]])  # type: ignore[index,arg-type]
    found = []
    for p in parameters:
        gradient = p.gradient
        if gradient is not None and gradient.meta["val"].dtype != dtype:
            found.append(replace(p, gradient=_in_dtype(graph, gradient, dtype)))
        else:
            found.append(p)
    output.args = ((*plain, *(p.gradient for p in found if p.gradient is not None)),)
    graph.eliminate_dead_code()
    return tuple(found)


def _in_dtype(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``node`` in ``dtype``: through views to the value that was rounded to make it, else by a cast."""
    views: list[fx.Node] = []
    source = node
    while source.target in VIEWS:
        views.append(source)
        source = source.all_input_nodes[0]
    if source.target is aten._to_copy.default and source.all_input_nodes[0].meta["val"].dtype == dtype:
        wide = source.all_input_nodes[0]
    else:
        with graph.inserting_after(source):
            wide = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
        wide.meta = {**source.meta, "val": source.meta["val"].to(dtype)}
    for view in reversed(views):
        with graph.inserting_after(view):
            copy = graph.node_copy(view)
        copy.replace_input_with(view.all_input_nodes[0], wide)
        copy.meta = {**view.meta, "val": view.meta["val"].to(dtype)}
        wide = copy
    return wide
