"""Tags every forward value: kept for the backward, or made again there.

Invariant: after `tag`, each forward call node has ``meta["recompute"]``, and the partitioner chooses nothing. Made
again are views, which cost nothing: keeping base and view would keep the same bytes twice. Gathered weights never come
up: capture gives the backward its own use of every parameter, so each direction gathers for itself. Left alone, both of
PyTorch's partitioners would keep them, and ZeRO-3 would silently keep the whole model (DESIGN section 6).
"""

from __future__ import annotations

import operator

from torch import fx

from autopar.sharding.operators import VIEWS


def tag(graph: fx.Graph) -> None:
    """Tag the forward nodes of a sharded joint graph."""
    for node in graph.nodes:
        if node.op == "call_function" and not node.meta["backward"]:
            source = node.all_input_nodes[0] if node.target is operator.getitem else node
            node.meta["recompute"] = source.target in VIEWS
