"""Pipeline stages by name: modules by stage, and from that the stage of a module and the stages of a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Module paths by stage.
Stages = Sequence[Sequence[str]]


def stage_of(module: str, stages: Stages) -> int | None:
    """The stage of a module: that of the longest path in ``stages`` that it lies in; None if there is none."""
    parts = module.split(".")
    paths = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((s for path in paths for s, names in enumerate(stages) if path in names), None)


def homes(names: Iterable[str], stages: Stages) -> frozenset[int]:
    """The stages that hold a parameter, by all its ``names``: those of the modules that own it, else the first."""
    found = (stage_of(name.rpartition(".")[0], stages) for name in names)
    return frozenset(s for s in found if s is not None) or frozenset([0])
