"""Cuts the phases of a training step into pipeline stages.

Where nodes belong is for `locate`. Located values that another stage reads travel from stage to stage, those of the
forward up and gradients down; what travels is a rank's own piece, so both sides agree on its layout, and what
redistributes it belongs to the reader. What is not located every stage that reads it makes for itself.

Invariant: run stage by stage, each with the values that it receives, the stages compute what the phases compute, the
gradient of a parameter being the sum of what the stages have for it. Of `Stage.input` and `Stage.weight`, together
`Stage.backward`, each node is in one.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import HintError, MicroBatchError
from autopar.passes.bucket import bucket
from autopar.passes.collectives import aten
from autopar.passes.locate import (
    Located,
    held_by,
    is_gradient,
    labels,
    locate_backward,
    locate_finish,
    locate_forward,
)
from autopar.passes.overlap import overlap
from autopar.passes.phases import Phase, Phases
from autopar.sharding.operators import VIEWS
from autopar.sharding.stages import Stages

#: Views that a stage repeats on a value that has travelled, rather than receive their result too: those of all of it.
_RESHAPES = VIEWS - {
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
}


@dataclass(frozen=True)
class Stage:
    """What one stage runs, values by name.

    ``prologue``, ``once``, ``forward``, ``backward`` and ``finish`` (of gradients) are its parts of the phases;
    ``input`` computes of ``backward`` what the stage before waits for, ``weight`` the rest. ``receives`` and ``sends``
    are the activations that come from the stage before and go to the next, ``receives_back`` and ``sends_back`` what
    comes from the next and goes to the one before. ``saved`` is kept from the forward of a micro-batch for its
    backward, ``between`` from ``input`` to ``weight``; ``left`` is what forward and backward leave in sum for the end
    of the step. ``results`` and ``gradients`` are the values that a step ends with here; what there is to do for the
    results, once all forwards have run, is ``result``. ``awaited`` are the sums over all its forwards that its first
    backward waits for, and ``known`` what is made of them before it. The results of the last stage go to all others:
    ``receives_last`` come from the next stage, and ``sends_last`` go to the one before, with the gradients of the last
    micro-batch.
    """

    prologue: Phase | None
    once: Phase | None
    forward: Phase
    backward: Phase
    input: Phase
    weight: Phase
    finish: Phase | None
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    receives_back: tuple[str, ...]
    sends_back: tuple[str, ...]
    saved: tuple[str, ...]
    between: tuple[str, ...]
    left: tuple[str, ...]
    results: tuple[str, ...]
    gradients: tuple[str, ...]
    awaited: tuple[str, ...] = ()
    known: Phase | None = None
    result: Phase | None = None
    receives_last: tuple[str, ...] = ()
    sends_last: tuple[str, ...] = ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All graphs, those of the backward as a whole and in its parts."""
        every = (
            self.prologue, self.once, self.forward, self.known, self.result, self.backward, self.input, self.weight,
            self.finish,
        )  # fmt: skip
        return tuple(phase for phase in every if phase is not None)

    @property
    def inputs(self) -> frozenset[str]:
        """The names of all that enters some graph."""
        return frozenset(name for phase in self.phases for name in phase.inputs)

    def hash(self) -> str:
        """SHA-256 of the text of all graphs: equal on every rank of a stage."""
        return hashlib.sha256("".join(phase.module.code for phase in self.phases).encode()).hexdigest()


def cut(
    phases: Phases, stages: Stages, parameters: Mapping[str, frozenset[int]], batch: Collection[str]
) -> tuple[Stage, ...]:
    """The stages of ``phases``, in which no collectives are merged.

    ``stages`` are module paths by stage. ``parameters`` gives the stages that have the inputs which are parameters
    (`sharding.stages.homes`); other stages that read one receive it. ``batch`` names the inputs that differ between
    batches. Raises HintError where a gradient cannot be taken stage by stage, or stages are not in the model's order.
    """
    return _Cutter(phases, stages, parameters, batch).stages()


class _Cutter:
    """Finds out what travels between stages, then writes the graphs of each."""

    def __init__(
        self, phases: Phases, stages: Stages, parameters: Mapping[str, frozenset[int]], batch: Collection[str]
    ) -> None:
        self.phases, self.count = phases, len(stages)
        self.held = held_by(phases, parameters, self.count)
        label = labels(stages)
        self.forward = locate_forward(phases, label, self.count, self.held, batch)
        self.backward = _located(phases.backward, lambda p: locate_backward(p, label, self.count, self.forward))
        sums = {name: self.backward.stages(node) for name, node in self.backward.outputs.items()}
        self.finish = _located(phases.finish, lambda p: locate_finish(p, sums))
        #: What the forward of every stage leaves: for its backward, and for the end of the step.
        self.saved: list[dict[str, fx.Node]] = [{} for _ in stages]
        self.ends: list[dict[str, fx.Node]] = [{} for _ in stages]
        #: Up to which stage values of the forward travel, and down to which those of the backward.
        self.up: dict[fx.Node, int] = {}
        self.down: dict[fx.Node, int] = {}
        #: The sums over forwards that the backward of every stage waits for.
        self.awaited: list[dict[str, fx.Node]] = [{} for _ in stages]
        self.results: list[list[str]] = [[] for _ in stages]
        self.gradients: list[list[str]] = [[] for _ in stages]
        self._end()
        self.in_backward = [self._in_backward(s) for s in range(self.count)]
        self.in_forward = [self._in_forward(s) for s in reversed(range(self.count))][::-1]

    # -- what is needed where -----------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Say at which stages a step's results and gradients come to be, and what that takes of the forward."""
        for name in self.phases.results:
            ends = self._forward_ends(name)
            where = max((self.forward.at[n] for n in ends.values() if n in self.forward.at), default=self.count - 1)
            self.results[where].append(name)
            self.ends[where] |= ends
        for name in self.phases.gradients:
            graph = self.finish if name in self.finish.outputs else self.backward
            stages = graph.stages(graph.outputs[name]) if name in graph.outputs else ()
            for s in sorted(stages) or [self.count - 1]:
                self.gradients[s].append(name)
                self.ends[s] |= self._forward_ends(name)

    def _forward_ends(self, name: str) -> dict[str, fx.Node]:
        """The outputs of the forward of which the end of a step makes ``name``."""
        if name not in self.finish.outputs:
            return {name: self.forward.outputs[name]} if name in self.forward.outputs else {}
        starts = [n.name for n in _closure([self.finish.outputs[name]], lambda n: True) if n.op == "placeholder"]
        sums = {name for start in starts for name in self._sums_of(start)}
        return {start: self.forward.outputs[start] for start in sorted(sums) if start in self.forward.outputs}

    def _sums_of(self, name: str) -> list[str]:
        """What of a micro-batch goes into a value that is there once a step: itself, or the sums between forwards and
        backwards that it is made of."""
        if (between := self.phases.between) is None or name not in between.outputs:
            return [name]
        graph = Located.of(between)
        return sorted(n.name for n in _closure([graph.outputs[name]], lambda n: True) if n.op == "placeholder")

    def _in_backward(self, s: int) -> set[fx.Node]:
        """What stage ``s`` computes in its backward; notes what that takes of the forward and of later stages. Called
        for the stages in order, so that what earlier ones need is known."""
        graph, stands = self.backward, self.backward.stand_ins(s)

        def makes(node: fx.Node) -> bool:
            stages = graph.stages(node)
            made = node.op == "call_function" and (not stages or s in stages or node.target in _RESHAPES)
            if not made:
                self._fetch(node, s)
            return made

        targets = [n for n in graph.outputs.values() if s in graph.stages(n)]
        targets += [n for n in self.down if graph.at[n] == s]
        return {n for n in _closure(targets, makes, stands) if n.op == "call_function" and makes(n)}

    def _fetch(self, node: fx.Node, s: int) -> None:
        """Note that stage ``s`` reads ``node`` of the backward without computing it there."""
        made = self.backward.at.get(node, s)
        if sums := [n for n in self._sums_of(node.name) if n in self.phases.awaited]:
            self._await(sums, s)
        elif made > s:
            self.down[node] = min(s, self.down.get(node, s))
        elif node.op == "placeholder":
            if node.name in self.forward.outputs:
                self.saved[s][node.name] = self.forward.outputs[node.name]
            elif s not in self.held.get(node.name, (s,)):
                self.saved[s][node.name] = next(n for n in self.forward.nodes if n.name == node.name)
        else:
            assert not is_gradient(node)  # gradients are located no later than what reads them
            self.saved[s][node.name] = next(n for n in self.forward.nodes if n.name == node.name)

    def _await(self, sums: Collection[str], s: int) -> None:
        """Note that the backward of stage ``s`` reads what is made of ``sums``, of what its forward makes or receives.
        """
        for name in sums:
            summand = self.forward.outputs[name]
            if self.forward.at.get(summand, s) > s:
                raise _not_awaited(summand, self.forward.at[summand], s)
            self.awaited[s][name] = summand

    def _in_forward(self, s: int) -> set[fx.Node]:
        """What stage ``s`` computes in its forward; notes what that takes of earlier stages. Called for the stages from
        the last one on, so that what later ones need is known."""
        graph = self.forward

        def makes(node: fx.Node) -> bool:
            made = node.op == "call_function" and (graph.at.get(node, s) == s or node.target in _RESHAPES)
            if not made and not (node.op == "placeholder" and s in self.held.get(node.name, (s,))):
                if self._made_at(node) > s:
                    raise _not_ordered(node, self._made_at(node), s)
                self.up[node] = max(s, self.up.get(node, s))
            return made

        ends = [*self.ends[s].values(), *self.awaited[s].values()]
        targets = [*ends, *self.saved[s].values(), *(n for n in self.up if self._made_at(n) == s)]
        return {n for n in _closure(targets, makes) if n.op == "call_function" and makes(n)}

    def _made_at(self, node: fx.Node) -> int:
        """The first stage that has a value of the forward which travels."""
        return min(self.held[node.name]) if node.op == "placeholder" else self.forward.at[node]

    def _travels(self, s: int) -> tuple[dict[str, fx.Node], dict[str, fx.Node]]:
        """What goes from stage ``s`` to the next, and from ``s`` to the one before."""
        back = self.backward.at
        up = {n.name: n for n in self.forward.nodes if n in self.up and self._made_at(n) <= s < self.up[n]}
        down = {n.name: n for n in self.backward.nodes if n in self.down and self.down[n] < s <= back[n]}
        return up, down

    # -- the graphs ---------------------------------------------------------------------------------------------------

    def stages(self) -> tuple[Stage, ...]:
        """The stages, in order."""
        return tuple(self._stage(s) for s in range(self.count))

    def _stage(self, s: int) -> Stage:
        sends, sends_back = self._travels(s)
        own = {name: n for name, n in sends.items() if self._made_at(n) == s}
        ends = self.ends[s] | self.awaited[s]
        forward = _extract(self.forward, ends | self.saved[s] | own, self.in_forward[s], "Forward")
        backward, first, second, between = self._backward(s, sends_back)
        result = self._finish(self.results[s], s, "Result")
        finish = self._finish(self.gradients[s], s, "Finish")
        given = {name for phase in (forward, backward, result, finish) for name in phase.inputs} | set(self.results[s])
        last = tuple(self.results[-1])
        known = _part(self.phases.between, given, "Between")
        given |= set(known.inputs) if known else set()
        once = _part(self.phases.once, given, "Once")
        given |= set(once.inputs) if once else set()
        return Stage(
            _part(self.phases.prologue, given, "Prologue"),
            once,
            forward,
            backward,
            first,
            second,
            finish if finish.outputs else None,
            tuple(self._travels(s - 1)[0]),
            tuple(sends),
            tuple(self._travels(s + 1)[1]),
            tuple(sends_back),
            tuple(self.saved[s]),
            between,
            (*ends, *(name for name, n in self.backward.outputs.items() if s in self.backward.stages(n))),
            tuple(self.results[s]),
            tuple(self.gradients[s]),
            tuple(name for name in self.phases.awaited if name in given),
            known,
            result if result.outputs else None,
            last if s < self.count - 1 else (),
            last if s > 0 else (),
        )

    def _backward(self, s: int, sends: Mapping[str, fx.Node]) -> tuple[Phase, Phase, Phase, tuple[str, ...]]:
        """The backward of a stage: whole, what the stage before waits for, the rest, and what those two share."""
        graph, inside, stands = self.backward, self.in_backward[s], self.backward.stand_ins(s)
        outputs = {name: n for name, n in graph.outputs.items() if s in graph.stages(n)}
        outputs |= {name: n for name, n in sends.items() if n in inside}
        if s > 0:
            first = {n for n in _closure(sends.values(), lambda n: n in inside) if n in inside}
        else:
            first = _reach_several(graph, outputs, inside, stands)
        first |= {n for n in inside if n.target is operator.getitem and n.args[0] in first}
        second = inside - first
        read = {_stand(arg, stands) for n in second for arg in n.all_input_nodes}
        between = {n.name: n for n in graph.nodes if n in first and n in read}
        early = {name: n for name, n in outputs.items() if _stand(n, stands) in first}
        late = {name: n for name, n in outputs.items() if name not in early}
        return (
            _extract(graph, outputs, inside, "Backward", stands),
            _extract(graph, early | between, first, "BackwardInput", stands),
            _extract(graph, late, second, "BackwardWeight", stands),
            tuple(between),
        )

    def _finish(self, names: Iterable[str], s: int, title: str) -> Phase:
        """The part of the step's end that makes ``names`` at stage ``s``."""
        graph, stands = self.finish, self.finish.stand_ins(s)
        outputs = {name: graph.outputs[name] for name in names if name in graph.outputs}
        inside = {n for n in _closure(outputs.values(), lambda n: True, stands) if n.op == "call_function"}
        return _extract(graph, outputs, inside, title, stands)


def _located(phase: Phase | None, locate: Callable[[Phase], Located]) -> Located:
    return locate(phase) if phase is not None else Located([], {})


def _stand(node: fx.Node, stands: Mapping[fx.Node, fx.Node]) -> fx.Node:
    while node in stands:
        node = stands[node]
    return node


def _closure(
    targets: Iterable[fx.Node], opens: Callable[[fx.Node], bool], stands: Mapping[fx.Node, fx.Node] | None = None
) -> set[fx.Node]:
    """``targets`` and all that they are made of, not looking behind nodes that ``opens`` refuses."""
    found = set[fx.Node]()
    stack = [*targets]
    while stack:
        node = _stand(stack.pop(), stands or {})
        if node not in found:
            found.add(node)
            if opens(node):
                stack.extend(node.all_input_nodes)
    return found


def _reach_several(
    graph: Located, outputs: Mapping[str, fx.Node], inside: Collection[fx.Node], stands: Mapping[fx.Node, fx.Node]
) -> set[fx.Node]:
    """The nodes of the first stage that more than one gradient is made of: what other stages would do to hand a
    gradient on."""
    reach: dict[fx.Node, set[str]] = {}
    for name, node in outputs.items():
        reach.setdefault(_stand(node, stands), set()).add(name)
    for node in reversed(graph.nodes):
        if node in inside:
            for arg in node.all_input_nodes:
                reach.setdefault(_stand(arg, stands), set()).update(reach.get(node, ()))
    return {node for node in inside if len(reach.get(node, ())) > 1}


def _part(phase: Phase | None, names: Collection[str], title: str) -> Phase | None:
    """The part of a phase that computes the outputs among ``names``; None if there are none."""
    graph = _located(phase, Located.of)
    outputs = {name: node for name, node in graph.outputs.items() if name in names}
    calls = {n for n in _closure(outputs.values(), lambda n: True) if n.op == "call_function"}
    return _extract(graph, outputs, calls, title) if outputs else None


def _extract(
    graph: Located,
    outputs: Mapping[str, fx.Node],
    inside: Collection[fx.Node],
    title: str,
    stands: Mapping[fx.Node, fx.Node] | None = None,
) -> Phase:
    """The graph of the calls ``inside`` that gives ``outputs``, with its collectives merged and put in order."""
    ends = {name: _stand(node, stands or {}) for name, node in outputs.items()}
    calls = [n for n in graph.nodes if n in inside]
    read = {_stand(arg, stands or {}) for n in calls for arg in n.all_input_nodes}.union(ends.values())
    starts = [n for n in graph.nodes if n in read and n not in inside]
    part, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in starts:
        new[node] = part.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in calls:
        new[node] = part.node_copy(node, lambda n: new[_stand(n, stands or {})])
    part.output(tuple(new[n] for n in ends.values()))
    bucket(part)
    overlap(part)
    part.lint()
    return Phase(fx.GraphModule(torch.nn.Module(), part, class_name=title), tuple(n.name for n in starts), tuple(ends))


def _not_awaited(node: fx.Node, at: int, reader: int) -> MicroBatchError:
    return MicroBatchError(
        f"the batch cannot run in micro-batches: the backward of stage {reader} needs a sum over the batch that stage "
        f"{at} has",
        expected="sums of what the stage that needs them has computed or received",
        found=f"{node.target} of {node.meta['module'] or 'the model'} in stage {at}",
        change="run the batch in one piece (micro_batch_size = global batch / dp), or give pp=1",
    )


def _not_ordered(node: fx.Node, at: int, reader: int) -> HintError:
    return HintError(
        f"the stages cannot run one after the other: stage {reader} needs what stage {at} computes in "
        f"{node.meta['module'] or 'the model'}",
        expected="stages in the order in which the model runs its modules",
        found=f"{node.target} of stage {at}",
        change="correct the hint stages, or give pp=1",
    )
