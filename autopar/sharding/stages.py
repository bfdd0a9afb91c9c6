"""Pipeline stages by name: modules by stage, and from that the stage of a module and the stages of a parameter."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

#: Module paths by stage.
Stages = Sequence[Sequence[str]]


@functools.lru_cache(maxsize=32)
def _places(stages: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    """The stage of every path; of one that several have, the first."""
    return {path: s for s, names in reversed(list(enumerate(stages))) for path in names}


def stage_of(module: str, stages: Stages) -> int | None:
    """The stage of a module: that of the longest path in ``stages`` that it lies in; None if there is none."""
    return _stage_of(module, _places(tuple(map(tuple, stages))))


def _stage_of(module: str, places: Mapping[str, int]) -> int | None:
    while module not in places:
        if "." not in module:
            return None
        module = module.rpartition(".")[0]
    return places[module]


def homes(names: Iterable[str], stages: Stages) -> frozenset[int]:
    """The stages that hold a parameter, by all its ``names``: those of the modules that own it, else the first."""
    places = _places(tuple(map(tuple, stages)))
    found = (_stage_of(name.rpartition(".")[0], places) for name in names)
    return frozenset(s for s in found if s is not None) or frozenset([0])
