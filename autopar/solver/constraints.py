"""What inline hints (`ops.constrain`) leave of the strategies of their operators."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.errors import HintError
from autopar.hints import Hints
from autopar.ops.constrain import WHOLE, read
from autopar.sharding.axes import degree, degree_of_plan
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operator, Operators
from autopar.sharding.rule import Choice, Strategy, layouts
from autopar.sharding.rules.constrain import CONSTRAIN


def constrained(op: Operator, mesh: Mesh) -> dict[str, int]:
    """The dim that an inline hint has each axis of ``mesh`` split, `WHOLE` for none; empty for other operators. Where
    dp or cp are several axes it names them all."""
    if op.call.target is not CONSTRAIN:
        return {}
    by_name = read(op.call.args[1])
    axes = {axis: degree_of_plan(axis) for axis in mesh.names}
    return {axis: by_name[name] for axis, name in axes.items() if name in by_name and degree(mesh, axis) > 1}


def may_choose(op: Operator, wanted: Mapping[str, int], axis: str, choice: Choice) -> bool:
    """Whether an axis that an inline hint names may take a choice."""
    dim = wanted[axis]
    factor = None if dim == WHOLE else op.rule.results[0][dim][0]
    return choice.linear is None and choice.factor == factor


def is_kept(op: Operator, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether a strategy keeps an operator's inline hint, if it has one."""
    if not (wanted := constrained(op, mesh)):
        return True
    (layout,) = layouts(op.rule, strategy, mesh)[1]
    split = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}
    owed = dict(layout.partial)
    return all(axis not in owed and split.get(axis, WHOLE) == dim for axis, dim in wanted.items())


def check_constraints(operators: Operators, hints: Hints) -> None:
    """HintError for an inline hint that splits a dim in more pieces than divide it under the degrees that ``hints``
    give."""
    for op in operators:
        if op.call.target is not CONSTRAIN:
            continue
        shape, dims = op.call.results[0].shape, read(op.call.args[1])
        given = {axis: n for axis in dims if (n := getattr(hints, axis)) is not None}
        for dim in {d: None for axis, d in dims.items() if d != WHOLE and given.get(axis, 1) > 1}:
            over = [axis for axis, d in dims.items() if d == dim and axis in given]
            pieces = math.prod(given[axis] for axis in over)
            if shape[dim] % pieces:
                raise HintError(
                    f"constrain() in {op.node.meta['module'] or 'the model'} splits dim {dim} of a tensor in {pieces} "
                    f"pieces ({' x '.join(over)}), which it does not divide into.",
                    expected=f"a size that {pieces} divides",
                    found=f"{shape[dim]} in the shape {tuple(shape)}",
                    change="name another dim there, or give another degree",
                )
