"""Cuts the tagged joint graph of a rank into the phases of a training step over micro-batches.

A value *varies* if it differs between micro-batches: it depends on the batch or on the micro-batch's coordinate, and
not through a sum over micro-batches, which the shard pass has left as an all_reduce over that axis. The phases, in the
order in which they run:

* ``prologue``, once a micro-batch: what is summed up before a forward can run, such as the number of tokens that count;
* ``once``, once a step: what is made of those sums, and of parameters if it is to be kept for the step;
* ``forward`` and ``backward``, once a micro-batch: everything that varies, and what of the parameters alone is made
  anew each time (a weight gathered for one use);
* ``between``, once a step: what is made of sums that only the backward needs and that take a forward to know (the
  shares of tokens in a balancing loss). A step that has such sums runs all forwards before the first backward;
* ``finish``, once a step: results and gradients from what forward and backward have left in sum.

Invariant: run in that order, with every sum taken over all micro-batches, they compute what the joint graph computes on
the whole batch. Every value has the name of its node; a sum that of the node that stands for it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import fx

from autopar.errors import MicroBatchError
from autopar.passes.collectives import ALL_REDUCE, WAIT, aten, axis_of, group_argument, operand
from autopar.passes.partition import extract
from autopar.passes.shard import Sharded
from autopar.sharding.flops import has_flops
from autopar.sharding.layout import MICRO_BATCH, Mesh


@dataclass(frozen=True)
class Phase:
    """``module(*inputs)`` returns ``outputs``, both by name."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Phases:
    """The phases of a step; None where there is nothing to do. ``sums`` gives the reduction (sum, max, min) by which
    values that ``prologue``, ``forward`` and ``backward`` return are taken together over micro-batches. Of what
    ``forward`` returns ``backward`` reads what is saved for it. ``results`` and ``gradients`` name the values that a
    step ends with, by place: results as asked for, gradients in the captured order. ``awaited`` are the sums over
    forwards that the first backward waits for."""

    prologue: Phase | None
    once: Phase | None
    forward: Phase
    backward: Phase | None
    finish: Phase | None
    sums: dict[str, str]
    results: tuple[str, ...]
    gradients: tuple[str, ...]
    between: Phase | None = None
    awaited: tuple[str, ...] = ()

    @functools.cached_property
    def left(self) -> tuple[str, ...]:
        """What forward and backward leave in sum; a value of the forward can be saved besides."""
        read = {*(self.finish.inputs if self.finish else ()), *self.results, *self.gradients, *self.awaited}
        made = (*self.forward.outputs, *(self.backward.outputs if self.backward else ()))
        return tuple(name for name in made if name in read)

    def all(self) -> list[Phase]:
        """The phases that there are, in the order in which they run."""
        every = (self.prologue, self.once, self.forward, self.between, self.backward, self.finish)
        return [phase for phase in every if phase is not None]

    def hash(self) -> str:
        """SHA-256 of the text of all phases: equal on every rank of a stage."""
        return hashlib.sha256("".join(phase.module.code for phase in self.all()).encode()).hexdigest()


#: Picks nodes of a graph.
Pick = Callable[[fx.Node], bool]


class _Cutter:
    """Sorts the nodes of one graph into phases."""

    def __init__(self, sharded: Sharded, mesh: Mesh, given: Collection[fx.Node], hoist: Pick, merge: bool) -> None:
        self.sharded, self.mesh, self.hoist, self.merge = sharded, mesh, hoist, merge
        self.order = {node: i for i, node in enumerate(sharded.module.graph.nodes)}
        self.sums = {n: str(n.args[0].args[1]) for n in self.order if is_sum(n)}
        self.varying = self._varying(given)

    def _varying(self, given: Collection[fx.Node]) -> set[fx.Node]:
        found = set(given)
        for node in self.order:
            if node in self.sums or node.op != "call_function":
                continue
            if self._reads_micro_batch(node) or any(arg in found for arg in node.all_input_nodes):
                found.add(node)
        return found

    def _reads_micro_batch(self, node: fx.Node) -> bool:
        """Whether a node that is given this rank's coordinates uses the one of the micro-batch, which is the first."""
        if MICRO_BATCH not in self.mesh.names or self.sharded.coordinates not in node.all_input_nodes:
            return False
        if node.target is aten.slice.Tensor:
            return bool(node.args[2] == 0)
        weights = node.args[1]
        assert isinstance(weights, list | tuple)  # autopar::starts: axes x dims, row-major
        return any(weights[: len(weights) // len(self.mesh.axes)])

    def before(self, targets: Iterable[fx.Node], stop: Pick) -> tuple[list[fx.Node], list[fx.Node]]:
        """What it takes to compute ``targets``: calls, and what they start from (placeholders and where ``stop``), both
        in order."""
        calls, starts = set[fx.Node](), set[fx.Node]()
        stack = list(targets)
        while stack:
            node = stack.pop()
            if node in calls or node in starts:
                continue
            if node.op == "placeholder" or stop(node):
                starts.add(node)
            else:
                calls.add(node)
                stack.extend(node.all_input_nodes)
        return self.sorted(calls), self.sorted(starts)

    def made_of(self, starts: Collection[fx.Node]) -> set[fx.Node]:
        """The nodes that depend on ``starts``."""
        found = set(starts)
        for node in self.order:
            if any(arg in found for arg in node.all_input_nodes):
                found.add(node)
        return found

    def sorted(self, nodes: Collection[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)

    def phase(self, name: str, outputs: dict[str, fx.Node], stop: Pick) -> Phase | None:
        """The graph that computes ``outputs``; None if there are none."""
        if not outputs:
            return None
        calls, starts = self.before(outputs.values(), stop)
        module = extract(calls, starts, list(outputs.values()), name, self.merge)
        return Phase(module, tuple(n.name for n in starts), tuple(outputs))


def is_sum(node: fx.Node) -> bool:
    """Whether a node stands for a sum over micro-batches."""
    if node.target is not WAIT:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source.target is ALL_REDUCE and axis_of(group_argument(source)) == MICRO_BATCH


def _summed(node: fx.Node) -> fx.Node:
    """What a node that `is_sum` adds up, without the copy that makes it contiguous: adding needs none."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return operand(source)


def _refuse(node: fx.Node, reason: str) -> MicroBatchError:
    return MicroBatchError(
        f"the batch cannot run in micro-batches: {reason}",
        expected="sums over the batch that are cheap to know before the forward, such as the number of tokens, or that "
        "the backward alone needs",
        found=f"a value of {node.meta['module'] or 'the model'} that all samples of the batch go into",
        change="run the batch in one piece (micro_batch_size = global batch / dp)",
    )


def cut(
    sharded: Sharded,
    mesh: Mesh,
    given: Collection[fx.Node],
    *,
    results: Collection[int],
    hoist: Pick = lambda node: False,
    merge: bool = True,
) -> Phases:
    """The phases of ``sharded`` (tagged by `recompute.tag`) on ``mesh``.

    ``given`` are the placeholders that vary: the tensors of the batch. ``results`` are the places of the results
    wanted; none may vary but where there is one micro-batch. ``hoist`` says which values made of parameters alone are
    kept for the step. Collectives are merged into buckets unless ``merge`` is False, for `pipeline.cut`. Raises
    MicroBatchError if a sum that the forward needs takes matrix products to know, or another such sum. A sum like that
    which the backward alone needs is `Phases.awaited`.
    """
    c = _Cutter(sharded, mesh, given, hoist, merge)
    wanted = [sharded.results[i] for i in sorted(results)]
    targets = [*wanted, *sharded.gradients]
    needed = {n for part in c.before(targets, lambda n: False) for n in part}
    early, awaited = _needed(c, needed)
    known = [*early, *awaited]
    hoisted = _hoisted(c, needed, known)
    between = c.made_of(awaited) & hoisted

    def is_ready(node: fx.Node) -> bool:
        return node in hoisted or node in known

    # what a step's end is made of: sums, and where nothing is summed (one micro-batch) what varies
    _, leaves = c.before(targets, lambda n: n in c.sums or n in c.varying or is_ready(n))
    summed = {n for n in leaves if n in c.sums or (n in c.varying and n.op != "placeholder")}
    left = c.sorted(summed.difference(early).union(awaited))
    outputs = {n.name: _summed(n) if n in c.sums else n for n in left}
    backward = {name: n for name, n in outputs.items() if n.meta["backward"]}
    forward = {name: n for name, n in outputs.items() if name not in backward}

    def is_handed_over(node: fx.Node) -> bool:
        return is_ready(node) or not (node.meta["backward"] or node.meta["recompute"])

    _, boundary = c.before(backward.values(), is_handed_over)
    saved = {n.name: n for n in boundary if n.op != "placeholder" and not is_ready(n)}
    made = c.phase("Forward", forward | saved, is_ready)
    assert made is not None
    made_last = {n.name: n for n in targets if n not in left and not is_ready(n)}
    return Phases(
        c.phase("Prologue", {s.name: _summed(s) for s in early}, lambda n: False),
        c.phase("Once", {n.name: n for n in c.sorted(hoisted - between)}, lambda n: n in early),
        made,
        c.phase("Backward", backward, is_handed_over),
        c.phase("Finish", made_last, lambda n: n in left or is_ready(n)),
        {n.name: c.sums[n] for n in [*early, *(n for n in left if n in c.sums)]},
        tuple(n.name for n in wanted),
        tuple(n.name for n in sharded.gradients),
        c.phase("Between", {n.name: n for n in c.sorted(between)}, lambda n: n in known or n in hoisted - between),
        tuple(n.name for n in awaited),
    )


def _needed(c: _Cutter, needed: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The sums that something which varies is made of, in order: those to know before the forwards, and those that
    only forwards tell and only backwards need."""
    early, awaited = list[fx.Node](), list[fx.Node]()
    leads, leads_forward = (_leads(c, {n for n in needed if keep(n)}) for keep in (lambda n: True, _is_forward))
    for s in [s for s in c.sums if s in leads]:
        if (reason := _why_late(c, s)) is None:
            early.append(s)
        elif s in leads_forward or any(n in awaited for n in c.before([_summed(s)], lambda n: False)[0]):
            raise _refuse(s, reason)
        else:
            awaited.append(s)
    return early, awaited


def _is_forward(node: fx.Node) -> bool:
    return not node.meta["backward"]


def _leads(c: _Cutter, inside: set[fx.Node]) -> set[fx.Node]:
    """The nodes of which something ``inside`` that varies is made, by nodes inside and not through sums."""
    leads = set[fx.Node]()
    for node in reversed(c.order):
        users = [user for user in node.users if user in inside]
        if any(user in c.varying or (user in leads and user not in c.sums) for user in users):
            leads.add(node)
    return leads


def _why_late(c: _Cutter, s: fx.Node) -> str | None:
    """Why a sum cannot be known before the forward; None if it can."""
    for node in c.before([_summed(s)], lambda n: False)[0]:
        if node in c.sums:
            return "one sum over the batch is needed for another"
        if has_flops(node.target) or node.target is aten.einsum.default:
            return f"a sum over the batch depends on {node.target} in {node.meta['module'] or 'the model'}"
    return None


def _hoisted(c: _Cutter, needed: set[fx.Node], known: list[fx.Node]) -> set[fx.Node]:
    """The values that do not vary and are made once a step, of those that something which varies reads: of ``known``
    sums, or of parameters."""
    made, of_sums = set[fx.Node](), set(known)
    for node in c.order:
        if node.op != "call_function" or node not in needed or node in c.varying or node in c.sums:
            continue
        if any(arg in of_sums for arg in node.all_input_nodes):
            of_sums.add(node)
            made.add(node)
        elif c.hoist(node):
            made.add(node)
    # a copy of a parameter is often read through a view, which does not vary either
    read = {n: [user for user in n.users if user in needed and user not in made] for n in made}
    found = {n for n, users in read.items() if any(user in c.varying or c.hoist(n) for user in users)}
    # what a collective has brought for these, the end of the step does not send for again
    calls = set(c.before(found, lambda n: n in known)[0])
    return found | {n for n in calls if n.target is WAIT and any(u in needed and u not in calls for u in n.users)}
