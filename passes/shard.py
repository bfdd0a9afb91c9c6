"""The shard pass: joint graph and assignment -> the joint graph of one rank.

Invariant: run on every rank with that rank's pieces and coordinates, the emitted graph computes the pieces of what the
captured graph computes, each output in its layout. The text of the graph is the same on all ranks: coordinates are an
input, groups are named by axis. Every redistribution is emitted once a direction, as `Router` decides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.capture.graph import Captured
from autopar.passes.collectives import aten, emit_exchange, emit_step
from autopar.passes.sums import base
from autopar.sharding.assignment import AliasKey, Assignment, Router, Transfer, direction, result_layouts
from autopar.sharding.buckets import Pieces
from autopar.sharding.layout import Layout, TensorSpec
from autopar.sharding.operators import ROUTED, Operator, Operators, Value, routing, value_of
from autopar.sharding.redistribute import Step
from autopar.sharding.rule import Local, layouts, run_local

#: Name of the input that carries a rank's mesh coordinates, int64 [axes].
COORDINATES = "coordinates"


@dataclass(frozen=True)
class Sharded:
    """The joint program of a rank. ``inputs`` maps the captured placeholders to the new ones (None key: coordinates);
    outputs stand in the captured order: results, then gradients. ``transfers`` are the redistributions in it."""

    module: fx.GraphModule
    coordinates: fx.Node
    inputs: dict[fx.Node, fx.Node]
    results: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]
    transfers: tuple[Transfer, ...]


class _Emitter:
    """Writes the graph of a rank node by node."""

    def __init__(self, captured: Captured, operators: Operators, assignment: Assignment) -> None:
        self.captured, self.operators, self.assignment = captured, operators, assignment
        self.mesh = assignment.mesh
        self.graph = fx.Graph()
        self.produced = result_layouts(operators, assignment)
        self.outputs = {value_of(node) for node in captured.graph.output_node().args[0]}  # type: ignore[union-attr,arg-type]
        self.router = Router(self.mesh)
        self.nodes: dict[tuple[Value, bool | None, Layout], fx.Node] = {}
        self.meta: dict[str, Any] = {}
        self.transfers: list[Transfer] = []
        named = [(p.name, p.placeholder, p.gradient) for p in captured.parameters]
        self.pieces = Pieces(operators, self.mesh, named)
        self.masters = {p.placeholder: p.spec.dtype for p in captured.parameters if p.master is not None}
        self.memo: dict[tuple[Any, ...], fx.Node] = {}

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = dict(self.meta)
        return node

    def _once(self, key: tuple[Any, ...], make: Callable[[], fx.Node]) -> fx.Node:
        """Small integer tensors that depend on coordinates only: made once a direction."""
        key = (*key, self.meta.get("backward"))
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def coordinate(self, axis: str) -> fx.Node:
        i = self.mesh.names.index(axis)
        return self._once(("coordinate", i), lambda: self.emit(aten.slice.Tensor, self.coordinates, 0, i, i + 1))

    def starts(self, layout: Layout, shape: Sequence[int]) -> fx.Node:
        weights = layout.start_weights(self.mesh, shape)
        return self._once(
            ("starts", *weights, len(shape)),
            lambda: self.emit(torch.ops.autopar.starts.default, self.coordinates, weights),
        )

    def placeholders(self) -> dict[fx.Node, fx.Node]:
        self.coordinates = self.graph.placeholder(COORDINATES)
        self.coordinates.meta = {"backward": False, "module": ""}
        new = {}
        for node in self.captured.graph.find_nodes(op="placeholder"):
            new[node] = self.graph.placeholder(node.name)
            new[node].meta = {"backward": node.meta["backward"], "module": node.meta["module"]}
            if Value(node) in self.pieces.parameters:
                new[node].meta["parameter"] = self.pieces.parameters[Value(node)]
        for node, given in new.items():
            self.nodes[(Value(node), None, self.produced[Value(node)])] = self._used(node, given)
        return new

    def _used(self, node: fx.Node, placeholder: fx.Node) -> fx.Node:
        """A placeholder as operators read it: a master parameter is cast before anything moves it."""
        dtype = self.masters.get(node)
        if dtype is None:
            return placeholder
        self.meta = {"module": node.meta["module"], "block": node.meta["block"], "backward": False, "piece": None}
        return self.emit(aten._to_copy.default, placeholder, dtype=dtype)

    def read(
        self, value: Value, backward: bool, alias: Layout | None, wanted: Layout, output: bool = False
    ) -> fx.Node:
        """``value`` in layout ``wanted``, redistributed where needed; ``output`` if it leaves the graph there."""
        own, meta = self.produced[value], self.meta
        backward = direction(value, self.operators.specs[value], backward)
        for transfer in self.router.route(value, self.operators.specs[value], backward, own, alias, wanted):
            transfer = replace(transfer, output=output)
            self.transfers.append(transfer)
            x = self._in(value, backward, transfer.source)
            for step, piece in zip(transfer.steps, self.pieces.of(transfer), strict=True):
                index = self._tokens_of_group(value, backward, step) if transfer.spec.routed else None
                self.meta = {**meta, "backward": backward, "piece": piece, ROUTED: transfer.spec.routed}
                x = self._step(x, step, transfer.spec, index)
            self.meta, self.nodes[(value, backward, transfer.target)] = meta, x
        return self._in(value, backward, wanted)

    def _tokens_of_group(self, rows: Value, backward: bool, step: Step) -> fx.Node | None:
        """Where ranks exchange rows, the experts that the tokens of all of them go to."""
        if step.kind != "all_to_all" or step.source not in (0, 1):
            return None
        index = routing(self.operators, rows)
        over = step.after if step.target == 0 else step.before
        return self.read(index, backward, None, Layout((over.dims[1], ())))

    def _step(self, x: fx.Node, step: Step, spec: TensorSpec, index: fx.Node | None) -> fx.Node:
        if index is None:
            return emit_step(self.emit, x, step, self.mesh, spec.shape, self.coordinate, spec.routed)
        shared = step.before if step.target == 0 else step.after
        first = self.emit(aten.select.int, self.starts(shared, spec.shape), 0, 0) if shared.dims[0] else None
        return emit_exchange(self.emit, x, step, self.mesh, spec.shape, self.coordinate(step.axis), index, first)

    def _in(self, value: Value, backward: bool, layout: Layout) -> fx.Node:
        return self.nodes[(value, None, layout) if layout == self.produced[value] else (value, backward, layout)]

    def operator(self, op: Operator) -> None:
        """Write a rank's part of one operator, its operands redistributed where needed."""
        meta = op.node.meta
        self.meta = {name: meta[name] for name in ("module", "block", "backward")} | {"operator": op.node}
        self.meta[ROUTED] = any(spec.routed for spec in (*op.call.operands, *op.call.results))
        ins, outs = layouts(op.rule, self.assignment.strategies[op.node], self.mesh)
        operands = []
        for value, layout in zip(op.operands, ins, strict=True):
            alias = self.assignment.aliases.get(AliasKey(value, op.backward, op.block))
            operands.append(self.read(value, op.backward, alias, layout))
        local = Local(op.call, self.mesh, tuple(operands), ins, outs, self.emit, self.starts)
        result = run_local(op.rule, local)
        vals = op.node.meta["val"]
        if isinstance(vals, torch.Tensor):
            self.nodes[(Value(op.node), None, outs[0])] = result
            return
        index = 0
        for position, val in enumerate(vals):
            if isinstance(val, torch.Tensor):
                if self.operators.consumers.get(Value(op.node, index)) or Value(op.node, index) in self.outputs:
                    own = result[index] if isinstance(result, list) else self.emit(operator.getitem, result, position)
                    self.nodes[(Value(op.node, index), None, outs[index])] = own
                index += 1

    def sinks(self) -> tuple[list[fx.Node], list[fx.Node]]:
        results, gradients = [], []
        wanted = ((self.assignment.sink_aliases.get(i), layout) for i, layout in enumerate(self.assignment.sinks))
        for output in self.captured.outputs:
            self.meta = {"module": "", "block": None, "backward": False}
            results.append(self.read(value_of(output.node), False, *next(wanted), output=True))
        held = {base(result) for result in results}
        for p in self.captured.parameters:
            if p.gradient is not None:
                self.meta = {"module": p.name.rpartition(".")[0], "block": None, "backward": True}
                gradient = self.read(value_of(p.gradient), True, *next(wanted), output=True)
                gradients.append(self._own(gradient, held))
        return results, gradients

    def _own(self, gradient: fx.Node, held: set[fx.Node]) -> fx.Node:
        """A gradient that clipping may write to: a copy of what is given to the graph, computed in the forward, or
        ``held`` by another gradient."""
        source = base(gradient)
        if source.op == "placeholder" or not source.meta["backward"] or source in held:
            return self.emit(aten.clone.default, gradient)
        held.add(source)
        return gradient


def shard(captured: Captured, operators: Operators, assignment: Assignment) -> Sharded:
    """Emit the joint program of a rank for ``assignment``."""
    emitter = _Emitter(captured, operators, assignment)
    inputs = emitter.placeholders()
    for op in operators:
        emitter.operator(op)
    results, gradients = emitter.sinks()
    emitter.graph.output((*results, *gradients))
    emitter.graph.eliminate_dead_code()
    emitter.graph.lint()
    module = LazyGraphModule(torch.nn.Module(), emitter.graph)  # it is cut before it runs: its text is not needed
    return Sharded(module, emitter.coordinates, inputs, tuple(results), tuple(gradients), tuple(emitter.transfers))
