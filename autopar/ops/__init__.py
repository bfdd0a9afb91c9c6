"""Operators of autopar's own: importing this package registers them under ``torch.ops.autopar``.

``starts`` turns a rank's mesh coordinates into the global index of its shard; ``dropout`` and ``attention`` are the two
operators whose result may not depend on how tensors are split or on the device a plan was made on (DESIGN.md, 4 and 5),
``scan`` one that can only be split whole. Import these from their modules, which have the same names.
"""

from __future__ import annotations

from autopar.ops import attention, coordinates, dropout, scan
from autopar.ops.coordinates import starts
from autopar.ops.dropout import active_dropout, counter_dropout
from autopar.ops.mask import keep_mask
from autopar.ops.sdpa import scaled_dot_product_attention

__all__ = [
    "active_dropout",
    "attention",
    "coordinates",
    "counter_dropout",
    "dropout",
    "keep_mask",
    "scaled_dot_product_attention",
    "scan",
    "starts",
]
