"""What is decided before the program is solved: by hints, by a plan that is carried to a graph, by the outer search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.sharding.layout import Layout
from autopar.sharding.rule import Strategy


@dataclass(frozen=True)
class Pins:
    """What is decided already.

    ``storage(name, layout)`` says whether a parameter may rest in a layout, ``operator(node, strategy)`` whether an
    operator may take a strategy; ``zero`` 0 or 3 settles whether parameters rest split over dp and cp, ``zero_dims``
    which dim an axis then splits, by name. Pins only close options: the space is the same with and without. ``strict``
    pins (hints) may leave no option; others (a plan carried to other shapes) then fall back to all. ``inputs`` are the
    layouts of the batch's tensors that do not come whole to every rank. With ``micro_batches`` only what is left of the
    batch in each of them can be split. ``experts`` says over how many ranks they are spread, and ``inside_experts``
    over how many the matrices of each are split, None that it is open, ``attention`` which of `rules.attention.WAYS` it
    takes on the axis of the sequence, and ``dispatch`` which of `rules.experts.DISPATCHERS` experts take.
    """

    storage: Callable[[str, Layout], bool] = lambda name, layout: True
    operator: Callable[[fx.Node, Strategy], bool] = lambda node, strategy: True
    zero: int | None = None
    zero_dims: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    strict: bool = True
    inputs: Mapping[fx.Node, Layout] = field(default_factory=dict)
    micro_batches: int = 1
    experts: int | None = None
    inside_experts: int | None = None
    attention: str | None = None
    dispatch: str | None = None
