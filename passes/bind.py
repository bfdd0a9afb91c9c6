"""Binds an emitted graph to this process: axis names to process groups, the device of the trace to the one that runs,
and who sends to whom in a group to what this rank sends and gets.

Invariant: nothing else changes. Graphs are compared between ranks before they are bound.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar._compat import pytree
from autopar.passes.collectives import ALL_TO_ALL, KINDS, PERMUTE, axis_of, group_argument


def bind(
    module: fx.GraphModule, groups: Mapping[str, str], places: Mapping[str, int], device: torch.device
) -> None:
    """Bind ``module`` in place; ``groups`` gives the process group name of every axis, ``places`` this rank's place in
    it."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is PERMUTE:
            _as_all_to_all(node, places[axis_of(group_argument(node))])
        if node.target in KINDS:
            node.args = (*node.args[:-1], groups[axis_of(group_argument(node))])
        node.args, node.kwargs = pytree.tree_map_only(torch.device, lambda _: device, (node.args, node.kwargs))
    module.recompile()


def _as_all_to_all(node: fx.Node, place: int) -> None:
    """A permutation as the all-to-all of the rank in ``place``: one piece to whom it sends, one from whom sends it."""
    x, rows, to, group = node.args
    assert isinstance(to, list | tuple)
    received = [rows if target == place else 0 for target in to]
    sent = [rows if rank == to[place] else 0 for rank in range(len(to))]
    node.target, node.args = ALL_TO_ALL, (x, received, sent, group)
