"""Attention with sinks against a softmax with one more score."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ops.sinks import attention_with_sinks

HEADS, QUERIES, DIM = 4, 6, 8


def written_out(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The sink is one more score, whose weight is dropped; a query that sees nothing gives zeros."""
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * DIM**-0.5).masked_fill(~mask, float("-inf"))
    sink = sinks.view(1, HEADS, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v


def inputs(kv_heads: int, value_dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Sinks, q, k and v, leaves that require a gradient; one sink decides all, one nothing."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, HEADS, QUERIES, DIM), (2, kv_heads, QUERIES, DIM), (2, kv_heads, QUERIES, value_dim))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [t.to(dtype).requires_grad_() for t in (torch.tensor([0.5, -30.0, 30.0, 2.0]), *tensors)]


def with_gradients(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    out = function(*tensors)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(("kv_heads", "value_dim"), [(4, 8), (2, 8), (1, 8), (2, 4)])
def test_equals_one_more_score(kv_heads: int, value_dim: int, window: int, dtype: torch.dtype, bound: float) -> None:
    """Causal, with a window, left padding whose queries see nothing, kernels and written-out attention."""
    key_mask = torch.ones(2, QUERIES, dtype=torch.bool)
    key_mask[1, :2] = False
    i = torch.arange(QUERIES)
    mask = (i[:, None] >= i) & key_mask[:, None, None, :]
    mask = mask & (i > i[:, None] - window) if window else mask

    def ours(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scalars = (DIM**-0.5, True, window, False, 0.0, 0.0, 0, [])
        return attention_with_sinks(sinks, q, k, v, key_mask, None, None, None, *scalars)

    given = inputs(kv_heads, value_dim, dtype)
    found = with_gradients(ours, given)
    for a, b in zip(found, with_gradients(lambda *t: written_out(*t, mask), given), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)
    assert not found[0][1, :, :2].any()


def test_a_learned_bias_has_its_gradient() -> None:
    bias = torch.linspace(-1, 1, QUERIES * QUERIES, dtype=torch.float64).view(1, 1, QUERIES, QUERIES).requires_grad_()
    sinks, q, k, v = inputs(2, 8)
    scalars = (DIM**-0.5, False, 0, False, 0.0, 0.0, 0, [])

    def ours(bias: Tensor) -> Tensor:
        return attention_with_sinks(sinks, q, k, v, None, bias, None, None, *scalars)

    def theirs(bias: Tensor) -> Tensor:
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        sink = sinks.view(1, HEADS, 1, 1).expand(2, HEADS, QUERIES, 1)
        scores = torch.cat([q @ keys.mT * DIM**-0.5 + bias, sink], -1)
        return scores.softmax(-1)[..., :-1] @ values

    for a, b in zip(with_gradients(ours, [bias]), with_gradients(theirs, [bias]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_autocast_computes_in_bf16() -> None:
    given = inputs(2, 8, torch.float32)
    scalars = (DIM**-0.5, True, 0, False, 0.0, 0.0, 0, [])
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_with_sinks(*given, None, None, None, None, *scalars)
    assert out.dtype == torch.bfloat16
    exact = written_out(*(t.double() for t in given), torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril())
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(out.float().sum(), given)
    expected = torch.autograd.grad(exact.sum(), given)
    for a, b in zip(gradients, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)
