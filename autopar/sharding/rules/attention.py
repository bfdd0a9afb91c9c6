"""Attention: batch, heads, queries, and queries and keys together."""

from __future__ import annotations

from typing import Any

import torch

import autopar.ops.attention  # noqa: F401  defines the operators
from autopar.sharding.layout import JOINT, Layout, Mesh
from autopar.sharding.rule import Arg, Dims, Local, OpCall, Passing, Rule, Strategy, layouts, make_rule
from autopar.sharding.rules import ring
from autopar.sharding.rules.common import aligned
from autopar.sharding.rules.registry import register

_FORWARD = ("q", "k", "v", "key_mask", "bias", "seed", "starts", *ring.SCALARS)
_BACKWARD = ("grad_out", "q", "k", "v", "key_mask", "bias", "out", "lse", "seed", "starts", *ring.SCALARS)
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
#: The factor of queries and keys together: a rank has those of the same places, and keys go round (`rules.ring`).
RING = "ring"
#: Ways to compute attention where the sequence is split, by the factors that its axis then splits there: heads, for
#: which a redistribution exchanges the sequence (Ulysses), queries and keys together, or queries, with keys gathered.
WAYS = {"heads": HEADS, "ring": frozenset({RING}), "gather": frozenset({POSITIONS, "s"})}
#: Factors that only some gradients have: k's and v's lack those of the queries, a broadcast bias's any of them.
_SUMMED = dict.fromkeys(("b", "g", "r", "s", POSITIONS), "sum")


def seen_share(call: OpCall, pieces: int = 1) -> float:
    """Of all pairs of query and key, the share that causality and a window leave; where queries are cut in ``pieces``
    to the last of them, which sees most."""
    given = dict(zip((a.name for a in call.target._schema.arguments), call.args, strict=False))
    share = 1 - 1 / (2 * pieces) if given["causal"] else 1.0
    keys = call.operands[given["k"].index].shape[2]
    return min(share, given["window"] / max(keys, 1)) if given["window"] else share


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
    starts, extent = names.index("starts"), names.index("extent")

    def on_ring(rows: Layout, keys_of: Layout, mesh: Mesh) -> tuple[ring.Ring, str] | None:
        """The ring that layouts of q and k stand for, and its axis, or several by one name."""
        if not keys_of.dims[2]:
            return None
        axis = JOINT.join(rows.dims[2])
        return ring.Ring(given, (batch, heads, queries, keys), mesh.degree(axis)), axis

    def passing(strategy: Strategy, mesh: Mesh) -> Passing | None:
        operands = layouts(rule, strategy, mesh)[0]
        found = on_ring(operands[given["q"].index], operands[given["k"].index], mesh)
        return None if found is None else ring.passing(call, *found, mesh, operands)

    def localize(local: Local) -> Any:
        rows = local.operand_layouts[given["q"].index]
        found = on_ring(rows, local.operand_layouts[given["k"].index], local.mesh)
        if found is not None:
            return ring.write(local, *found)
        if given["starts"] is None and (s != POSITIONS or not rows.dims[2]):
            return local.default()
        shape = [batch, heads, queries, keys]
        begin = local.starts(Layout((*rows.dims[:3], ())), shape)
        return local.default(**{f"arg{starts}": begin, f"arg{extent}": shape})

    possible = "bias" not in results and ring.is_possible(call, given)
    rule = make_rule(
        call,
        [terms[name] for name in names if isinstance(given[name], Arg)],
        [terms[name] for name in results],
        localize=localize,
        reduced=_SUMMED if names is _BACKWARD else {},
        fixed=["t"],  # only where a softmax is put together again
        sizes={"g": kv_heads, "r": heads // kv_heads if kv_heads else 0},
        joint={RING: (s, "t")} if possible else {},
        passing=passing,
    )
    return rule


@register(torch.ops.autopar.attention.default)
def attention(call: OpCall) -> Rule:
    return _attention(call, _FORWARD, ("out", "lse"))


@register(torch.ops.autopar.attention_backward.default)
def attention_backward(call: OpCall) -> Rule:
    return _attention(call, _BACKWARD, ("q", "k", "v"))


@register(torch.ops.autopar.attention_bias_backward.default)
def attention_bias_backward(call: OpCall) -> Rule:
    return _attention(call, _BACKWARD, ("q", "k", "v", "bias"))
