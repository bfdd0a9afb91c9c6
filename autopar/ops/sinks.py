"""Attention with sinks: every softmax has one more score, learned by its head, whose weight goes to no value.

With ``lse`` the logarithm of the sum of a query's exponentials and ``z`` its head's sink, all sums become
``exp(lse) + exp(z)``: results shrink by ``exp(lse - total)``, total = log of that sum. FlashAttention's backward (Dao
et al., 2022, algorithm 4) computes weights from the logarithm it is given and subtracts the product of a result and its
gradient from theirs, so that of `autopar.ops.attention` is right as it is, given the results that have shrunk and the
totals. A sink has the gradient of one more score whose value is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.attention import attention, attention_backward, attention_bias_backward
from autopar.ops.attention_kernels import Call


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sinks: Tensor, *inputs: Any) -> Tensor:
        out, lse = attention(*inputs)
        own = sinks.to(lse.dtype)[:, None]
        most = torch.maximum(lse, own)
        total = most + torch.log(torch.exp(lse - most) + torch.exp(own - most))
        out = (out * torch.exp(lse - total)[..., None]).to(out.dtype)
        c = Call(*inputs)
        ctx.save_for_backward(sinks, c.q, c.k, c.v, c.key_mask, c.bias, out, total, c.seed, c.starts)
        ctx.scalars = c[7:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sinks, *saved = ctx.saved_tensors
        out, total = saved[5:7]
        dbias = None
        if ctx.needs_input_grad[1 + Call._fields.index("bias")]:
            dq, dk, dv, dbias = attention_bias_backward(grad, *saved, *ctx.scalars)
        else:
            dq, dk, dv = attention_backward(grad, *saved, *ctx.scalars)
        weight = torch.exp(sinks.to(total.dtype)[:, None] - total)
        products = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
        dsinks = -(weight * products).sum((0, 2)).to(sinks.dtype)
        return dsinks, dq, dk, dv, None, dbias, *([None] * (len(Call._fields) - 5))


def attention_with_sinks(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """`attention` by its arguments, with ``sinks`` [Hq], one for every head: [B, Hq, S, Dv] in q's dtype."""
    device = q.device.type
    if torch.is_autocast_enabled(device):  # before the operator does so inside, where its backward does not see it
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    out: Tensor = _WithSinks.apply(sinks, q, k, v, *rest)
    return out
