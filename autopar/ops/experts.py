"""``autopar::dispatch``, ``grouped_mm``, ``combine`` and their backwards: a mixture of experts by its routed rows.

A router gives every token t of T the experts ``index[t, k]`` of K. Think of a tensor [E, T, H] with a slot for every
expert and token, of which T x K are filled: this is what these operators work on, and what the rules split, by experts
or by tokens. Kept are the filled slots alone, sorted by expert and, for one expert, by token and k: rows [1, P, H],
with P = T x K where nothing is split. A rank that has some of the experts has the rows of those, so that P depends on
the data; an ``index`` outside of [0, experts) belongs to another rank, or to nobody (a token that is dropped), and has
no row. No token is dropped for want of room.

What is planned with is the mean: rows are declared as [E, C, H] with C = T / ``group``, where ``group`` divides T and
is at most E / K (`group_of`), so that E x C is T x K or little more. Only operators that ask for no size of the first
two dims may work on rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


class Pairs(NamedTuple):
    """The (token, k) pairs that go to experts of this rank, sorted by expert."""

    order: Tensor  # [P], places in the flattened index
    counts: Tensor  # [experts], rows of every expert


def group_of(tokens: int, top_k: int, experts: int) -> int:
    """How many tokens share one declared slot of an expert: the largest divisor of ``tokens`` up to experts / top_k."""
    return next(g for g in range(max(min(experts // max(top_k, 1), tokens), 1), 0, -1) if tokens % g == 0)


#: Attribute of an index: its pairs, with the version that it had and the number of experts.
_FOUND = "autopar_pairs"


def routed_pairs(index: Tensor, experts: int) -> Pairs:
    """The pairs of ``index`` [T, K] that go to some of the ``experts``. Every operator on rows asks for them, so they
    are kept with the index while it lives: one sort, and on a device one wait for the number of rows.
    """
    if index.is_inference():  # has no version
        return _sorted_pairs(index, experts)
    state = index._version, experts
    found = getattr(index, _FOUND, None)
    if found is None or found[0] != state:
        found = state, _sorted_pairs(index, experts)
        setattr(index, _FOUND, found)
    pairs: Pairs = found[1]
    return pairs


def _sorted_pairs(index: Tensor, experts: int) -> Pairs:
    flat = index.reshape(-1)
    keys = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counts = torch.bincount(keys, minlength=experts + 1)[:experts]
    return Pairs(torch.argsort(keys, stable=True)[: int(counts.sum())], counts)


def check_rows(rows: Tensor, index: Tensor, name: str) -> None:
    """Raise ValueError where rows and index cannot belong together."""
    if rows.dim() != 3 or index.dim() != 2 or index.dtype != torch.int64:
        raise ValueError(
            f"{name} expects rows of 3 dims and an int64 index [T, K], found {list(rows.shape)}, {index.dtype} "
            f"{list(index.shape)}"
        )


def products(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """For every expert the product of its rows of ``a`` [P, I] with ``b``: its matrix of [E, I, O], giving [P, O]; or
    of its columns of ``a`` [I, P] with its rows of ``b`` [P, O], giving [E, I, O]."""
    if a.is_cuda and a.dtype == torch.bfloat16:  # where there is one kernel for all of them
        return F.grouped_mm(a, b, offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    if b.dim() == 3:
        pieces = [x @ w for x, w in zip(a.split(sizes), b, strict=True)]
        return torch.cat(pieces) if pieces else a.new_empty(0, b.shape[2])
    columns, rows = a.split(sizes, dim=1), b.split(sizes)
    return torch.stack([x @ y for x, y in zip(columns, rows, strict=True)])


@torch.library.custom_op(
    "autopar::expert_counts", mutates_args=(), schema="(Tensor index, SymInt experts) -> Tensor"
)
def expert_counts(index: Tensor, experts: int) -> Tensor:
    """How many tokens ``index`` [T, K] sends to each of ``experts`` experts: int64 [experts]."""
    return routed_pairs(index, experts).counts.clone()


@expert_counts.register_fake
def _(index: Tensor, experts: int) -> Tensor:
    return index.new_empty(experts)


@torch.library.custom_op(
    "autopar::dispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor index, Tensor? weights, SymInt experts, SymInt group) -> Tensor",
)
def dispatch(x: Tensor, index: Tensor, weights: Tensor | None, experts: int, group: int) -> Tensor:
    """The rows of tokens ``x`` [T, H] that ``index`` [T, K] sends to ``experts`` experts, times ``weights`` [T, K] if
    given: [1, P, H], declared as [experts, T / group, H].

    Raises:
        ValueError: an index that is not int64 [T, K].
    """
    check_rows(x.unsqueeze(0), index, "dispatch")
    order = routed_pairs(index, experts).order
    rows = x[order // index.shape[1]]
    if weights is not None:
        rows = rows * weights.reshape(-1)[order, None]
    return rows.unsqueeze(0)


@dispatch.register_fake
def _(x: Tensor, index: Tensor, weights: Tensor | None, experts: int, group: int) -> Tensor:
    return x.new_empty(experts, x.shape[0] // group, x.shape[1])


@torch.library.custom_op(
    "autopar::combine",
    mutates_args=(),
    schema="(Tensor rows, Tensor index, Tensor? weights, SymInt experts, SymInt group) -> Tensor",
)
def combine(rows: Tensor, index: Tensor, weights: Tensor | None, experts: int, group: int) -> Tensor:
    """The sum over a token's rows [1, P, H], times ``weights`` [T, K] if given: [T, H], zero where a token has none.

    Raises:
        ValueError: rows or an index of other dims.
    """
    check_rows(rows, index, "combine")
    order, (tokens, top_k) = routed_pairs(index, experts).order, index.shape
    found = rows[0] if weights is None else rows[0] * weights.reshape(-1)[order, None]
    # a row a pair and a sum over them, and no index_add: its order of additions is not fixed on CUDA
    pairs = rows.new_zeros(tokens * top_k, rows.shape[2])
    pairs[order] = found
    return pairs.view(tokens, top_k, rows.shape[2]).sum(1)


@combine.register_fake
def _(rows: Tensor, index: Tensor, weights: Tensor | None, experts: int, group: int) -> Tensor:
    return rows.new_empty(index.shape[0], rows.shape[2])


@torch.library.custom_op(
    "autopar::combine_weights_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor rows, Tensor index, SymInt experts, SymInt group) -> Tensor",
)
def combine_weights_backward(grad: Tensor, rows: Tensor, index: Tensor, experts: int, group: int) -> Tensor:
    """Gradient of the weights of `combine`, [T, K]: the product of ``grad`` [T, H] of a token with each of its rows."""
    order = routed_pairs(index, experts).order
    found = grad.new_zeros(index.numel())
    found[order] = (grad[order // index.shape[1]] * rows[0]).sum(-1)
    return found.view(index.shape)


@combine_weights_backward.register_fake
def _(grad: Tensor, rows: Tensor, index: Tensor, experts: int, group: int) -> Tensor:
    return grad.new_empty(index.shape)


@torch.library.custom_op(
    "autopar::grouped_mm", mutates_args=(), schema="(Tensor rows, Tensor weight, Tensor index) -> Tensor"
)
def grouped_mm(rows: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """Every row [1, P, I] times the matrix of its expert, ``weight`` [E, I, O]: [1, P, O].

    Raises:
        ValueError: rows or an index of other dims.
    """
    check_rows(rows, index, "grouped_mm")
    return products(rows[0], weight, routed_pairs(index, weight.shape[0]).counts).unsqueeze(0)


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    return rows.new_empty(*rows.shape[:2], weight.shape[2])


@torch.library.custom_op(
    "autopar::grouped_outer",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor index, SymInt experts) -> Tensor",
)
def grouped_outer(a: Tensor, b: Tensor, index: Tensor, experts: int) -> Tensor:
    """For every expert the sum over its rows of the outer products of ``a`` [1, P, I] and ``b`` [1, P, O]: [E, I, O],
    zero for an expert without rows. The gradient of `grouped_mm`'s weight."""
    check_rows(a, index, "grouped_outer")
    return products(a[0].t(), b[0], routed_pairs(index, experts).counts)


@grouped_outer.register_fake
def _(a: Tensor, b: Tensor, index: Tensor, experts: int) -> Tensor:
    return a.new_empty(experts, a.shape[2], b.shape[2])


@torch.library.custom_op(
    "autopar::grouped_bias", mutates_args=(), schema="(Tensor rows, Tensor bias, Tensor index) -> Tensor"
)
def grouped_bias(rows: Tensor, bias: Tensor, index: Tensor) -> Tensor:
    """Every row [1, P, O] plus the vector of its expert, ``bias`` [E, O]."""
    check_rows(rows, index, "grouped_bias")
    return rows + bias.repeat_interleave(routed_pairs(index, bias.shape[0]).counts, dim=0)


@grouped_bias.register_fake
def _(rows: Tensor, bias: Tensor, index: Tensor) -> Tensor:
    return torch.empty_like(rows)


@torch.library.custom_op(
    "autopar::grouped_sum", mutates_args=(), schema="(Tensor rows, Tensor index, SymInt experts) -> Tensor"
)
def grouped_sum(rows: Tensor, index: Tensor, experts: int) -> Tensor:
    """The sum over the rows [1, P, O] of every expert, [E, O]: the gradient of `grouped_bias`'s bias."""
    check_rows(rows, index, "grouped_sum")
    sizes = routed_pairs(index, experts).counts.tolist()
    return torch.stack([piece.sum(0) for piece in rows[0].split(sizes)])


@grouped_sum.register_fake
def _(rows: Tensor, index: Tensor, experts: int) -> Tensor:
    return rows.new_empty(experts, rows.shape[2])


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, index, weights, ctx.experts, ctx.group = inputs
    if weights is not None:
        raise NotImplementedError("dispatch with weights is a gradient, and has none itself")
    ctx.save_for_backward(index)


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    return combine(grad, index, None, ctx.experts, ctx.group), None, None, None, None


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, index, weights, ctx.experts, ctx.group = inputs
    ctx.save_for_backward(rows, index, weights)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, index, weights = ctx.saved_tensors
    of_rows = dispatch(grad, index, weights, ctx.experts, ctx.group)
    of_weights = None
    if weights is not None and ctx.needs_input_grad[2]:
        of_weights = combine_weights_backward(grad, rows, index, ctx.experts, ctx.group)
    return of_rows, None, of_weights, None, None


@torch.library.custom_op("autopar::put_into_zeros", mutates_args=())
def put_into_zeros(x: Tensor, size: int, start: int, end: int, step: int) -> Tensor:
    """Zeros of the shape of ``x`` but for a last dim of ``size``, with ``x`` in ``[start:end:step]`` of it: the
    gradient of such a slice, as ``aten.slice_backward``, without the sizes of other dims, which rows do not have."""
    out = x.new_zeros((*x.shape[:-1], size))
    out[..., start:end:step] = x
    return out


@put_into_zeros.register_fake
def _(x: Tensor, size: int, start: int, end: int, step: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], size))


def _mm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, index = ctx.saved_tensors
    of_rows = grouped_mm(grad, weight.transpose(1, 2), index) if ctx.needs_input_grad[0] else None
    of_weight = grouped_outer(rows, grad, index, weight.shape[0]) if ctx.needs_input_grad[1] else None
    return of_rows, of_weight, None


def _bias_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, index = inputs
    ctx.experts = bias.shape[0]
    ctx.save_for_backward(index)


def _bias_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    return grad, grouped_sum(grad, index, ctx.experts) if ctx.needs_input_grad[1] else None, None


dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_context)
combine.register_autograd(_combine_backward, setup_context=_combine_context)
grouped_mm.register_autograd(_mm_backward, setup_context=_mm_context)
grouped_bias.register_autograd(_bias_backward, setup_context=_bias_context)


@register_flop_formula(torch.ops.autopar.grouped_mm)
def _mm_flops(rows: Sequence[int], weight: Sequence[int], index: Any, **_: Any) -> int:
    return 2 * rows[0] * rows[1] * rows[2] * weight[2]


@register_flop_formula(torch.ops.autopar.grouped_outer)
def _outer_flops(a: Sequence[int], b: Sequence[int], index: Any, experts: int, **_: Any) -> int:
    return 2 * a[0] * a[1] * a[2] * b[2]
