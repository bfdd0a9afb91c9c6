"""Cuts a graph into segments that can be compiled: what lies between two collectives and within one block.

Invariant: the outer graph computes the same. Collectives, and the waits for them, stay in it in their order, so that
they overlap with the segments between them as before. Segments are written in normal form: those of isomorphic blocks
are equal text, and one compilation serves all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.passes.collectives import KINDS, WAIT, aten
from autopar.passes.sums import KEEPS_SUM
from autopar.sharding.operators import ROUTED, VIEWS

#: What runs a segment: takes its inputs, returns its outputs.
Run = Callable[..., Sequence[Any]]


@dataclass
class _Segment:
    """Nodes that are compiled together, the values that they read from outside, and those that are read outside."""

    nodes: dict[fx.Node, None] = field(default_factory=dict)

    def inputs(self) -> list[fx.Node]:
        read = (arg for node in self.nodes for arg in node.all_input_nodes)
        return list(dict.fromkeys(arg for arg in read if arg not in self.nodes))

    def outputs(self) -> list[fx.Node]:
        return [node for node in self.nodes if any(user not in self.nodes for user in node.users)]

    def is_worth_it(self) -> bool:
        """Whether there is anything to fuse."""
        return sum(node.target not in VIEWS and node.target is not operator.getitem for node in self.nodes) > 1

    def module(self) -> fx.GraphModule:
        """The segment as a graph of its own, with names by position; the same call of the same values, such as a copy
        that two products read, stands there once, unless both are read outside."""
        graph, outputs = fx.Graph(), self.outputs()
        new = {node: graph.placeholder(f"in_{i}") for i, node in enumerate(self.inputs())}
        first: dict[str, fx.Node] = {}
        for i, node in enumerate(self.nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
            key = f"{node.target} {args} {kwargs}" if _may_stand_once(node) else f"{i}"
            if key in first and node not in outputs:
                new[node] = first[key]
                continue
            new[node] = graph.create_node("call_function", node.target, args, kwargs, name=f"value_{i}")
            first.setdefault(key, new[node])
        graph.output(tuple(new[node] for node in outputs))
        return fx.GraphModule(torch.nn.Module(), graph, class_name="Segment")


def _may_stand_once(node: fx.Node) -> bool:
    """Whether two calls of the same values return the same, and change nothing."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is operator.getitem
    return not schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]


def _is_apart(node: fx.Node) -> bool:
    """Whether a node stays in the outer graph: what is no computation; what packs a bucket, whose operands are as many
    as the model is deep, so that every depth would need a compilation of its own; and what has to do with rows of
    experts, of which there are others in every step."""
    if node.meta.get(ROUTED):
        return True
    packs = node.target is aten.cat.default and node.meta.get("piece") is not None
    return node.op != "call_function" or node.target in KINDS or node.target is WAIT or packs


def _segments(graph: fx.Graph) -> dict[fx.Node, _Segment]:
    """The segment of every node that has one. Parts of a result stay with the operator that makes it."""
    found: dict[fx.Node, _Segment] = {}
    current, block = _Segment(), None
    for node in graph.nodes:
        if node.meta.get(KEEPS_SUM):  # in the outer graph, behind what makes the summand; the segment goes on
            continue
        if _is_apart(node):
            current = _Segment()
            continue
        if node.target is operator.getitem and (whole := node.args[0]) in found:
            assert isinstance(whole, fx.Node)
            found[node] = found[whole]
        else:
            if node.meta.get("block") != block:
                current, block = _Segment(), node.meta.get("block")
            found[node] = current
        found[node].nodes[node] = None
    return found


def segmented(graph: fx.Graph, make: Callable[[fx.GraphModule], Run]) -> fx.Graph:
    """``graph`` with every segment of more than one operator as one call of what ``make`` makes of it."""
    segments = {node: segment for node, segment in _segments(graph).items() if segment.is_worth_it()}
    outer = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    written: set[int] = set()
    for node in graph.nodes:
        segment = segments.get(node)
        if segment is None:
            new[node] = outer.node_copy(node, new.__getitem__)
        elif id(segment) not in written:
            written.add(id(segment))
            run, inputs = make(segment.module()), segment.inputs()
            call = outer.call_function(run, tuple(new[value] for value in inputs))
            for i, value in enumerate(segment.outputs()):
                new[value] = outer.call_function(operator.getitem, (call, i))
    return outer
