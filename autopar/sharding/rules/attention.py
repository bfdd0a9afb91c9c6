"""Attention: batch, heads and queries."""

from __future__ import annotations

from typing import Any

import torch

import autopar.ops.attention  # noqa: F401  defines the operators
from autopar.sharding.layout import Layout
from autopar.sharding.rule import Arg, Dims, Local, OpCall, Rule, make_rule
from autopar.sharding.rules.common import aligned
from autopar.sharding.rules.registry import register

_FORWARD = ("q", "k", "v", "key_mask", "bias", "seed", "starts", "scale", "causal", "window")
#: Where ``extent`` stands among the arguments after those of `_FORWARD` and `_BACKWARD`: spread, softcap, dropout and
#: stream come before it.
_AFTER_WINDOW = 4
_BACKWARD = ("grad_out", "q", "k", "v", "key_mask", "bias", "out", "lse", "seed", "starts", "scale", "causal", "window")
#: The operators of these rules.
ATTENTION = frozenset(
    {
        torch.ops.autopar.attention.default,
        torch.ops.autopar.attention_backward.default,
        torch.ops.autopar.attention_bias_backward.default,
    }
)
#: The factors of its heads: groups that share a key and value head, and the query heads of a group.
HEADS = frozenset({"g", "r"})
#: The factor of queries that depend on their position. A piece of them computes as many scores as if it came last, and
#: with causality only half of all scores are worth computing, so only the axis of the sequence is to split it.
POSITIONS = "positions"
#: Factors that only some gradients have: k's and v's lack those of the queries, a broadcast bias's any of them.
_SUMMED = dict.fromkeys(("b", "g", "r", "s", POSITIONS), "sum")


def _attention(call: OpCall, names: tuple[str, ...], results: tuple[str, ...]) -> Rule:
    given = dict(zip(names, call.args, strict=False))
    (batch, heads, queries, _), kv = (call.operands[given[name].index].shape for name in ("q", "k"))
    keys, kv_heads = kv[2], kv[1]
    # The split of a shared head reaches k and v only by its group, so their gradients are summed over the group.
    s = POSITIONS if given["causal"] or given["window"] else "s"
    query: Dims = (("b",), ("g", "r"), (s,), ())
    key: Dims = (("b",), ("g",), ("t",), ())
    terms: dict[str, Dims] = {
        "q": query,
        "k": key,
        "v": key,
        "grad_out": query,
        "out": query,
        "lse": query[:3],
        "key_mask": (("b",), ()),
        "seed": ((),),
        "starts": ((),),
    }
    if isinstance(given["bias"], Arg):
        terms["bias"] = aligned(call.operands[given["bias"].index], query, (batch, heads, queries, keys))
    starts, extent = names.index("starts"), len(names) + _AFTER_WINDOW

    def localize(local: Local) -> Any:
        rows = local.operand_layouts[given["q"].index]
        if given["starts"] is None and (s != POSITIONS or not rows.dims[2]):
            return local.default()
        shape = [batch, heads, queries, keys]
        begin = local.starts(Layout((*rows.dims[:3], ())), shape)
        return local.default(**{f"arg{starts}": begin, f"arg{extent}": shape})

    return make_rule(
        call,
        [terms[name] for name in names if isinstance(given[name], Arg)],
        [terms[name] for name in results],
        localize=localize,
        reduced=_SUMMED if names is _BACKWARD else {},
        fixed=["t"],  # only a softmax that is put together again, as of a ring, could split keys
        sizes={"g": kv_heads, "r": heads // kv_heads if kv_heads else 0},
    )


@register(torch.ops.autopar.attention.default)
def attention(call: OpCall) -> Rule:
    return _attention(call, _FORWARD, ("out", "lse"))


@register(torch.ops.autopar.attention_backward.default)
def attention_backward(call: OpCall) -> Rule:
    return _attention(call, _BACKWARD, ("q", "k", "v"))


@register(torch.ops.autopar.attention_bias_backward.default)
def attention_bias_backward(call: OpCall) -> Rule:
    return _attention(call, _BACKWARD, ("q", "k", "v", "bias"))
