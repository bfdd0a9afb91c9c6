"""Layers of PyTorch that trace to operators which hide how they can be split, written so that they can.

An embedding bag is a lookup and a sum over its items, a bilinear layer an einsum; a recurrence is one operator of
autopar's own a layer and direction, instead of a kernel of one device or a graph as long as the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.ops.rnn import gru, lstm, rnn_relu, rnn_tanh


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """As ``F.embedding_bag``: bags are the rows of ``input`` [B, items], or begin in ``input`` [N] at ``offsets``."""
    if max_norm is not None or scale_grad_by_freq or mode == "max":
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    items = F.embedding(input, weight)
    if per_sample_weights is not None:
        items = items * per_sample_weights.unsqueeze(-1)
    counts = torch.ones_like(input, dtype=weight.dtype)
    if padding_idx is not None:
        kept = input != padding_idx % weight.shape[0]
        items = torch.where(kept.unsqueeze(-1), items, 0.0)
        counts = kept.to(weight.dtype)
    if offsets is None:
        total, counted = items.sum(1), counts.sum(1)
    else:
        bags = offsets.shape[0] - include_last_offset
        positions = torch.arange(input.shape[0], device=input.device, dtype=offsets.dtype)
        bag = torch.bucketize(positions, offsets, right=True) - 1
        total = items.new_zeros((bags, weight.shape[1])).index_add(0, bag, items)
        counted = counts.new_zeros(bags).index_add(0, bag, counts)
    return total if mode == "sum" else total / counted.clamp(min=1.0).unsqueeze(-1)


def _bilinear(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.bilinear``: [..., I], [..., J], [O, I, J] and [O] to [..., O]."""
    out = torch.einsum("...i,oij,...j->...o", first, weight, second)
    return out if bias is None else out + bias


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    F.bilinear: _bilinear,
    F.embedding_bag: _embedding_bag,
    torch.gru: gru,
    torch.lstm: lstm,
    torch.rnn_relu: rnn_relu,
    torch.rnn_tanh: rnn_tanh,
}


class SplittableLayers(TorchFunctionMode):
    """Context in which embedding bags, bilinear layers and recurrences trace to what can be split."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))
