"""What a loss needs of the scores of a vocabulary: batch, sequence, and words.

A rank that has a part of the words has a part of what is summed up, and so of the logarithm of the sum of their
exponentials: those of all ranks are made one by two small all-reduces, of the largest and of the sums.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

import autopar.ops.vocabulary  # noqa: F401  defines the operators
from autopar.sharding.axes import group_of
from autopar.sharding.layout import JOINT, Layout, Mesh
from autopar.sharding.rule import Hop, Local, OpCall, Passing, Rule, Strategy, layouts, rule
from autopar.sharding.rules.registry import register

aten = torch.ops.aten
functional = torch.ops._c10d_functional

#: The factor of the words in the forward, whose results are made whole where it is split.
WORDS = "words"


def _first(local: Local, weight: int) -> Any:
    """The number of the first word here, None where all are."""
    layout = local.operand_layouts[weight]
    if not layout.dims[0]:
        return None
    begin = local.starts(layout, local.call.operands[weight].shape)
    return local.emit(aten.slice.Tensor, begin, 0, 0, 1)


def _axis(rows: Layout) -> str | None:
    """The axis that splits the words, if any, or several by one name."""
    return JOINT.join(rows.dims[0]) or None


@register(torch.ops.autopar.token_scores.default)
def token_scores(call: OpCall) -> Rule:
    def localize(local: Local) -> Any:
        axis = _axis(local.operand_layouts[1])
        if axis is None:
            return local.default()
        found = local.default(arg3=_first(local, 1))
        lse, score = (local.emit(operator.getitem, found, i) for i in (0, 1))

        def reduced(x: Any, op: str) -> Any:
            sent = local.emit(functional.all_reduce.default, x, op, group_of(axis))
            return local.emit(functional.wait_tensor.default, sent)

        largest = reduced(lse, "max")
        part = local.emit(aten.exp.default, local.emit(aten.sub.Tensor, lse, largest))
        sums = reduced(local.emit(aten.stack.default, [part, score]), "sum")
        total, score = (local.emit(aten.select.int, sums, 0, i) for i in (0, 1))
        return [local.emit(aten.add.Tensor, local.emit(aten.log.default, total), largest), score]

    def passing(strategy: Strategy, mesh: Mesh) -> Passing | None:
        (_, rows, _), (out, _) = layouts(found, strategy, mesh)
        axis = _axis(rows)
        if axis is None:
            return None
        nbytes = out.local_numel(mesh, call.results[0].shape) * call.results[0].dtype.itemsize
        return Passing(1, tuple(Hop(axis, n * nbytes, None, kind="all_reduce") for n in (1, 2)))

    annotation, joint = "b s _, v _, b s -> b s, b s", {WORDS: ("v",)}
    found = rule(call, annotation, fixed=["v"], joint=joint, passing=passing, localize=localize)
    return found


@register(torch.ops.autopar.token_scores_backward.default)
def token_scores_backward(call: OpCall) -> Rule:
    return rule(
        call,
        "b s _, v _, b s, b s, b s, b s -> b s _, v _",
        reduced=dict.fromkeys(("b", "s", "v"), "sum"),
        localize=lambda local: local.default(arg3=_first(local, 1)),
    )
