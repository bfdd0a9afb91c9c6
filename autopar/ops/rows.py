"""The operators that work on routed rows (`autopar.ops.experts`, `autopar.ops.gated`), all of them."""

from __future__ import annotations

import torch

import autopar.ops.gated  # noqa: F401  defines operators, and those of experts

#: Operators that take or give rows; a pointwise operator on rows gives rows as well.
MAKE_ROWS = frozenset(
    {
        torch.ops.autopar.dispatch.default,
        torch.ops.autopar.grouped_mm.default,
        torch.ops.autopar.grouped_bias.default,
        torch.ops.autopar.gated_mm.default,
        torch.ops.autopar.gated_mm_backward.default,
    }
)
TAKE_ROWS = frozenset(
    {
        torch.ops.autopar.combine.default,
        torch.ops.autopar.combine_weights_backward.default,
        torch.ops.autopar.grouped_outer.default,
        torch.ops.autopar.grouped_sum.default,
        torch.ops.autopar.gated_outer.default,
    }
)
