"""``autopar::scan`` and its backward: the selective state space scan of Mamba-2, whole.

For every head a state h [P, N] runs along the sequence, h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T, and y_t = h_t c_t.
Traced as it is written the scan is hundreds of nodes, whose chunk-by-chunk matrices would all be saved for the
backward; as one operator it has the factors batch and head, and saves its inputs.

The computation is by chunks (Dao and Gu, "Transformers are SSMs", 2024, section 6): inside a chunk as attention with
decaying weights, between chunks by the states at their borders. Sums of logarithms of decays are taken over ranges and
never as differences of longer sums, in the backward too, so that nothing cancels. In the einsums z is a chunk, l and s
are positions in it, g a group, r a head of it, p a channel of the head and n one of the state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_INPUTS = "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, int chunk"
_BACKWARD_RESULTS = "(Tensor dx, Tensor ddt, Tensor da, Tensor db, Tensor dc)"


class _Chunks(NamedTuple):
    """The inputs by chunks and what both directions need of them; heads are (group, head of the group)."""

    dt: Tensor  # [B, z, l, g, r]
    x: Tensor  # [B, z, l, g, r, p]
    u: Tensor  # dt x
    b: Tensor  # [B, z, l, g, n]
    c: Tensor
    decay: Tensor  # [B, z, g, r, l, s]: from position s to l >= s, else 0
    weights: Tensor  # c_l b_s decay
    from_start: Tensor  # [B, z, l, g, r, 1]: decay from the state before the chunk
    to_end: Tensor  # [B, z, l, g, r, 1]: decay to the state after it
    across: Tensor  # [B, z, g, r, 1, 1]: decay across it


def _check(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> None:
    """Raise ValueError where the arguments contradict the docstring of ``scan``."""
    tensors = (x, dt, a, b, c)
    if [t.dim() for t in tensors] != [4, 3, 1, 4, 4] or len({t.dtype for t in tensors}) != 1:
        raise ValueError("scan expects x, dt, a, b, c of 4, 3, 1, 4 and 4 dims and one dtype")
    batch, length, heads, _ = x.shape
    groups = b.shape[2]
    expected = (batch, length, heads), (heads,), (batch, length, groups), b.shape
    if (tuple(dt.shape), tuple(a.shape), tuple(b.shape[:3]), c.shape) != expected or (groups and heads % groups):
        raise ValueError(
            f"scan expects dt [B, S, H], a [H], b and c [B, S, G, N] with G dividing H for x {list(x.shape)}, found "
            f"{[list(t.shape) for t in tensors[1:]]}"
        )
    if chunk < 1:
        raise ValueError(f"chunk is positive, found {chunk}")


def by_chunks(t: Tensor, chunk: int, *heads: int) -> Tensor:
    """[B, S, H or G, ...] -> [B, z, l, *heads, ...], the sequence filled up with zeros, which change nothing."""
    missing = -t.shape[1] % chunk
    if missing:
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, missing))
    return t.reshape(t.shape[0], t.shape[1] // chunk, chunk, *heads, *t.shape[3:])


def whole(t: Tensor, like: Tensor) -> Tensor:
    """The inverse of `by_chunks`, in the shape of ``like``."""
    return t.reshape(t.shape[0], t.shape[1] * t.shape[2], *like.shape[2:])[:, : like.shape[1]].contiguous()


def decays(log: Tensor) -> Tensor:
    """exp of the sum of ``log`` [..., l] over s < i <= l, [..., l, s]; 0 where s > l."""
    length = log.shape[-1]
    lower = torch.ones(length, length, dtype=torch.bool, device=log.device).tril()
    sums = log[..., None].expand(*log.shape, length).masked_fill(~lower.tril(-1), 0.0).cumsum(-2)
    return sums.masked_fill(~lower, -math.inf).exp()


def _prepare(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> _Chunks:
    groups = b.shape[2]
    heads = groups, x.shape[2] // groups if groups else 0
    chunk = max(min(chunk, x.shape[1]), 1)
    x, dt = by_chunks(x, chunk, *heads), by_chunks(dt, chunk, *heads)
    b, c = by_chunks(b, chunk, groups), by_chunks(c, chunk, groups)
    log = (dt * a.view(heads)).permute(0, 1, 3, 4, 2)
    decay = decays(log)
    weights = torch.einsum("bzlgn,bzsgn->bzgls", c, b).unsqueeze(3) * decay
    sums = log.cumsum(-1)
    from_start, to_end = (t.permute(0, 1, 4, 2, 3)[..., None] for t in (sums.exp(), decay[..., -1, :]))
    across = sums[..., -1].exp()[..., None, None]
    return _Chunks(dt, x, x * dt[..., None], b, c, decay, weights, from_start, to_end, across)


def _carried(states: Tensor, across: Tensor, reverse: bool = False) -> Tensor:
    """What reaches every chunk of the ``states`` [B, z, g, r, p, n] added by the others before it (or after it)."""
    carried, state = [], torch.zeros_like(states[:, 0]) if states.shape[1] else None
    order = range(states.shape[1])
    for z in reversed(order) if reverse else order:
        assert state is not None
        carried.append(state)
        state = state * across[:, z] + states[:, z]
    return torch.stack(carried[::-1] if reverse else carried, 1) if carried else torch.zeros_like(states)


def _states(k: _Chunks) -> Tensor:
    """The states before every chunk, [B, z, g, r, p, n]."""
    return _carried(torch.einsum("bzlgn,bzlgrp->bzgrpn", k.b, k.u * k.to_end), k.across)


@torch.library.custom_op("autopar::scan", mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """y_t = h_t c_t with h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T from h = 0, for every head.

    Args:
        x: [B, S, H, P]. dt: [B, S, H], positive. a: [H], negative. b, c: [B, S, G, N]; head h uses group h // (H // G).
            All of one floating dtype.
        chunk: how many positions are computed together; it changes the work and the rounding only.

    Returns:
        y [B, S, H, P], contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or a chunk that is not positive.
    """
    _check(x, dt, a, b, c, chunk)
    k = _prepare(x, dt, a, b, c, chunk)
    inside = torch.einsum("bzgrls,bzsgrp->bzlgrp", k.weights, k.u)
    return whole(inside + torch.einsum("bzlgn,bzgrpn->bzlgrp", k.c, _states(k)) * k.from_start, x)


@scan.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    _check(x, dt, a, b, c, chunk)
    return x.new_empty(x.shape)


def log_gradient(pairs: Tensor, later: Tensor, earlier: Tensor, through: Tensor) -> Tensor:
    """Gradient of the logarithm of the decay into every position t, [..., l]: of all ``pairs`` [..., l, s] of an input
    s before t and a result l at or after it, each with what its decay owes. ``later`` [..., l] has what results of the
    chunk owe to the state before it, ``earlier`` what inputs of the chunk give to the state after it, ``through``
    [..., 1] what passes it."""
    before = pairs.cumsum(-1) - pairs  # over s < t; the subtraction is of one term from a sum that holds it
    inside = before.tril().sum(-2)
    return inside + later.flip(-1).cumsum(-1).flip(-1) + (earlier.cumsum(-1) - earlier) + through


@torch.library.custom_op(
    "autopar::scan_backward", mutates_args=(), schema=f"(Tensor grad, {_INPUTS}) -> {_BACKWARD_RESULTS}"
)
def scan_backward(
    grad: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Contiguous gradients (dx, ddt, da, db, dc) of ``scan``, by its arguments and the gradient [B, S, H, P] of y."""
    k = _prepare(x, dt, a, b, c, chunk)
    heads = k.dt.shape[3:]
    g = by_chunks(grad, k.dt.shape[2], *heads)
    states = _states(k)
    d_states = _carried(torch.einsum("bzlgn,bzlgrp->bzgrpn", k.c, g * k.from_start), k.across, reverse=True)
    d_weights = torch.einsum("bzlgrp,bzsgrp->bzgrls", g, k.u)
    of_pairs = (k.decay * d_weights).sum(3)
    of_state = torch.einsum("bzlgrp,bzgrpn->bzlgrn", g * k.from_start, states)
    of_d_state = torch.einsum("bzlgrp,bzgrpn->bzlgrn", k.u * k.to_end, d_states)
    dc = torch.einsum("bzgls,bzsgn->bzlgn", of_pairs, k.b) + of_state.sum(4)
    db = torch.einsum("bzgls,bzlgn->bzsgn", of_pairs, k.c) + of_d_state.sum(4)
    du = torch.einsum("bzgrls,bzlgrp->bzsgrp", k.weights, g)
    du = du + torch.einsum("bzlgn,bzgrpn->bzlgrp", k.b, d_states) * k.to_end
    through = (k.across * states * d_states).sum((-2, -1))[..., None]
    later, earlier = (
        (t * of.unsqueeze(4)).sum(-1).permute(0, 1, 3, 4, 2) for t, of in ((of_state, k.c), (of_d_state, k.b))
    )
    d_log = log_gradient(k.weights * d_weights, later, earlier, through).permute(0, 1, 4, 2, 3)
    ddt = (k.x * du).sum(-1) + d_log * a.view(heads)
    da = (d_log * k.dt).sum((0, 1, 2)).reshape(a.shape)
    return whole(du * k.dt[..., None], x), whole(ddt, dt), da, whole(db, b), whole(dc, c)


@scan_backward.register_fake
def _(
    grad: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, ddt, da, db, dc = (t.new_empty(t.shape) for t in (x, dt, a, b, c))
    return dx, ddt, da, db, dc


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *scan_backward(grad, *ctx.saved_tensors, ctx.chunk), None


scan.register_autograd(_backward, setup_context=_setup_context)


def _products(x: Sequence[int], b: Sequence[int], chunk: int, pairs: tuple[int, int], states: int) -> int:
    """FLOPs of products over pairs of positions of a chunk (one with the state's channels a group, one with the head's
    channels a head; how many of each is ``pairs``) and of ``states`` products of head and state channels."""
    batch, length, heads, channels = x
    groups, state = b[2], b[3]
    chunk = min(chunk, length)
    by_group, by_head = pairs
    work = chunk * (by_group * groups * state + by_head * heads * channels) + states * heads * channels * state
    return 2 * batch * length * work


@register_flop_formula(torch.ops.autopar.scan)
def _scan_flops(x: Sequence[int], dt: Any, a: Any, b: Sequence[int], c: Any, chunk: int, **_: Any) -> int:
    return _products(x, b, chunk, (1, 1), 2)


@register_flop_formula(torch.ops.autopar.scan_backward)
def _scan_backward_flops(
    grad: Any, x: Sequence[int], dt: Any, a: Any, b: Sequence[int], c: Any, chunk: int, **_: Any
) -> int:
    return _products(x, b, chunk, (3, 2), 5)
