"""A graph whose values are known by shape: what `lower` needs to see before it rewrites anything.

Values are on the meta device, so nothing is computed. They are those of one run; shapes and dtypes are the same in
every other, strides of what follows from a batch need not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import OpOverload, pytree, storage_key
from autopar.ops.rows import TAKE_ROWS
from autopar.passes.collectives import KINDS, WAIT
from autopar.sharding.operators import ROUTED


def _on_meta(value: Any) -> Any:
    """Tensors in ``value`` on the meta device, with their strides."""

    def empty(t: Tensor) -> Tensor:
        return t if t.is_meta else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    return pytree.tree_map_only(Tensor, empty, value)


def _all_routed(users: Iterable[fx.Node]) -> bool:
    """Whether there are readers, and all of them have to do with rows of experts."""
    return bool(users) and all(user.meta.get(ROUTED) for user in users)


def _one_row(value: Any) -> Any:
    """Rows [1, P, H], or as they are declared, as a single one; other values as they are."""
    is_rows = isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()
    return value.new_empty(1, 1, value.shape[2]) if is_rows else value


class Shaped:
    """``graph`` with the ``values`` of its nodes when it runs on ``inputs``; kept up to date by `emit` and `replace`.

    Nodes with rows of experts, whose number is another in every step, are not to be touched: `tensor` is None for them.
    Their values are as if there were a single row: what is made of rows depends on their last dim alone.
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[Any]) -> None:
        self.graph = graph
        self.values: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                value = _on_meta(next(given))
                self.values[node] = _one_row(value) if _all_routed(node.users) else value
            elif node.op == "call_function":
                value = self._value(node.target, node.args, node.kwargs)
                gives_rows = node.meta.get(ROUTED) and node.target not in TAKE_ROWS
                self.values[node] = pytree.tree_map(_one_row, value) if gives_rows else value

    def _value(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = fx.node.map_arg((args, kwargs), self.values.__getitem__)
        if target is WAIT:  # what it waits for
            return args[0]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return _on_meta(target(*args, **kwargs))

    def calls(self) -> list[fx.Node]:
        """The calls of operators that may be rewritten, in order: no collectives, and nothing with rows of experts."""
        return [node for node in self.graph.nodes if self._is_open(node)]

    def _is_open(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.meta.get(ROUTED) or node.target in KINDS or node.target is WAIT:
            return False
        return isinstance(node.target, OpOverload) and isinstance(self.values[node], Tensor)

    def tensor(self, value: Any) -> Tensor | None:
        """The tensor that an argument of a call stands for; None if it is none."""
        if not isinstance(value, fx.Node) or value.meta.get(ROUTED):
            return None
        found = self.values.get(value)
        return found if isinstance(found, Tensor) else None

    def alike(self, value: Any, node: fx.Node) -> bool:
        """Whether an argument has the shape and dtype of a call's result."""
        a, b = self.tensor(value), self.values[node]
        return a is not None and a.shape == b.shape and a.dtype == b.dtype

    def readers(self) -> dict[int, list[int]]:
        """The places in the graph of those that read a storage, by its `storage_key`; views of it are none."""
        found: dict[int, list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            own = self.tensor(node)
            for arg in node.all_input_nodes:
                read = self.tensor(arg)
                if read is not None and (own is None or storage_key(own) != storage_key(read)):
                    found.setdefault(storage_key(read), []).append(i)
        return found

    def emit(self, before: fx.Node, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """A call in the place of ``before``, whose ``meta`` it takes over."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = dict(before.meta)
        self.values[node] = self._value(target, args, kwargs)
        return node

    def replace(self, node: fx.Node, other: fx.Node) -> None:
        """Let ``other`` stand for ``node``."""
        node.replace_all_uses_with(other)
        self.graph.erase_node(node)
