"""Puts the nodes of a graph in a new order, as near to a wanted one as their dependencies allow."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from torch import fx


def reorder(graph: fx.Graph, wanted: Mapping[fx.Node, tuple[float, ...]]) -> None:
    """Order the calls of ``graph`` by ``wanted``, ties in the order in which they stand; a call comes after its
    operands even where it is wanted before them. Placeholders stay in front.

    Invariant: the graph computes the same values.
    """
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: i for i, node in enumerate(calls)}
    missing = {node: sum(arg in place for arg in node.all_input_nodes) for node in calls}
    ready = [(wanted[node], place[node]) for node in calls if missing[node] == 0]
    heapq.heapify(ready)
    end = graph.output_node()
    while ready:
        node = calls[heapq.heappop(ready)[1]]
        end.prepend(node)
        for user in node.users:
            if user is not end:
                missing[user] -= 1
                if missing[user] == 0:
                    heapq.heappush(ready, (wanted[user], place[user]))
