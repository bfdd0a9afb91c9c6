"""Operators of autopar's own: importing this package registers them under ``torch.ops.autopar``.

``starts`` turns a rank's mesh coordinates into the global index of its shard, ``dropout`` and ``attention`` are the two
operators whose result may not depend on how tensors are split or on the device a plan was made on (DESIGN.md, 4 and 5).
"""

from __future__ import annotations

from autopar.ops.attention import attention, attention_backward, scaled_dot_product_attention
from autopar.ops.coordinates import starts
from autopar.ops.dropout import counter_dropout, dropout, keep_mask

__all__ = [
    "attention",
    "attention_backward",
    "counter_dropout",
    "dropout",
    "keep_mask",
    "scaled_dot_product_attention",
    "starts",
]
