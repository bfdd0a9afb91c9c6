"""``autopar::token_scores`` and its backward: what a loss needs of the scores of a vocabulary, without all of them.

The scores of S tokens for V words are x weight^T, S x V numbers, of which cross entropy needs two a token: the
logarithm of the sum of their exponentials, and that of the label. Both are found for a chunk of tokens at a time, and
the backward makes the scores of a chunk again instead of keeping them (as Liger's fused linear cross entropy does,
Hsu et al., arXiv:2410.10989; here the gradients wait for the backward). Where words are split, a rank has the sum over
its own words, and the score of the labels that are among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar.ops.attention_kernels import accumulate_dtype

#: Bytes of the scores of a chunk of tokens, in the dtype in which they are summed up.
CHUNK_BYTES = 2**28

_GIVEN = "Tensor x, Tensor weight, Tensor labels, Tensor? first"


def _chunks(x: Tensor, weight: Tensor, labels: Tensor, first: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Places of chunks of tokens, their scores, and their labels as counted from the first word that is here."""
    wide = accumulate_dtype(x.dtype)
    tokens, flat = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    if first is not None:
        flat = flat - first.to(flat.device)
    size = max(1, CHUNK_BYTES // (weight.shape[0] * wide.itemsize))
    for begin in range(0, tokens.shape[0], size):
        at = slice(begin, begin + size)
        yield at, (tokens[at] @ weight.t()).to(wide), flat[at]


def _is_here(labels: Tensor, words: int) -> Tensor:
    return (labels >= 0) & (labels < words)


@torch.library.custom_op(
    "autopar::token_scores", mutates_args=(), schema=f"({_GIVEN}) -> (Tensor lse, Tensor score)"
)
def token_scores(x: Tensor, weight: Tensor, labels: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of the scores x weight^T, rounded to x's dtype, the logarithm of the sum of exp over all words, and the label's.

    Args:
        x: [B, S, H]. weight: [V, H], in x's dtype. labels: int64 [B, S]; the score of one that is no word is 0.
        first: int64 [1], the number of the first word in ``weight``, of which these are a piece; None: 0.

    Returns:
        lse and score, both [B, S], float32 (float64 for float64); differentiable in x and weight.
    """
    found = x.new_empty((2, labels.numel()), dtype=accumulate_dtype(x.dtype))
    for at, scores, own in _chunks(x, weight, labels, first):
        here = _is_here(own, weight.shape[0])
        found[0, at] = torch.logsumexp(scores, dim=-1)
        of_label = scores.gather(1, torch.where(here, own, 0)[:, None])[:, 0]
        found[1, at] = torch.where(here, of_label, 0.0)
    lse, score = found.view(2, *labels.shape)
    return lse.clone(), score.clone()


@token_scores.register_fake
def _(x: Tensor, weight: Tensor, labels: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(x.dtype)
    return x.new_empty(labels.shape, dtype=dtype), x.new_empty(labels.shape, dtype=dtype)


@torch.library.custom_op(
    "autopar::token_scores_backward", mutates_args=(),
    schema=f"({_GIVEN}, Tensor lse, Tensor dlse, Tensor dscore) -> (Tensor dx, Tensor dweight)",
)  # fmt: skip
def token_scores_backward(
    x: Tensor, weight: Tensor, labels: Tensor, first: Tensor | None, lse: Tensor, dlse: Tensor, dscore: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `token_scores`, by its arguments and the ``lse`` over all words. Of a piece of the words that of x
    is a part of a sum. The gradient of the scores is rounded to x's dtype, as it would be behind a cast."""
    words, wide = weight.shape[0], accumulate_dtype(x.dtype)
    tokens, rows = x.reshape(-1, x.shape[-1]), [t.reshape(-1, 1) for t in (dlse, dscore, lse)]
    dx, dweight = torch.empty_like(tokens), weight.new_zeros(weight.shape, dtype=wide)
    for at, scores, own in _chunks(x, weight, labels, first):
        by_lse, by_score, total = (row[at] for row in rows)
        here = _is_here(own, words)
        gradient = scores.sub_(total).exp_().mul_(by_lse)
        gradient.scatter_add_(1, torch.where(here, own, 0)[:, None], torch.where(here[:, None], by_score, 0.0))
        rounded = gradient.to(x.dtype)
        dx[at] = rounded @ weight
        dweight += rounded.t() @ tokens[at]
    return dx.view(x.shape), dweight.to(weight.dtype, copy=True)


@token_scores_backward.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _backward(ctx: Any, dlse: Tensor, dscore: Tensor) -> tuple[Tensor | None, ...]:
    return (*token_scores_backward(*ctx.saved_tensors, dlse, dscore), None, None)


token_scores.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.autopar.token_scores)
def _flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """One product."""
    batch, length, hidden = x
    return 2 * batch * length * hidden * int(weight[0])


@register_flop_formula(torch.ops.autopar.token_scores_backward)
def _backward_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """The scores again, and two gradients."""
    return 3 * _flops(x, weight)
