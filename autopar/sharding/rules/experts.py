"""Mixtures of experts: experts and tokens.

Routed rows (`autopar.ops.experts`) have a slot for every expert ``e`` and token. The tokens [T] are ``(c g)``: ``c`` is
what a declared slot counts and what is split, ``g`` the tokens that share one. Split by experts, a rank has the rows of
its experts, and what is combined from them is a partial sum; split by tokens, those of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import autopar.ops.experts
import autopar.ops.gated  # noqa: F401  both define operators
from autopar.sharding.rule import Arg, Local, OpCall, Rule, rule
from autopar.sharding.rules.common import aten, linear_args, names, once, start_of, takes_every
from autopar.sharding.rules.registry import register

#: How tokens come to experts that are spread over ranks: each to those of its experts, or all to all.
DISPATCHERS = ("exchange", "gather")
#: The operators in which tokens and rows of experts meet.
MEETINGS = frozenset(
    {
        torch.ops.autopar.dispatch.default,
        torch.ops.autopar.combine.default,
        torch.ops.autopar.combine_weights_backward.default,
    }
)


def _rule(
    call: OpCall,
    annotation: str,
    *,
    index: int,
    experts: int | None = None,
    added: int | None = None,
    reduced: Sequence[str] = (),
    linear: Sequence[Sequence[int]] = (),
) -> Rule:
    """The rule of an operator whose argument ``index`` has the experts that tokens go to, and whose argument
    ``experts``, if it has one, how many there are. A rank that has some of the experts counts from its first one: the
    index of others is then outside. Argument ``added`` counts once in a sum over ranks; ``linear`` are places of
    arguments, as in `linear_args`."""
    terms = [term.split() for term in annotation.replace("->", ",").split(",")]
    at = next(i for i, term in enumerate(terms) if term[0] == "e")

    def localize(local: Local) -> Any:
        layouts, specs = (*local.operand_layouts, *local.result_layouts), (*call.operands, *call.results)
        layout, shape = layouts[at], specs[at].shape
        replaced: dict[str, Any] = {}
        if experts is not None:
            replaced[f"arg{experts}"] = layout.local_shape(local.mesh, shape)[0]
        if added is not None:
            replaced[f"arg{added}"] = once(local, added)
        if layout.dims[0]:
            whole = local.substitute(call.args[index])
            own = local.emit(aten.sub.Tensor, whole, start_of(local, layout, shape, 0))
            replaced[f"arg{index}"] = own
        return local.default(**replaced)

    return rule(
        call,
        annotation,
        reduced=dict.fromkeys(reduced, "sum"),
        fixed=("g", "t") if "t" in annotation.split() else ("g",),
        linear=linear_args(call, *linear),
        localize=localize,
    )


def _with_weights(call: OpCall, annotation: str) -> str:
    """The annotation, of an operator that may be given weights [T, K] behind its second tensor."""
    left, right = annotation.split(" -> ")
    return f"{left}, (c g) _ -> {right}" if isinstance(call.args[2], Arg) else annotation


@register(torch.ops.autopar.dispatch.default)
def dispatch(call: OpCall) -> Rule:
    """(x, index, weights, experts, group) -> rows"""
    return _rule(call, _with_weights(call, "(c g) h, (c g) _ -> e c h"), index=1, experts=3, linear=[(0,)])


@register(torch.ops.autopar.combine.default)
def combine(call: OpCall) -> Rule:
    """(rows, index, weights, experts, group) -> [T, H]"""
    annotation = _with_weights(call, "e c h, (c g) _ -> (c g) h")
    return _rule(call, annotation, index=1, experts=3, reduced="e", linear=[(0,)])


@register(torch.ops.autopar.combine_weights_backward.default)
def combine_weights_backward(call: OpCall) -> Rule:
    """(grad, rows, index, experts, group) -> [T, K]"""
    annotation = "(c g) h, e c h, (c g) _ -> (c g) _"
    return _rule(call, annotation, index=2, experts=3, reduced="eh", linear=[(0,), (1,)])


@register(torch.ops.autopar.expert_counts.default)
def expert_counts(call: OpCall) -> Rule:
    """(index, experts) -> [E]"""
    return rule(call, "c _ -> _", reduced={"c": "sum"})


@register(torch.ops.autopar.put_into_zeros.default)
def put_into_zeros(call: OpCall) -> Rule:
    """(x, size, start, end, step)"""
    dims = " ".join(names[0] for names in names("d", len(call.operands[0].shape) - 1))
    _, size, start, end, step = call.args
    if not takes_every(size, start, end, step):
        return rule(call, f"{dims} _ -> {dims} _", linear=linear_args(call, (0,)))

    def localize(local: Local) -> Any:
        return local.default(arg1=local.result_shape()[-1])

    return rule(
        call, f"{dims} i -> {dims} (i s)", fixed=("s",), linear=linear_args(call, (0,)), localize=localize
    )


@register(torch.ops.autopar.gated_mm.default)
def gated_mm(call: OpCall) -> Rule:
    """(rows, weight, index) -> (rows, rows)"""
    return _rule(call, "e c h, e t i h, (c g) _ -> e c i, e c i", index=2, reduced="h", linear=[(0,), (1,)])


@register(torch.ops.autopar.gated_mm_backward.default)
def gated_mm_backward(call: OpCall) -> Rule:
    """(rows, rows, weight, index) -> rows"""
    return _rule(call, "e c i, e c i, e t i h, (c g) _ -> e c h", index=3, reduced="i", linear=[(0, 1), (2,)])


@register(torch.ops.autopar.gated_outer.default)
def gated_outer(call: OpCall) -> Rule:
    """(rows, rows, rows, index, experts) -> [E, 2, I, H]"""
    annotation = "e c i, e c i, e c h, (c g) _ -> e t i h"
    return _rule(call, annotation, index=3, experts=4, reduced="c", linear=[(0, 1), (2,)])


@register(torch.ops.autopar.grouped_mm.default)
def grouped_mm(call: OpCall) -> Rule:
    """(rows, weight, index) -> rows"""
    return _rule(call, "e c i, e i o, (c g) _ -> e c o", index=2, reduced="i", linear=[(0,), (1,)])


@register(torch.ops.autopar.grouped_outer.default)
def grouped_outer(call: OpCall) -> Rule:
    """(rows, rows, index, experts) -> [E, I, O]"""
    annotation = "e c i, e c o, (c g) _ -> e i o"
    return _rule(call, annotation, index=2, experts=3, reduced="c", linear=[(0,), (1,)])


@register(torch.ops.autopar.grouped_bias.default)
def grouped_bias(call: OpCall) -> Rule:
    """(rows, bias, index) -> rows"""
    return _rule(call, "e c o, e o, (c g) _ -> e c o", index=2, added=1, linear=[(0, 1)])


@register(torch.ops.autopar.grouped_sum.default)
def grouped_sum(call: OpCall) -> Rule:
    """(rows, index, experts) -> [E, O]"""
    return _rule(call, "e c o, (c g) _ -> e o", index=1, experts=2, reduced="c", linear=[(0,)])
