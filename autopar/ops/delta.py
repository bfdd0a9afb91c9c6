"""``autopar::delta_rule`` and its backward: linear attention whose state is overwritten, whole.

For every head a state S [N, P] runs along the sequence. It decays, then what it has for the key is replaced in part by
the value: S <- exp(g_t) S, u_t = beta_t (v_t - S^T k_t), S <- S + k_t u_t^T, and y_t = S^T q_t (Yang, Kautz and
Hatamizadeh, "Gated Delta Networks", 2025). Traced as it is written that is a graph as long as the sequence; as one
operator it has the factors batch, head and channel, and saves its inputs.

The computation is by chunks (section 3.3 there). Inside a chunk the u solve a unit triangular system, M_ts = beta_t
(k_t k_s) D_ts for s < t, with D the decay from s to t; between chunks the state is carried. The backward is the chain
rule through it. Decays are exponentials of sums over ranges, as in `autopar.ops.scan`, whose letters the einsums use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar.ops.scan import by_chunks, decays, log_gradient, whole

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int chunk"
_BACKWARD_RESULTS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta)"


class _Chunks(NamedTuple):
    """The inputs by chunks, heads before positions, and what both directions need of them."""

    q: Tensor  # [B, z, g, 1, l, n]
    k: Tensor
    v: Tensor  # [B, z, g, r, l, p]
    beta: Tensor  # [B, z, g, r, l, 1]
    decay: Tensor  # D, [B, z, g, r, l, s]: from position s to l >= s, else 0
    keys: Tensor  # k_l k_s, [B, z, g, 1, l, s]
    system: Tensor  # I + M, [B, z, g, r, l, s]
    scores: Tensor  # (q_l k_s) D_ls
    from_start: Tensor  # [B, z, g, r, l, 1]: decay from the state before the chunk
    to_end: Tensor  # [B, z, g, r, l, 1]: decay to the state after it
    across: Tensor  # [B, z, g, r, 1, 1]: decay across it


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> None:
    """Raise ValueError where the arguments contradict the docstring of ``delta_rule``."""
    tensors = (q, k, v, g, beta)
    if [t.dim() for t in tensors] != [4, 4, 4, 3, 3] or len({t.dtype for t in tensors}) != 1:
        raise ValueError("delta_rule expects q, k, v of 4 dims, g and beta of 3, and one dtype")
    groups, heads = k.shape[2], v.shape[:3]
    if (q.shape, g.shape, beta.shape, k.shape[:2]) != (k.shape, heads, heads, heads[:2]) or heads[2] % max(groups, 1):
        raise ValueError(
            f"delta_rule expects q and k [B, S, G, N], and for v [B, S, H, P] with G dividing H g and beta [B, S, H], "
            f"found {[list(t.shape) for t in tensors]}"
        )
    if chunk < 1:
        raise ValueError(f"chunk is positive, found {chunk}")


def _heads_first(t: Tensor) -> Tensor:
    """[B, z, l, g, r, ...] -> [B, z, g, r, l, ...]"""
    return t.movedim(2, 4)


def _prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> _Chunks:
    groups = k.shape[2]
    heads = groups, v.shape[2] // groups if groups else 0
    chunk = max(min(chunk, k.shape[1]), 1)
    q, k = (_heads_first(by_chunks(t, chunk, groups, 1)) for t in (q, k))
    v, g, beta = (_heads_first(by_chunks(t, chunk, *heads)) for t in (v, g, beta))
    decay, sums = decays(g), g.cumsum(-1)
    keys = k @ k.mT
    system = torch.eye(chunk, dtype=k.dtype, device=k.device) + (beta[..., None] * keys * decay).tril(-1)
    return _Chunks(
        q, k, v, beta[..., None], decay, keys, system, (q @ k.mT) * decay, sums.exp()[..., None],
        decay[..., -1, :, None], sums[..., -1:, None].exp(),
    )  # fmt: skip


def _replaced(c: _Chunks) -> tuple[Tensor, Tensor]:
    """The states before every chunk, [B, z, g, r, n, p], and the u of every chunk, [B, z, g, r, l, p]."""
    states, replaced = [], []
    batch, chunks, *heads, _, channels = c.v.shape
    state = c.v.new_zeros((batch, *heads, c.k.shape[-1], channels))
    for z in range(chunks):
        states.append(state)
        new = c.beta[:, z] * (c.v[:, z] - c.from_start[:, z] * (c.k[:, z] @ state))
        u = torch.linalg.solve_triangular(c.system[:, z], new, upper=False, unitriangular=True)
        state = c.across[:, z] * state + (c.to_end[:, z] * c.k[:, z]).mT @ u
        replaced.append(u)
    empty = c.v.new_zeros((batch, 0, *heads, c.k.shape[-1], channels))
    return (torch.stack(states, 1), torch.stack(replaced, 1)) if states else (empty, torch.zeros_like(c.v))


@torch.library.custom_op("autopar::delta_rule", mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """y_t = S_t^T q_t with the state of the module's docstring, from S = 0, for every head.

    Args:
        q, k: [B, S, G, N]; head h uses group h // (H // G). v: [B, S, H, P]. g: [B, S, H], logarithms of decays, at
            most 0. beta: [B, S, H]. All of one floating dtype.
        chunk: how many positions are computed together; it changes the work and the rounding only.

    Returns:
        y [B, S, H, P], contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or a chunk that is not positive.
    """
    _check(q, k, v, g, beta, chunk)
    c = _prepare(q, k, v, g, beta, chunk)
    states, u = _replaced(c)
    return whole((c.from_start * (c.q @ states) + c.scores @ u).movedim(4, 2), v)


@delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    _check(q, k, v, g, beta, chunk)
    return v.new_empty(v.shape)


def _returned(c: _Chunks, states: Tensor, u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What the results owe to the states after every chunk, and to the right sides of the triangular systems."""
    d_states, d_rights = [], []
    d_state = torch.zeros_like(states[:, 0]) if states.shape[1] else None
    for z in reversed(range(states.shape[1])):
        assert d_state is not None
        d_states.append(d_state)
        d_u = c.scores[:, z].mT @ grad[:, z] + c.to_end[:, z] * (c.k[:, z] @ d_state)
        d_right = torch.linalg.solve_triangular(c.system[:, z].mT, d_u, upper=True, unitriangular=True)
        queries, keys = (c.from_start[:, z] * t[:, z] for t in (c.q, c.k))
        d_state = c.across[:, z] * d_state + queries.mT @ grad[:, z] - keys.mT @ (c.beta[:, z] * d_right)
        d_rights.append(d_right)
    if not d_states:
        return torch.zeros_like(states), torch.zeros_like(u)
    return torch.stack(d_states[::-1], 1), torch.stack(d_rights[::-1], 1)


@torch.library.custom_op(
    "autopar::delta_rule_backward", mutates_args=(), schema=f"(Tensor grad, {_INPUTS}) -> {_BACKWARD_RESULTS}"
)
def delta_rule_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Contiguous gradients of ``delta_rule``, by its arguments and the gradient [B, S, H, P] of y."""
    c = _prepare(q, k, v, g, beta, chunk)
    states, u = _replaced(c)
    dy = _heads_first(by_chunks(grad, c.v.shape[4], *c.v.shape[2:4]))
    d_states, d_right = _returned(c, states, u, dy)
    d_system, d_scores = -(d_right @ u.mT).tril(-1), (dy @ u.mT).tril()
    of_state = c.from_start * (states.mT.unsqueeze(-3) @ c.k.unsqueeze(-1)).squeeze(-1)  # what a key finds there
    d_found = -c.beta * d_right
    by_key, by_query = c.from_start * (d_found @ states.mT), c.from_start * (dy @ states.mT)
    by_end = c.to_end * (u @ d_states.mT)
    of_keys, of_scores = d_system * c.beta * c.decay, d_scores * c.decay
    dq = by_query + of_scores @ c.k
    dk = by_key + by_end + of_keys @ c.k + of_keys.mT @ c.k + of_scores.mT @ c.q
    dbeta = (d_right * (c.v - of_state)).sum(-1) + (d_system * c.keys * c.decay).sum(-1)
    pairs = of_keys * c.keys + d_scores * c.scores
    later, earlier = (by_query * c.q + by_key * c.k).sum(-1), (by_end * c.k).sum(-1)
    dg = log_gradient(pairs, later, earlier, (c.across * states * d_states).sum((-2, -1))[..., None])
    by_group = [whole(t.sum(3).movedim(3, 2), of) for t, of in ((dq, q), (dk, k))]
    by_head = [whole(t.movedim(4, 2), of) for t, of in ((c.beta * d_right, v), (dg, g), (dbeta, beta))]
    return by_group[0], by_group[1], by_head[0], by_head[1], by_head[2]


@delta_rule_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, dbeta = (t.new_empty(t.shape) for t in (q, k, v, g, beta))
    return dq, dk, dv, dg, dbeta


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *delta_rule_backward(grad, *ctx.saved_tensors, ctx.chunk), None


delta_rule.register_autograd(_backward, setup_context=_setup_context)


def _products(k: Sequence[int], v: Sequence[int], chunk: int, keys: int, channels: float, states: int) -> int:
    """FLOPs of products over pairs of positions of a chunk, ``keys`` of them with a key's channels and ``channels`` of
    them with a value's (a triangular solve is half of one), and of ``states`` products of a state with keys or
    values."""
    batch, length, heads, width = v
    chunk = min(chunk, length)
    work = heads * (chunk * (keys * k[3] + channels * width) + states * k[3] * width)
    return round(2 * batch * length * work)


@register_flop_formula(torch.ops.autopar.delta_rule)
def _delta_rule_flops(q: Any, k: Sequence[int], v: Sequence[int], g: Any, beta: Any, chunk: int, **_: Any) -> int:
    by_group = _products(k, [*v[:2], k[2], v[3]], chunk, 2, 0, 0)
    return by_group + _products(k, v, chunk, 0, 1.5, 3)


@register_flop_formula(torch.ops.autopar.delta_rule_backward)
def _delta_rule_backward_flops(
    grad: Any, q: Any, k: Sequence[int], v: Sequence[int], g: Any, beta: Any, chunk: int, **_: Any
) -> int:
    by_group = _products(k, [*v[:2], k[2], v[3]], chunk, 2, 0, 0)
    return by_group + _products(k, v, chunk, 4, 4, 9)
