"""Binds an emitted graph to this process: axis names to process groups, the device of the trace to the one that runs.

Invariant: nothing else changes. Graphs are compared between ranks before they are bound.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar._compat import pytree
from autopar.passes.collectives import KINDS, axis_of, group_argument


def bind(module: fx.GraphModule, groups: Mapping[str, str], device: torch.device) -> None:
    """Bind ``module`` in place; ``groups`` gives the process group name of every axis."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in KINDS:
            node.args = (*node.args[:-1], groups[axis_of(group_argument(node))])
        node.args, node.kwargs = pytree.tree_map_only(torch.device, lambda _: device, (node.args, node.kwargs))
    module.recompile()
