"""``autopar::attention`` and its backward: one device-neutral attention with its mask, windows and dropout inside.

A plan made on a CPU fits a GPU because graphs contain these operators and none of PyTorch's per-device variants; the
bodies (`attention_kernels`) call the variant that the device has.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar.ops.attention_kernels import (
    BACKWARD,
    FORWARD,
    Call,
    accumulate_dtype,
    backend,
    check,
    math_backward_with_bias,
)

#: Arguments that are no tensors.
SCALARS = (
    "float scale, bool causal, int window, bool spread, float softcap, float dropout, int stream, SymInt[] extent"
)
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? bias, Tensor? seed, Tensor? starts, "
    f"{SCALARS}) -> (Tensor out, Tensor lse)"
)
_BACKWARD_ARGUMENTS = (
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? bias, Tensor out, Tensor lse, "
    f"Tensor? seed, Tensor? starts, {SCALARS})"
)
_BACKWARD_SCHEMA = f"{_BACKWARD_ARGUMENTS} -> (Tensor dq, Tensor dk, Tensor dv)"
_BIAS_BACKWARD_SCHEMA = f"{_BACKWARD_ARGUMENTS} -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"


def by_tokens(x: Tensor) -> Tensor:
    """``x`` [B, H, S, D] as it is in memory around projections, contiguous as [B, S, H, D]: that is how kernels return
    it, and so the projection that comes next needs no copy."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_by_tokens(like: Tensor, shape: Sequence[int]) -> Tensor:
    batch, heads, rows, dim = shape
    return like.new_empty((batch, rows, heads, dim)).transpose(1, 2)


@torch.library.custom_op("autopar::attention", mutates_args=(), schema=_SCHEMA)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    starts: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    spread: bool,
    softcap: float,
    dropout: float,
    stream: int,
    extent: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Softmax attention, differentiable in q, k, v and a float bias.

    Args:
        q: [B, Hq, S, D]. k: [B, Hkv, T, D]. v: [B, Hkv, T, Dv]. One dtype; query head h uses kv head h // (Hq // Hkv).
        key_mask: bool [B, T], True where a key may be attended (padding), or None.
        bias: [B or 1, Hq or 1, S or 1, T], bool (True: may be attended) or float (added to the scores), or None.
        seed: as ``keep_mask``; None when dropout is 0.
        starts: int64 [4], global index of the first element of this piece of [B, Hq, S, T]. With dropout as
            ``keep_mask``; without it is given where queries are a piece of all, whose positions begin at ``starts[2]``.
        scale: factor of q k^T.
        causal: query i attends keys j <= i, aligned to the top left as in torch's ``is_causal`` (S == T in training);
            of a piece of all queries i counts from ``starts[2]``.
        window: 0 for none, else only keys j > i - window (one-sided; with causal, the ``window`` latest keys).
        spread: what a query gets that key_mask, a bool bias, causality and window leave no key. False: 0, an lse of
            -inf and no gradients, as in torch's attention. True: it attends all T keys equally, as where masks are
            added to the scores as a large negative number (transformers' written-out attention).
        softcap: 0 for none, else scores become softcap * tanh(scores / softcap), before bias and masks.
        dropout: probability of dropping an attention weight. stream: number of this operator in the model.
        extent: global [B, Hq, S, T]; may be empty where ``starts`` is None.

    Returns:
        out [B, Hq, S, Dv] in q's dtype, in memory as `by_tokens`, and lse [B, Hq, S], the natural logarithm of the sum
        of exp of the masked scores, float32 (float64 for float64); lse is not differentiable.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    c = Call(q, k, v, key_mask, bias, seed, starts, scale, causal, window, spread, softcap, dropout, stream, extent)
    check(c)
    out, lse = FORWARD[backend(c)](c)
    return by_tokens(out), lse.contiguous()


@attention.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    c = Call(*args)
    check(c)
    rows = c.q.shape[:3]
    return _empty_by_tokens(c.q, (*rows, c.v.shape[3])), c.q.new_empty(rows, dtype=accumulate_dtype(c.q.dtype))


@torch.library.custom_op("autopar::attention_backward", mutates_args=(), schema=_BACKWARD_SCHEMA)
def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    starts: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    spread: bool,
    softcap: float,
    dropout: float,
    stream: int,
    extent: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of ``attention``, in memory as `by_tokens`, by its arguments, its results and grad_out
    [B, Hq, S, Dv]."""
    c = Call(q, k, v, key_mask, bias, seed, starts, scale, causal, window, spread, softcap, dropout, stream, extent)
    dq, dk, dv = BACKWARD[backend(c)](c, grad_out, out, lse)
    return by_tokens(dq), by_tokens(dk), by_tokens(dv)


@attention_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_by_tokens(q, q.shape), _empty_by_tokens(k, k.shape), _empty_by_tokens(v, v.shape)


@torch.library.custom_op("autopar::attention_bias_backward", mutates_args=(), schema=_BIAS_BACKWARD_SCHEMA)
def attention_bias_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    bias: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention_backward` for a float bias that is learned: besides (dq, dk, dv) its gradient, in its shape and dtype.

    An operator of its own, since no kernel has that gradient: it costs a matrix of S x T scores a head.
    """
    gradients = math_backward_with_bias(Call(q, k, v, key_mask, bias, *rest), grad_out, out, lse)
    dq, dk, dv, dbias = gradients
    return by_tokens(dq), by_tokens(dk), by_tokens(dv), dbias.contiguous()


@attention_bias_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, bias: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty_by_tokens(x, x.shape) for x in (q, k, v))
    return dq, dk, dv, bias.new_empty(bias.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    c, (out, lse) = Call(*inputs), output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(c.q, c.k, c.v, c.key_mask, c.bias, out, lse, c.seed, c.starts)
    ctx.scalars = c[7:]


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.needs_input_grad[Call._fields.index("bias")]:
        dq, dk, dv, dbias = attention_bias_backward(grad_out, *ctx.saved_tensors, *ctx.scalars)
    else:
        (dq, dk, dv), dbias = attention_backward(grad_out, *ctx.saved_tensors, *ctx.scalars), None
    return dq, dk, dv, None, dbias, *([None] * (len(Call._fields) - 5))


attention.register_autograd(_backward, setup_context=_setup_context)


def _autocast(device: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Under autocast, what torch's own attention does: its list of lower-precision operators is closed to others."""
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return attention(*(x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v)), *rest)


_library = torch.library.Library("autopar", "FRAGMENT")
for _device, _dispatch_key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _library.impl("attention", functools.partial(_autocast, _device), _dispatch_key)


def products(q: Sequence[int], k: Sequence[int], with_q: int, with_v: int, value_dim: int) -> int:
    """FLOPs of ``with_q`` products over the head dim and ``with_v`` over v's, each 2 * B * Hq * S * T * dim."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * queries * k[2] * (with_q * head_dim + with_v * value_dim)


@register_flop_formula(torch.ops.autopar.attention)
def _attention_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """q k^T and weights v; the causal half is counted, as torch.utils.flop_counter does for its own attention."""
    return products(q, k, 1, 1, v[3])


@register_flop_formula([torch.ops.autopar.attention_backward, torch.ops.autopar.attention_bias_backward])
def _attention_backward_flops(
    _grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    """Recomputed q k^T, dq and dk over the head dim; dv and the weights' gradient over v's: 2.5 times the forward."""
    return products(q, k, 3, 2, v[3])
