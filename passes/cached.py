"""Has a step of a generation write keys and values where they rest.

Invariant: the results are the same, and what the graph is given as a cache holds afterwards what it returned before.
Only for graphs whose caches belong to whoever runs them.
"""

from __future__ import annotations

import torch
from torch import fx

WRITE, WRITE_IN_PLACE = torch.ops.autopar.cache_write.default, torch.ops.autopar.cache_write_.default


def in_place(module: fx.GraphModule) -> None:
    """Rewrite ``module``, whose every write is to a tensor that it is given and reads nowhere else. Raises ValueError
    where one is not, which would be lost."""
    graph = module.graph
    for node in list(graph.find_nodes(op="call_function", target=WRITE)):
        cache = node.args[0]
        if cache.op != "placeholder" or len(cache.users) > 1:
            raise ValueError(f"{node} writes to {cache}, which is no input of its own")
        with graph.inserting_before(node):
            graph.call_function(WRITE_IN_PLACE, node.args).meta = dict(node.meta)
        node.replace_all_uses_with(cache, delete_user_cb=lambda user: user.target is not WRITE_IN_PLACE)
        graph.erase_node(node)
    graph.lint()
    module.recompile()
