"""Matrix products: all of their factors can be split, the contracted ones leaving partial sums."""

from __future__ import annotations

from typing import Any

from autopar.sharding.rule import Local, OpCall, Rule, make_rule, rule
from autopar.sharding.rules.common import aligned, aten, contiguous_args, linear_args, names, once
from autopar.sharding.rules.contract import localize_einsum
from autopar.sharding.rules.registry import register


@register(aten.addmm.default)
def addmm(call: OpCall) -> Rule:
    result = (("m",), ("n",))
    operands = [aligned(call.operands[0], result, call.results[0].shape), (("m",), ("k",)), (("k",), ("n",))]
    return make_rule(
        call,
        operands,
        [result],
        reduced={"k": "sum"},
        linear=linear_args(call, (0, 1), (0, 2)),
        localize=lambda local: local.default(arg0=once(local, 0)),
    )


@register(aten.baddbmm.default)
def baddbmm(call: OpCall) -> Rule:
    result = (("b",), ("m",), ("n",))
    first = aligned(call.operands[0], result, call.results[0].shape)
    return make_rule(
        call,
        [first, (("b",), ("m",), ("k",)), (("b",), ("k",), ("n",))],
        [result],
        reduced={"k": "sum"},
        linear=linear_args(call, (0, 1), (0, 2)),
        localize=lambda local: local.default(arg0=once(local, 0)),
    )


@register(aten.bmm.default)
def bmm(call: OpCall) -> Rule:
    return rule(call, "b m k, b k n -> b m n", reduced={"k": "sum"}, linear=linear_args(call, (0,), (1,)))


@register(aten._cdist_forward.default)
def cdist(call: OpCall) -> Rule:
    """(x1 [..., P, M], x2 [..., R, M], p, mode) -> distances [..., P, R]"""
    outer = names("b", len(call.results[0].shape) - 2)
    return make_rule(call, [(*outer, ("p",), ()), (*outer, ("r",), ())], [(*outer, ("p",), ("r",))])


@register(aten._cdist_backward.default)
def cdist_backward(call: OpCall) -> Rule:
    """(grad, x1, x2, p, distances) -> gradient of x1"""
    outer = names("b", len(call.results[0].shape) - 2)
    first, distances = (*outer, ("p",), ()), (*outer, ("p",), ("r",))
    return make_rule(
        call,
        [distances, first, (*outer, ("r",), ()), distances],
        [first],
        reduced={"r": "sum"},
        linear=linear_args(call, (0,)),
        localize=lambda local: local.default(**contiguous_args(local, 0, 1, 2, 4)),
    )


@register(aten.dot.default, aten.vdot.default)
def dot(call: OpCall) -> Rule | None:
    if call.results[0].dtype.is_complex:
        return None
    return rule(call, "k, k -> ", reduced={"k": "sum"}, linear=linear_args(call, (0,), (1,)))


@register(aten.einsum.default)
def einsum(call: OpCall) -> Rule | None:
    equation = call.args[0].replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        return None
    terms = left.split(",")
    sizes: dict[str, int] = {}
    for term, spec in zip(terms, call.operands, strict=True):
        for letter, size in zip(term, spec.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, size)) if size else 0
    diagonal = {f for term in (*terms, right) for f in term if term.count(f) > 1}
    # einsum broadcasts dims of size 1
    operands = [
        tuple((f,) if size == sizes[f] and f not in diagonal else () for f, size in zip(term, spec.shape, strict=True))
        for term, spec in zip(terms, call.operands, strict=True)
    ]
    result = tuple(() if f in diagonal else (f,) for f in right)
    reduced = {f: "sum" for f in sizes if f not in right and f not in diagonal}
    linear = [(i,) for i, spec in enumerate(call.operands) if spec.dtype.is_floating_point]
    return make_rule(call, operands, [result], reduced=reduced, linear=linear, localize=localize_einsum)


@register(aten.linear.default)
def linear(call: OpCall) -> Rule:
    outer = names("d", len(call.operands[0].shape) - 1)
    operands = [(*outer, ("k",)), (("n",), ("k",)), (("n",),)][: len(call.operands)]
    with_bias = len(operands) == 3

    def localize(local: Local) -> Any:
        return local.default(arg2=once(local, 2)) if with_bias else local.default()

    groups = linear_args(call, (0, 2), (1, 2)) if with_bias else linear_args(call, (0,), (1,))
    return make_rule(call, operands, [(*outer, ("n",))], reduced={"k": "sum"}, linear=groups, localize=localize)


@register(aten.mm.default)
def mm(call: OpCall) -> Rule:
    return rule(call, "m k, k n -> m n", reduced={"k": "sum"}, linear=linear_args(call, (0,), (1,)))


@register(aten.mv.default)
def mv(call: OpCall) -> Rule:
    return rule(call, "m k, k -> m", reduced={"k": "sum"}, linear=linear_args(call, (0,), (1,)))
