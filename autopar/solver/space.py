"""The space of sharded programs of one graph on one mesh: decisions, their options, and the tensors between them.

A *decision* is taken once for a group of nodes. Heavy operators (matrix products, attention), parameters, outputs and
shared tensors decide for themselves; every other operator follows one of its operands where each layout of that operand
leaves it one sensible strategy. Isomorphic blocks share their decisions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from autopar.capture.graph import Captured
from autopar.sharding.assignment import AliasKey, Assignment
from autopar.sharding.axes import spread_axes
from autopar.sharding.cached import cached_layout
from autopar.sharding.layout import Layout, Mesh, TensorSpec
from autopar.sharding.operators import Operator, Operators, Value, value_of
from autopar.sharding.rule import Strategy, layouts
from autopar.solver.alike import alike
from autopar.solver.constraints import constrained
from autopar.solver.operator_options import OperatorOptions
from autopar.solver.pins import Pins
from autopar.solver.program import Ints
from autopar.solver.tensor_options import TensorOptions

aten = torch.ops.aten

_OF_TOKENS_AND_ROWS = frozenset(
    {
        torch.ops.autopar.dispatch.default,
        torch.ops.autopar.combine.default,
        torch.ops.autopar.combine_weights_backward.default,
    }
)


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
        self.space = Space(mesh)
        self.alike = alike(captured, operators)
        self.canon = self.space.canon = self.alike.first
        self.offers: dict[tuple[int, int, bool, int], tuple[Layout, ...]] = {}
        self.tuples: dict[int, tuple[Sequence[Layout], tuple[Layout, ...]]] = {}
        self.flows: dict[tuple[int, int, int, int, TensorSpec], int] = defaultdict(int)
        self.of_tensors = TensorOptions(captured, operators, mesh, pins, axes_split_all)
        self.of_operators = OperatorOptions(captured, operators, mesh, pins, axes_split_all)
        self.reduced_in = set(_reduction_casts(captured, operators))

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
            rests = cached_layout(self.mesh, spec.shape) if node in self.captured.caches else whole
            self.space.of_source[node] = (fixed, [self.pins.inputs.get(node, rests)])
        for output in self.captured.outputs:
            value = value_of(output.node)
            options = self.of_tensors.shared(value)
            if output.buffer is not None:  # it rests whole on every rank
                options = [Layout.replicated(len(self.operators.specs[value].shape))]
            if output.cached:
                options = [cached_layout(self.mesh, self.operators.specs[value].shape)]
            d = self.space.new(f"output {output.node.name}", [True] * len(options))
            self.space.of_sink.append((d, options))
            if output.tangent is not None:
                self.space.of_source[output.tangent] = (d, options)
        for p in sorted(self.captured.parameters, key=lambda p: p.placeholder in self.canon):
            first = self.canon.get(p.placeholder)
            if first is not None:
                self.space.of_source[p.placeholder] = self.space.of_source[first]
            else:
                options = self.of_tensors.stored(p)
                allowed = self._open([self.of_tensors.may_rest(p, layout, options) for layout in options])
                d = self.space.new(p.name, self.of_tensors.split_over_all(p, options, allowed))
                self.space.of_source[p.placeholder] = (d, options)

    def _open(self, allowed: list[bool]) -> list[bool]:
        return allowed if self.pins.strict or any(allowed) else [True] * len(allowed)

    # -- operators --------------------------------------------------------------------------------------------------

    def _by_option(self, op: Operator, result: bool, index: int) -> tuple[Layout, ...]:
        """The layouts of a result or operand of a decided operator by option; one tuple for all blocks of a class."""
        chosen = self.space.of_node[op.node][1]
        key = (id(op.rule), id(chosen), result, index)
        if key not in self.offers:
            self.offers[key] = tuple(layouts(op.rule, s, self.mesh)[result][index] for s in chosen)
        return self.offers[key]

    def _decide(self, op: Operator) -> None:
        every = self.of_operators.strategies(op)
        if op.call.target is torch.ops.autopar.cache_write.default:
            self.space.of_node[op.node] = self._in_place(op, every)
            return
        if not op.is_heavy and not self._exchanges(op) and not constrained(op, self.mesh):
            sizes = [self.operators.specs[v].numel for v in op.operands]
            for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
                followed = self._follow(op, i, every)
                if followed is not None:
                    self.space.of_node[op.node] = followed
                    return
        label = f"{op.node.meta['module']} {op.node.name}"
        allowed = self._open([self.of_operators.may_run(op, s) for s in every])
        self.space.of_node[op.node] = (self.space.new(label, allowed), every)

    def _in_place(self, op: Operator, every: list[Strategy]) -> tuple[int, list[Strategy]]:
        """What writes over a tensor that the graph is given takes that as it lies."""
        d, offered = self.space.of_source[op.operands[0].node]
        by_layout = {layouts(op.rule, s, self.mesh)[0][0]: s for s in every if all(c.linear is None for c in s)}
        return d, [by_layout[layout] for layout in offered]

    def _exchanges(self, op: Operator) -> bool:
        """Whether an operator has both tokens and rows where experts may be spread over axes of the tokens: it comes
        before the ranks exchange what they have, or after."""
        return bool(spread_axes(self.mesh)) and op.call.target in _OF_TOKENS_AND_ROWS

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
                options = self.of_tensors.shared(key.value)
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
