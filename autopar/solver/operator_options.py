"""The strategies that an operator may take: what axes are there to split, and of heavy operators what splits most."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from autopar.capture.graph import Captured
from autopar.sharding.axes import (
    BATCH_AXES,
    CONTEXT_AXES,
    EXPERT_AXES,
    TOKEN_AXES,
    batch_pieces,
    degree,
    sequence_pieces,
    spread_axes,
)
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operator, Operators, Value, inside_experts, own_factors, splits_batch
from autopar.sharding.rule import REPLICATE, Choice, Strategy
from autopar.sharding.rule import strategies as rule_strategies
from autopar.sharding.rules.attention import ATTENTION, WAYS
from autopar.sharding.rules.experts import MEETINGS
from autopar.solver.constraints import constrained, is_kept, may_choose
from autopar.solver.pins import Pins


class OperatorOptions:
    """The options of the operators of a captured graph on a mesh, and which of them ``pins`` leave."""

    def __init__(self, captured: Captured, operators: Operators, mesh: Mesh, pins: Pins, axes_split_all: bool) -> None:
        self.operators, self.mesh, self.pins, self.axes_split_all = operators, mesh, pins, axes_split_all
        self.parameters = {p.placeholder for p in captured.parameters}

    def _allowed(self, op: Operator) -> Callable[[str, Choice], bool]:
        """What each axis may do: those of the batch and of the sequence split it wherever there is one that divides, or
        experts where they may be spread over the axis."""

        spread = spread_axes(self.mesh)

        def allowed(axis: str, choice: Choice) -> bool:
            if self.mesh.degree(axis) == 1:
                return choice == REPLICATE
            if self.axes_split_all:
                return True
            own = own_factors(self.operators, op, axis)
            if axis not in TOKEN_AXES:
                return choice.factor is None or choice.factor in own
            if axis in BATCH_AXES:
                n = batch_pieces(self.mesh, axis) * self.pins.micro_batches
            else:
                n = sequence_pieces(self.mesh, axis)
            if axis in EXPERT_AXES and op.rule.inward:  # here they are: what is for tokens alone goes by tokens
                return choice.factor in (op.rule.inward if op.is_heavy else op.rule.inward | own)
            if axis in spread and choice.factor in op.rule.inward:
                return True
            divides = any(op.rule.sizes[f] % n == 0 and f not in op.rule.fixed for f in own)
            if axis in CONTEXT_AXES and not all(spec.dtype.is_floating_point for spec in op.call.results):
                return choice.factor is None or choice.factor in own  # masks and positions are small, and needed whole
            return splits_batch(choice, own) if divides and choice.linear is None else choice.factor is None

        return allowed

    def strategies(self, op: Operator) -> list[Strategy]:
        """What an operator may do; a heavy one only what splits it over as many axes as can be."""
        allowed = self._allowed(op)
        if wanted := constrained(op, self.mesh):
            kept = rule_strategies(
                op.rule, self.mesh, lambda a, c: may_choose(op, wanted, a, c) if a in wanted else allowed(a, c)
            )
            if kept := [s for s in kept if self._leaves_micro_batches(op, s)]:
                return kept

        def without(axes: Sequence[str]) -> list[Strategy]:
            given_up = [axis for axis in axes if degree(self.mesh, axis) > 1]
            return rule_strategies(
                op.rule, self.mesh, lambda a, c: c.factor is None if a in given_up else allowed(a, c)
            )

        every = [s for s in without(()) if self._leaves_micro_batches(op, s)]
        if not every and any(axis in CONTEXT_AXES for axis in self.mesh.names):
            every = [s for s in without(CONTEXT_AXES) if self._leaves_micro_batches(op, s)]
        if not every:  # the batch divides, but not inside this operator's compound dims
            every = without(TOKEN_AXES)
        if not op.is_heavy:
            return every
        by_spread: dict[tuple[int, int | None], list[Strategy]] = defaultdict(list)
        for s in every:
            inside = None if self.pins.inside_experts is None else self._inside(op, s)
            by_spread[self._spread(op, s), inside].append(s)
        return [s for some in by_spread.values() for s in self._prefer_split(op, some)]

    def _spread(self, op: Operator, strategy: Strategy) -> int:
        """Over how many ranks a strategy spreads experts; each number is worth having, so what else is split is not
        compared between them."""
        return self._pieces(op.rule.inward, strategy)

    def _inside(self, op: Operator, strategy: Strategy) -> int:
        """Over how many ranks a strategy splits the matrices of each expert."""
        return self._pieces(inside_experts(op), strategy)

    def _pieces(self, factors: Collection[str], strategy: Strategy) -> int:
        """Over how many ranks a strategy splits any of ``factors``."""
        return math.prod(n for n, choice in zip(self.mesh.sizes, strategy, strict=True) if choice.factor in factors)

    def _leaves_micro_batches(self, op: Operator, strategy: Strategy) -> bool:
        """Whether what a strategy leaves of the batch still divides into micro-batches, where the whole batch does."""
        m, sizes = self.pins.micro_batches, op.rule.sizes
        for f in self.operators.batch_factors[op.node] if m > 1 else ():
            pieces = math.prod(n for (_, n), c in zip(self.mesh.axes, strategy, strict=True) if c.factor == f)
            if sizes[f] % m == 0 and sizes[f] % (m * pieces):
                return False
        return True

    def _prefer_split(self, op: Operator, every: list[Strategy]) -> list[Strategy]:
        """Heavy operators are split on as many axes as possible; and tp splits a factor of the weight where one
        divides, since splitting the tokens is what the other axes are for."""
        most = max(sum(c.factor is not None and n > 1 for c, n in zip(s, self.mesh.sizes, strict=True)) for s in every)
        kept = [
            s
            for s in every
            if sum(c.factor is not None and n > 1 for c, n in zip(s, self.mesh.sizes, strict=True)) == most
        ]
        weight = {
            f
            for i, value in enumerate(op.operands)
            if self._is_weight(value)
            for factors in op.rule.operands[i]
            for f in factors
        }
        if not weight:
            return kept
        by_weight = [
            s
            for s in kept
            if all(
                c.factor in weight
                for (axis, n), c in zip(self.mesh.axes, s, strict=True)
                if axis not in TOKEN_AXES and n > 1 and c.factor is not None
            )
        ]
        return by_weight or kept

    def may_run(self, op: Operator, strategy: Strategy) -> bool:
        """Whether pins let an operator take a strategy."""
        experts = op.is_heavy and bool(op.rule.inward)
        if self.pins.attention and op.call.target in ATTENTION:
            of_context = [c for axis, c in zip(self.mesh.names, strategy, strict=True) if axis in CONTEXT_AXES]
            if any(c.factor not in WAYS[self.pins.attention] for c in of_context):
                return False
        if self.pins.dispatch is not None and op.call.target in MEETINGS and not self._may_meet(op, strategy):
            return False
        if not is_kept(op, strategy, self.mesh):
            return False
        if experts and self.pins.experts not in (None, self._spread(op, strategy)):
            return False
        if experts and self.pins.inside_experts not in (None, self._inside(op, strategy)):
            return False
        return self.pins.operator(op.node, strategy)

    def _may_meet(self, op: Operator, strategy: Strategy) -> bool:
        """Whether tokens and rows may meet so: to exchange rows, where the tokens are; to gather tokens, where the
        experts are, on axes over which there may be some."""
        spread = self._spread(op, strategy)
        if self.pins.dispatch == "exchange":
            return spread == 1
        if self.pins.experts is not None:
            return spread == self.pins.experts
        own = [c for axis, c in zip(self.mesh.names, strategy, strict=True) if axis not in TOKEN_AXES]
        at_experts = [c for axis, c in zip(self.mesh.names, strategy, strict=True) if axis in EXPERT_AXES]
        return all(c.factor != "c" for c in (*own, *at_experts))

    def _is_weight(self, value: Value) -> bool:
        """Whether a value is a parameter, seen through views."""
        return self.operators.base(value).node in self.parameters
