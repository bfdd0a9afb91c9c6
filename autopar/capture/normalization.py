"""Batch norm, variances and weight norm as means and pointwise operators; 16-bit layer and group norms.

Statistics are then reductions like any other: with the batch split they are those of the whole batch (what
SyncBatchNorm computes), in forward and backward, and so are the running statistics. Two passes, because the mean of
squares minus the square of the mean loses in float32 what eager keeps.

Layer and group norm stay whole. What their backward sums over the batch for weight and bias is summed in float32 and
rounded at the end: one process does so inside the operator, and across ranks every partial sum would be rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def widened(x: Tensor) -> Tensor:
    """``x``, in float32 if it is a 16-bit number: what is summed or normalised is so in eager."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _variance(
    x: Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor] | None:
    """Variance and mean over ``dim`` (None: all dims) in x's dtype; None for complex numbers."""
    if x.is_complex():
        return None
    wide, over = widened(x), list(range(x.dim())) if not dim else [d % x.dim() for d in dim]
    count = 1
    for d in over:
        count *= x.shape[d]
    mean = wide.mean(over, keepdim=True)
    squares = (wide - mean).square().sum(over, keepdim=keepdim)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    return variance.to(x.dtype), (mean if keepdim else mean.squeeze(over)).to(x.dtype)


def _var(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    found = _variance(x, dim, correction, keepdim)
    return NotImplemented if found is None else found[0]


def _std(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    found = _variance(x, dim, correction, keepdim)
    return NotImplemented if found is None else found[0].sqrt()


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    found = _variance(x, dim, correction, keepdim)
    return NotImplemented if found is None else found


def _channels(x: Tensor) -> tuple[list[int], list[int]]:
    """The dims of ``x`` [N, C, ...] that are averaged over, and the shape in which a [C] broadcasts to it."""
    return [0, *range(2, x.dim())], [-1 if d == 1 else 1 for d in range(x.dim())]


def _scaled(x: Tensor, centered: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``centered`` by rstd [C], weight and bias, in x's dtype."""
    shape = _channels(x)[1]
    scale = rstd if weight is None else rstd * weight
    out = centered * scale.view(shape)
    return (out if bias is None else out + bias.view(shape)).to(x.dtype)


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, and mean, reciprocal deviation and variance [C] of the batch ``x`` [N, C, ...]."""
    over, shape = _channels(x)
    wide = widened(x)
    mean = wide.mean(over)
    centered = wide - mean.view(shape)
    variance = centered.square().mean(over)
    rstd = (variance + eps).rsqrt()
    return _scaled(x, centered, rstd, weight, bias), mean, rstd, variance


def _without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _batch_norm(x, weight, bias, eps)[:3]


def _training(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Output, mean and reciprocal deviation of the batch, and the new running mean and (unbiased) variance."""
    if not training:
        return (*_evaluation(x, weight, bias, running_mean, running_var, momentum, eps), running_mean, running_var)
    out, mean, rstd, variance = _batch_norm(x, weight, bias, eps)
    count = x.numel() // x.shape[1]
    unbiased = variance * (count / max(count - 1, 1))
    new = [
        (old * (1 - momentum) + value * momentum).to(old.dtype)
        for old, value in ((running_mean, mean), (running_var, unbiased))
    ]
    return out, mean, rstd, *new


def _evaluation(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    centered = widened(x) - running_mean.view(_channels(x)[1])
    out = _scaled(x, centered, (running_var + eps).rsqrt(), weight, bias)
    return out, x.new_empty(0), x.new_empty(0)  # the batch has no statistics of interest


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias. S. Ioffe, C. Szegedy, "Batch Normalization", ICML 2015, section 3."""
    over, shape = _channels(x)
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, rstd = save_mean, save_invstd
    else:
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, (running_var + eps).rsqrt()
    wide = widened(grad)
    normal = (widened(x) - mean.view(shape)) * rstd.view(shape)
    total, along = wide.sum(over), (wide * normal).sum(over)
    grad_input = None
    if output_mask[0]:
        scale = rstd if weight is None else rstd * weight
        if train:
            count = x.numel() // x.shape[1]
            wide = wide - (total / count).view(shape) - normal * (along / count).view(shape)
        grad_input = (wide * scale.view(shape)).to(x.dtype)
    like = x if weight is None else weight
    return (
        grad_input,
        along.to(like.dtype) if output_mask[1] else None,
        total.to(like.dtype) if output_mask[2] else None,
    )


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """``v`` scaled to the norms ``g`` (size 1 in all dims but ``dim``), and the norms that it had."""
    norms = widened(v).square().sum([d for d in range(v.dim()) if d != dim], keepdim=True).sqrt()
    return (v * (g / norms)).to(v.dtype), norms


def _weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Gradients of v and g. T. Salimans, D. P. Kingma, "Weight Normalization", NIPS 2016, equation 3."""
    over = [d for d in range(v.dim()) if d != dim]
    along = widened(grad * v).sum(over, keepdim=True) / norms
    return (g / norms * (grad - v * (along / norms))).to(v.dtype), along.to(g.dtype)


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _is_narrow(x: Tensor, output_mask: Sequence[bool]) -> bool:
    """Whether gradients of parameters are asked for that sum up 16-bit numbers."""
    return x.dtype in (torch.float16, torch.bfloat16) and any(output_mask[1:])


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> _Gradients:
    if not _is_narrow(x, output_mask):
        return NotImplemented  # the operator as it is
    backward, like = aten.native_layer_norm_backward.default, x if weight is None else weight
    shape, learned = list(normalized_shape), [None if p is None else widened(p) for p in (weight, bias)]
    grad_input = None
    if output_mask[0]:
        grad_input = backward(grad, x, shape, mean, rstd, weight, bias, [True, False, False])[0]
    wide = (widened(grad), widened(x), shape, widened(mean), widened(rstd), *learned)
    return grad_input, *_rounded(backward(*wide, [False, *output_mask[1:]])[1:], like.dtype)


def _group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    channels: int,
    pixels: int,
    groups: int,
    output_mask: Sequence[bool],
) -> _Gradients:
    if not _is_narrow(x, output_mask):
        return NotImplemented
    backward, like = aten.native_group_norm_backward.default, x if weight is None else weight
    counts = (n, channels, pixels, groups)
    grad_input = None
    if output_mask[0]:
        grad_input = backward(grad, x, mean, rstd, weight, *counts, [True, False, False])[0]
    learned = None if weight is None else widened(weight)
    wide = (widened(grad), widened(x), widened(mean), widened(rstd), learned, *counts)
    return grad_input, *_rounded(backward(*wide, [False, *output_mask[1:]])[1:], like.dtype)


def _rounded(gradients: Sequence[Tensor | None], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias in ``dtype``."""
    weight, bias = (None if g is None else g.to(dtype) for g in gradients)
    return weight, bias


def normalization_table() -> dict[Any, Callable[..., Any]]:
    """Decompositions of norms and variances, by operator."""
    return {
        aten._native_batch_norm_legit.no_stats: _without_statistics,
        aten._native_batch_norm_legit_functional.default: _training,
        aten._native_batch_norm_legit_no_training.default: _evaluation,
        aten._weight_norm_interface.default: _weight_norm,
        aten._weight_norm_interface_backward.default: _weight_norm_backward,
        aten.native_batch_norm_backward.default: _backward,
        aten.native_group_norm_backward.default: _group_norm_backward,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
        aten.std.correction: _std,
        aten.var.correction: _var,
        aten.var_mean.correction: _var_mean,
    }
