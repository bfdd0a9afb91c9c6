"""Tags every forward value: kept for the backward, or made again there.

Invariant: after `tag`, each forward call node has ``meta["recompute"]``, and the partitioner chooses nothing. Made
again is what follows from parameters, buffers and constants alone, which includes every gathered weight: left to itself
a partitioner keeps those, and ZeRO-3 silently keeps the whole model (DESIGN section 6). Views are made again too: they
cost nothing, and keeping base and view would keep the same bytes twice.
"""

from __future__ import annotations

import operator

from torch import fx

from autopar.sharding.operators import VIEWS


def tag(graph: fx.Graph, kept_inputs: set[fx.Node]) -> None:
    """Tag the nodes of a sharded joint graph. ``kept_inputs`` are the placeholders that stay the same between forward
    and backward whatever the batch: parameters, buffers, coordinates."""
    free: set[fx.Node] = set(kept_inputs)
    for node in graph.nodes:
        if node.op != "call_function" or node.meta["backward"]:
            continue
        if all(arg in free for arg in node.all_input_nodes):
            free.add(node)
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        node.meta["recompute"] = node in free or source.target in VIEWS
