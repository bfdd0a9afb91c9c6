"""The programs of every pipeline stage on a tape, as `passes.locate` and `passes.pipeline` would cut them.

What depends on parameters and on the batch is at the stage of its module, or by data flow; all else (a mask, cosines, a
gathered weight) every stage that reads it makes for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.capture.graph import Captured
from autopar.sharding.layout import Mesh
from autopar.sharding.stages import homes, stage_of
from autopar.solver.programs import Program, closure, extract
from autopar.solver.steps import Cut
from autopar.solver.tape import Tape


@dataclass(frozen=True)
class StagePrograms:
    """The programs of one stage; ``saved`` is what its forward leaves for its backward, ``between`` what the backward
    of inputs leaves for that of weights, ``ready`` what is there for the step, and ``ends`` what micro-batches add up,
    the first outputs of ``backward``."""

    forward: Program
    backward: Program
    input: Program
    weight: Program
    finish: Program | None
    saved: tuple[int, ...]
    between: tuple[int, ...]
    ready: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass
class _Cutter:
    """Finds out where entries are, what travels between stages, and writes the programs of each."""

    tape: Tape
    captured: Captured
    mesh: Mesh
    cut: Cut
    stages: Sequence[Sequence[str]]
    batch: Collection[int]
    at: dict[int, int] = field(default_factory=dict)
    saved: dict[int, dict[int, None]] = field(default_factory=dict)
    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.entries, self.last = self.tape.entries, len(self.stages) - 1
        self.home = {p.name: homes((p.name, *p.aliases), self.stages) for p in self.captured.parameters}
        self.label = functools.cache(lambda module: stage_of(module, self.stages))
        self._locate()
        self.ends = self._ends()

    def _reached(self, starts: Iterable[int]) -> set[int]:
        found = set(starts)
        for i, entry in enumerate(self.entries):
            if any(arg in found for arg in entry.args):
                found.add(i)
        return found

    def _locate(self) -> None:
        """Find the stage of every entry that has one."""
        inputs = self.tape.inputs.values()
        parameters = [i for i in inputs if self.entries[i].parameter is not None]
        sums = [i for i in self.cut.ready if self.entries[i].sums]
        both = self._reached(parameters) & self._reached((*self.batch, *sums))
        for i, entry in enumerate(self.entries):
            if not entry.call or (i not in both and not entry.backward):
                continue
            own = self.label(entry.owner.meta["module"]) if entry.owner is not None else None
            found = self._backward(i, own) if entry.backward else self._forward(i, own)
            if found is not None:
                self.at[i] = found

    def _forward(self, i: int, own: int | None) -> int:
        """The module's stage, but no earlier than what it reads; what is in none comes with it."""
        known = [self.at[arg] for arg in self.entries[i].args if arg in self.at]
        return max([*known, *([] if own is None else [own])], default=0)

    def _backward(self, i: int, own: int | None) -> int | None:
        """`locate._backward_stage`."""
        args = [arg for arg in self.entries[i].args if arg in self.at]
        low = [self.at[arg] for arg in args if not self.entries[arg].backward]
        high = [self.at[arg] for arg in args if self.entries[arg].backward]
        if not args:
            return own if own is not None else None
        reached = own is not None and (not high or own <= min(high))
        stage = own if reached and own is not None else min(high) if high else max(low)
        return min([max([stage, *low]), *high])

    def _ends(self) -> dict[int, int]:
        """Where what micro-batches leave of the backward is made. Of a sum that several stages have summands of each of
        them has its own, which is as large."""
        found: dict[int, int] = {}
        for i in self.cut.backward:
            stack = [i]
            while stack:
                j = stack.pop()
                args = [arg for arg in self.entries[j].args if self.entries[arg].backward and arg in self.at]
                places = {self.at[arg] for arg in args}
                if len(places) > 1 or (len(args) == 1 and self.entries[j].view):
                    stack.extend(args)
                else:
                    found[j] = self.at.get(j, self.last)
        return found

    # -- what is needed where -----------------------------------------------------------------------------------------

    def _is_given(self, i: int, s: int) -> bool:
        """Whether the backward of stage ``s`` does not make an entry."""
        entry = self.entries[i]
        if i in self.cut.ready:
            return True
        elsewhere = self.at.get(i, s) != s
        return elsewhere and not entry.view if entry.backward else not entry.again or (elsewhere and not entry.view)

    def backward_of(self, s: int, targets: Sequence[int]) -> tuple[list[int], list[int]]:
        """What a stage computes of its backward, and what it starts from."""
        calls, starts = closure(self.tape, targets, lambda i: self._is_given(i, s))
        for i in starts:
            entry = self.entries[i]
            if not entry.call or i in self.cut.ready:
                continue
            if entry.backward:
                self.down[i] = min(s, self.down.get(i, s))
            else:
                self.saved.setdefault(s, {})[i] = None
        return calls, starts

    def forward_of(self, s: int, targets: Sequence[int]) -> tuple[list[int], list[int]]:
        """What a stage computes of its forward, and what it starts from."""

        def given(i: int) -> bool:
            return i in self.cut.ready or (self.at.get(i, s) != s and not self.entries[i].view)

        calls, starts = closure(self.tape, targets, given)
        for i in starts:
            if self.entries[i].call and i not in self.cut.ready:
                self.up[i] = max(s, self.up.get(i, s))
        return calls, starts

    # -- the programs -------------------------------------------------------------------------------------------------

    def programs(self, kept: Sequence[int]) -> dict[int, StagePrograms]:
        """The programs of the ``kept`` stages, by number."""
        back = {s: [i for i, at in self.ends.items() if at == s] for s in kept}
        backward = {}
        for s in kept:
            sends = [i for i in self.down if self.at[i] == s]
            backward[s] = (sends, self.backward_of(s, [*back[s], *sends]))
        forward = {}
        for s in reversed(kept):
            ends = [i for i in self.cut.forward if self.at.get(i, self.last) == s]
            own = [i for i in self.up if self.at[i] == s]
            outputs = [*ends, *self.saved.get(s, {}), *own]
            forward[s] = (outputs, self.forward_of(s, outputs))
        finish = self._finish()
        return {s: self._stage(s, forward[s], backward[s], back[s], finish.get(s, [])) for s in kept}

    def _stage(
        self,
        s: int,
        forward: tuple[list[int], tuple[list[int], list[int]]],
        backward: tuple[list[int], tuple[list[int], list[int]]],
        ends: list[int],
        finish: list[int],
    ) -> StagePrograms:
        sends, (calls, starts) = backward
        first, second, between = self._apart(s, calls, ends, sends)
        ready = tuple(i for i in self.cut.ready if s in self._homes(i))
        return StagePrograms(
            self._extract(*forward[1], forward[0]),
            self._extract(calls, starts, [*ends, *sends]),
            self._extract(first, self._starts(first), [*sends, *between]),
            self._extract(second, self._starts(second), ends),
            self._finished(finish),
            tuple(self.saved.get(s, {})),
            tuple(between),
            ready,
            tuple(ends),
        )

    def _apart(
        self, s: int, calls: list[int], ends: list[int], sends: list[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """What the backward of inputs computes, what is left for that of weights, and what the one leaves the other:
        results, and of what was saved all that is still read. The first stage hands nothing on; there the former is
        what more than one gradient is made of."""
        inside = set(calls)
        if sends:
            early = set(closure(self.tape, sends, lambda i: self._is_given(i, s))[0])
        else:
            early = self._of_several(calls, ends)
        first, second = [i for i in calls if i in early], [i for i in calls if i not in early]
        read = dict.fromkeys(arg for i in second for arg in self.entries[i].args if arg in early or arg not in inside)
        between = [i for i in read if i in early or (self.entries[i].call and i not in self.cut.ready)]
        return first, second, [*between, *(i for i in ends if i in early and i not in read)]

    def _of_several(self, calls: list[int], ends: list[int]) -> set[int]:
        reach = {i: 1 << k for k, i in enumerate(ends)}
        for i in reversed(calls):
            for arg in self.entries[i].args:
                reach[arg] = reach.get(arg, 0) | reach.get(i, 0)
        return {i for i in calls if reach.get(i, 0).bit_count() > 1}

    def _starts(self, calls: list[int]) -> list[int]:
        inside = set(calls)
        return sorted({arg for i in calls for arg in self.entries[i].args if arg not in inside})

    def _extract(self, calls: list[int], starts: list[int], outputs: Sequence[int]) -> Program:
        return extract(self.tape, self.mesh, calls, starts, [i for i in outputs if i in {*calls, *starts}])

    def _homes(self, i: int) -> Collection[int]:
        name = self.entries[i].parameter
        return range(len(self.stages)) if name is None else self.home[name]

    def _finish(self) -> dict[int, list[int]]:
        """What the end of a step makes at every stage."""
        left = frozenset(self.cut.left)
        found: dict[int, list[int]] = {}
        for i in self.cut.last:
            _, starts = closure(self.tape, [i], lambda j: j in left or j in self.cut.ready)
            places = [self.at[j] for j in starts if j in left and j in self.at]
            found.setdefault(min(places, default=self.last), []).append(i)
        return found

    def _finished(self, outputs: list[int]) -> Program | None:
        left = frozenset(self.cut.left)
        if not outputs:
            return None
        calls, starts = closure(self.tape, outputs, lambda i: i in left or i in self.cut.ready)
        return extract(self.tape, self.mesh, calls, starts, outputs)


def stage_programs(
    tape: Tape,
    captured: Captured,
    mesh: Mesh,
    found: Cut,
    stages: Sequence[Sequence[str]],
    batch: Collection[int],
    kept: Sequence[int],
) -> Mapping[int, StagePrograms]:
    """The programs of the ``kept`` ones of ``stages`` (module paths by stage) on a tape that has their blocks.
    ``batch`` are the entries of the tensors of the batch."""
    return _Cutter(tape, captured, mesh, found, stages, batch).programs(kept)
