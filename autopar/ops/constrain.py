"""``autopar.constrain``: an inline hint, in a model's own code, of how one of its tensors is to lie.

While a model is captured it leaves ``autopar::constrain`` in the graph, an identity that the planner may only run with
the tensor in that layout; at all other times it returns what it is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from autopar.errors import HintError

#: The axes that split tensors (`sharding.axes`).
AXES = ("dp", "cp", "tp")
#: How a layout is written in the graph: dims by axis, -1 for none of them, "tp:1 dp:-1".
WHOLE = -1

_capturing = False


def constrain(tensor: Tensor, **placements: Shard | Replicate | None) -> Tensor:
    """``tensor``, which in a plan passes here in a layout that places it so on every axis that is named: split along a
    dim (``tp=Shard(-1)``) or whole on each of the axis' ranks (``Replicate()`` or None). Other axes are the planner's::

        def forward(self, x):                                          # [batch, sequence, hidden]
            x = autopar.constrain(self.up(x), tp=Shard(-1))
            return self.down(x)

    Whoever reads the tensor may still redistribute it, and its gradient is free. On an axis of degree 1 it says
    nothing. Outside of `plan`, `parallelize` and `verify`, compiled or not, it is the tensor itself, with its gradient.
    HintError for another axis or placement, and for a dim that the tensor does not have; a plan that is to split a dim
    which its degrees do not divide is refused when it is made.
    """
    text = _text(tensor, placements)
    return torch.ops.autopar.constrain(tensor, text) if _capturing and text else tensor


def _text(tensor: Tensor, placements: dict[str, Shard | Replicate | None]) -> str:
    """The layout as it is written in the graph; HintError for what is none."""
    found = []
    for axis, placement in placements.items():
        if axis not in AXES:
            raise HintError(
                f"constrain() names an unknown axis {axis!r}.",
                expected=f"one of {', '.join(AXES)}",
                found=f"{axis}={placement!r}",
                change="write for instance constrain(x, tp=Shard(-1))",
            )
        if placement is not None and not isinstance(placement, Shard | Replicate):
            raise HintError(
                f"constrain() is given no placement on {axis}.",
                expected="Shard(dim), Replicate() or None, of torch.distributed.tensor",
                found=f"{axis}={placement!r}",
                change=f"write for instance constrain(x, {axis}=Shard(-1)); degrees are for Hints({axis}=...)",
            )
        dim = placement.dim if isinstance(placement, Shard) else WHOLE
        if isinstance(placement, Shard):
            if not -tensor.dim() <= dim < tensor.dim():
                raise HintError(
                    f"constrain() splits dim {dim} over {axis}, and the tensor has no such dim.",
                    expected=f"a dim from {-tensor.dim()} to {tensor.dim() - 1}" if tensor.dim() else "Replicate()",
                    found=f"{axis}={placement!r}, and a tensor of shape {tuple(tensor.shape)}",
                    change="name another dim",
                )
            dim %= tensor.dim()
        found.append(f"{axis}:{dim}")
    return " ".join(found)


def read(text: str) -> dict[str, int]:
    """The dim that each axis splits, `WHOLE` for none, of a layout as it is written in the graph."""
    return {axis: int(dim) for axis, dim in (entry.split(":") for entry in text.split())}


@contextlib.contextmanager
def kept_in_graph() -> Iterator[None]:
    """For the length of a trace: `constrain` leaves its operator."""
    global _capturing
    before, _capturing = _capturing, True
    try:
        yield
    finally:
        _capturing = before


@torch.library.custom_op("autopar::constrain", mutates_args=(), schema="(Tensor x, str layout) -> Tensor")
def _constrain(x: Tensor, layout: str) -> Tensor:
    """``x`` once more; the emitted graph has what it reads in its place."""
    return x.clone()


@_constrain.register_fake
def _(x: Tensor, layout: str) -> Tensor:
    return torch.empty_like(x)


_constrain.register_autograd(lambda ctx, gradient: (gradient, None))
