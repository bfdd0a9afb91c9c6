"""Lets operators write their result over an operand that is of no use afterwards.

Invariant: the graph returns the same values, and writes to nothing that it is given, that it returns besides, or that a
collective reads. Shapes and strides decide only whether it is worth it, never whether it is right: whoever may return a
view of what it is given counts as one, even where these strides need a copy.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.passes.collectives import KINDS, aten
from autopar.passes.shaped import Shaped
from autopar.passes.sums import base

#: Operators with the one that writes over an operand, and the places of those that it may write over.
OVER: dict[OpOverload, tuple[OpOverload, tuple[int, ...]]] = {
    aten.add.Tensor: (aten.add_.Tensor, (0, 1)),
    aten.addcmul.default: (aten.addcmul_.default, (0,)),
    aten.addmm.default: (aten.addmm_.default, (0,)),
    aten.div.Scalar: (aten.div_.Scalar, (0,)),
    aten.div.Tensor: (aten.div_.Tensor, (0,)),
    aten.exp.default: (aten.exp_.default, (0,)),
    aten.mul.Scalar: (aten.mul_.Scalar, (0,)),
    aten.mul.Tensor: (aten.mul_.Tensor, (0, 1)),
    aten.neg.default: (aten.neg_.default, (0,)),
    aten.sub.Tensor: (aten.sub_.Tensor, (0,)),
}


class Lives:
    """Who reads the storages of a graph last."""

    def __init__(self, graph: fx.Graph) -> None:
        self._base: dict[fx.Node, fx.Node] = {}
        self._stands: dict[fx.Node, fx.Node] = {}
        self._last: dict[fx.Node, fx.Node] = {}
        self._kept = set[fx.Node]()
        for node in graph.nodes:
            for arg in node.all_input_nodes:
                source = self.of(arg)
                self._last[source] = node
                if node.op == "output" or node.target in KINDS:  # a collective reads on while the graph goes on
                    self._kept.add(source)

    def of(self, node: fx.Node) -> fx.Node:
        """The node whose storage ``node`` may look at: one that is given or computed."""
        source = self._base.get(node)
        if source is None:
            source = self._base[node] = base(node)
        return self._stands.get(source, source)

    def ends(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether nobody needs the storage of ``node``, which the graph itself has made, after ``reader``, and
        ``reader`` looks at it once."""
        source = self.of(node)
        if source.op != "call_function" or source in self._kept or self._last[source] is not reader:
            return False
        made = isinstance(source.target, OpOverload) or source.target is operator.getitem
        return made and sum(self.of(arg) is source for arg in reader.all_input_nodes) == 1

    def hand_over(self, node: fx.Node, operand: fx.Node) -> None:
        """``node`` writes over ``operand`` from now on, and has no storage of its own."""
        source = self.of(operand)
        self._stands[node] = source
        if node in self._kept:
            self._kept.add(source)
        if node in self._last:
            self._last[source] = self._last[node]


def _operand(shaped: Shaped, lives: Lives, node: fx.Node, places: tuple[int, ...]) -> int | None:
    """The place of the operand that ``node`` may write over; None if there is none."""
    for place in places:
        x = node.args[place]
        if not isinstance(x, fx.Node) or not shaped.alike(x, node) or not lives.ends(x, node):
            continue
        own, whole, result = shaped.values[x], shaped.values[lives.of(x)], shaped.values[node]
        if isinstance(whole, torch.Tensor) and whole.numel() == own.numel() and own.stride() == result.stride():
            return place
    return None


def reuse(shaped: Shaped) -> None:
    """Rewrite a graph in place."""
    lives = Lives(shaped.graph)
    for node in shaped.calls():
        if node.target not in OVER or node.kwargs:
            continue
        target, places = OVER[node.target]
        place = _operand(shaped, lives, node, places)
        if place is None:
            continue
        operand = node.args[place]
        assert isinstance(operand, fx.Node)
        lives.hand_over(node, operand)
        if place == 1:  # sums and products alone are written over their second operand
            node.args = (operand, node.args[0])
        node.target = target
