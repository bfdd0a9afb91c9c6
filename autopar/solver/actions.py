"""What every stage of a pipeline does in its actions, as the passes emit it: operators and collectives in their order.

A program is the list of tasks (`cost_model.simulate`) of one graph that the runtime runs: ``begin`` (copies that live
for the step, sums that are known early), the forward and the backward of a micro-batch, the latter whole or in its two
parts, and ``end`` (gradients that are reduced once a step, sums). Within a graph the order is passes/overlap.py's:

* a gather of parameters starts when the one before it has arrived, beside the compute with those: one block ahead; it
  is waited for by the first operator that reads one of its parameters;
* a reduction of gradients starts when the last gradient of its bucket has been computed; a reduce-scatter is waited for
  when the next one starts, an all-reduce at the end of the graph; one that reduces what another has brought (hybrid
  ZeRO, across its groups) starts when that is waited for;
* what ranks send each other beside a part of an operator (`Passing`) starts with that part and is waited for after it;
* all other collectives (those of tp and cp, sums of numbers) are waited for where they stand: nothing hides them;
* what a block makes again in the backward comes right before its backward.

A graph waits for all of its collectives before it ends. Where the backward is split, gradients of weights are reduced
in its second part. Work of the forward that is the same for all micro-batches is counted in ``begin``; casts of
gradients to the dtype in which they are reduced come before they are added up, in every micro-batch.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.cost_model.compute import optimizer_seconds, stream_seconds
from autopar.cost_model.simulate import COMPUTE, Task
from autopar.cost_model.step import BEGIN, END, Program, Repeated
from autopar.sharding.assignment import Assignment, zero_ranks
from autopar.sharding.operators import Operator
from autopar.sharding.recompute import Kept
from autopar.sharding.zero import Keeping
from autopar.solver.collectives import Issue
from autopar.solver.costs import Prices, state_bytes
from autopar.solver.setting import Setting

#: How often a gradient's bytes move when it is added to a sum: both are read, and the sum is written.
ADDED = 3.0


@dataclass(frozen=True)
class StageWork:
    """What belongs to one stage: its operators in graph order and those that its backward runs again, seconds of each
    node's work ``once`` (in one micro-batch), the nodes that run only once a step (``early``), the backward operators
    that gradients of weights alone are made of, its collectives, and bytes of gradients that are added up over
    micro-batches."""

    operators: Sequence[Operator]
    again: Sequence[Operator]
    once: Mapping[fx.Node, float]
    early: frozenset[fx.Node]
    of_weights: Collection[fx.Node]
    issues: Sequence[Issue]
    accumulated: float = 0.0


def programs(work: StageWork, prices: Prices, kinds: Collection[str]) -> dict[str, Program]:
    """The programs of one stage by kind of action: `BEGIN`, F, `END`, and of its backward those of ``kinds``: B, or I
    and W, or for schedules that run some of them in one piece all three."""
    early = [op for op in work.operators if op.node in work.early]
    forward = [op for op in work.operators if not op.backward and op.node not in work.early]
    backward = [op for op in work.operators if op.backward]
    found = {
        BEGIN: _Writer(work, prices, early, phase="once").write(),
        "F": _Writer(work, prices, forward, phase="forward").write(),
        END: _Writer(work, prices, (), phase="finish").write(),
    }
    if "B" in kinds:
        found["B"] = _Writer(work, prices, backward, work.again, "backward").write(work.accumulated)
    if "W" not in kinds:
        return found
    inputs = [op for op in backward if op.node not in work.of_weights]
    weights = [op for op in backward if op.node in work.of_weights]
    first, second = _split(work, {op.node for op in weights})
    found["I"] = _Writer(replace(work, issues=first), prices, inputs, work.again, "backward").write()
    found["W"] = _Writer(replace(work, issues=second), prices, weights, phase="backward").write(work.accumulated)
    return found


def _split(work: StageWork, weights: Container[fx.Node]) -> tuple[list[Issue], list[Issue]]:
    """The collectives of the two parts of a backward."""
    late = [i.ready is not None or i.reader in weights for i in work.issues]
    parts = list(zip(work.issues, late, strict=True))
    return [i for i, second in parts if not second], [i for i, second in parts if second]


def label(path: str | None) -> str:
    """The class of a block: its path without its number."""
    return "" if path is None else re.sub(r"\.\d+$", ".*", path)


@dataclass
class _Tape:
    """Tasks as they are written, in chunks of one block; compute that nothing interrupts is one task."""

    chunks: list[list[Task]] = field(default_factory=lambda: [[]])
    count: int = 0
    pending: float = 0.0
    waits: set[int] = field(default_factory=set)
    last: int | None = None
    kind: str = ""
    name: str = ""

    def block(self, kind: str, name: str) -> None:
        """What comes now belongs to another block."""
        self.flush()
        self.kind, self.name = kind, name
        if self.chunks[-1]:
            self.chunks.append([])

    def compute(self, seconds: float) -> None:
        """The operators that run next."""
        self.pending += seconds

    def flush(self) -> None:
        """End the compute that is being written."""
        if self.pending:
            self.last = self._add(COMPUTE, self.pending, self.kind, self.name, self.waits)
            self.pending, self.waits = 0.0, set()

    def start(self, issue: Issue, seconds: float) -> int:
        """Start a collective: after what computes now, and what that would have to wait for."""
        self.flush()
        after = self.waits if self.last is None else {*self.waits, self.last}
        return self._add(issue.axis, seconds, issue.kind, issue.purpose, after)

    def wait(self, task: int) -> None:
        """Let what computes next wait for a collective."""
        self.flush()
        self.waits.add(task)

    def _add(self, stream: str, seconds: float, kind: str, name: str, after: Iterable[int]) -> int:
        back = tuple(sorted(self.count - i for i in after))
        self.chunks[-1].append(Task(stream, seconds, back, kind, name))
        self.count += 1
        return self.count - 1

    def program(self) -> Program:
        """What was written, equal chunks in a row as one."""
        self.flush()
        groups = itertools.groupby(tuple(chunk) for chunk in self.chunks if chunk)
        return tuple(Repeated(sum(1 for _ in group), chunk) for chunk, group in groups)


class _Writer:
    """Writes one graph: ``operators`` in order, before those of a block what it makes ``again``, and the collectives of
    a ``phase``."""

    def __init__(
        self,
        work: StageWork,
        prices: Prices,
        operators: Sequence[Operator],
        again: Sequence[Operator] = (),
        phase: str = "",
    ) -> None:
        self.work, self.prices, self.tape, self.phase = work, prices, _Tape(), phase
        self.order = _in_order(operators, again)
        self.gathers: dict[tuple[fx.Node, bool], list[Issue]] = defaultdict(list)
        self.moves: dict[tuple[fx.Node, bool], list[Issue]] = defaultdict(list)
        self.reductions: dict[fx.Node, list[Issue]] = defaultdict(list)
        #: Reductions of what others bring, by the operator that those start after.
        self.deeper: dict[fx.Node, list[Issue]] = defaultdict(list)
        #: Collectives that belong to no operator here: before the first, and after the last; and reductions of what
        #: is there from the start.
        self.first: list[Issue] = []
        self.last: list[Issue] = []
        self.known: list[Issue] = []
        here = {(op.node, made) for op, made in self.order}
        for issue in work.issues:
            if issue.phase == phase:
                self._sort(issue, here)
        ahead = [g for key in ((op.node, made) for op, made in self.order) for g in self.gathers.get(key, ())]
        self.ahead, self.started = iter(ahead), list[int]()
        #: The reduce-scatter that nothing has waited for yet, and the operator that it started after.
        self.scattered: tuple[int, fx.Node] | None = None

    def _sort(self, issue: Issue, here: set[tuple[fx.Node, bool]]) -> None:
        if issue.ready is not None:
            if self.phase == "finish":
                self.last.append(issue)
            elif issue.depth:
                self.deeper[issue.ready].append(issue)
            elif (issue.ready, False) in here:
                self.reductions[issue.ready].append(issue)
            else:
                self.known.append(issue)
        elif issue.reader is None or (issue.reader, issue.again) not in here:
            (self.last if self.phase == "finish" else self.first).append(issue)
        elif issue.purpose == "parameters":
            self.gathers[issue.reader, issue.again].append(issue)
        else:
            self.moves[issue.reader, issue.again].append(issue)

    def write(self, accumulated: float = 0.0) -> Program:
        """The program; ``accumulated`` are bytes of gradients that are added to those of other micro-batches."""
        before: tuple[str | None, bool] | None = None
        for issue in self.first:
            self._at_once(issue)
        for issue in self.known:
            self._reduce(issue)
        self._start_next()
        for op, made in self.order:
            if (op.block, made) != before:
                before = (op.block, made)
                self.tape.block("recompute" if made else "backward" if op.backward else "forward", label(op.block))
            self._operator(op, made)
        self._end(accumulated)
        return self.tape.program()

    def _operator(self, op: Operator, made: bool) -> None:
        for _ in self.gathers.get((op.node, made), ()):
            self.tape.wait(self.started.pop(0))
            self._start_next()
        self._compute(op, self.moves.get((op.node, made), ()))
        for issue in self.reductions.get(op.node, ()) if not made else ():
            self._reduce(issue)

    def _compute(self, op: Operator, moves: Sequence[Issue]) -> None:
        """An operator after what moves its operands, in parts where something is sent beside these."""
        beside: dict[int, list[Issue]] = defaultdict(list)
        parts = 1
        for issue in moves:
            if issue.part is None:
                self._at_once(issue)
            else:
                i, parts = issue.part
                beside[i].append(issue)
        for i in range(parts):
            started = [self.tape.start(issue, self._seconds(issue)) for issue in beside[i]]
            self.tape.compute(self.work.once[op.node] / parts)
            for task in started:
                self.tape.wait(task)

    def _end(self, accumulated: float) -> None:
        if accumulated:
            self.tape.block("accumulate", "gradients")
            self.tape.compute(stream_seconds(accumulated, self.prices.cluster.device))
        last = [*self.last, *itertools.chain.from_iterable(self.deeper.values())]
        if last:
            self.tape.block("", "")
        for issue in sorted(last, key=lambda issue: (issue.ready is None, issue.depth)):
            if issue.depth and self.scattered is not None:
                self.tape.wait(self.scattered[0])
            if issue.ready is not None:
                self._reduce(issue)
            else:
                self._at_once(issue)

    def _seconds(self, issue: Issue) -> float:
        return self.prices.collective_seconds(issue.kind, issue.axis, issue.nbytes)

    def _at_once(self, issue: Issue) -> None:
        """Issue a collective and wait for it."""
        self.tape.wait(self.tape.start(issue, self._seconds(issue)))

    def _start_next(self) -> None:
        """Start the next gather, if there is one."""
        issue = next(self.ahead, None)
        if issue is not None:
            self.started.append(self.tape.start(issue, self._seconds(issue)))

    def _reduce(self, issue: Issue) -> None:
        """Start a reduction of gradients."""
        scatters = issue.kind == "reduce_scatter" and issue.ready is not None
        if scatters and self.scattered is not None:
            before, ready = self.scattered
            self.tape.wait(before)
            for deeper in self.deeper.pop(ready, ()):
                self._reduce(deeper)
        task = self.tape.start(issue, self._seconds(issue))
        if scatters and issue.ready is not None:
            self.scattered = task, issue.ready


def _in_order(operators: Sequence[Operator], again: Sequence[Operator]) -> list[tuple[Operator, bool]]:
    """Operators with whether they are made again: those of a block before its first operator that is more than a view
    (of what all blocks share), others in front."""
    waiting: dict[str | None, list[Operator]] = defaultdict(list)
    blocks = {op.block for op in operators if not op.is_view}
    for op in again:
        waiting[op.block if op.block in blocks else None].append(op)
    found = [(op, True) for op in waiting.pop(None, ())]
    for op in operators:
        if not op.is_view:
            found += [(made, True) for made in waiting.pop(op.block, ())]
        found.append((op, False))
    return found


def accumulated_bytes(
    setting: Setting, assignment: Assignment, keep: Mapping[str, Keeping], names: Iterable[str], micro_batches: int
) -> float:
    """Bytes that adding the gradients of the parameters ``names`` to those of the micro-batches before reads and
    writes, on average over the micro-batches: those of `ADDED` times a gradient, but by the first."""
    if micro_batches == 1:
        return 0.0
    wanted, found = set(names), 0.0
    for p in setting.captured.parameters:
        if p.name in wanted and p.gradient is not None:
            storage = assignment.sources[p.placeholder]
            numel = storage.local_numel(assignment.mesh, p.spec.shape)
            if keep[p.name].gradient == "step":
                numel *= zero_ranks(setting.operators, assignment, p.placeholder)
            found += ADDED * numel * p.gradient.meta["val"].dtype.itemsize
    return found * (micro_batches - 1) / micro_batches


def optimizer_time(setting: Setting, assignment: Assignment, names: Iterable[str]) -> float:
    """Seconds of the optimizer's step on the parameters ``names`` of one rank."""
    wanted = set(names)
    totals = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for p in setting.captured.parameters:
        if p.name in wanted and p.gradient is not None:
            local = assignment.sources[p.placeholder].local_numel(assignment.mesh, p.spec.shape)
            for kind, nbytes in state_bytes(local, p.storage_dtype, setting.optimizer).items():
                totals[kind] += nbytes
    return optimizer_seconds(
        setting.optimizer, totals["parameters"], totals["gradients"], totals["optimizer"], setting.cluster.device
    )


def again_of(held: Kept, by_node: Mapping[fx.Node, Operator], place: Mapping[fx.Node, int]) -> list[Operator]:
    """The operators that the backward makes again, in graph order."""
    return [by_node[node] for node in sorted(held.operators, key=place.__getitem__)]
