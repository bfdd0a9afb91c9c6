"""``autopar::permute``: every rank of a group sends one other what it has, and gets what a third one sends.

A step of a ring is such a permutation, and so is an exchange with a mirror rank. Written down, it names who sends to
whom for all ranks at once, so that the emitted graph is the same on each; `autopar.passes.bind` makes of it the
all-to-all of this rank, whose pieces are empty but for one, and the simulation moves tensors between ranks. It never
runs as it is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op(
    "autopar::permute", mutates_args=(), schema="(Tensor x, SymInt rows, SymInt[] to, str group) -> Tensor"
)
def permute(x: Tensor, rows: int, to: Sequence[int], group: str) -> Tensor:
    """What the rank sends that sends to this one. ``x`` has ``rows`` rows and is contiguous, and the rank in the i-th
    place of ``group`` sends its own to the one in place ``to[i]``; like a functional collective it is on its way until
    it is waited for.

    Raises:
        RuntimeError: always; see the module.
    """
    raise RuntimeError(f"a permutation of the ranks of {group} runs in a graph that is bound to its process groups")


@permute.register_fake
def _(x: Tensor, rows: int, to: Sequence[int], group: str) -> Tensor:
    return x.new_empty(x.shape)
