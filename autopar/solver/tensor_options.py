"""The layouts of tensors that decide for themselves: parameters at rest, outputs, and what several operators read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from autopar.capture.graph import Captured, Parameter
from autopar.ops.rows import MAKE_ROWS, TAKE_ROWS
from autopar.sharding.axes import (
    BATCH_AXES,
    CONTEXT_AXES,
    EXPERT_AXES,
    EXPERT_AXIS,
    STATE_AXES,
    TOKEN_AXES,
    batch_pieces,
    degree,
    sequence_pieces,
    spread_axes,
    state_axes,
)
from autopar.sharding.layout import Layout, Mesh, TensorSpec
from autopar.sharding.operators import Operators, Value
from autopar.solver.pins import Pins


class TensorOptions:
    """The options of the tensors of a captured graph on a mesh, and which of them ``pins`` leave."""

    def __init__(self, captured: Captured, operators: Operators, mesh: Mesh, pins: Pins, axes_split_all: bool) -> None:
        self.operators, self.mesh, self.pins, self.axes_split_all = operators, mesh, pins, axes_split_all
        parameters = {p.placeholder for p in captured.parameters}
        heavy = (value for op in operators if op.is_heavy for value in op.operands)
        self.weights = {node for value in heavy if (node := operators.base(value).node) in parameters}
        #: What says which experts tokens go to: whoever has rows of all ranks' tokens reads it whole.
        self.indices = {
            value
            for op in operators
            if op.call.target in MAKE_ROWS | TAKE_ROWS
            for value in op.operands
            if not operators.specs[value].dtype.is_floating_point
        }

    def split_over_all(self, p: Parameter, options: list[Layout], allowed: list[bool]) -> list[bool]:
        """Of what is allowed, for a parameter that a heavy operator reads what splits it over as many axes other than
        the data's as any option does: weights go over tp, as heavy operators split their factors."""
        if p.placeholder not in self.weights or self.axes_split_all:
            return allowed
        over = [sum(axis not in STATE_AXES for axis in layout.split_axes) for layout in options]
        most = max((n for n, ok in zip(over, allowed, strict=True) if ok), default=0)
        return [ok and n == most for n, ok in zip(over, allowed, strict=True)]

    def may_rest(self, p: Parameter, layout: Layout, options: list[Layout]) -> bool:
        """Whether pins let a parameter rest in ``layout``. ZeRO-3 asks for a split only where a dim divides, also
        beside what other pins split."""
        sharded = self._is_sharded(p, layout)
        if not self.pins.storage(p.name, layout) or (self.pins.zero == 0 and sharded):
            return False
        if self.pins.zero != 3 or sharded:
            return True
        if self._may_spread(p):  # over what the experts leave to split
            options = [other for other in options if other.dims[0] == layout.dims[0]]
        return not any(self._is_sharded(p, other) and self.pins.storage(p.name, other) for other in options)

    def _is_sharded(self, p: Parameter, layout: Layout) -> bool:
        """Whether ZeRO splits a parameter that rests in ``layout``: dim 0 of what experts have is never its to split
        where axes of the tokens may split the experts."""
        return bool(state_axes(layout, layout.dims[0] if self._may_spread(p) else ()))

    def _may_spread(self, p: Parameter) -> bool:
        """Whether a parameter is of experts that may be spread over axes of the tokens."""
        by_expert = self.operators.specs[Value(p.placeholder)].by_expert
        return by_expert and bool(spread_axes(self.mesh))

    def shared(self, value: Value) -> list[Layout]:
        """Layouts without outstanding reductions in which a tensor may be shared: on the axes of the batch and of the
        sequence that dim, where the tensor has one that divides, or its experts; on the others any dim."""
        spec, batch = self.operators.specs[value], self.operators.batch_dims[value]
        shape = self._of_micro_batch(spec.shape, batch)
        per_axis: list[list[int | None]] = []
        for axis, n in self.mesh.axes:
            dims = [d for d, size in enumerate(shape) if n > 1 and size > 1 and size % n == 0]
            experts = [0] if spec.by_expert and 0 in dims else []
            if axis in BATCH_AXES and not self.axes_split_all:
                dims = [d for d in dims if d in batch and shape[d] % batch_pieces(self.mesh, axis) == 0]
                dims += experts if axis == EXPERT_AXIS else []
                whole = axis == EXPERT_AXIS and value in self.indices
                per_axis.append([None, *dims] if whole or not dims else [*dims])
            elif axis in CONTEXT_AXES and not self.axes_split_all:
                able = self.operators.sequence.dims[value] - batch
                dims = [d for d in dims if d in able and shape[d] % sequence_pieces(self.mesh, axis) == 0]
                experts = experts if axis in spread_axes(self.mesh) else []
                forced = dims and spec.dtype.is_floating_point
                per_axis.append([*dims, *experts] if forced else [None, *dims, *experts])
            else:
                per_axis.append([None, *dims])
        found = []
        for dims_by_axis in itertools.product(*per_axis):
            chosen = {axis: d for axis, d in zip(self.mesh.names, dims_by_axis, strict=True) if d is not None}
            layout = self._nested(spec, chosen)
            if layout.divides(self.mesh, shape):
                found.append(layout)
        return found

    def _nested(self, spec: TensorSpec, by_axis: Mapping[str, int]) -> Layout:
        """The layout in which axes split those dims of a tensor, nested as in the mesh, or of experts as
        `Rule.inward`."""
        found = Layout.shard(len(spec.shape), by_axis, self.mesh.names)
        return Layout((found.dims[0][::-1], *found.dims[1:])) if spec.by_expert else found

    def _of_micro_batch(self, shape: Sequence[int], batch: Collection[int]) -> tuple[int, ...]:
        """The shape of a tensor in one micro-batch."""
        m = self.pins.micro_batches
        return tuple(size // m if d in batch and size % m == 0 else size for d, size in enumerate(shape))

    def stored(self, p: Parameter) -> list[Layout]:
        """Where a parameter may rest: any dim on tp; where experts may be spread over the axes of the tokens, dim 0 of
        their parameters on those; on dp and cp (ZeRO) the first dim that is free and divides, else inside the dim that
        tp splits."""
        shape, ndim = p.spec.shape, len(p.spec.shape)
        dims: dict[str, list[int | None]] = {}
        for axis, n in self.mesh.axes:
            able = [d for d in range(ndim) if shape[d] > 1 and shape[d] % n == 0]
            if axis not in TOKEN_AXES and n > 1:
                dims[axis] = [None, *able]
            elif axis in spread_axes(self.mesh) and 0 in able and self._may_spread(p):
                dims[axis] = [0] if axis in EXPERT_AXES else [None, 0]
        found = []
        for choice in itertools.product(*dims.values()):
            taken = {axis: d for axis, d in zip(dims, choice, strict=True) if d is not None}
            base = self._nested(self.operators.specs[Value(p.placeholder)], taken)
            if not base.divides(self.mesh, shape):
                continue
            found.append(base)
            hinted = self.pins.zero_dims.get(p.name, {})
            sharded = self._zero_layout(base, shape, hinted, 1 if self._may_spread(p) else 0)
            if sharded != base:
                found.append(sharded)
        return found

    def _zero_layout(self, base: Layout, shape: Sequence[int], hinted: Mapping[str, int], first: int) -> Layout:
        """``base`` with the axes of ZeRO inside: in one dim where one divides, else each where it does, or nowhere;
        dims before ``first`` are not theirs."""
        axes = [axis for axis in STATE_AXES if degree(self.mesh, axis) > 1 and axis not in base.split_axes]
        dims = range(first, len(shape))
        hinted = {axis: d for axis, d in hinted.items() if d in dims}
        free = [d for d in dims if not base.dims[d]] + [d for d in dims if base.dims[d]]

        def split(layout: Layout, together: Sequence[str]) -> Layout:
            n = math.prod(self.mesh.degree(axis) for axis in together)
            dims = dict.fromkeys(hinted[axis] for axis in together if axis in hinted)
            for d in (dims or free) if len(dims) < 2 else ():
                if shape[d] > 0 and shape[d] % (layout.splits(self.mesh, d) * n) == 0:
                    return Layout((*layout.dims[:d], (*layout.dims[d], *together), *layout.dims[d + 1 :]))
            return layout

        if (together := split(base, axes)) != base:
            return together
        for axis in axes:
            base = split(base, [axis])
        return base
