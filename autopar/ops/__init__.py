"""Operators of autopar's own: importing this package registers them under ``torch.ops.autopar``.

``starts`` turns a rank's mesh coordinates into the global index of its shard; ``attention``, ``dropout`` and
``uniform`` are operators whose result may not depend on how tensors are split or on the device a plan was made on
(DESIGN.md, 4 and 5), those of ``scan`` and ``delta`` can only be split whole. Import these from their modules, which
have the same names.
"""

from __future__ import annotations

from autopar.ops import attention, constrain, coordinates, delta, dropout, scan, uniform
from autopar.ops.coordinates import starts
from autopar.ops.draws import active_draws, counter_draws
from autopar.ops.mask import keep_mask
from autopar.ops.sdpa import scaled_dot_product_attention

__all__ = [
    "active_draws",
    "attention",
    "constrain",
    "coordinates",
    "counter_draws",
    "delta",
    "dropout",
    "keep_mask",
    "scaled_dot_product_attention",
    "scan",
    "starts",
    "uniform",
]
