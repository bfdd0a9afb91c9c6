"""``F.scaled_dot_product_attention`` by ``autopar::attention``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.ops.attention import attention


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
        return attention(query, key, value, key_mask, bias, None, None, scale, is_causal, 0, False, 0.0, 0.0, 0, [])[0]
    starts = torch.zeros(4, dtype=torch.int64, device=query.device)
    extent = [*query.shape[:3], key.shape[2]]
    return attention(
        query, key, value, key_mask, bias, seed, starts, scale, is_causal, 0, False, 0.0, dropout_p, stream, extent
    )[0]
