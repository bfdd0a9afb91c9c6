"""The options of a plan's decisions, priced: the tables that `Plan.explain` shows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autopar.capture.blocks import block_path, pattern
from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.garbage import collecting_later
from autopar.hints import Hints
from autopar.plan import Plan
from autopar.report.describe import factor_words
from autopar.report.explain import Decision, Option, layout_text
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operator, Operators
from autopar.sharding.rule import Strategy
from autopar.solver.carry import hint_pins, plan_pins
from autopar.solver.pins import Pins
from autopar.solver.program import Floats, Ints, Program, solve
from autopar.solver.setting import Setting
from autopar.solver.space import Space, build_space
from autopar.solver.spmd import make_program, read
from autopar.workload import Workload

#: Options that a plan keeps of a decision, the cheapest ones, for parameters and heavy operators and for others: with
#: all of them its file would be several times larger.
OPTIONS_KEPT, LIGHT_OPTIONS_KEPT = 6, 3

#: Significant digits of seconds that are kept; what differs by less is a tie (`report.explain.TIE`).
DIGITS = 6


def with_decisions(plan: Plan, captured: Captured, compiled: bool = False) -> Plan:
    """``plan`` with the tables of its decisions. ``captured`` is the graph that it was made for; ``compiled`` says
    whether it was priced as Inductor runs it."""
    return replace(plan, decisions=decisions(plan, captured, compiled))


@collecting_later()
def decisions(plan: Plan, captured: Captured, compiled: bool = False) -> tuple[Decision, ...]:
    """What ``plan`` decides for every parameter and every operator that is no view and has a choice, in the order of
    the graph, each with its cheapest options.

    The space is that of the search, with nothing closed; what hints leave open is marked.
    """
    workload, cluster = Workload.from_dict(plan.workload), Cluster.from_dict(plan.cluster)
    operators = read(captured, imbalance=workload.expert_imbalance)
    carried, hinted = plan_pins(captured, operators, plan), hint_pins(captured, Hints.from_dict(plan.hints))
    dims = {**hinted.zero_dims, **carried.zero_dims}
    free = Pins(zero_dims=dims, micro_batches=plan.num_micro_batches)
    setting = Setting(captured, operators, cluster, workload.optimizer, plan.recompute, compiled=compiled)
    space, program = make_program(setting, plan.mesh, free)

    def left_open(pins: Pins) -> list[np.ndarray]:
        pins = replace(pins, zero_dims=dims, micro_batches=plan.num_micro_batches)
        return [d.allowed for d in build_space(captured, operators, plan.mesh, pins).decisions]

    taken = [np.where(a, s, np.inf) for a, s in zip(left_open(carried), program.seconds, strict=True)]
    solution = solve(replace(program, seconds=taken))
    assert solution is not None  # without a budget every space has an answer
    tables = _Tables(space, program, solution.options, left_open(hinted), _exchanges(program, solution.options))
    return tuple(_described(captured, operators, tables))


@dataclass(frozen=True)
class _Tables:
    """A priced space, the option that was taken of every decision, which ones hints leave open, and the seconds of
    communication of every option with the neighbours as they are."""

    space: Space
    program: Program
    taken: Ints
    open: Sequence[np.ndarray]
    exchanges: Sequence[Floats]

    def decision(
        self, d: int, name: str, module: str, kind: str, blocks: str, words: Sequence[str], most: int = OPTIONS_KEPT
    ) -> Decision:
        """The table of one decision, of at most ``most`` options; ``words`` are those of the options."""
        seconds, exchange = self.program.seconds[d], self.exchanges[d]
        total = seconds + exchange
        chosen = int(self.taken[d])
        order = [int(k) for k in np.argsort(total, kind="stable") if k != chosen and np.isfinite(seconds[k])]
        kept = sorted([chosen, *order[: most - 1]])
        options = tuple(
            Option(
                words[k],
                _rounded(seconds[k]),
                _rounded(exchange[k]) if np.isfinite(exchange[k]) else None,
                int(self.program.memory[d][k]),
                "" if self.open[d][k] else "hints",
            )
            for k in kept
        )
        left_out = len(order) + 1 - len(kept)
        return Decision(name, module, kind, blocks, kept.index(chosen), left_out, options)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def _exchanges(program: Program, taken: Ints) -> list[Floats]:
    """Seconds of communication of every option of every decision, the others as taken; inf where there is no way."""
    found = [np.zeros(len(s)) for s in program.seconds]
    for edge in program.edges:
        a, b = edge.source, edge.target
        if a == b:
            found[a] += edge.cost[edge.source_class, edge.target_class]
        else:
            found[a] += edge.cost[edge.source_class, edge.target_class[taken[b]]]
            found[b] += edge.cost[edge.source_class[taken[a]], edge.target_class]
    return found


def _described(captured: Captured, operators: Operators, tables: _Tables) -> Iterator[Decision]:
    space, blocks = tables.space, _Blocks(captured, tables.space)
    seen: set[int] = set()
    for p in captured.parameters:
        d, layouts = space.of_source[p.placeholder]
        if d in seen:
            continue
        seen.add(d)
        where = blocks.of(p.placeholder, block_path(p.name))
        name = pattern(p.name) if where else p.name
        yield tables.decision(
            d, name, name.rpartition(".")[0], "parameter", where, [layout_text(layout) for layout in layouts]
        )
    words = factor_words(captured, operators)
    for op in operators:
        d, strategies = space.of_node[op.node]
        if d in seen or op.is_view or (len(strategies) == 1 and not op.is_heavy):
            continue
        seen.add(d)
        first = operators.by_node[space.canon.get(op.node, op.node)]  # of a backward, the last block comes first
        where = blocks.of(first.node, first.block)
        module = first.node.meta["module"] or "(root)"
        module = pattern(module) if where else module
        texts = _strategies_text(first, strategies, space.mesh, words)
        most = OPTIONS_KEPT if first.is_heavy else LIGHT_OPTIONS_KEPT
        yield tables.decision(d, module, module, _kind(first, operators), where, texts, most)


class _Blocks:
    """Which blocks decide as one."""

    def __init__(self, captured: Captured, space: Space) -> None:
        self.paths = {c.paths[0]: c.paths for c in captured.blocks}
        self.alike = Counter(space.canon.values())

    def of(self, first: fx.Node, block: str | None) -> str:
        """The numbers of the blocks whose counterparts of ``first`` decide with it, as ranges; empty if it is alone."""
        if block is None or not self.alike[first]:
            return ""
        numbers = sorted(int(path.rpartition(".")[2]) for path in self.paths[block])
        runs: dict[int, list[int]] = defaultdict(list)
        for i, n in enumerate(numbers):
            runs[n - i].append(n)
        return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs.values())


def _kind(op: Operator, operators: Operators) -> str:
    """An operator and its direction; of the two products in the backward of a linear layer also whose gradient it is:
    that of the weight is summed over the batch."""
    name = getattr(op.call.target, "_opname", str(op.call.target))
    if not op.backward:
        return f"{name} forward"
    if op.is_heavy and len(op.operands) == 2:
        of_weight = operators.batch_factors[op.node] & set(op.rule.reduced)
        return f"{name} backward, of the {'weight' if of_weight else 'input'}"
    return f"{name} backward"


def _strategies_text(
    op: Operator, strategies: Sequence[Strategy], mesh: Mesh, words: Mapping[tuple[fx.Node, str], str]
) -> list[str]:
    """Every strategy of an operator in words. Factors of one meaning, as the groups of heads and the heads of a group,
    are told apart by the rule's letters where it takes that."""

    def text(strategy: Strategy, letters: bool) -> str:
        parts = []
        for (axis, degree), choice in zip(mesh.axes, strategy, strict=True):
            if degree == 1:
                continue
            if choice.factor is not None:
                name = words[op.node, choice.factor] + (f" ({choice.factor})" if letters else "")
                summed = ", summed" if choice.factor in op.rule.reduced else ""
                parts.append(f"{name} over {axis}{summed}")
            elif choice.linear is not None:
                parts.append(f"partial sums over {axis}")
        return "; ".join(parts) or "whole"

    plain = [text(s, False) for s in strategies]
    return plain if len(set(plain)) == len(plain) else [text(s, True) for s in strategies]
