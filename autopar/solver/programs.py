"""Programs of a tape: which entries run in which order, as the passes would have it, and what is alive meanwhile.

`extract` follows `passes.partition.extract`: what is made again comes right before its first use, the collectives of
parameters and gradients are merged (`passes.bucket`) and put where they run beside the computation (`passes.overlap`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.sharding.buckets import Piece, buckets, goes_by_block, merged
from autopar.sharding.layout import Mesh
from autopar.solver.tape import Entry, Tape

#: Where an entry is wanted in an order.
Places = dict[int, tuple[float, ...]]


@dataclass
class Program:
    """``order`` are entries of the tape, ``args`` what each of them reads here, ``inputs`` the entries that are given
    and ``outputs`` those that are returned; ``times`` says of storages how many they stand for."""

    tape: Tape
    order: list[int]
    args: dict[int, tuple[int, ...]]
    inputs: list[int]
    outputs: list[int]
    times: dict[int, int] = field(default_factory=dict)

    def users(self) -> dict[int, list[int]]:
        """Who reads every entry."""
        found: dict[int, list[int]] = {}
        for i in self.order:
            for arg in self.args[i]:
                found.setdefault(arg, []).append(i)
        return found


def closure(tape: Tape, targets: Iterable[int], stop: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """What it takes to compute ``targets``: calls, and what they start from (placeholders and where ``stop``), both in
    order."""
    calls, starts, stack, entries = set[int](), set[int](), list(targets), tape.entries
    while stack:
        i = stack.pop()
        if i in calls or i in starts:
            continue
        if not entries[i].call or stop(i):
            starts.add(i)
        else:
            calls.add(i)
            stack.extend(entries[i].args)
    return sorted(calls), sorted(starts)


def extract(tape: Tape, mesh: Mesh, calls: Sequence[int], inputs: list[int], outputs: Sequence[int]) -> Program:
    """The program of ``calls``, which gives ``outputs`` from ``inputs``."""
    order, stands = _in_time(tape, calls)
    args = {i: tuple([stands.get(arg, arg) for arg in tape.entries[i].args]) for i in order}
    program = Program(tape, order, args, inputs, [stands.get(i, i) for i in outputs])
    _bucket(program, mesh)
    _overlap(program)
    handed_over = [i for i in inputs if tape.entries[i].call]
    program.times |= tape.times_of((*handed_over, *program.outputs))
    return program


def _in_time(tape: Tape, listed: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """`passes.recompute.in_time`."""
    entries = tape.entries
    if not any(entries[i].backward for i in listed):
        return list(listed), {}
    late = {i for i in listed if not entries[i].backward}
    order: dict[int, None] = {}
    for i in listed:
        if i not in late:
            for found in _needed(entries, i, late, order):
                order[found] = None
            order[i] = None
    first: dict[object, int] = {}
    stands: dict[int, int] = {}
    kept = []
    for i in [*order, *(i for i in listed if i not in order)]:
        entry = entries[i]
        if entry.key is not None:
            other = first.setdefault((entry.key, tuple([stands.get(arg, arg) for arg in entry.args])), i)
            if entries[other].backward != entry.backward:
                stands[i] = other
                continue
        kept.append(i)
    return kept, stands


def _needed(entries: list[Entry], i: int, late: Collection[int], placed: Collection[int]) -> list[int]:
    """What of ``late`` an entry needs and is not ``placed`` yet, in the order of need."""
    found: dict[int, None] = {}
    stack = [(arg, False) for arg in reversed(entries[i].args)]
    while stack:
        arg, ready = stack.pop()
        if ready:
            found[arg] = None
        elif arg in late and arg not in placed and arg not in found:
            stack.append((arg, True))
            stack.extend((other, False) for other in reversed(entries[arg].args))
    return list(found)


def _reorder(program: Program, wanted: Places) -> None:
    """`passes.order.reorder`."""
    place = {i: at for at, i in enumerate(program.order)}
    missing = {i: sum(arg in place for arg in dict.fromkeys(program.args[i])) for i in program.order}
    users: dict[int, list[int]] = {}
    for i in program.order:
        for arg in dict.fromkeys(program.args[i]):
            users.setdefault(arg, []).append(i)
    ready = [(wanted[i], place[i]) for i in program.order if missing[i] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        i = program.order[heapq.heappop(ready)[1]]
        order.append(i)
        for user in users.get(i, ()):
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (wanted[user], place[user]))
    program.order = order


def _bucket(program: Program, mesh: Mesh) -> None:
    """`passes.bucket.bucket`."""
    entries = program.tape.entries
    moves = [i for i in program.order if entries[i].move and entries[i].piece is not None]
    pieces = [_weighted(p, program.tape.times) for i in moves if (p := entries[i].piece) is not None]
    merger = _Merger(program, mesh)
    for places in buckets(pieces):
        if len(places) > 1:
            merger.merge([moves[at] for at in places], [pieces[at] for at in places])
    if merger.stands:
        merger.finish()


def _weighted(piece: Piece, times: Mapping[str, int]) -> Piece:
    """A piece with the bytes of all that it stands for, where those share buckets; the others have their own."""
    n = times.get(piece.name, 1) if _is_shared(piece) else 1
    if n == 1:
        return piece
    flat = (n * math.prod(piece.before),)
    return replace(piece, nbytes=n * piece.nbytes, before=flat, after=flat)


def _is_shared(piece: Piece) -> bool:
    """Whether blocks share the collective of a piece, so that what stands for several counts as often as there are."""
    return not goes_by_block(piece.kind, piece.axis)


@dataclass
class _Merger:
    """Writes the entries of merged collectives."""

    program: Program
    mesh: Mesh
    stands: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tape, self.users = self.program.tape, self.program.users()
        self.place: Places = {i: (at, 0) for at, i in enumerate(self.program.order)}
        self.gone: set[int] = set()

    def merge(self, members: list[int], pieces: list[Piece]) -> None:
        """One collective in the place of ``members``."""
        entries = self.tape.entries
        waits = [self.users[member][0] for member in members]
        gathers = pieces[0].kind == "all_gather"
        first = min if gathers else max
        start, wait = (first(self.place[i] for i in found) for found in (members, waits))
        whole, size = merged(pieces), pieces[0].dtype.itemsize
        if _is_shared(pieces[0]):  # what is pending counts as often as there are
            self._weigh(members)
        parts = [self._part(member, start, whole) for member in members]
        packed = self._add(parts, whole.before[0] * size, start, members[0], whole)
        if gathers:
            self._want_before(packed, start)
        move = entries[members[0]].move
        if pieces[0].kind == "all_reduce":  # `buckets.is_overwritten`
            moved = self._view(packed, packed, start, whole, move)
        else:
            moved = self._add([packed], whole.after[0] * size, start, members[0], whole, move)
        done = self._view(moved, moved, wait, whole)
        for w, piece in zip(waits, pieces, strict=True):
            cut = self.users.get(w, [])
            whole_again = gathers and not (cut and all(entries[u].reshape for u in cut))
            own = self.place[w] if gathers else wait
            if whole_again:
                nbytes = math.prod(piece.after) * size
                self.stands[w] = self._add([done], nbytes, own, w, whole)
            else:
                self.stands[w] = self._view(done, moved, own, whole)
        self.gone.update((*members, *waits))

    def _weigh(self, members: list[int]) -> None:
        entries = self.tape.entries
        for member in members:
            (sent,) = self.program.args[self.program.args[member][0]]
            for storage in entries[sent].storages:
                self.program.times[storage] = entries[member].times

    def _part(self, member: int, start: tuple[float, ...], whole: Piece) -> int:
        """What a collective sends, without the copy that makes it contiguous; flat, which copies what is not."""
        entries = self.tape.entries
        together = self.program.args[member][0]
        (sent,) = self.program.args[together]
        if entries[together].storages == entries[sent].storages:
            return sent
        return self._add([sent], self.tape.nbytes[entries[together].storages[0]], start, member, whole)

    def _add(
        self, args: list[int], nbytes: int, place: tuple[float, ...], like: int, piece: Piece, move: str = ""
    ) -> int:
        source = self.tape.entries[like]
        times = 1 if _is_shared(piece) else source.times
        storages = (self.tape.storage(nbytes),)
        entry = Entry(tuple(args), storages, source.backward, source.owner, times, piece=piece, move=move)
        return self._put(entry, place)

    def _view(self, arg: int, of: int, place: tuple[float, ...], piece: Piece, move: str = "") -> int:
        source = self.tape.entries[of]
        entry = Entry((arg,), source.storages, source.backward, source.owner, source.times, piece=piece, move=move)
        return self._put(entry, place)

    def _put(self, entry: Entry, place: tuple[float, ...]) -> int:
        i = self.tape.append(entry)
        self.program.args[i], self.place[i] = entry.args, place
        self.program.order.append(i)
        return i

    def _want_before(self, i: int, place: tuple[float, ...]) -> None:
        for arg in self.program.args[i]:
            if arg in self.place and self.place[arg] > place:
                self.place[arg] = place
                self._want_before(arg, place)

    def finish(self) -> None:
        """Let all read what stands for merged pieces, leave out what nobody reads, and put the rest in order."""
        program = self.program
        for i, args in program.args.items():
            program.args[i] = tuple([self.stands.get(arg, arg) for arg in args])
        program.outputs = [self.stands.get(i, i) for i in program.outputs]
        program.order = [i for i in program.order if i not in self.gone]
        read, stack = set[int](), list(program.outputs)
        here = set(program.order)
        while stack:
            i = stack.pop()
            if i in here and i not in read:
                read.add(i)
                stack.extend(program.args[i])
        program.order = [i for i in program.order if i in read]
        _reorder(program, self.place)


def _overlap(program: Program) -> None:
    """`passes.overlap.overlap`."""
    entries, users = program.tape.entries, program.users()
    found = [i for i in program.order if entries[i].move and entries[i].piece is not None]
    gathers = [i for i in found if entries[i].piece.purpose == "parameters"]  # type: ignore[union-attr]
    reductions = [i for i in found if entries[i].piece.purpose == "gradients"]  # type: ignore[union-attr]
    hops = [i for i in program.order if entries[i].move == "p2p"]
    if not found and not hops:
        return
    wait = {i: users[i][0] for i in found}
    places: Places = {i: (float(at),) for at, i in enumerate(program.order)}
    for i in reductions:
        _want(program, places, i, (-1,))
        places[wait[i]] = (math.inf,)
    _reorder(program, places)
    places = {i: (float(at),) for at, i in enumerate(program.order)}
    begin = -1.0
    for i in sorted(gathers, key=lambda i: places[wait[i]]):
        _want(program, places, i, (begin,))
        begin = places[wait[i]][0] + 0.5
    for i in hops:
        places[i] = (places[program.args[i][0]][0] + 0.25,)
    reduced = set(reductions)
    scatters = [i for i in program.order if i in reduced and entries[i].move == "reduce_scatter"]
    for i, following in itertools.pairwise(scatters):
        places[wait[i]] = (places[following][0] - 0.5,)
    _reorder(program, places)


def _want(program: Program, places: Places, i: int, place: tuple[float, ...]) -> None:
    """Want a collective at ``place``, or where it is if that is earlier, and with it what its operand is packed of."""
    if places[i] <= place:
        return
    places[i] = place
    for arg in program.args[i]:
        if arg in places and program.tape.entries[arg].piece is not None:
            _want(program, places, arg, place)


def _last_uses(program: Program, order: Sequence[int]) -> dict[int, int]:
    """The place in ``order`` of the last entry that reads each. What a collective reads it holds until it is waited
    for, but for those that copy it (`Tape.copied`)."""
    place = {i: at for at, i in enumerate(order)}
    last, users, tape = dict(place), program.users(), program.tape
    for i in program.order:
        move = tape.entries[i].move
        done = users[i][0] if move and move not in tape.copied and i in users else i
        for arg in program.args[i]:
            last[arg] = max(last[arg], place[done])
    return last


def _written_over(program: Program, born: Mapping[int, int], died: Mapping[int, int]) -> list[tuple[int, int]]:
    """`passes.inplace.reuse`: the storages of results that lie over an operand which is of no use afterwards, and where
    they are made."""
    entries, found = program.tape.entries, []
    routed = program.tape.routed  # `passes.lower` leaves what has to do with rows of experts alone
    kept = {s for i in program.inputs for s in entries[i].storages}
    kept.update(s for i in program.order if entries[i].move for arg in program.args[i] for s in entries[arg].storages)
    for at, i in enumerate(program.order, len(program.inputs)):
        if not entries[i].over or entries[i].owner in routed:
            continue
        read = [s for arg in program.args[i] for s in entries[arg].storages]
        over = [entries[program.args[i][place]] for place in entries[i].over]
        operands = [entry.storages[0] for entry in over if entry.key is not None or entry.owner not in routed]
        (made,) = entries[i].storages
        if born[made] == at and any(died[s] == at and s not in kept and read.count(s) == 1 for s in operands):
            found.append((made, at))
    return found


def life(program: Program, kinds: Mapping[int, str | None], other: str) -> dict[str, int]:
    """Bytes by kind at the moment of a program when most are alive. ``kinds`` are those of storages that are not
    ``other``, None for what is not counted. Moments of what stands for several blocks do not count."""
    entries, nbytes = program.tape.entries, program.tape.nbytes
    order, end = [*program.inputs, *program.order], len(program.inputs) + len(program.order)
    last = _last_uses(program, order)
    last.update(dict.fromkeys(program.outputs, end))
    born: dict[int, int] = {}
    died: dict[int, int] = {}
    for at, i in enumerate(order):
        for s in entries[i].storages:
            born.setdefault(s, at)
            died[s] = max(died.get(s, 0), last[i])
    for i, at in _written_over(program, born, died):
        born[i] = at + 1  # its operand is there until then
    change: dict[str, npt.NDArray[np.int64]] = {}
    for s, at in born.items():
        if (kind := kinds.get(s, other)) is not None:
            steps = change.setdefault(kind, np.zeros(end + 2, dtype=np.int64))
            steps[at] += nbytes[s] * program.times.get(s, 1)
            steps[died[s] + 1] -= nbytes[s] * program.times.get(s, 1)
    alive = {kind: np.cumsum(steps) for kind, steps in change.items()}
    counts = np.array([entries[i].times == 1 for i in order] + [True, True])
    total = np.where(counts, sum(alive.values(), np.zeros(end + 2, dtype=np.int64)), -1)
    moment = int(np.argmax(total))
    return {kind: int(levels[moment]) for kind, levels in alive.items()}
