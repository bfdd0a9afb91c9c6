"""Finds what a batch's shapes do not let a plan split, and which dim of the inputs is to blame.

A strategy of the plan that does not divide a new shape takes the nearest valid one (`carry.operator_pin`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping

from torch import fx

from autopar.capture.graph import Captured
from autopar.plan import Plan
from autopar.runtime.batches import Fallback
from autopar.sharding.assignment import Assignment
from autopar.sharding.operators import Operators
from autopar.solver.carry import Lost, lost_choices
from autopar.solver.spmd import read


def _dim_of(captured: Captured) -> Callable[[fx.Node, str], int | None]:
    """Which dim of the inputs a factor of an operator carries, None if none. Followed when asked for."""
    deepest = max((node.meta["val"].dim() for node in captured.inputs), default=0)

    @functools.cache
    def factors(dim: int) -> Mapping[fx.Node, frozenset[str]]:
        return read(captured, dim).batch_factors

    return lambda node, factor: next((dim for dim in range(deepest) if factor in factors(dim)[node]), None)


def fallbacks(
    captured: Captured, operators: Operators, assignment: Assignment, plan: Plan, names: list[str]
) -> tuple[Fallback, ...]:
    """What ``assignment`` could not take over from ``plan``, by axis and dim; ``names`` are those of the inputs."""
    lost = lost_choices(operators, plan)
    if not lost:
        return ()
    dim_of = _dim_of(captured)
    found: dict[tuple[str, int | None], list[Lost]] = defaultdict(list)
    for each in lost:
        found[each.axis, dim_of(each.operator.node, each.factor)].append(each)
    for axis, dim in [kind for kind in found if kind[1] is None]:
        # rules do not follow dims of size 1 everywhere: such operators count with the others that the axis lost
        if (traced := next((kind for kind in found if kind[0] == axis and kind[1] is not None), None)) is not None:
            found[traced] += found.pop((axis, dim))
    flops = sum(op.flops for op in operators)
    return tuple(
        Fallback(
            axis,
            dim,
            _inputs_with(captured, names, dim),
            max(each.multiple for each in kind),
            sum(each.operator.flops for each in kind if _is_whole(each, assignment)) / flops,
        )
        for (axis, dim), kind in found.items()
    )


def _inputs_with(captured: Captured, names: list[str], dim: int | None) -> tuple[tuple[str, int], ...]:
    shapes = [tuple(node.meta["val"].shape) for node in captured.inputs]
    return tuple((n, s[dim]) for n, s in zip(names, shapes, strict=True) if dim is not None and len(s) > dim)


def _is_whole(lost: Lost, assignment: Assignment) -> bool:
    """Whether every rank of the axis does all of the operator's work."""
    return assignment.strategies[lost.operator.node][assignment.mesh.names.index(lost.axis)].factor is None
