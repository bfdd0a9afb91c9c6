"""The programs of a training step on a tape, as `passes.phases.cut` would cut them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from autopar.sharding.layout import Mesh
from autopar.solver.programs import Program, closure, extract
from autopar.solver.tape import Tape

#: Picks entries of a tape.
Pick = Callable[[int], bool]


@dataclass(frozen=True)
class Cut:
    """Which entries each phase of a step is there for: ``once`` what is kept for the step, ``left`` what micro-batches
    leave for its end and ``summed`` what each of them has for that, those of the forward first; ``saved`` what the
    forward hands to the backward, ``last`` what the end of the step makes, and ``awaited`` the sums that the first
    backward waits for."""

    once: tuple[int, ...]
    left: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    saved: tuple[int, ...]
    last: tuple[int, ...]
    ready: frozenset[int]
    awaited: tuple[int, ...] = ()

    def is_handed_over(self, tape: Tape) -> Pick:
        """Picks what the backward does not make: it is there once a step, or kept from the forward."""
        entries = tape.entries
        return lambda i: i in self.ready or not (entries[i].backward or entries[i].again)


@dataclass(frozen=True)
class Step:
    """The programs of a step; None where there is nothing to do."""

    cut: Cut
    once: Program | None
    forward: Program
    backward: Program | None
    finish: Program | None


def cut(tape: Tape, given: Collection[int], results: Iterable[int]) -> Cut:
    """How a step is cut. ``given`` are the entries of the batch, ``results`` what it ends with besides gradients."""
    entries = tape.entries
    targets = [*results, *tape.gradients]
    calls, starts = closure(tape, targets, lambda i: False)
    needed = set(calls) | set(starts)
    varying = _varying(tape, calls, given)
    known, hoisted = _ready(tape, calls, needed, varying)
    ready, awaited = frozenset(known) | hoisted, _awaited(tape, known)
    _, leaves = closure(tape, targets, lambda i: entries[i].sums or i in varying or i in ready)
    summed = {i for i in leaves if i not in known and (entries[i].sums or (i in varying and entries[i].call))}
    left = sorted(summed.union(awaited))
    outputs = {i: _summed(tape, i) if entries[i].sums else i for i in left}
    backward = tuple(n for n in outputs.values() if entries[n].backward)
    forward = tuple(n for n in outputs.values() if not entries[n].backward)
    once = tuple(sorted(hoisted.difference(_made_of(tape, calls, awaited))))
    found = Cut(once, tuple(left), forward, backward, (), (), ready)
    _, boundary = closure(tape, backward, found.is_handed_over(tape))
    saved = tuple(i for i in boundary if entries[i].call and i not in ready)
    last = tuple(i for i in targets if i not in outputs and i not in ready)
    return Cut(found.once, found.left, forward, backward, saved, last, ready, awaited)


def _awaited(tape: Tape, known: Iterable[int]) -> tuple[int, ...]:
    """Of the sums that are known before a backward those that take a forward to know."""
    heavy = {i for i, entry in enumerate(tape.entries) if entry.key is None and entry.owner in tape.heavy}
    return tuple(sorted(i for i in known if heavy.intersection(closure(tape, [i], lambda j: False)[0])))


def _made_of(tape: Tape, calls: Iterable[int], starts: Collection[int]) -> set[int]:
    found = set(starts)
    for i in calls if starts else ():
        if any(arg in found for arg in tape.entries[i].args):
            found.add(i)
    return found


def _varying(tape: Tape, calls: Iterable[int], given: Collection[int]) -> set[int]:
    """What differs between micro-batches, and not through a sum over them."""
    found = set(given)
    for i in calls:
        entry = tape.entries[i]
        if not entry.sums and any(arg in found for arg in entry.args):
            found.add(i)
    return found


def _summed(tape: Tape, i: int) -> int:
    """What an entry that stands for a sum over micro-batches adds up: what the collective's copy that is contiguous is
    made of."""
    (start,) = tape.entries[i].args
    (together,) = tape.entries[start].args
    return tape.entries[together].args[0]


def _ready(tape: Tape, calls: list[int], needed: set[int], varying: set[int]) -> tuple[set[int], frozenset[int]]:
    """The sums that something which varies is made of, and what is made once a step and read by what varies."""
    entries, users = tape.entries, dict[int, list[int]]()
    for i in calls:
        for arg in entries[i].args:
            users.setdefault(arg, []).append(i)
    leads = set[int]()
    for i in reversed(calls):
        if any(u in varying or (u in leads and not entries[u].sums) for u in users.get(i, ())):
            leads.add(i)
    early = {i for i in calls if entries[i].sums and i in leads}
    made, of_sums = set[int](), set(early)
    for i in calls:
        if i in varying or entries[i].sums:
            continue
        if any(arg in of_sums for arg in entries[i].args):
            of_sums.add(i)
            made.add(i)
        elif entries[i].once:
            made.add(i)
    read = {i: [u for u in users.get(i, ()) if u not in made] for i in made}
    return early, frozenset(i for i, us in read.items() if any(u in varying or entries[i].once for u in us))


def programs(tape: Tape, mesh: Mesh, found: Cut) -> Step:
    """The programs of a step that is not cut into stages."""

    def program(outputs: tuple[int, ...], stop: Pick) -> Program | None:
        return extract(tape, mesh, *closure(tape, outputs, stop), outputs) if outputs else None

    forward = program((*found.forward, *found.saved), lambda i: i in found.ready)
    assert forward is not None
    left = frozenset(found.left)
    return Step(
        found,
        program(found.once, lambda i: i in found.ready and i not in found.once),
        forward,
        program(found.backward, found.is_handed_over(tape)),
        program(found.last, lambda i: i in left or i in found.ready),
    )
