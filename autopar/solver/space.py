"""The space of sharded programs of one graph on one mesh: decisions, their options, and the tensors between them.

A *decision* is taken once for a group of nodes. Heavy operators (matrix products, attention), parameters, outputs and
shared tensors decide for themselves; every other operator follows one of its operands where each layout of that operand
leaves it one sensible strategy. Isomorphic blocks share their decisions.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from autopar.capture.graph import Captured, Parameter
from autopar.ops.experts import MAKE_ROWS, TAKE_ROWS
from autopar.sharding.assignment import AliasKey, Assignment
from autopar.sharding.axes import (
    BATCH_AXES,
    CONTEXT_AXIS,
    EXPERT_AXIS,
    SPREAD_AXES,
    STATE_AXES,
    TOKEN_AXES,
    batch_pieces,
    degree,
    state_axes,
)
from autopar.sharding.layout import Layout, Mesh, TensorSpec
from autopar.sharding.operators import Operator, Operators, Value, own_factors, splits_batch, value_of
from autopar.sharding.rule import REPLICATE, Choice, Strategy, layouts, strategies
from autopar.sharding.rules.attention import ATTENTION, WAYS
from autopar.solver.alike import alike
from autopar.solver.program import Ints

aten = torch.ops.aten

_OF_TOKENS_AND_ROWS = frozenset(
    {
        torch.ops.autopar.dispatch.default,
        torch.ops.autopar.combine.default,
        torch.ops.autopar.combine_weights_backward.default,
    }
)


@dataclass(frozen=True)
class Pins:
    """What is decided already.

    ``storage(name, layout)`` says whether a parameter may rest in a layout, ``operator(node, strategy)`` whether an
    operator may take a strategy; ``zero`` 0 or 3 settles whether parameters rest split over dp and cp, ``zero_dims``
    which dim an axis then splits, by name. Pins only close options: the space is the same with and without. ``strict``
    pins (hints) may leave no option; others (a plan carried to other shapes) then fall back to all. ``inputs`` are the
    layouts of the batch's tensors that do not come whole to every rank. With ``micro_batches`` only what is left of the
    batch in each of them can be split. ``experts`` says over how many ranks they are spread, None that it is open,
    and ``attention`` which of `WAYS` it takes on the axis of the sequence.
    """

    storage: Callable[[str, Layout], bool] = lambda name, layout: True
    operator: Callable[[fx.Node, Strategy], bool] = lambda node, strategy: True
    zero: int | None = None
    zero_dims: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    strict: bool = True
    inputs: Mapping[fx.Node, Layout] = field(default_factory=dict)
    micro_batches: int = 1
    experts: int | None = None
    attention: str | None = None


@dataclass
class Decision:
    """One choice among options; ``allowed`` says which of them pins leave open."""

    label: str
    allowed: npt.NDArray[np.bool_]

    @property
    def size(self) -> int:
        """Number of options."""
        return len(self.allowed)


@dataclass(frozen=True)
class Flow:
    """A tensor between two decisions: the layout it is offered in for each option of ``source``, and wanted in for each
    option of ``target``."""

    source: int
    target: int
    offered: tuple[Layout, ...]
    wanted: tuple[Layout, ...]
    spec: TensorSpec


@dataclass
class Space:
    """Everything the solver chooses from. Per node the decision it belongs to and, by option, its strategy; likewise
    the layouts of placeholders, shared tensors and outputs. ``flows`` counts how often each flow occurs."""

    mesh: Mesh
    decisions: list[Decision] = field(default_factory=list)
    of_node: dict[fx.Node, tuple[int, list[Strategy]]] = field(default_factory=dict)
    of_source: dict[fx.Node, tuple[int, list[Layout]]] = field(default_factory=dict)
    of_alias: dict[AliasKey, tuple[int, list[Layout]]] = field(default_factory=dict)
    of_sink: list[tuple[int, list[Layout]]] = field(default_factory=list)
    flows: dict[Flow, int] = field(default_factory=lambda: defaultdict(int))
    canon: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def new(self, label: str, allowed: Sequence[bool]) -> int:
        """Add a decision, return its index."""
        self.decisions.append(Decision(label, np.array(allowed, dtype=bool)))
        return len(self.decisions) - 1

    def assignment(self, options: Ints) -> Assignment:
        """The assignment that a choice of options stands for."""
        return Assignment(
            self.mesh,
            {node: chosen[options[d]] for node, (d, chosen) in self.of_node.items()},
            {node: chosen[options[d]] for node, (d, chosen) in self.of_source.items()},
            tuple(chosen[options[d]] for d, chosen in self.of_sink),
            {key: chosen[options[d]] for key, (d, chosen) in self.of_alias.items()},
        )


def output_values(captured: Captured) -> list[tuple[Value, bool]]:
    """The values of the graph's outputs with their direction: results first, then gradients."""
    found = [(value_of(o.node), False) for o in captured.outputs]
    return found + [(value_of(p.gradient), True) for p in captured.parameters if p.gradient is not None]


def _reduction_casts(captured: Captured, operators: Operators) -> Iterator[fx.Node]:
    """The casts of gradients to a dtype in which they are to be reduced and that is not the parameter's own."""
    for p in captured.parameters:
        node = p.gradient
        if node is None or node.meta["val"].dtype == p.spec.dtype:
            continue
        rounded = operators.base(value_of(node)).node
        if rounded.target is aten._to_copy.default:
            yield rounded


class SpaceBuilder:
    """Builds the `Space` of a captured graph; see `build_space`."""

    def __init__(self, captured: Captured, operators: Operators, mesh: Mesh, pins: Pins, axes_split_all: bool) -> None:
        self.captured, self.operators, self.mesh, self.pins = captured, operators, mesh, pins
        self.axes_split_all = axes_split_all
        self.space = Space(mesh)
        self.alike = alike(captured, operators)
        self.canon = self.space.canon = self.alike.first
        self.offers: dict[tuple[int, int, bool, int], tuple[Layout, ...]] = {}
        self.tuples: dict[int, tuple[Sequence[Layout], tuple[Layout, ...]]] = {}
        self.flows: dict[tuple[int, int, int, int, TensorSpec], int] = defaultdict(int)
        self.parameter_of = {p.placeholder: p for p in captured.parameters}
        heavy = (value for op in operators if op.is_heavy for value in op.operands)
        self.weights = {node for value in heavy if (node := operators.base(value).node) in self.parameter_of}
        self.reduced_in = set(_reduction_casts(captured, operators))
        #: What says which experts tokens go to: whoever has rows of all ranks' tokens reads it whole.
        self.indices = {
            value
            for op in operators
            if op.call.target in MAKE_ROWS | TAKE_ROWS
            for value in op.operands
            if not operators.specs[value].dtype.is_floating_point
        }

    def build(self) -> Space:
        """The space: decisions of what enters and leaves, of operators in graph order, and the flows between them."""
        self._sources()
        for op in self.operators:
            if op.node not in self.canon:
                self._decide(op)
        for op in self.operators:
            if op.node in self.canon:  # after all others: the backward of the first block of a class comes last
                self.space.of_node[op.node] = self.space.of_node[self.canon[op.node]]
        for op, count in self.alike.kinds:
            self._flows(op, count)
        for key in self.alike.readers:
            self._alias(key)
        self._sinks()
        self._count_flows()
        return self.space

    # -- what enters ------------------------------------------------------------------------------------------------

    def _sources(self) -> None:
        fixed = self.space.new("inputs", [True])
        for node in self.captured.graph.find_nodes(op="placeholder"):
            spec = self.operators.specs[Value(node)]
            whole = Layout.replicated(len(spec.shape))
            self.space.of_source[node] = (fixed, [self.pins.inputs.get(node, whole)])
        for output in self.captured.outputs:
            value = value_of(output.node)
            options = self._tensor_layouts(value)
            if output.buffer is not None:  # it rests whole on every rank
                options = [Layout.replicated(len(self.operators.specs[value].shape))]
            d = self.space.new(f"output {output.node.name}", [True] * len(options))
            self.space.of_sink.append((d, options))
            if output.tangent is not None:
                self.space.of_source[output.tangent] = (d, options)
        for p in sorted(self.captured.parameters, key=lambda p: p.placeholder in self.canon):
            first = self.canon.get(p.placeholder)
            if first is not None:
                self.space.of_source[p.placeholder] = self.space.of_source[first]
            else:
                options = self._storage_layouts(p)
                allowed = self._open([self._may_rest(p, layout, options) for layout in options])
                d = self.space.new(p.name, self._split_over_all(p, options, allowed))
                self.space.of_source[p.placeholder] = (d, options)

    def _split_over_all(self, p: Parameter, options: list[Layout], allowed: list[bool]) -> list[bool]:
        """Of what is allowed, for a parameter that a heavy operator reads what splits it over as many axes other than
        the data's as any option does: weights go over tp, as heavy operators split their factors."""
        if p.placeholder not in self.weights or self.axes_split_all:
            return allowed
        over = [sum(axis not in STATE_AXES for axis in layout.split_axes) for layout in options]
        most = max((n for n, ok in zip(over, allowed, strict=True) if ok), default=0)
        return [ok and n == most for n, ok in zip(over, allowed, strict=True)]

    def _open(self, allowed: list[bool]) -> list[bool]:
        return allowed if self.pins.strict or any(allowed) else [True] * len(allowed)

    def _may_rest(self, p: Parameter, layout: Layout, options: list[Layout]) -> bool:
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
        return by_expert and any(degree(self.mesh, axis) > 1 for axis in SPREAD_AXES)

    def _tensor_layouts(self, value: Value) -> list[Layout]:
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
            elif axis == CONTEXT_AXIS and not self.axes_split_all:
                dims = [d for d in dims if d in self.operators.sequence.dims[value] - batch]
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

    def _storage_layouts(self, p: Parameter) -> list[Layout]:
        """Where a parameter may rest: any dim on tp; where experts may be spread over the axes of the tokens, dim 0 of
        their parameters on those; on dp and cp (ZeRO) the first dim that is free and divides, else inside the dim that
        tp splits."""
        shape, ndim = p.spec.shape, len(p.spec.shape)
        dims: dict[str, list[int | None]] = {}
        for axis, n in self.mesh.axes:
            able = [d for d in range(ndim) if shape[d] > 1 and shape[d] % n == 0]
            if axis not in TOKEN_AXES and n > 1:
                dims[axis] = [None, *able]
            elif axis in SPREAD_AXES and 0 in able and self._may_spread(p):
                dims[axis] = [0] if axis == EXPERT_AXIS else [None, 0]
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

    # -- operators --------------------------------------------------------------------------------------------------

    def _by_option(self, op: Operator, result: bool, index: int) -> tuple[Layout, ...]:
        """The layouts of a result or operand of a decided operator by option; one tuple for all blocks of a class."""
        chosen = self.space.of_node[op.node][1]
        key = (id(op.rule), id(chosen), result, index)
        if key not in self.offers:
            self.offers[key] = tuple(layouts(op.rule, s, self.mesh)[result][index] for s in chosen)
        return self.offers[key]

    def _allowed(self, op: Operator) -> Callable[[str, Choice], bool]:
        """What each axis may do: those of the batch and of the sequence split it wherever there is one that divides, or
        experts where they may be spread over the axis."""

        def allowed(axis: str, choice: Choice) -> bool:
            if self.mesh.degree(axis) == 1:
                return choice == REPLICATE
            if self.axes_split_all:
                return True
            own = own_factors(self.operators, op, axis)
            if axis not in TOKEN_AXES:
                return choice.factor is None or choice.factor in own
            n = self.mesh.degree(axis)
            if axis in BATCH_AXES:
                n = batch_pieces(self.mesh, axis) * self.pins.micro_batches
            if axis == EXPERT_AXIS and op.rule.inward:  # here they are: what is for tokens alone goes by tokens
                return choice.factor in (op.rule.inward if op.is_heavy else op.rule.inward | own)
            if axis == CONTEXT_AXIS and choice.factor in op.rule.inward:
                return True
            divides = any(op.rule.sizes[f] % n == 0 and f not in op.rule.fixed for f in own)
            if axis == CONTEXT_AXIS and not all(spec.dtype.is_floating_point for spec in op.call.results):
                return choice.factor is None or choice.factor in own  # masks and positions are small, and needed whole
            return splits_batch(choice, own) if divides and choice.linear is None else choice.factor is None

        return allowed

    def _strategies(self, op: Operator) -> list[Strategy]:
        allowed = self._allowed(op)

        def without(axes: Sequence[str]) -> list[Strategy]:
            given_up = [axis for axis in axes if degree(self.mesh, axis) > 1]
            return strategies(op.rule, self.mesh, lambda a, c: c.factor is None if a in given_up else allowed(a, c))

        every = [s for s in without(()) if self._leaves_micro_batches(op, s)]
        if not every and CONTEXT_AXIS in self.mesh.names:
            every = [s for s in without([CONTEXT_AXIS]) if self._leaves_micro_batches(op, s)]
        if not every:  # the batch divides, but not inside this operator's compound dims
            every = without(TOKEN_AXES)
        if not op.is_heavy:
            return every
        by_spread: dict[int, list[Strategy]] = defaultdict(list)
        for s in every:
            by_spread[self._spread(op, s)].append(s)
        return [s for some in by_spread.values() for s in self._prefer_split(op, some)]

    def _spread(self, op: Operator, strategy: Strategy) -> int:
        """Over how many ranks a strategy spreads experts; each number is worth having, so what else is split is not
        compared between them."""
        pairs = zip(self.mesh.sizes, strategy, strict=True)
        return math.prod(n for n, choice in pairs if choice.factor in op.rule.inward)

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

    def _is_weight(self, value: Value) -> bool:
        """Whether a value is a parameter, seen through views."""
        return self.operators.base(value).node in self.parameter_of

    def _decide(self, op: Operator) -> None:
        every = self._strategies(op)
        if not op.is_heavy and not self._exchanges(op):
            sizes = [self.operators.specs[v].numel for v in op.operands]
            for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
                followed = self._follow(op, i, every)
                if followed is not None:
                    self.space.of_node[op.node] = followed
                    return
        label = f"{op.node.meta['module']} {op.node.name}"
        allowed = self._open([self._may_run(op, s) for s in every])
        self.space.of_node[op.node] = (self.space.new(label, allowed), every)

    def _may_run(self, op: Operator, strategy: Strategy) -> bool:
        """Whether pins let an operator take a strategy."""
        spread = self.pins.experts if op.is_heavy and op.rule.inward else None
        way = self.pins.attention if op.call.target in ATTENTION and CONTEXT_AXIS in self.mesh.names else None
        if way and strategy[self.mesh.names.index(CONTEXT_AXIS)].factor not in WAYS[way]:
            return False
        return spread in (None, self._spread(op, strategy)) and self.pins.operator(op.node, strategy)

    def _exchanges(self, op: Operator) -> bool:
        """Whether an operator has both tokens and rows where experts may be spread over axes of the tokens: it comes
        before the ranks exchange what they have, or after."""
        spread = any(degree(self.mesh, axis) > 1 for axis in SPREAD_AXES)
        return spread and op.call.target in _OF_TOKENS_AND_ROWS

    def _offer(self, op: Operator, i: int) -> tuple[int, Sequence[Layout]] | None:
        """Who decides the layout in which operand ``i`` is read, if an operator of the same block and direction."""
        value = op.operands[i]
        shared = self._alias(AliasKey(value, op.backward, op.block))
        if shared is not None:
            return shared
        producer = self.operators.by_node.get(value.node)
        if producer is None or producer.block != op.block or producer.backward != op.backward:
            return None
        return self.space.of_node[value.node][0], self._by_option(producer, True, value.index)

    def _follow(self, op: Operator, i: int, every: list[Strategy]) -> tuple[int, list[Strategy]] | None:
        """Let ``op`` take what operand ``i`` is offered in, if every offer leaves it exactly one strategy."""
        offer = self._offer(op, i)
        if offer is None:
            return None
        d, offered = offer
        # Only views hand partial sums on unasked, and the cast of a gradient to the dtype in which it is to be reduced.
        # For any other operator it is a choice whether to reduce first, and whether its other operands can be partial
        # as well is for their producers to say.
        hands_on = op.is_view or op.node in self.reduced_in
        alone = [s for s in every if hands_on or all(c.linear is None for c in s)]
        by_layout = {layouts(op.rule, s, self.mesh)[0][i]: s for s in alone}
        if len(by_layout) < len(alone) or any(layout not in by_layout for layout in offered):
            return None  # the operand does not say which strategy, or offers something that has none
        return d, [by_layout[layout] for layout in offered]

    def _alias(self, key: AliasKey) -> tuple[int, list[Layout]] | None:
        """The shared tensor that the consumers of ``key`` read, if there are several."""
        readers = self.alike.readers[key]
        if len(readers) < 2:
            return None
        if key not in self.space.of_alias:
            node, i = readers[0]
            first = self.canon.get(node, node)
            if first is not node:
                value = self.operators.by_node[first].operands[i]
                counterpart = self._alias(AliasKey(value, key.backward, self.operators.by_node[first].block))
                assert counterpart is not None
                self.space.of_alias[key] = counterpart
            else:
                options = self._tensor_layouts(key.value)
                d = self.space.new(
                    f"{'backward' if key.backward else 'forward'} {key.value.node.name}", [True] * len(options)
                )
                self.space.of_alias[key] = (d, options)
        return self.space.of_alias[key]

    # -- flows ------------------------------------------------------------------------------------------------------

    def _produced(self, value: Value) -> tuple[int, Sequence[Layout]]:
        if value.node in self.space.of_source:
            return self.space.of_source[value.node]
        op = self.operators.by_node[value.node]
        return self.space.of_node[value.node][0], self._by_option(op, True, value.index)

    def _tuple(self, options: Sequence[Layout]) -> tuple[Layout, ...]:
        """``options`` as one tuple for as long as they are the same object, which is kept so that no other takes its
        identity."""
        found = self.tuples.get(id(options))
        if found is None:
            whole = options if isinstance(options, tuple) else tuple(options)
            found = self.tuples[id(options)] = (options, whole)
            self.tuples[id(whole)] = (whole, whole)
        return found[1]

    def _flow(
        self, offer: tuple[int, Sequence[Layout]], want: tuple[int, Sequence[Layout]], spec: TensorSpec, count: int = 1
    ) -> None:
        """Count a flow that occurs ``count`` times. Options are told apart by identity, which blocks share: to compare
        them one by one would take longer than all the rest."""
        offered, wanted = self._tuple(offer[1]), self._tuple(want[1])
        self.flows[offer[0], want[0], id(offered), id(wanted), spec] += count

    def _count_flows(self) -> None:
        for (source, target, offered, wanted, spec), count in self.flows.items():
            self.space.flows[Flow(source, target, self.tuples[offered][1], self.tuples[wanted][1], spec)] += count

    def _flows(self, op: Operator, count: int) -> None:
        """The flows into the operators of a kind."""
        d = self.space.of_node[op.node][0]
        for i, value in enumerate(op.operands):
            key, spec = AliasKey(value, op.backward, op.block), self.operators.specs[value]
            want = (d, self._by_option(op, False, i))
            shared = self._alias(key)
            if shared is None:
                self._flow(self._produced(value), want, spec, count)
                continue
            if self.alike.readers[key][0] == (op.node, i):
                self._flow(self._produced(value), shared, spec, count)
            self._flow(shared, want, spec, count)

    def _sinks(self) -> None:
        for output, sink in zip(self.captured.outputs, list(self.space.of_sink), strict=True):
            value = value_of(output.node)
            self._flow(self._produced(value), sink, self.operators.specs[value])
        for p in self.captured.parameters:
            if p.gradient is not None:
                sink = self.space.of_source[p.placeholder]
                self.space.of_sink.append(sink)
                value = value_of(p.gradient)
                self._flow(self._produced(value), sink, self.operators.specs[value])


def build_space(
    captured: Captured, operators: Operators, mesh: Mesh, pins: Pins | None = None, *, axes_split_all: bool = False
) -> Space:
    """The decisions of a captured graph on ``mesh``. ``axes_split_all`` lets the axes of the batch and of the sequence
    split any factor."""
    return SpaceBuilder(captured, operators, mesh, pins or Pins(), axes_split_all).build()
