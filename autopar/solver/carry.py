"""Carries a plan's decisions to a graph: the one it was made for, the same model at other shapes, or a smaller one.

Decisions are found by name: parameters by theirs, heavy operators by module, operator, direction and occurrence. A
layer's number is a wildcard where all layers of the pattern agree, so a plan for 80 layers fits a model of 4.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from autopar.capture.blocks import pattern
from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.hints import Hints, matching
from autopar.plan import Plan
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Layout
from autopar.sharding.operators import Operators
from autopar.sharding.rule import Strategy
from autopar.solver.space import Pins


def operator_keys(operators: Operators) -> dict[fx.Node, str]:
    """The exact key of every heavy operator: "module operator direction occurrence"."""
    seen: Counter[str] = Counter()
    keys = {}
    for op in operators:
        if op.is_heavy:
            name = getattr(op.call.target, "_opname", str(op.call.target))
            stem = f"{op.node.meta['module'] or '(root)'} {name} {'backward' if op.backward else 'forward'}"
            keys[op.node] = f"{stem} {seen[stem]}"
            seen[stem] += 1
    return keys


def _by_pattern(key: str) -> str:
    module, _, rest = key.partition(" ")
    return f"{pattern(module)} {rest}"


def operator_choices(operators: Operators, assignment: Assignment) -> dict[str, dict[str, str]]:
    """What every heavy operator splits on each axis, by pattern key, and by exact key where it differs from the first
    of its pattern."""
    found: dict[str, dict[str, str]] = {}
    for node, key in operator_keys(operators).items():
        choice = {axis: str(c) for axis, c in zip(assignment.mesh.names, assignment.strategies[node], strict=True)}
        if found.setdefault(_by_pattern(key), choice) != choice:
            found[key] = choice
    return found


def operator_pin(operators: Operators, choices: Mapping[str, Mapping[str, str]]) -> Callable[[fx.Node, Strategy], bool]:
    """Whether a strategy is the one that ``choices`` has for the operator; operators not named there are free."""
    keys = operator_keys(operators)

    def pin(node: fx.Node, strategy: Strategy) -> bool:
        key = keys.get(node)
        chosen = None if key is None else choices.get(key, choices.get(_by_pattern(key)))
        return chosen is None or list(chosen.values()) == [str(c) for c in strategy]

    return pin


def storage_of(plan: Plan) -> Callable[[str], Layout | None]:
    """The layout that ``plan`` has for a parameter: by name, else what most of its pattern have, else None."""
    votes: dict[str, Counter[Layout]] = defaultdict(Counter)
    for name, parameter in plan.parameters.items():
        votes[pattern(name)][parameter.storage] += 1

    def find(name: str) -> Layout | None:
        if name in plan.parameters:
            return plan.parameters[name].storage
        common = votes.get(pattern(name))
        return None if common is None else common.most_common(1)[0][0]

    return find


def hint_pins(captured: Captured, hints: Hints) -> Pins:
    """The pins that hints stand for."""
    aliases = {p.name: (p.name, *p.aliases) for p in captured.parameters}

    def storage(name: str, layout: Layout) -> bool:
        return all(axis in layout.dims[dim] for axis, dim in matching(hints, *aliases[name]).items())

    zero_dims = {name: dims["dp"] for name, names in aliases.items() if "dp" in (dims := matching(hints, *names))}
    return Pins(storage=storage, zero=hints.zero, zero_dims=zero_dims)


def plan_pins(captured: Captured, operators: Operators, plan: Plan) -> Pins:
    """The pins that carry ``plan`` to a graph."""
    storage = storage_of(plan)
    layouts = {p.name: layout for p in captured.parameters if (layout := storage(p.name)) is not None}
    zero_dims = {name: d for name, layout in layouts.items() if (d := layout.dim_of("dp")) is not None}
    return Pins(
        storage=lambda name, layout: name not in layouts or layouts[name] == layout,
        operator=operator_pin(operators, plan.operators),
        zero_dims=zero_dims,
        strict=False,
    )


def shrink(plan: Plan) -> Plan:
    """A plan for at most 2 ranks an axis that takes the same decisions, for `verify` on one machine."""
    degrees = {axis: min(2, n) for axis, n in plan.degrees.items()}
    if degrees == plan.degrees:
        return plan
    device = Cluster.from_dict(plan.cluster).device
    return replace(plan, degrees=degrees, cluster=Cluster(device, 1, math.prod(degrees.values())).to_dict())
