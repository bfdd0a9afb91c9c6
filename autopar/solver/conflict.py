"""Which hints cannot be kept together: an irreducible set, so that without any one of them there is a plan.

HiGHS finds no infeasible subsystem through MathOpt (DESIGN section 8), and hints reach further than one program: so
hints are dropped one by one (a deletion filter) and the search itself is asked whether there is a plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.errors import HintError, InfeasibleError
from autopar.hints import Hints

#: Seconds of the processor after which no further set of hints is tried.
CONFLICT_SECONDS = 30.0

#: Hints by how soon they are dropped, those that are not here first of all. What stays says most: a memory limit before
#: degrees, degrees before how a single parameter is split.
_LAST = ("recompute", "micro_batch_size", "zero", "etp", "ep", "dp", "cp", "tp", "pp", "memory_limit")

#: Hints that mean nothing without another one.
_NEEDS = {"schedule": "pp", "stages": "pp", "reshard_after_forward": "zero", "zero_group_size": "zero",
          "attention": "cp"}  # fmt: skip

#: A hint by its name, with the pattern of one entry of ``shard``.
Constraint = tuple[str, str]

T = TypeVar("T")


def processor_seconds() -> float:
    """Seconds of the processor that this process and those that it has waited for have taken."""
    return sum(os.times()[:4])


@dataclass(frozen=True)
class Conflict:
    """Hints that cannot be kept together, as texts such as "tp=1"; none if there is no plan even without hints. Not
    ``proved``, time ran out before it was known that none of them can be left out."""

    hints: tuple[str, ...]
    proved: bool

    def __str__(self) -> str:
        if not self.hints:
            return "there is no plan without hints either"
        names = _joined(self.hints)
        if not self.proved:
            return f"some of {names} cannot be kept together"
        if len(self.hints) == 1:
            return f"{names} cannot be kept; without it there is a plan"
        return f"{names} cannot be kept together; without any one of them there is a plan"


def constraints(hints: Hints) -> tuple[Constraint, ...]:
    """What ``hints`` fixes, one a hint and one a pattern of ``shard``, in the order in which they are dropped."""
    found = [(name, "") for name in hints.to_dict() if name != "shard"]
    found += [("shard", pattern) for pattern in hints.shard or {}]
    return tuple(sorted(found, key=lambda c: _LAST.index(c[0]) if c[0] in _LAST else -1))


def restricted(hints: Hints, kept: Sequence[Constraint]) -> Hints:
    """Of ``hints`` those that are ``kept``, without those that mean nothing without one that is not."""
    names = {name for name, _ in kept}
    table = {
        name: value
        for name, value in hints.to_dict().items()
        if name in names and _NEEDS.get(name, name) in names
    }
    if "shard" in table:
        table["shard"] = {pattern: dims for pattern, dims in table["shard"].items() if ("shard", pattern) in kept}
    return Hints.from_dict(table)


def conflict(
    hints: Hints,
    feasible: Callable[[Hints], bool],
    seconds: float = CONFLICT_SECONDS,
    clock: Callable[[], float] = processor_seconds,
) -> Conflict:
    """An irreducible set of ``hints``, which together are known to leave no plan, by asking ``feasible`` about others.

    The hint that is dropped last is asked about alone, as a memory limit is often all that is wrong. Then each hint is
    dropped in turn, and stays away if there is still no plan; until none is. No set is asked about twice, and none
    after ``seconds``. Nothing is assumed of ``feasible``: what is claimed has been asked.
    """
    known: dict[tuple[Constraint, ...], bool] = {}
    kept, end = constraints(hints), clock() + seconds

    def ask(some: tuple[Constraint, ...]) -> bool | None:
        """Whether there is a plan with ``some`` hints; None if that is not known and there is no time left."""
        if some not in known:
            if clock() > end:
                return None
            known[some] = feasible(restricted(hints, some))
        return known[some]

    if (without := ask(())) is not True:
        return Conflict((), True) if without is False else Conflict(_texts(hints, kept), False)
    if ask(kept[-1:]) is False:
        kept = kept[-1:]
    again = len(kept) > 1
    while again:
        again = False
        for one in kept:
            rest = tuple(c for c in kept if c != one)
            found = ask(rest)
            if found is None:
                return Conflict(_texts(hints, kept), False)
            if not found:
                kept, again = rest, True
    return Conflict(_texts(hints, kept), True)


def searched(
    find: Callable[[Hints], T],
    hints: Hints,
    feasible: Callable[[Hints], bool],
    seconds: float = CONFLICT_SECONDS,
) -> T:
    """``find(hints)``. Where it raises HintError or InfeasibleError for several hints, the error says besides which of
    them cannot be kept together, as `conflict` finds it in ``seconds`` by asking what is ``feasible``."""
    try:
        return find(hints)
    except (HintError, InfeasibleError) as error:
        if len(constraints(hints)) < 2:
            raise
        found = conflict(hints, feasible, seconds)
        raise type(error)(
            error.what, expected=error.expected, found=f"{error.found}; {found}", change=error.change
        ) from None


def _texts(hints: Hints, kept: Sequence[Constraint]) -> tuple[str, ...]:
    return tuple(
        f"shard[{pattern!r}]={dict((hints.shard or {})[pattern])}" if name == "shard" else f"{name}={table[name]!r}"
        for table in [hints.to_dict()]
        for name, pattern in kept
    )


def _joined(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
