"""Which tensors are rows of experts (`autopar.ops.experts`), and whether all done to them may be done to rows."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.ops.experts import MAKE_ROWS, TAKE_ROWS
from autopar.sharding.operators import ROUTED

aten = torch.ops.aten

#: Besides pointwise operators: those that look at the last dim alone, given the dim's place among their arguments.
_ALONG = {aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.cat.default: 1, aten.slice.Tensor: 1}
_POINTWISE = frozenset({aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default})


def mark_routed(graph: fx.Graph) -> None:
    """Note in ``meta`` which nodes are rows of experts.

    Rows are declared with a mean shape, so an operator that is given a size of their first two dims, or that depends on
    how many there are, would be wrong: those raise CaptureError.
    """
    rows: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in MAKE_ROWS:
            rows.add(node)
        elif node.target not in TAKE_ROWS and any(arg in rows for arg in node.all_input_nodes):
            if node.op == "output" or not _keeps(node):
                raise CaptureError(
                    f"{node.meta.get('module') or 'the model'} does something to the rows of its experts that depends "
                    "on how many there are",
                    expected="pointwise operators, and splits of the last dim, between the products of the experts",
                    found=str(node.target),
                    change="give the experts another activation or gate: this one cannot be captured yet",
                )
            rows.add(node)
    for node in rows:
        node.meta[ROUTED] = True


def _keeps(node: fx.Node) -> bool:
    """Whether an operator treats every row alike, however many there are."""
    target = node.target
    if target is operator.getitem or target in _POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ()):
        return True
    if target not in _ALONG:
        return False
    place = _ALONG[target]
    dim = node.args[place] if len(node.args) > place else 0
    return isinstance(dim, int) and dim in (2, -1)
