"""Decompositions used while tracing: what turns a composite into operators that can be split.

The loss is the reason for most of them: as reductions and a gather, a vocabulary-sharded loss needs no special case,
and the number of tokens that count is a sum of its own, exact however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar._compat import get_decompositions
from autopar.capture.normalization import normalization_table, widened

aten = torch.ops.aten


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """In float32 for 16-bit numbers, as in eager, and rounded at the end."""
    wide = widened(x)
    shifted = wide - wide.amax(dim, keepdim=True)
    found = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return found if half_to_float else found.to(x.dtype)


def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide = widened(grad)
    return (wide - widened(output).exp() * wide.sum(dim, keepdim=True)).to(input_dtype)


def _classes_dim(x: Tensor) -> int:
    return min(1, x.dim() - 1)


def _nll_loss_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """x [N, C] (or [C], or [N, C, H, W]) log-probabilities, target x's shape without C; reduction 0 none, 1 mean, 2
    sum."""
    dim = _classes_dim(x)
    counts = target != ignore_index
    safe = torch.where(counts, target, 0)
    losses = -torch.gather(x, dim, safe.unsqueeze(dim)).squeeze(dim)
    if weight is not None:
        losses = losses * weight[safe]
    losses = torch.where(counts, losses, 0.0)
    if reduction == 0:
        return losses, x.new_zeros(())
    losses = widened(losses)  # in bf16 a sum of some hundred tokens, or their number, would be rounded
    total = (counts.to(losses.dtype) if weight is None else torch.where(counts, widened(weight)[safe], 0.0)).sum()
    return (losses.sum() / total if reduction == 1 else losses.sum()).to(x.dtype), total


def _nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    dim = _classes_dim(x)
    counts = target != ignore_index
    safe = torch.where(counts, target, 0)
    scale = -grad / total_weight if reduction == 1 else -grad
    column = torch.where(counts, scale if weight is None else scale * weight[safe], 0.0).unsqueeze(dim)
    classes = torch.arange(x.shape[dim], device=x.device).view([-1] + [1] * (x.dim() - 1 - dim))
    return torch.where(classes == safe.unsqueeze(dim), column, 0.0).to(x.dtype)


def _convolution_backward(grad: Tensor, *args: Any) -> Any:
    """The bias's gradient as a sum of its own: it needs neither input nor weight, and 16-bit sums can be widened."""
    *rest, mask = args
    if not mask[2]:
        return NotImplemented  # the operator as it is
    total = grad.sum([0, *range(2, grad.dim())])
    if not any(mask[:2]):
        return None, None, total
    return (*aten.convolution_backward.default(grad, *rest, [*mask[:2], False])[:2], total)


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """The table given to AOTAutograd. Composites with good rules of their own (layer norm, softmax, activations and
    their backwards, embeddings) are left whole."""
    table: dict[Any, Callable[..., Any]] = dict(
        get_decompositions(
            [
                aten.mse_loss,
                aten.mse_loss_backward,
                aten.smooth_l1_loss,
                aten.smooth_l1_loss_backward,
                aten._prelu_kernel,
                aten._prelu_kernel_backward,
                aten.addbmm,
                aten.addmv,
                aten.aminmax,
                aten.binary_cross_entropy,
                aten.binary_cross_entropy_backward,
                aten.binary_cross_entropy_with_logits,
                aten.celu,
                aten.glu,
                aten.glu_backward,
                aten.hardshrink,
                aten.huber_loss,
                aten.huber_loss_backward,
                aten.log_sigmoid_backward,
                aten.log_sigmoid_forward,
                aten.logaddexp,
                aten.mish_backward,
                aten.soft_margin_loss,
                aten.softshrink,
                aten.xlogy,
                aten.softplus_backward,
                aten.addcmul,
                aten.addcdiv,
                aten.rsub,
                aten.leaky_relu_backward,
                aten.elu_backward,
                aten.hardswish_backward,
                aten.split_with_sizes_copy,
            ]
        )
    )
    table.update(normalization_table())
    table.update(
        {
            aten._log_softmax.default: _log_softmax,
            aten.convolution_backward.default: _convolution_backward,
            aten._log_softmax_backward_data.default: _log_softmax_backward,
            aten.nll_loss_forward.default: _nll_loss_forward,
            aten.nll_loss_backward.default: _nll_loss_backward,
            aten.nll_loss2d_forward.default: _nll_loss_forward,
            aten.nll_loss2d_backward.default: _nll_loss_backward,
        }
    )
    return table
