"""Which modules go to which pipeline stage.

A model is a row of units in the order in which it runs them: its blocks, and outside of them the modules that own
parameters. A stage is some units in a row.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.errors import HintError
from autopar.hint_checks import nearest_names
from autopar.hints import Hints
from autopar.schedule import ALL_SCHEDULES, check_stages
from autopar.sharding.axes import DATA_AXIS
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operators
from autopar.sharding.rule import REPLICATE
from autopar.solver.costs import Prices
from autopar.solver.work import local_work

#: Stages a rank of schedules that leave it open.
CHUNKS = 2

#: Units by stage, by module path.
Stages = tuple[tuple[str, ...], ...]


def unit_of(node: fx.Node, owners: Mapping[str, str]) -> str | None:
    """The unit of a node: its block, else the innermost module around it among ``owners``."""
    if node.meta["block"] is not None:
        return str(node.meta["block"])
    parts = node.meta["module"].split(".")
    return next((found for n in range(len(parts), 0, -1) if (found := owners.get(".".join(parts[:n])))), None)


def units(captured: Captured, operators: Operators) -> tuple[str, ...]:
    """The units of a model, in the order in which its forward first runs them."""
    owners = _owners(captured)
    found = (unit_of(op.node, owners) for op in operators if not op.backward)
    return tuple(dict.fromkeys(unit for unit in found if unit is not None))


def _owners(captured: Captured) -> dict[str, str]:
    """The modules outside of blocks that own a parameter."""
    names = [name for p in captured.parameters for name in (p.name, *p.aliases)]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return {m: m for m in modules if m and not any(part.isdigit() for part in m.split("."))}


def unit_seconds(captured: Captured, operators: Operators, seconds: Mapping[fx.Node, float]) -> dict[str, float]:
    """Seconds of the operators of every unit, forward and backward. What is in no unit counts for the unit that was run
    last before it, as the embedding's neighbours and the loss do; of the backward, for the last unit of all."""
    owners, order = _owners(captured), units(captured, operators)
    total, last = dict.fromkeys(order, 0.0), order[0] if order else ""
    for op in operators:
        unit = unit_of(op.node, owners)
        if unit in total:
            last = unit if not op.backward else last
        else:
            unit = order[-1] if op.backward and order else last
        if unit in total:
            total[unit] += seconds[op.node]
    return total


def balanced(costs: Mapping[str, float], count: int) -> Stages:
    """The cut of a row of units into ``count`` stages of which the costliest costs least. HintError if there are fewer
    units than stages."""
    names, values = list(costs), list(costs.values())
    if len(names) < count:
        raise HintError(
            f"the model cannot be cut into {count} pipeline stages",
            expected=f"at least {count} blocks and modules with parameters, one a stage",
            found=f"{len(names)}: {', '.join(names)}",
            change="give a smaller pp, or a schedule with fewer stages a rank",
        )
    before = [0.0]
    for value in values:
        before.append(before[-1] + value)
    # best[n] for k stages: the least (costliest stage, sum of squares) of the first n units, and where the last begins
    best = [[(before[n], before[n] ** 2, 0) for n in range(len(names) + 1)]]
    for k in range(1, count):
        row = [(float("inf"), float("inf"), 0)] * (len(names) + 1)
        for n in range(k + 1, len(names) + 1):
            row[n] = min(
                (max(best[-1][i][0], own := before[n] - before[i]), best[-1][i][1] + own**2, i) for i in range(k, n)
            )
        best.append(row)
    cuts = [len(names)]
    for row in reversed(best):
        cuts.append(row[cuts[-1]][2])
    cuts.reverse()
    return tuple(tuple(names[a:b]) for a, b in itertools.pairwise(cuts))


def hinted(row: Sequence[str], given: Mapping[str, int]) -> Stages:
    """The stages that the hint ``stages`` gives: module pattern -> stage. A unit that no pattern names goes to the
    stage of the unit before it, the first ones to stage 0. HintError for a pattern that matches no unit, a unit that
    two patterns give to different stages, stages that go back, and a stage without units."""
    of_unit: dict[str, tuple[int, str]] = {}
    for pattern, stage in given.items():
        expression = re.compile(".+".join(map(re.escape, pattern.split("*"))))
        matched = [unit for unit in row if expression.fullmatch(unit)]
        if not matched:
            raise _bad(f"the hint stages[{pattern!r}] matches no module", "one of the model's blocks, or a module "
                       "outside of them that owns parameters", pattern, nearest_names(pattern, row))  # fmt: skip
        for unit in matched:
            other = of_unit.setdefault(unit, (stage, pattern))
            if other[0] != stage:
                raise _bad(f"two hints give {unit} to different stages", "one stage a module",
                           f"stages[{other[1]!r}] = {other[0]} and stages[{pattern!r}] = {stage}",
                           "remove one of the two, or make its pattern narrower")  # fmt: skip
    stages: list[list[str]] = []
    now = 0
    for unit in row:
        before, now = now, of_unit.get(unit, (now, ""))[0]
        if now < before:
            raise _bad(f"the hint stages gives {unit} to a stage before that of the module before it",
                       "stages in the order in which the model runs its modules", f"stage {now} after stage {before}",
                       "correct the hint stages")  # fmt: skip
        while len(stages) <= now:
            stages.append([])
        stages[now].append(unit)
    if empty := [s for s, names in enumerate(stages) if not names]:
        raise _bad(f"the hint stages leaves stage {empty[0]} without a module", "stages numbered from 0 without gaps",
                   f"stages {sorted({s for s, _ in of_unit.values()})}", "number the stages from 0")  # fmt: skip
    return tuple(map(tuple, stages))


def _bad(what: str, expected: str, found: str, change: str) -> HintError:
    return HintError(what, expected=expected, found=found, change=change)


@dataclass(frozen=True)
class Pipeline:
    """A degree, a schedule and the modules of every stage."""

    pp: int
    schedule: str
    stages: Stages


def make_pipeline(captured: Captured, operators: Operators, cluster: Cluster, hints: Hints) -> Pipeline | None:
    """The pipeline that the hints ask for, its stages balanced by the seconds of their operators unless hinted; None
    without. HintError if the model cannot be cut so."""
    pp = hints.pp or 1
    if pp == 1:
        return None
    schedule = hints.schedule or "1f1b"
    row = units(captured, operators)
    if hints.stages is not None:
        stages = hinted(row, hints.stages)
        check_stages(schedule, pp, len(stages))
        return Pipeline(pp, schedule, stages)
    count = pp * (ALL_SCHEDULES[schedule] or CHUNKS)
    return Pipeline(pp, schedule, balanced(costs(captured, operators, cluster), count))


def costs(captured: Captured, operators: Operators, cluster: Cluster) -> dict[str, float]:
    """Seconds of every unit on one device."""
    mesh = Mesh(((DATA_AXIS, 1),))
    work = [local_work(op, operators, mesh, (REPLICATE,)) for op in operators]
    seconds = Prices(cluster, mesh).work_seconds(work)
    by_node = {op.node: float(s) for op, s in zip(operators, seconds, strict=True)}
    return unit_seconds(captured, operators, by_node)
