"""``autopar::attention`` and its backward: one device-neutral attention with its mask, windows and dropout inside.

A plan made on a CPU fits a GPU because graphs contain these operators and none of PyTorch's per-device variants; the
bodies call the variant that the device has. Which one is a pure function of the arguments (``_backend``), so forward
and backward agree. ``out`` and ``lse`` mean the same whatever the backend.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar.ops.dropout import keep_mask

aten = torch.ops.aten

_SCALARS = "float scale, bool causal, int window, float softcap, float dropout, int stream, SymInt[] extent"
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? bias, Tensor? seed, Tensor? starts, "
    f"{_SCALARS}) -> (Tensor out, Tensor lse)"
)
_BACKWARD_SCHEMA = (
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? bias, Tensor out, Tensor lse, "
    f"Tensor? seed, Tensor? starts, {_SCALARS}) -> (Tensor dq, Tensor dk, Tensor dv)"
)
_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD_DIM = 256  # of FlashAttention-2's CUDA kernels, in multiples of 8
_MIN_FLASH_CAPABILITY = (8, 0)  # Ampere


class _Call(NamedTuple):
    """The arguments of ``autopar::attention``, in schema order."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    starts: Tensor | None
    scale: float
    causal: bool
    window: int
    softcap: float
    dropout: float
    stream: int
    extent: Sequence[int]

    @property
    def windowed(self) -> bool:
        """Whether the window hides anything: one that reaches the first key from the last query does not."""
        return 0 < self.window < self.q.shape[2]


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(c: _Call) -> None:
    """Raise ValueError where the arguments contradict the docstring of ``attention``."""
    if any(x.dim() != 4 for x in (c.q, c.k, c.v)) or not (c.q.dtype == c.k.dtype == c.v.dtype):
        raise ValueError("attention expects q, k, v of one dtype and four dims [batch, heads, sequence, head dim]")
    (batch, heads, queries, head_dim), (k_batch, kv_heads, keys, k_dim) = c.q.shape, c.k.shape
    if (batch, head_dim) != (k_batch, k_dim) or c.k.shape[:3] != c.v.shape[:3] or heads % kv_heads:
        raise ValueError(
            f"attention expects k [B, Hkv, T, D] and v [B, Hkv, T, Dv] with Hkv dividing Hq for q {list(c.q.shape)}, "
            f"found k {list(c.k.shape)} and v {list(c.v.shape)}"
        )
    if c.key_mask is not None and (c.key_mask.dtype != torch.bool or tuple(c.key_mask.shape) != (batch, keys)):
        raise ValueError(f"key_mask must be bool [{batch}, {keys}], found {c.key_mask.dtype} {list(c.key_mask.shape)}")
    if c.bias is not None and (
        c.bias.dim() != 4
        or c.bias.shape[3] != keys
        or any(n not in (1, full) for n, full in zip(c.bias.shape, (batch, heads, queries), strict=False))
    ):
        raise ValueError(
            f"bias must be [{batch} or 1, {heads} or 1, {queries} or 1, {keys}], found {list(c.bias.shape)}"
        )
    if c.dropout != 0.0 and (c.seed is None or c.starts is None):
        raise ValueError("attention with dropout needs seed and starts")
    if c.window < 0 or c.softcap < 0.0:
        raise ValueError(f"window and softcap are positive, or 0 for none; found {c.window} and {c.softcap}")


def _allowed(c: _Call, causal: bool) -> Tensor | None:
    """Bool, broadcastable to [B, Hq, S, T], True where a query may attend a key; None where all may."""
    queries, keys = c.q.shape[2], c.k.shape[2]
    masks = []
    if c.key_mask is not None:
        masks.append(c.key_mask[:, None, None, :])
    if c.bias is not None and c.bias.dtype == torch.bool:
        masks.append(c.bias)
    if causal or c.windowed:
        i = torch.arange(queries, device=c.q.device)[:, None]
        j = torch.arange(keys, device=c.q.device)
        if causal:
            masks.append((j <= i)[None, None])
        if c.windowed:
            masks.append((j > i - c.window)[None, None])
    return functools.reduce(torch.logical_and, masks) if masks else None


def _float_bias(c: _Call) -> Tensor | None:
    return c.bias if c.bias is not None and c.bias.dtype != torch.bool else None


def _additive_mask(c: _Call) -> Tensor | None:
    """key_mask and bias as the one float mask that the CPU kernel takes, beside its own is_causal; None for none."""
    allowed, bias = _allowed(c, causal=False), _float_bias(c)
    if allowed is None and bias is None:
        return None
    if bias is None:
        bias = torch.zeros((), dtype=c.q.dtype, device=c.q.device)
    elif not (c.q.dtype in _HALF and bias.dtype == torch.float32):  # the one mixture that the kernel takes
        bias = bias.to(c.q.dtype)
    return (bias if allowed is None else torch.where(allowed, bias, -math.inf)).contiguous()


def _dead_rows(c: _Call, mask: Tensor) -> Tensor:
    """Bool, broadcastable to [B, Hq, S]: queries that may attend no key under an additive ``mask`` and causality."""
    keys = mask.shape[-1]
    live = mask != -math.inf
    first = torch.where(live.any(-1), live.int().argmax(-1), keys)  # argmax gives the first of equals
    last = torch.arange(c.q.shape[2], device=mask.device) if c.causal else keys - 1
    return first > last


def _backend(c: _Call) -> Literal["cpu", "cuda", "math"]:
    """Which implementation runs; forward and backward must agree, so only the arguments may count."""
    head_dim, queries, keys = c.q.shape[3], c.q.shape[2], c.k.shape[2]
    if c.dropout != 0.0 or c.softcap != 0.0 or c.windowed or c.v.shape[3] != head_dim:
        return "math"
    if c.q.numel() == 0 or c.k.numel() == 0:
        return "math"
    if c.q.device.type == "cpu":
        return "cpu"
    flash = (
        c.q.device.type == "cuda"
        and c.q.dtype in _HALF
        and c.key_mask is None
        and c.bias is None
        and head_dim % 8 == 0
        and head_dim <= _MAX_FLASH_HEAD_DIM
        and (not c.causal or queries == keys)  # CUDA's causal mask is aligned to the bottom right
        and torch.cuda.get_device_capability(c.q.device) >= _MIN_FLASH_CAPABILITY
    )
    return "cuda" if flash else "math"


def _rows(x: Tensor) -> Tensor:
    """The kernels take any strides but that of the last dim."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _cpu_forward(c: _Call) -> tuple[Tensor, Tensor]:
    mask = _additive_mask(c)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        _rows(c.q), _rows(c.k), _rows(c.v), 0.0, c.causal, attn_mask=mask, scale=c.scale
    )
    if mask is not None:  # the kernel reports 0 for the log of nothing
        lse = lse.masked_fill(_dead_rows(c, mask), -math.inf)
    return out, lse


def _cpu_backward(c: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_rows(x) for x in (grad_out, c.q, c.k, c.v, out)),
        lse, 0.0, c.causal, attn_mask=_additive_mask(c), scale=c.scale,
    )  # fmt: skip


def _cuda_forward(c: _Call) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        _rows(c.q), _rows(c.k), _rows(c.v), 0.0, c.causal, False, scale=c.scale
    )
    return out, lse


def _cuda_backward(c: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    no_lengths, no_rng = None, torch.zeros(2, dtype=torch.uint64, device=c.q.device)  # dense batches, no dropout
    return aten._scaled_dot_product_flash_attention_backward(
        *(_rows(x) for x in (grad_out, c.q, c.k, c.v, out)),
        lse, no_lengths, no_lengths, c.q.shape[2], c.k.shape[2], 0.0, c.causal, no_rng, no_rng, scale=c.scale,
    )  # fmt: skip


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, S, N] -> [B, Hkv, G * S, N]: the queries that share a key and value head as rows of one matrix."""
    batch, heads, rows, columns = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * rows, columns)


def _scores(c: _Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """Masked scores [B, Hq, S, T] in the accumulation dtype, and their derivative by the uncapped ones (None: 1)."""
    batch, heads, queries, _ = c.q.shape
    scores = (_grouped(q, k.shape[1]) @ k.mT).view(batch, heads, queries, k.shape[2]).mul_(c.scale)
    slope = None
    if c.softcap != 0.0:
        bounded = scores.div_(c.softcap).tanh_()
        scores, slope = bounded * c.softcap, 1.0 - bounded * bounded
    bias, allowed = _float_bias(c), _allowed(c, c.causal)
    if bias is not None:
        scores = scores.add_(bias)
    if allowed is not None:
        scores = scores.masked_fill_(~allowed, -math.inf)
    return scores, slope


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse) in place of the scores, and 0 where a row has nothing to attend (there both are -inf)."""
    return scores.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()


def _drop(c: _Call, keep: Tensor | None, x: Tensor) -> Tensor:
    if keep is None:
        return x
    return torch.where(keep, x / (1.0 - c.dropout) if c.dropout < 1.0 else x, 0.0)


def _kept(c: _Call, shape: Sequence[int]) -> Tensor | None:
    if c.dropout == 0.0:
        return None
    assert c.seed is not None and c.starts is not None  # _check
    return keep_mask(c.seed, c.starts, c.dropout, c.stream, shape, c.extent, c.q.device)


def _math_forward(c: _Call) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(_accumulate_dtype(x.dtype)) for x in (c.q, c.k, c.v))
    scores, _ = _scores(c, q, k)
    lse = torch.logsumexp(scores, dim=-1)
    weights = _drop(c, _kept(c, scores.shape), _probabilities(scores, lse))
    out = _grouped(weights, k.shape[1]) @ v
    return out.view(*c.q.shape[:3], c.v.shape[3]).to(c.q.dtype), lse


def _math_backward(c: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's backward (Dao et al., 2022, algorithm 4) untiled; softcap and dropout by the chain rule."""
    q, k, v, grad, out = (x.to(_accumulate_dtype(x.dtype)) for x in (c.q, c.k, c.v, grad_out, out))
    kv_heads = k.shape[1]
    scores, slope = _scores(c, q, k)
    probabilities = _probabilities(scores, lse)
    keep = _kept(c, scores.shape)
    grouped_grad = _grouped(grad, kv_heads)
    dv = _grouped(_drop(c, keep, probabilities), kv_heads).mT @ grouped_grad
    d_weights = (grouped_grad @ v.mT).view(scores.shape)
    delta = (grad * out).sum(-1, keepdim=True)  # = sum over keys of probability times its gradient, also with dropout
    d_scores = probabilities * (_drop(c, keep, d_weights) - delta) * c.scale
    if slope is not None:
        d_scores = d_scores * slope
    grouped = _grouped(d_scores, kv_heads)
    dq = (grouped @ k).view(c.q.shape)
    dk = grouped.mT @ _grouped(q, kv_heads)
    return dq.to(c.q.dtype), dk.to(c.k.dtype), dv.to(c.v.dtype)


_FORWARD = {"cpu": _cpu_forward, "cuda": _cuda_forward, "math": _math_forward}
_BACKWARD = {"cpu": _cpu_backward, "cuda": _cuda_backward, "math": _math_backward}


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
    softcap: float,
    dropout: float,
    stream: int,
    extent: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Softmax attention; a query that may attend no key gives 0, an lse of -inf and no gradients.

    Args:
        q: [B, Hq, S, D]. k: [B, Hkv, T, D]. v: [B, Hkv, T, Dv]. One dtype; query head h uses kv head h // (Hq // Hkv).
        key_mask: bool [B, T], True where a key may be attended (padding), or None.
        bias: [B or 1, Hq or 1, S or 1, T], bool (True: may be attended) or float (added to the scores), or None.
        seed, starts: as ``keep_mask``, starts int64 [4] for [B, Hq, S, T]; None when dropout is 0.
        scale: factor of q k^T.
        causal: query i attends keys j <= i, aligned to the top left as in torch's ``is_causal`` (S == T in training).
        window: 0 for none, else only keys j > i - window (one-sided; with causal, the ``window`` latest keys).
        softcap: 0 for none, else scores become softcap * tanh(scores / softcap), before bias and masks.
        dropout: probability of dropping an attention weight. stream: number of this operator in the model.
        extent: global [B, Hq, S, T]; may be empty when dropout is 0.

    Returns:
        out [B, Hq, S, Dv] in q's dtype, contiguous, and lse [B, Hq, S], the natural logarithm of the sum of exp of the
        masked scores, float32 (float64 for float64); lse is not differentiable.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: a float bias requires a gradient.
    """
    c = _Call(q, k, v, key_mask, bias, seed, starts, scale, causal, window, softcap, dropout, stream, extent)
    _check(c)
    out, lse = _FORWARD[_backend(c)](c)
    return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    c = _Call(*args)
    _check(c)
    rows = c.q.shape[:3]
    return c.q.new_empty((*rows, c.v.shape[3])), c.q.new_empty(rows, dtype=_accumulate_dtype(c.q.dtype))


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
    softcap: float,
    dropout: float,
    stream: int,
    extent: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous gradients (dq, dk, dv) of ``attention``, by its arguments, its results and grad_out [B, Hq, S, Dv]."""
    c = _Call(q, k, v, key_mask, bias, seed, starts, scale, causal, window, softcap, dropout, stream, extent)
    dq, dk, dv = _BACKWARD[_backend(c)](c, grad_out, out, lse)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@attention_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    c, (out, lse) = _Call(*inputs), output
    if c.bias is not None and c.bias.requires_grad:
        raise NotImplementedError("autopar::attention has no gradient for its bias; detach it or use eager attention")
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(c.q, c.k, c.v, c.key_mask, c.bias, out, lse, c.seed, c.starts)
    ctx.scalars = c[7:]


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = attention_backward(grad_out, *ctx.saved_tensors, *ctx.scalars)
    return *gradients, *([None] * (len(_Call._fields) - 3))


attention.register_autograd(_backward, setup_context=_setup_context)


def _autocast(device: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Under autocast, what torch's own attention does: its list of lower-precision operators is closed to others."""
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return attention(*(x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v)), *rest)


_library = torch.library.Library("autopar", "FRAGMENT")
for _device, _dispatch_key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _library.impl("attention", functools.partial(_autocast, _device), _dispatch_key)


def _products(q: Sequence[int], k: Sequence[int], with_q: int, with_v: int, value_dim: int) -> int:
    """FLOPs of ``with_q`` products over the head dim and ``with_v`` over v's, each 2 * B * Hq * S * T * dim."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * queries * k[2] * (with_q * head_dim + with_v * value_dim)


@register_flop_formula(torch.ops.autopar.attention)
def _attention_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """q k^T and weights v; the causal half is counted, as torch.utils.flop_counter does for its own attention."""
    return _products(q, k, 1, 1, v[3])


@register_flop_formula(torch.ops.autopar.attention_backward)
def _attention_backward_flops(
    _grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    """Recomputed q k^T, dq and dk over the head dim; dv and the weights' gradient over v's: 2.5 times the forward."""
    return _products(q, k, 3, 2, v[3])


def _split_mask(mask: Tensor | None, batch: int, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """A 4-D SDPA mask as (key_mask, bias): a bool mask of keys alone need not be S x T, nor be split by heads."""
    if mask is None:
        return None, None
    mask = mask.expand(*mask.shape[:3], keys)
    if mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
        return mask[:, 0, 0].expand(batch, keys), None
    return None, mask


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """``F.scaled_dot_product_attention`` by ``autopar::attention``, on the whole tensors (starts at 0).

    Args:
        query, key, value: [B, Hq, S, D], [B, Hkv, T, D], [B, Hkv, T, Dv], or without the head dim.
        attn_mask: bool or float, broadcastable to [B, Hq, S, T] (or [B, S, T]).
        dropout_p, is_causal, scale, enable_gqa: as in torch; kv heads that divide the query heads are always allowed.
        seed: int64 [2], needed when dropout_p > 0. stream: number of the operator in the model.

    Returns:
        [B, Hq, S, Dv], or [B, S, Dv] for 3-D inputs.

    Raises:
        ValueError: other numbers of dims, or as ``attention``.
    """
    if query.dim() == 3:
        q, k, v = (x.unsqueeze(1) for x in (query, key, value))
        mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        out = scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, seed=seed, stream=stream
        )
        return out.squeeze(1)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    key_mask, bias = _split_mask(attn_mask, query.shape[0], key.shape[2])
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if dropout_p == 0.0:
        return attention(query, key, value, key_mask, bias, None, None, scale, is_causal, 0, 0.0, 0.0, 0, [])[0]
    starts = torch.zeros(4, dtype=torch.int64, device=query.device)
    extent = [*query.shape[:3], key.shape[2]]
    return attention(
        query, key, value, key_mask, bias, seed, starts, scale, is_causal, 0, 0.0, dropout_p, stream, extent
    )[0]
