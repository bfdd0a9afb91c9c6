"""Finds out at which pipeline stage every node of a step's phases belongs.

A node that depends on both parameters and the batch is *located*: at the stage of its unit (a block, or a module
outside of the blocks), else by data flow; forward nodes never before, backward nodes never after what they are made of.
All else (a mask, cosines, a gathered weight) is at no stage: whoever reads it can make it.

A gradient of a parameter that several stages use is *shared*: from where only linear operators are left (sums, views,
collectives), each stage has its own summand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.errors import HintError
from autopar.passes.accumulate import is_linear
from autopar.passes.collectives import aten
from autopar.passes.phases import Phase, Phases
from autopar.sharding.stages import Stages, stage_of

#: The stage of a node's unit, None where it has none.
Label = Callable[[fx.Node], "int | None"]


def labels(stages: Stages) -> Label:
    """The stage of every node by its module."""

    @functools.cache
    def of_module(module: str) -> int | None:
        return stage_of(module, stages)

    return lambda node: of_module(str(node.meta.get("module", "")))


@dataclass
class Located:
    """One phase: its nodes, its outputs by name, the stage ``at`` which located nodes are, and for shared ones the
    stages that have a summand, in ``shares``."""

    nodes: list[fx.Node]
    outputs: dict[str, fx.Node]
    at: dict[fx.Node, int] = field(default_factory=dict)
    shares: dict[fx.Node, frozenset[int]] = field(default_factory=dict)

    @staticmethod
    def of(phase: Phase) -> Located:
        """A phase of which nothing is located yet."""
        values = phase.module.graph.output_node().args[0]
        assert isinstance(values, tuple | list)
        outputs: dict[str, fx.Node] = dict(zip(phase.outputs, values, strict=True))  # type: ignore[arg-type]
        return Located(list(phase.module.graph.nodes), outputs)

    @property
    def calls(self) -> list[fx.Node]:
        """The nodes that compute, in order."""
        return [n for n in self.nodes if n.op == "call_function"]

    def stages(self, node: fx.Node) -> frozenset[int]:
        """The stages at which a node is computed; none if it is not located."""
        if node in self.shares:
            return self.shares[node]
        return frozenset([self.at[node]] if node in self.at else ())

    def stand_ins(self, stage: int) -> dict[fx.Node, fx.Node]:
        """What stands for a sum of which ``stage`` has one summand only: that summand."""
        found = {}
        for node, stages in self.shares.items():
            if node.target is aten.add.Tensor and stage in stages:
                own = [arg for arg in node.all_input_nodes if stage in self.stages(arg)]
                if len(own) < len(node.all_input_nodes):
                    found[node] = own[0]
        return found


def reached(graph: Located, names: Collection[str]) -> set[fx.Node]:
    """The nodes that depend on the inputs called ``names``."""
    found = {n for n in graph.nodes if n.op == "placeholder" and n.name in names}
    for node in graph.calls:
        if any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def locate_forward(
    phases: Phases, label: Label, count: int, held: Mapping[str, frozenset[int]], batch: Collection[str]
) -> Located:
    """The forward, located at ``count`` stages. ``held`` gives the stages that have the inputs which are parameters, or
    are made of them once a step, ``batch`` names those that differ between batches."""
    varied = set(batch)
    if phases.prologue is not None:
        varied |= set(phases.prologue.outputs)
    if phases.once is not None:
        once = Located.of(phases.once)
        of_batch = reached(once, varied)
        varied |= {name for name, n in once.outputs.items() if n in of_batch}
    graph = Located.of(phases.forward)
    both = reached(graph, held) & reached(graph, varied)
    # from where on a value can be made: parameters travel to later stages, as activations do, not to earlier ones
    earliest = {n: min(held.get(n.name, (0,))) for n in graph.nodes if n.op == "placeholder"}
    for node in graph.calls:
        earliest[node] = max((earliest[arg] for arg in node.all_input_nodes), default=0)
        known = [graph.at[arg] for arg in node.all_input_nodes if arg in graph.at]
        if node in both and (own := label(node)) is not None:
            known.append(own)
        if known:
            graph.at[node] = max(*known, earliest[node])
    for node in reversed(graph.nodes):  # in no unit and not made of any: where it is first read
        if node in both and node not in graph.at:
            graph.at[node] = min((graph.at[user] for user in node.users if user in graph.at), default=count - 1)
    return graph


def held_by(phases: Phases, parameters: Mapping[str, frozenset[int]], count: int) -> dict[str, frozenset[int]]:
    """The stages that have each parameter and each value that is made of parameters once a step: those that have all
    that it is made of. HintError if no stage has."""
    found = dict(parameters)
    if phases.once is None:
        return found
    once = Located.of(phases.once)
    every = frozenset(range(count))
    have = {n: parameters.get(n.name, every) for n in once.nodes}
    for node in once.calls:
        have[node] = every.intersection(*(have[arg] for arg in node.all_input_nodes))
        if not have[node]:
            raise HintError(
                f"parameters of several stages are joined in {node.meta['module'] or 'the model'}",
                expected="parameters that are used together on one pipeline stage",
                found=f"{node.target} of parameters that no stage has all of",
                change="put the modules that own them on one stage (hint stages), or give pp=1",
            )
    of_parameters = reached(once, parameters)
    return found | {name: have[n] for name, n in once.outputs.items() if n in of_parameters}


def is_gradient(node: fx.Node) -> bool:
    """Whether a node of the backward graph is of the backward itself, not of the forward made again or handed over."""
    return node.op == "call_function" and bool(node.meta["backward"])


def locate_backward(phase: Phase, label: Label, count: int, forward: Located) -> Located:
    """The backward, given where the forward is."""
    graph = Located.of(phase)
    known = {n.name: forward.at[n] for n in forward.nodes if n in forward.at}
    of_module: dict[str, set[int]] = {}
    for node, stage in forward.at.items():
        of_module.setdefault(node.meta["module"], set()).add(stage)
    for node in graph.nodes:
        if node.op == "placeholder" and (saved := forward.outputs.get(node.name)) in forward.at:
            graph.at[node] = forward.at[saved]
        elif node.op == "call_function" and not is_gradient(node) and node.name in known:
            graph.at[node] = known[node.name]
        elif node.op == "call_function":
            own = label(node)  # where the forward of its module really is tells more: a module may be used twice
            stages = of_module.get(node.meta["module"], {own} if own is not None else set())
            if (found := _backward_stage(graph, node, stages)) is not None:
                graph.at[node] = found
    _share(graph)
    for node in graph.outputs.values():
        if node not in graph.at:  # made of nothing that is located: where its parameter is
            own = label(node)
            graph.shares[node] = frozenset([count - 1 if own is None else own])
    return graph


def _backward_stage(graph: Located, node: fx.Node, own: Collection[int]) -> int | None:
    """Where a node is by its unit, or by the stages at which the forward of its module is, and by what it is made of:
    the last of ``own`` that its gradients have not passed."""
    args = [arg for arg in node.all_input_nodes if arg in graph.at]
    low = [graph.at[arg] for arg in args if not is_gradient(arg)]
    high = [graph.at[arg] for arg in args if is_gradient(arg)]
    if not args:
        return None
    reached = [stage for stage in own if not high or stage <= min(high)]
    stage = max(reached) if reached else min(high) if high else max(low)
    return min([max([stage, *low]), *high])


def locate_finish(phase: Phase, sums: Mapping[str, frozenset[int]]) -> Located:
    """The end of a step; ``sums`` gives the stages that have a summand of what its backwards have left. HintError if
    something else than linear operators is made of sums of several stages."""
    graph = Located.of(phase)
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in sums:
            graph.shares[node] = sums[node.name]
            graph.at[node] = min(sums[node.name])
        elif any(arg in graph.at for arg in node.all_input_nodes):
            graph.at[node] = min(graph.at[arg] for arg in node.all_input_nodes if arg in graph.at)
    _share(graph)
    for node in graph.calls:
        stages = frozenset[int]().union(*(graph.stages(arg) for arg in node.all_input_nodes))
        if len(stages) > 1 and node not in graph.shares:
            raise HintError(
                f"the gradient of a parameter in {node.meta['module'] or 'the model'} cannot be taken stage by stage",
                expected="a parameter that one pipeline stage uses, or a gradient that is a sum",
                found=f"{node.target} of gradients of stages {sorted(stages)}",
                change="put the modules that share the parameter on one stage (hint stages), or give pp=1",
            )
    return graph


def _share(graph: Located) -> None:
    """Fill ``shares`` for the linear ends of a graph."""
    constants = {node for node in graph.nodes if node not in graph.at}
    tail: set[fx.Node] = {graph.nodes[-1]}
    for node in reversed(graph.calls):
        moving = [arg for arg in node.all_input_nodes if arg in graph.at]
        single = node.target is aten.add.Tensor or len(moving) == 1
        if moving and single and tail.issuperset(node.users) and (is_linear(node, constants) or _scales(node, moving)):
            tail.add(node)
    for node in graph.calls:
        if node in tail:
            graph.shares[node] = frozenset[int]().union(*(graph.stages(arg) for arg in node.all_input_nodes))


def _scales(node: fx.Node, moving: Sequence[fx.Node]) -> bool:
    """Whether a node multiplies the one thing that moves by something fixed."""
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        return len(moving) == 1 and node.args.count(moving[0]) == 1
    return node.target in (aten.div.Tensor, aten.div.Scalar) and list(moving) == [node.args[0]]
