"""What a parallel module makes of the batches that users pass: names, and words about what does not divide."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar._compat import pytree


@dataclass(frozen=True)
class Fallback:
    """Heavy operators that the plan splits over ``axis`` along ``dim`` of the inputs, which does not divide here.

    ``dim`` is None where no dim of an input is to blame (a smaller model). ``inputs`` are the inputs that have the dim,
    with its size; ``replicated`` is the share of all FLOPs that every rank of the axis now repeats.
    """

    axis: str
    degree: int
    dim: int | None
    inputs: tuple[tuple[str, int], ...]
    replicated: float

    def __str__(self) -> str:
        now = f"{self.replicated:.0%} of the FLOPs run replicated over {self.axis} for this batch; results are the same"
        if self.dim is None:
            return f"sizes of the model do not divide over {self.axis}={self.degree} as the plan splits them: {now}."
        where = ", ".join(f"{name} ({size})" for name, size in self.inputs)
        change = "drop_last=True in the DataLoader, or pad the batch" if self.dim == 0 else "pad the batch"
        return (
            f"dim {self.dim} of {where} does not divide over {self.axis}={self.degree} as the plan splits it: {now}. "
            f"To split the work, make the dim a multiple of {self.degree} ({change})."
        )


def input_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """A name for every tensor of a batch, in the order of `Captured.inputs`: its keyword, or "argument 0" and so on."""
    named = [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
    return [
        name + pytree.keystr(path)
        for name, value in named
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor)
    ]


def warn_of(fallbacks: Iterable[Fallback], told: set[tuple[str, int | None]]) -> None:
    """Warn of each kind of fallback (axis and dim) that is not in ``told``, and put it there."""
    for fallback in fallbacks:
        kind = (fallback.axis, fallback.dim)
        if kind not in told:
            told.add(kind)
            warnings.warn(str(fallback), UserWarning, stacklevel=2)
