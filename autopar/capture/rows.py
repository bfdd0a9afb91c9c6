"""Normal form of tokens that a model merges: batch and sequence stay two dims where each row is treated alike.

A loss is usually taken of ``logits.view(-1, vocabulary)``: the view makes one dim of batch and sequence, of which only
the batch can be split, so that with the sequence split the logits would have to be gathered. Here the view moves behind
the operators that treat every row by itself (`_row_by_row`), up to where their results are summed or opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar._compat import PlainAOTInput
from autopar.capture.graph import spec_of

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
#: Reductions that take a list of dims.
_OVER_DIMS = {aten.amax.default, aten.amin.default, aten.sum.dim_IntList, aten.mean.dim}
#: Operators with one dim as an argument, and where it stands.
_ALONG_DIM: dict[Any, int] = {aten.gather.default: 1, aten.squeeze.dim: 1, aten.unsqueeze.default: 1}
_OF_ALL = {aten.sum.default, aten.mean.default}


def _shape(node: fx.Node) -> tuple[int, ...]:
    spec = spec_of(node)
    assert spec is not None, node
    return spec.shape


def _token_shapes(graph: fx.Graph) -> set[tuple[int, int]]:
    """Batch and sequence of every input that has both."""
    inputs = (n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta.get("desc"), PlainAOTInput))
    shapes = (_shape(n)[:2] for n in inputs if spec_of(n) is not None)
    return {(shape[0], shape[1]) for shape in shapes if len(shape) == 2 and min(shape) > 1}


@dataclass
class _Rows:
    """The rewrite of one graph. ``apart`` has for a tensor [b * s, ...] the same as [b, s, ...]."""

    graph: fx.Graph
    tokens: set[tuple[int, int]]
    apart: dict[fx.Node, fx.Node] = field(default_factory=dict)
    merged: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if self._merges(node):
                (self.apart[node],) = node.all_input_nodes
            elif any(arg in self.apart for arg in node.all_input_nodes):
                self._rewrite(node)
        self.graph.eliminate_dead_code()

    def _merges(self, node: fx.Node) -> bool:
        """Whether a node is a view that merges batch and sequence and nothing else."""
        if node.target not in _VIEWS:
            return False
        source, shape = _shape(node.all_input_nodes[0]), _shape(node)
        return source[:2] in self.tokens and shape == (source[0] * source[1], *source[2:])

    def _rewrite(self, node: fx.Node) -> None:
        """Let ``node`` read its operands with batch and sequence apart, or if it cannot have them merged again."""
        if node.target in _OF_ALL:
            (arg,) = node.all_input_nodes
            node.replace_input_with(arg, self.apart[arg])
            return
        tokens = {_shape(self.apart[arg])[:2] for arg in node.all_input_nodes if arg in self.apart}
        if len(tokens) == 1 and node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
            (pair,) = tokens
            with self.graph.inserting_before(node):
                if (found := _row_by_row(node, self._opener(node, pair))) is not None:
                    self._replace(node, *found, pair)
                    return
        for arg in node.all_input_nodes:
            if arg in self.apart:
                node.replace_input_with(arg, self._merge(arg))

    def _replace(self, node: fx.Node, args: tuple[Any, ...], rows: bool, pair: tuple[int, ...]) -> None:
        """Put the same operator with ``args`` in the place of ``node``; ``rows`` if its result has rows too."""
        twin = self.graph.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]
        shape = (*pair, *_shape(node)[1:]) if rows else _shape(node)
        twin.meta = {**node.meta, "val": node.meta["val"].new_empty(shape)}
        if rows:
            self.apart[node] = twin
        else:
            node.replace_all_uses_with(twin)

    def _opener(self, node: fx.Node, pair: tuple[int, ...]) -> Callable[[Any], Any]:
        """Gives an operand of ``node`` as it is read with batch and sequence apart; None if it has no such form."""
        ndim = max(len(_shape(arg)) for arg in node.all_input_nodes if arg in self.apart)

        def open_(arg: Any) -> Any:
            if not isinstance(arg, fx.Node):
                return arg
            if arg in self.apart:
                return self.apart[arg] if len(_shape(arg)) == ndim else None
            shape = _shape(arg)
            if len(shape) < ndim or shape[0] == 1:
                return arg  # broadcast to every row
            return self._view(arg, (*pair, *shape[1:]), arg)

        return open_

    def _merge(self, node: fx.Node) -> fx.Node:
        """A tensor whose operators were rewritten, with its rows as one dim."""
        if node not in self.merged:
            twin = self.apart[node]
            with self.graph.inserting_after(node):
                self.merged[node] = self._view(twin, _shape(node), node)
        return self.merged[node]

    def _view(self, source: fx.Node, shape: Sequence[int], like: fx.Node) -> fx.Node:
        view = self.graph.call_function(aten.view.default, (source, list(shape)))
        view.meta = {**like.meta, "val": source.meta["val"].new_empty(shape)}
        return view


def _row_by_row(node: fx.Node, open_: Callable[[Any], Any]) -> tuple[tuple[Any, ...], bool] | None:
    """The arguments of ``node`` with rows opened into batch and sequence, and whether its result has rows; None for an
    operator that does not treat every row alike."""
    target: Any = node.target
    first = node.args[0] if node.args else None
    if target in _VIEWS:
        return _viewed(node, open_(first))
    pointwise = target is aten._to_copy.default or torch.Tag.pointwise in getattr(target, "tags", ())
    along = _ALONG_DIM.get(target)
    if not (pointwise or along is not None or target in _OVER_DIMS or target is aten.expand.default):
        return None
    args: list[Any] = [open_(arg) for arg in node.args]
    if any(new is None and old is not None for new, old in zip(args, node.args, strict=True)):
        return None
    ndim = len(_shape(first)) if isinstance(first, fx.Node) else 0
    if pointwise:
        return (tuple(args), True) if len(_shape(node)) == max(map(len, map(_shape, node.all_input_nodes))) else None
    if along is not None:
        dim = args[along] % (ndim + (target is aten.unsqueeze.default))
        args[along] = dim + 1
        return (tuple(args), True) if dim > 0 else None
    if target is aten.expand.default:
        shape = _shape(node)
        args[1] = [*_shape(args[0])[:2], *shape[1:]]
        return (tuple(args), True) if len(shape) == ndim else None
    dims = sorted(d % ndim for d in args[1]) if len(args) > 1 and args[1] else list(range(ndim))
    keeps = len(args) > 2 and args[2]
    args[1:2] = [[*([0, 1] if dims[0] == 0 else []), *(d + 1 for d in dims if d > 0)]]
    return (tuple(args), dims[0] > 0) if dims[0] > 0 or not keeps else None


def _viewed(node: fx.Node, opened: fx.Node) -> tuple[tuple[Any, ...], bool] | None:
    """A view of rows: one that opens them, or one that leaves them alone."""
    shape, (batch, length) = _shape(node), _shape(opened)[:2]
    if shape[:2] == (batch, length):
        return (opened, list(shape)), False
    if shape and shape[0] == batch * length:
        return (opened, [batch, length, *shape[1:]]), True
    return None


def tokens_apart(graph: fx.Graph) -> None:
    """Keep batch and sequence apart where every row is treated alike (see the module)."""
    _Rows(graph, _token_shapes(graph)).run()
