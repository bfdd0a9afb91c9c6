"""Carries a plan's decisions to a graph: the one it was made for, the same model at other shapes, or a smaller one.

Decisions are found by name: parameters by theirs, heavy operators by module, operator, direction and occurrence. A
layer's number is a wildcard where all layers of the pattern agree, so a plan for 80 layers fits a model of 4.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import fx

from autopar.capture.blocks import pattern
from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.hint_checks import DEGREES
from autopar.hints import Hints, matching
from autopar.plan import ParameterPlan, Plan
from autopar.sharding.assignment import Assignment, zero_axes
from autopar.sharding.axes import CONTEXT_AXIS, DATA_AXIS, EXPERT_AXES, STATE_AXES, degree_of_plan, state_axes
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.operators import Operator, Operators
from autopar.sharding.rule import REPLICATE, Choice, Strategy
from autopar.sharding.zero import Keeping, keeping
from autopar.solver.pins import Pins

T = TypeVar("T")

#: How a plan writes what needs no factor that divides: replicated, and partial sums handed on.
_WITHOUT_FACTOR = frozenset({str(REPLICATE), str(Choice(linear=frozenset()))})


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


def _fitting(op: Operator, chosen: Mapping[str, str], mesh: Mesh) -> dict[str, str]:
    """Of what a plan has ``op`` split, by axis, that which divides here; the outermost axis takes its pieces first."""
    left = dict(op.rule.sizes)
    kept = {}
    for axis, n in mesh.axes:
        factor = chosen[axis]
        if factor in _WITHOUT_FACTOR:
            kept[axis] = factor
        elif left.get(factor, 1) % n == 0:
            kept[axis] = factor
            left[factor] //= n
    return kept


def _chosen(operators: Operators, choices: Mapping[str, Mapping[str, str]]) -> dict[fx.Node, Mapping[str, str]]:
    """What a plan's ``choices`` have every heavy operator split, by axis; operators not named there are left out."""
    keys = operator_keys(operators).items()
    found = {node: choices.get(key, choices.get(_by_pattern(key))) for node, key in keys}
    return {node: choice for node, choice in found.items() if choice is not None}


def operator_pin(
    operators: Operators, choices: Mapping[str, Mapping[str, str]], mesh: Mesh
) -> Callable[[fx.Node, Strategy], bool]:
    """Whether a strategy is the nearest valid one to what ``choices`` has for the operator: the same on every axis on
    which that divides. Operators not named there are free."""
    chosen = _chosen(operators, choices)
    fitting = {node: _fitting(operators.by_node[node], choice, mesh) for node, choice in chosen.items()}

    def pin(node: fx.Node, strategy: Strategy) -> bool:
        kept = fitting.get(node, {})
        return all(kept.get(axis) in (None, str(c)) for axis, c in zip(mesh.names, strategy, strict=True))

    return pin


@dataclass(frozen=True)
class Lost:
    """A heavy operator whose ``factor`` a plan splits over ``axis``, which here does not divide; to keep all that the
    plan splits, the factor would have to be a ``multiple``."""

    operator: Operator
    axis: str
    factor: str
    multiple: int


def lost_choices(operators: Operators, plan: Plan) -> list[Lost]:
    """What ``plan`` splits and these shapes do not divide."""
    mesh, found = plan.mesh, []
    for node, choice in _chosen(operators, plan.operators).items():
        fitting = _fitting(operators.by_node[node], choice, mesh)
        for axis, factor in choice.items():
            if axis not in fitting:
                multiple = math.prod(mesh.degree(other) for other, split in choice.items() if split == factor)
                found.append(Lost(operators.by_node[node], axis, factor, multiple))
    return found


def _most_common(plan: Plan, decision: Callable[[ParameterPlan], T]) -> Callable[[str], T | None]:
    """What ``plan`` decides for a parameter: by name, else what most of its pattern have, else None."""
    votes: dict[str, Counter[T]] = defaultdict(Counter)
    for name, parameter in plan.parameters.items():
        votes[pattern(name)][decision(parameter)] += 1

    def find(name: str) -> T | None:
        if name in plan.parameters:
            return decision(plan.parameters[name])
        common = votes.get(pattern(name))
        return None if common is None else common.most_common(1)[0][0]

    return find


def storage_of(plan: Plan) -> Callable[[str], Layout | None]:
    """The layout that ``plan`` has for a parameter: by name, else what most of its pattern have, else None."""
    return _most_common(plan, lambda p: p.storage)


def keepings(captured: Captured, operators: Operators, assignment: Assignment, plan: Plan) -> dict[str, Keeping]:
    """What ``plan`` does with the copies and gradients of a graph's parameters: what it says of them, and for those
    that rest in another way here what its kind of ZeRO does."""
    decided = _most_common(plan, lambda p: (bool(state_axes(p.storage, p.used)), Keeping(p.copy, p.gradient)))
    found = {}
    for p in captured.parameters:
        sharded = bool(zero_axes(operators, assignment, p.placeholder))
        other, kept = decided(p.name) or (None, Keeping())
        known = other == sharded
        found[p.name] = kept if known else keeping(plan.zero, sharded, p.master is not None, plan.reshard_after_forward)
    return found


def hint_pins(captured: Captured, hints: Hints) -> Pins:
    """The pins that hints stand for."""
    aliases = {p.name: (p.name, *p.aliases) for p in captured.parameters}

    def storage(name: str, layout: Layout) -> bool:
        return all(
            any(degree_of_plan(split) == axis for split in layout.dims[dim])
            for axis, dim in matching(hints, *aliases[name]).items()
        )

    hinted = {name: matching(hints, *names) for name, names in aliases.items()}
    for dims in hinted.values():  # a hint says dp and cp of all their ranks
        dims.update({axis: dims[degree_of_plan(axis)] for axis in EXPERT_AXES if degree_of_plan(axis) in dims})
    zero_dims = {name: {a: d for a, d in dims.items() if a in STATE_AXES} for name, dims in hinted.items()}
    zero = 3 if hints.zero else hints.zero  # what rests sharded rests alike, however long copies of it live
    return Pins(
        storage=storage, zero=zero, zero_dims=zero_dims, experts=hints.ep, inside_experts=hints.etp,
        attention=hints.attention, dispatch=hints.dispatch,
    )  # fmt: skip


def plan_pins(captured: Captured, operators: Operators, plan: Plan) -> Pins:
    """The pins that carry ``plan`` to a graph."""
    storage = storage_of(plan)
    layouts = {p.name: layout for p in captured.parameters if (layout := storage(p.name)) is not None}
    return carried_pins(operators, plan.mesh, layouts, plan.operators, plan.hints.get("dispatch"))


def carried_pins(
    operators: Operators,
    mesh: Mesh,
    layouts: Mapping[str, Layout],
    choices: Mapping[str, Mapping[str, str]],
    dispatch: str | None,
) -> Pins:
    """The pins of a graph whose parameters rest in ``layouts``, by name, and whose heavy operators split what
    ``choices`` (`operator_choices`) say."""
    zero_dims = {name: {a: d for a in STATE_AXES if (d := lay.dim_of(a)) is not None} for name, lay in layouts.items()}
    return Pins(
        storage=lambda name, layout: name not in layouts or layouts[name] == layout,
        operator=operator_pin(operators, choices, mesh),
        zero_dims=zero_dims,
        strict=False,
        dispatch=dispatch,
    )


def shrink(plan: Plan) -> Plan:
    """A plan for at most 2 ranks an axis that takes the same decisions, for `verify` on one machine: with hybrid ZeRO
    two groups of two ranks of dp, and where experts are spread over a part of dp or of cp two such parts."""
    degrees, groups = {axis: min(2, n) for axis, n in plan.degrees.items() if axis in DEGREES}, None
    spread = None if plan.expert_group_size is None else 2
    if plan.zero_group_size is not None:
        degrees[DATA_AXIS], groups = 4, 2
    elif spread is not None and plan.expert_group_size != plan.degrees[DATA_AXIS]:
        degrees[DATA_AXIS] = 4
    within = None if plan.expert_context_size is None else 2
    if within is not None:
        degrees[CONTEXT_AXIS] = 4
    if all(degrees[axis] == plan.degrees[axis] for axis in DEGREES):
        return plan
    device = Cluster.from_dict(plan.cluster).device
    cluster = Cluster(device, 1, math.prod(degrees.values())).to_dict()
    return replace(
        plan,
        degrees=degrees,
        zero_group_size=groups,
        expert_group_size=spread,
        expert_context_size=within,
        cluster=cluster,
        stages=_joined(plan, degrees["pp"]),
        timing=None,
    )


def _joined(plan: Plan, pp: int) -> tuple[tuple[str, ...], ...]:
    """The plan's stages as those of ``pp`` ranks, as many a rank as before."""
    before = len(plan.stages)
    count = before // plan.degrees["pp"] * pp
    edges = [before * i // count for i in range(count + 1)]
    return tuple(sum(plan.stages[a:b], ()) for a, b in itertools.pairwise(edges))
