"""The bodies of ``autopar::attention`` and its backward, and which one runs.

That is a pure function of the arguments (``backend``), so forward and backward agree. ``out`` and ``lse`` mean the same
whatever the backend.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from autopar.ops.mask import keep_mask

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD_DIM = 256  # of FlashAttention-2's CUDA kernels, in multiples of 8
_MIN_FLASH_CAPABILITY = (8, 0)  # Ampere


class Call(NamedTuple):
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
    spread: bool
    softcap: float
    dropout: float
    stream: int
    extent: Sequence[int]

    @property
    def windowed(self) -> bool:
        """Whether the window hides anything: one that reaches the first key from the last query does not."""
        return 0 < self.window < self.positions

    @property
    def positions(self) -> int:
        """Number of queries of which these are a piece, or all."""
        return self.extent[2] if self.is_piece else self.q.shape[2]

    @property
    def is_piece(self) -> bool:
        """Whether queries begin at a position of their own, which only kernels that take a mask can respect."""
        return self.starts is not None

    @property
    def may_leave_no_key(self) -> bool:
        """Whether there may be a query that may attend nothing (causality alone leaves everyone the first key)."""
        beyond_keys = self.windowed and self.k.shape[2] < self.positions
        return beyond_keys or self.key_mask is not None or (self.bias is not None and self.bias.dtype == torch.bool)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(c: Call) -> None:
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
    if c.starts is not None and len(c.extent) != 4:
        raise ValueError(f"attention with starts needs the extent of [B, Hq, S, T], found {list(c.extent)}")
    if c.window < 0 or c.softcap < 0.0:
        raise ValueError(f"window and softcap are positive, or 0 for none; found {c.window} and {c.softcap}")


def _allowed(c: Call, causal: bool) -> Tensor | None:
    """Bool, broadcastable to [B, Hq, S, T], True where a query may attend a key; None where all may."""
    queries, keys = c.q.shape[2], c.k.shape[2]
    masks = []
    if c.key_mask is not None:
        masks.append(c.key_mask[:, None, None, :])
    if c.bias is not None and c.bias.dtype == torch.bool:
        masks.append(c.bias)
    if causal or c.windowed:
        i = torch.arange(queries, device=c.q.device)[:, None]
        if c.starts is not None:
            i = i + c.starts[2].to(i.device)
        j = torch.arange(keys, device=c.q.device)
        if c.starts is not None:
            j = j + c.starts[3].to(j.device)
        if causal:
            masks.append((j <= i)[None, None])
        if c.windowed:
            masks.append((j > i - c.window)[None, None])
    return functools.reduce(torch.logical_and, masks) if masks else None


def _float_bias(c: Call) -> Tensor | None:
    return c.bias if c.bias is not None and c.bias.dtype != torch.bool else None


def _additive_mask(c: Call) -> Tensor | None:
    """key_mask, bias and window (of a piece of the queries also causality) as the one float mask that the CPU kernel
    takes beside its own is_causal, or None."""
    allowed, bias = _allowed(c, causal=c.causal and c.is_piece), _float_bias(c)
    if allowed is None and bias is None:
        return None
    if bias is None:
        bias = torch.zeros((), dtype=c.q.dtype, device=c.q.device)
    elif not (c.q.dtype in _HALF and bias.dtype == torch.float32):  # the one mixture that the kernel takes
        bias = bias.to(c.q.dtype)
    return (bias if allowed is None else torch.where(allowed, bias, -math.inf)).contiguous()


def _by_kernel(c: Call) -> bool:
    """Whether causality is left to the kernel, whose first query is the first of all."""
    return c.causal and not c.is_piece


def _dead_rows(c: Call, mask: Tensor) -> Tensor:
    """Bool, broadcastable to [B, Hq, S]: queries that may attend no key under an additive ``mask`` and causality."""
    keys = mask.shape[-1]
    live = mask != -math.inf
    first = torch.where(live.any(-1), live.int().argmax(-1), keys)  # argmax gives the first of equals
    last = torch.arange(c.q.shape[2], device=mask.device) if _by_kernel(c) else keys - 1
    return first > last


def backend(c: Call) -> Literal["cpu", "cuda", "math"]:
    """Which implementation runs; forward and backward must agree, so only the arguments may count."""
    head_dim, queries, keys = c.q.shape[3], c.q.shape[2], c.k.shape[2]
    if c.spread and c.may_leave_no_key:
        return "math"  # no kernel lets a query attend what is masked
    if c.dropout != 0.0 or c.softcap != 0.0 or c.v.shape[3] != head_dim:
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
        and not c.windowed
        and not (c.causal and c.is_piece)
        and head_dim % 8 == 0
        and head_dim <= _MAX_FLASH_HEAD_DIM
        and (not c.causal or queries == keys)  # CUDA's causal mask is aligned to the bottom right
        and torch.cuda.get_device_capability(c.q.device) >= _MIN_FLASH_CAPABILITY
    )
    return "cuda" if flash else "math"


def _rows(x: Tensor) -> Tensor:
    """The kernels take any strides but that of the last dim."""
    return x if x.stride(-1) == 1 else x.contiguous()


def cpu_forward(c: Call) -> tuple[Tensor, Tensor]:
    mask = _additive_mask(c)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        _rows(c.q), _rows(c.k), _rows(c.v), 0.0, _by_kernel(c), attn_mask=mask, scale=c.scale
    )
    if mask is not None:  # the kernel reports 0 for the log of nothing
        lse = lse.masked_fill(_dead_rows(c, mask), -math.inf)
    return out, lse


def cpu_backward(c: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_rows(x) for x in (grad_out, c.q, c.k, c.v, out)),
        lse, 0.0, _by_kernel(c), attn_mask=_additive_mask(c), scale=c.scale,
    )  # fmt: skip


def cuda_forward(c: Call) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        _rows(c.q), _rows(c.k), _rows(c.v), 0.0, c.causal, False, scale=c.scale
    )
    return out, lse


def cuda_backward(c: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    no_lengths, no_rng = None, torch.zeros(2, dtype=torch.uint64, device=c.q.device)  # dense batches, no dropout
    return aten._scaled_dot_product_flash_attention_backward(
        *(_rows(x) for x in (grad_out, c.q, c.k, c.v, out)),
        lse, no_lengths, no_lengths, c.q.shape[2], c.k.shape[2], 0.0, c.causal, no_rng, no_rng, scale=c.scale,
    )  # fmt: skip


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, S, N] -> [B, Hkv, G * S, N]: the queries that share a key and value head as rows of one matrix."""
    batch, heads, rows, columns = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * rows, columns)


def _scores(c: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
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
        if c.spread:
            scores = scores.masked_fill_(~allowed.any(-1, keepdim=True), 0.0)
    return scores, slope


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse) in place of the scores, and 0 where a row has nothing to attend (there both are -inf)."""
    return scores.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()


def _drop(c: Call, keep: Tensor | None, x: Tensor) -> Tensor:
    if keep is None:
        return x
    return torch.where(keep, x / (1.0 - c.dropout) if c.dropout < 1.0 else x, 0.0)


def _kept(c: Call, shape: Sequence[int]) -> Tensor | None:
    if c.dropout == 0.0:
        return None
    assert c.seed is not None and c.starts is not None  # check
    return keep_mask(c.seed, c.starts, c.dropout, c.stream, shape, c.extent, c.q.device)


def math_forward(c: Call) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(accumulate_dtype(x.dtype)) for x in (c.q, c.k, c.v))
    scores, _ = _scores(c, q, k)
    lse = torch.logsumexp(scores, dim=-1)
    weights = _drop(c, _kept(c, scores.shape), _probabilities(scores, lse))
    out = _grouped(weights, k.shape[1]) @ v
    return out.view(*c.q.shape[:3], c.v.shape[3]).to(c.q.dtype), lse


def _gradients(c: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradient [B, Hq, S, T] of the scores after softcap and bias, in the accumulation dtype.

    FlashAttention's backward (Dao et al., 2022, algorithm 4) untiled; softcap and dropout by the chain rule.
    """
    q, k, v, grad, out = (x.to(accumulate_dtype(x.dtype)) for x in (c.q, c.k, c.v, grad_out, out))
    kv_heads = k.shape[1]
    scores, slope = _scores(c, q, k)
    probabilities = _probabilities(scores, lse)
    keep = _kept(c, scores.shape)
    grouped_grad = _grouped(grad, kv_heads)
    dv = _grouped(_drop(c, keep, probabilities), kv_heads).mT @ grouped_grad
    d_weights = (grouped_grad @ v.mT).view(scores.shape)
    delta = (grad * out).sum(-1, keepdim=True)  # = sum over keys of probability times its gradient, also with dropout
    d_biased = probabilities * (_drop(c, keep, d_weights) - delta)
    d_scores = d_biased * c.scale
    if slope is not None:
        d_scores = d_scores * slope
    grouped = _grouped(d_scores, kv_heads)
    dq = (grouped @ k).view(c.q.shape)
    dk = grouped.mT @ _grouped(q, kv_heads)
    return dq, dk, dv, d_biased


def math_backward(c: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) on any device."""
    dq, dk, dv, _ = _gradients(c, grad_out, out, lse)
    return dq.to(c.q.dtype), dk.to(c.k.dtype), dv.to(c.v.dtype)


def math_backward_with_bias(c: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dbias) on any device; ``c.bias`` is a float bias."""
    assert c.bias is not None
    dq, dk, dv, d_biased = _gradients(c, grad_out, out, lse)
    return dq.to(c.q.dtype), dk.to(c.k.dtype), dv.to(c.v.dtype), d_biased.sum_to_size(c.bias.shape).to(c.bias.dtype)


FORWARD = {"cpu": cpu_forward, "cuda": cuda_forward, "math": math_forward}
BACKWARD = {"cpu": cpu_backward, "cuda": cuda_backward, "math": math_backward}
