"""``autopar::gated_mm`` and its backwards: the two products that a gate takes, of routed rows (`autopar.ops.experts`).

Weights that are fused have the matrices of gate and up one after the other in one dim, [E, 2 x I, H]. As [E, 2, I, H],
which is a view, each expert's hidden dim I can be split with every rank having its part of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar.ops.experts import check_rows, products, routed_pairs


def _fused(weight: Tensor) -> Tensor:
    """[E, 2, I, H] as [E, 2 x I, H]."""
    return weight.reshape(weight.shape[0], -1, weight.shape[3])


@torch.library.custom_op(
    "autopar::gated_mm", mutates_args=(), schema="(Tensor rows, Tensor weight, Tensor index) -> (Tensor, Tensor)"
)
def gated_mm(rows: Tensor, weight: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Every row [1, P, H] times both matrices of its expert, ``weight`` [E, 2, I, H]: gate and up, each [1, P, I].

    Raises:
        ValueError: rows or an index of other dims.
    """
    check_rows(rows, index, "gated_mm")
    counts = routed_pairs(index, weight.shape[0]).counts
    both = products(rows[0], _fused(weight).transpose(1, 2), counts)
    gate, up = (half.clone(memory_format=torch.contiguous_format) for half in both.chunk(2, dim=1))
    return gate.unsqueeze(0), up.unsqueeze(0)


@gated_mm.register_fake
def _(rows: Tensor, weight: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*rows.shape[:2], weight.shape[2])
    return rows.new_empty(shape), rows.new_empty(shape)


@torch.library.custom_op(
    "autopar::gated_mm_backward",
    mutates_args=(),
    schema="(Tensor gate, Tensor up, Tensor weight, Tensor index) -> Tensor",
)
def gated_mm_backward(gate: Tensor, up: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """Gradient of the rows of `gated_mm`, [1, P, H], of those of its results, each [1, P, I]."""
    check_rows(gate, index, "gated_mm_backward")
    counts = routed_pairs(index, weight.shape[0]).counts
    return products(torch.cat([gate[0], up[0]], 1), _fused(weight), counts).unsqueeze(0)


@gated_mm_backward.register_fake
def _(gate: Tensor, up: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    return gate.new_empty(*gate.shape[:2], weight.shape[3])


@torch.library.custom_op(
    "autopar::gated_outer",
    mutates_args=(),
    schema="(Tensor gate, Tensor up, Tensor rows, Tensor index, SymInt experts) -> Tensor",
)
def gated_outer(gate: Tensor, up: Tensor, rows: Tensor, index: Tensor, experts: int) -> Tensor:
    """Gradient of the weight of `gated_mm`, [E, 2, I, H], zero for an expert without rows, of those of its results and
    its rows [1, P, H]."""
    check_rows(gate, index, "gated_outer")
    counts = routed_pairs(index, experts).counts
    found = products(torch.cat([gate[0], up[0]], 1).t(), rows[0], counts)
    return found.view(experts, 2, gate.shape[2], rows.shape[2])


@gated_outer.register_fake
def _(gate: Tensor, up: Tensor, rows: Tensor, index: Tensor, experts: int) -> Tensor:
    return gate.new_empty(experts, 2, gate.shape[2], rows.shape[2])


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gate: Tensor, up: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, index = ctx.saved_tensors
    of_rows = gated_mm_backward(gate, up, weight, index) if ctx.needs_input_grad[0] else None
    of_weight = gated_outer(gate, up, rows, index, weight.shape[0]) if ctx.needs_input_grad[1] else None
    return of_rows, of_weight, None


gated_mm.register_autograd(_backward, setup_context=_context)


@register_flop_formula([torch.ops.autopar.gated_mm, torch.ops.autopar.gated_mm_backward])
def _mm_flops(rows: Sequence[int], *args: Any, **_: Any) -> int:
    _, halves, inner, width = next(shape for shape in args if len(shape) == 4)
    return 2 * rows[0] * rows[1] * halves * inner * width


@register_flop_formula(torch.ops.autopar.gated_outer)
def _outer_flops(gate: Sequence[int], up: Sequence[int], rows: Sequence[int], *args: Any, **_: Any) -> int:
    return 2 * gate[0] * gate[1] * (gate[2] + up[2]) * rows[2]
