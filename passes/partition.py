"""Cuts the tagged joint graph of a rank into a forward and a backward graph.

Invariant: run one after the other, with the saved values handed over, they compute what the joint graph computes; the
forward returns the results asked for and exactly the values tagged as kept that the backward reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.bucket import bucket
from autopar.passes.overlap import overlap
from autopar.passes.recompute import in_time
from autopar.passes.shard import Sharded
from autopar.passes.zero import kept_for_the_step


@dataclass(frozen=True)
class Copies:
    """``module(*inputs)`` makes the copies ``outputs`` of parameters, both by name."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """``forward(*forward_inputs) -> (results..., saved...)`` and ``backward(*backward_inputs) -> gradients``, inputs by
    placeholder name; a name in ``saved`` is handed over by the forward. ``results`` are the places of the results among
    the captured outputs, ``copies`` makes what is kept of parameters from step to step (`zero.keep`) and is read by
    both."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    forward_inputs: tuple[str, ...]
    backward_inputs: tuple[str, ...]
    saved: tuple[str, ...]
    results: tuple[int, ...]
    copies: Copies | None = None

    @property
    def num_results(self) -> int:
        """How many of the forward's outputs are results."""
        return len(self.results)

    def hash(self) -> str:
        """SHA-256 of the text of all graphs: equal on every rank of a stage."""
        code = self.forward.code + (self.backward.code if self.backward else "")
        code += self.copies.module.code if self.copies else ""
        return hashlib.sha256(code.encode()).hexdigest()


def _backward_nodes(sharded: Sharded) -> tuple[dict[fx.Node, None], dict[fx.Node, None]]:
    """The call nodes of the backward graph, and the values it takes over, both in graph order."""
    needed: set[fx.Node] = set()
    boundary: set[fx.Node] = set()
    stack = list(sharded.gradients)
    while stack:
        node = stack.pop()
        if node in needed or node in boundary:
            continue
        if _enters(node) or not (node.meta["backward"] or node.meta["recompute"]):
            boundary.add(node)
        else:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    order = list(sharded.module.graph.nodes)
    return {n: None for n in order if n in needed}, {n: None for n in order if n in boundary}


def extract(
    nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node], name: str, merge: bool = True
) -> fx.GraphModule:
    """The graph that computes ``outputs`` by ``nodes`` from ``inputs``, which become its placeholders. ``merge`` its
    collectives, unless it is to be cut further."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    calls, stands = in_time(nodes)
    for node in calls:
        new[node] = graph.node_copy(node, lambda n: new[stands.get(n, n)])
    graph.output(tuple(new[stands.get(n, n)] for n in outputs))
    if merge:
        bucket(graph)
        overlap(graph)
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph, class_name=name)


def partition(sharded: Sharded, *, results: Collection[int] | None = None, gradients: bool = True) -> Program:
    """Cut ``sharded`` (tagged by `recompute.tag`) in two. ``results`` are the places of the outputs that the forward
    returns (None: all); without ``gradients`` there is no backward, and nothing is saved for one."""
    places = tuple(i for i in range(len(sharded.results)) if results is None or i in results)
    wanted = [sharded.results[i] for i in places]
    calls, boundary = _backward_nodes(sharded) if gradients else ({}, {})
    saved = [n for n in boundary if not _enters(n)]
    forward: set[fx.Node] = set()
    stack = [*wanted, *saved]
    while stack:
        node = stack.pop()
        if node not in forward:
            forward.add(node)
            stack.extend([] if _enters(node) else node.all_input_nodes)
    order = [n for n in sharded.module.graph.nodes if n in forward]
    inputs = [n for n in order if _enters(n)]
    module = extract([n for n in order if not _enters(n)], inputs, [*wanted, *saved], "Forward")
    backward = None
    if gradients and sharded.gradients:
        backward = extract(list(calls), list(boundary), list(sharded.gradients), "Backward")
    return Program(
        module,
        backward,
        tuple(n.name for n in inputs),
        tuple(n.name for n in boundary),
        tuple(n.name for n in saved),
        places,
        _copies([n for n in dict.fromkeys((*inputs, *boundary)) if n.op != "placeholder" and _enters(n)]),
    )


def _enters(node: fx.Node) -> bool:
    """Whether forward and backward are given a value: a placeholder, or a copy that is kept from step to step."""
    return node.op == "placeholder" or kept_for_the_step(node)


def _copies(nodes: list[fx.Node]) -> Copies | None:
    """The graph that makes copies of parameters; None if there are none."""
    if not nodes:
        return None
    made, stack = set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in made:
            made.add(node)
            stack.extend(node.all_input_nodes)
    order = [n for n in nodes[0].graph.nodes if n in made]
    inputs = [n for n in order if n.op == "placeholder"]
    module = extract([n for n in order if n.op == "call_function"], inputs, nodes, "Copies")
    return Copies(module, tuple(n.name for n in inputs), tuple(n.name for n in nodes))
