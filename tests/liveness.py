"""Bytes that are alive while an emitted graph runs, node by node, by the sizes of its tensors.

A graph frees every value after its last use (`runtime.release`), so its order says when each storage is born and when
it dies; views share the storage of what they look at. Tensors are on the meta device: nothing is computed. What a
kernel allocates inside and frees again is not seen, nor what the allocator rounds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx

from autopar._compat import pytree, storage_key
from autopar.passes.collectives import KINDS, REDUCE_SCATTER
from autopar.sharding.buckets import is_overwritten
from autopar.solver.peaks import TRANSIENTS


@dataclass(frozen=True)
class Life:
    """``peak`` are the bytes by kind at the moment when most are alive, ``outputs`` what the graph returns, on the meta
    device."""

    peak: dict[str, int]
    outputs: tuple[Any, ...]


def _evaluate(graph: fx.Graph, given: Mapping[str, Tensor]) -> dict[fx.Node, Any]:
    """Every value of the graph on the meta device."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name]
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
            target: Any = node.target
            same = target is wait or is_overwritten(node)  # waiting hands on what it waits for
            values[node] = args[0] if same else target(*args, **kwargs)
    return values


@dataclass
class _Storage:
    """One storage: its bytes, its kind (None: not counted), and the places of the nodes between which it is alive."""

    nbytes: int
    kind: str | None
    born: int
    died: int


def _last_uses(graph: fx.Graph) -> dict[fx.Node, int]:
    """The place of the last user of every node; an output lives to the end, and what a collective reads until it is
    waited for, but for a reduce-scatter's, which Gloo copies."""
    place = {node: i for i, node in enumerate(graph.nodes)}

    def done(user: fx.Node) -> int:
        held = user.target in KINDS and user.target is not REDUCE_SCATTER and user.users
        return min(place[wait] for wait in user.users) if held else place[user]

    return {node: max((done(user) for user in node.users), default=i) for node, i in place.items()}


def _storages(
    graph: fx.Graph, values: Mapping[fx.Node, Any], entering: Mapping[str, str], leaving: Mapping[str, str]
) -> list[_Storage]:
    last, returned = _last_uses(graph), set(graph.output_node().all_input_nodes)
    found: dict[int, _Storage] = {}
    for i, (node, value) in enumerate(values.items()):
        for tensor in pytree.tree_leaves(value):
            if not isinstance(tensor, Tensor):
                continue
            kind = entering.get(node.name) if node.op == "placeholder" else TRANSIENTS
            storage = _Storage(tensor.untyped_storage().nbytes(), kind, i, last[node])
            storage = found.setdefault(storage_key(tensor), storage)
            storage.died = max(storage.died, last[node])
            if storage.kind == TRANSIENTS and node in returned:
                storage.kind = leaving.get(node.name, TRANSIENTS)
    return list(found.values())


def life(graph: fx.Graph, given: Mapping[str, Tensor], entering: Mapping[str, str], leaving: Mapping[str, str]) -> Life:
    """Run ``graph`` on meta tensors ``given`` by placeholder name.

    ``entering`` says of which kind the bytes of a placeholder are, by name; it dies after its last use, and others are
    not counted. ``leaving`` gives the kinds of what the graph returns, by the name of the node; all else is
    `TRANSIENTS`.
    """
    values = _evaluate(graph, given)
    end = len(values) + 1
    change: dict[str, npt.NDArray[np.int64]] = {}
    for storage in _storages(graph, values, entering, leaving):
        if storage.kind is not None:
            steps = change.setdefault(storage.kind, np.zeros(end + 1, dtype=np.int64))
            steps[storage.born] += storage.nbytes
            steps[storage.died + 1] -= storage.nbytes
    alive = {kind: np.cumsum(steps) for kind, steps in change.items()}
    moment = int(np.argmax(sum(alive.values(), np.zeros(end + 1, dtype=np.int64))))
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, tuple)
    return Life(
        {kind: int(levels[moment]) for kind, levels in alive.items()},
        tuple(values[n] if isinstance(n, fx.Node) else None for n in outputs),
    )
