"""Keeps copies of parameters for longer than one use: what makes ZeRO 1 and 2, and SHARD_GRAD_OP, of ZeRO-3.

A copy is what redistributions (and the cast of a master) make of a parameter that rests. The shard pass emits one a
direction, made again in the backward. Invariant: `keep` changes no value; of a parameter whose copy is kept the
backward reads the forward's, which is tagged to be handed over (``meta["recompute"]`` is False), and if it is kept for
the step also ``meta["once"]``, by which `phases.cut` makes it once for all micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.passes.shard import COORDINATES


def keep(graph: fx.Graph, copies: Mapping[str, str]) -> None:
    """Keep copies in a tagged joint graph, in place; ``copies`` says by parameter how long they live, as
    `sharding.zero.COPIES`."""
    owners = _owners(graph)
    _share(graph, owners, {name for name, life in copies.items() if life != "use"})
    for node, name in owners.items():
        life = copies.get(name, "use")
        if node.op == "placeholder" or life == "use" or all(user in owners for user in node.users):
            continue
        node.meta["recompute"] = False
        node.meta["once"] = life == "step"


def kept_for_the_step(node: fx.Node) -> bool:
    """Whether `keep` has marked a node to be made once a step."""
    return bool(node.meta.get("once", False))


def _owners(graph: fx.Graph) -> dict[fx.Node, str]:
    """The parameters, and what is made by moving and casting one of them alone: node to parameter."""
    owners: dict[fx.Node, str] = {}
    constants = {node for node in graph.find_nodes(op="placeholder") if node.name == COORDINATES}
    for node in graph.nodes:
        if node.op == "placeholder" and "parameter" in node.meta:
            owners[node] = node.meta["parameter"]
        elif node.op == "call_function" and "piece" in node.meta and node.all_input_nodes:
            names = {owners.get(arg) for arg in node.all_input_nodes if arg not in constants}
            if not names:
                constants.add(node)
            elif len(names) == 1 and (name := names.pop()) is not None:
                owners[node] = name
    return owners


def _share(graph: fx.Graph, owners: dict[fx.Node, str], names: set[str]) -> None:
    """Let the backward read what the forward has made of the parameters ``names``."""
    made: dict[Any, fx.Node] = {}
    for node in list(owners):
        if node.op == "placeholder" or owners[node] not in names:
            continue
        key = (node.target, str(node.args), str(node.kwargs))
        first = made.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            del owners[node]
