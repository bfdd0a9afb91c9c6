"""Which forward values are made again in the backward instead of kept, and what that leaves to be kept.

Modes: ``none``; ``selective``: whatever costs no matrix product (norms, activations, rotary embeddings, dropout, casts)
and attention are made again, matrix products and what collectives gave are kept, and so is attention over so long a
sequence that no byte of a product's result in its block takes as many FLOPs as one of its; ``full``: inside the
repeated blocks only what enters is kept, collectives are issued again; ``full:4``: the same in the first four blocks,
and nothing in the others. Views cost nothing and are made again in every mode: to keep base and view would keep the
same bytes twice. What leaves a block is kept in every mode, or the first backward would make the whole forward again.

Weights are never kept gathered: a redistribution of a parameter, or of an input, is issued again where it is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.sharding.assignment import Assignment, Transfer, direction, forward_moves, result_layouts
from autopar.sharding.layout import Layout
from autopar.sharding.operators import Operator, Operators, Value, of_graph
from autopar.sharding.redistribute import redistribution
from autopar.sharding.rules.attention import seen_share

#: Operators that do floating point work and are made again under ``selective`` all the same, where their seconds are
#: worth less than the bytes in which their results are kept (Korthikanti et al., arXiv:2205.05198).
_CHEAP_PRODUCTS = frozenset({"autopar::attention"})


@dataclass(frozen=True)
class MadeAgain:
    """``operators`` are the forward operators that are made again where the backward needs their results, ``moves``
    those whose operands, where they are redistributed, are redistributed again too."""

    operators: frozenset[fx.Node] = frozenset()
    moves: frozenset[fx.Node] = frozenset()


@dataclass
class Kept:
    """What the backward of an assignment takes over from the forward: ``saved`` are values in the layout in which they
    are kept, each storage once. ``operators`` are the calls and ``transfers`` the redistributions of the forward that
    it makes again. Keys in order of need; placeholders are kept anyway and do not appear."""

    saved: dict[tuple[Value, Layout], None] = field(default_factory=dict)
    operators: dict[fx.Node, None] = field(default_factory=dict)
    transfers: dict[tuple[Value, Layout], Transfer] = field(default_factory=dict)


def blocks_made_again(mode: object) -> int | None:
    """How many blocks ``mode`` makes again in full, from the first; None for all. ValueError if it is no mode."""
    if mode == "full":
        return None
    if mode in ("none", "selective"):
        return 0
    if isinstance(mode, str) and (match := re.fullmatch(r"full:([1-9]\d*)", mode)):
        return int(match[1])
    raise ValueError(f"{mode!r} is no way to recompute")


def forward_blocks(operators: Operators) -> list[str]:
    """The repeated blocks in the order in which the forward enters them."""
    return list(dict.fromkeys(op.block for op in operators if op.block is not None and not op.backward))


def _leaving(operators: Operators) -> set[fx.Node]:
    """The forward operators whose results are read in the forward outside of their own block."""
    found = set()
    for value, users in operators.consumers.items():
        op = operators.by_node.get(value.node)
        readers = [operators.by_node[node] for node, _ in users]
        if op is not None and any(not r.backward and r.block != op.block for r in readers):
            found.add(operators.base(value).node)
    return found


def _is_attention(op: Operator) -> bool:
    return getattr(op.call.target, "name", lambda: "")() in _CHEAP_PRODUCTS


def _dearness(op: Operator) -> float:
    """FLOPs a byte of what an operator makes: what a byte saves in which it is kept."""
    flops = op.flops * seen_share(op.call) if _is_attention(op) else op.flops
    return flops / max(sum(spec.bytes for spec in op.call.results), 1)


def _cheap(forward: Sequence[Operator]) -> set[fx.Node]:
    """What ``selective`` makes again: all that is not heavy, and attention but where a byte of its result takes more
    FLOPs than one of any product of its block. In 16 bits both take as many FLOPs a byte as numbers are summed up, of
    which attention has the keys that a query sees on average, twice: it is kept where these are more than half of what
    the widest of those products sums over."""
    most: dict[str | None, float] = {}
    for op in forward:
        if op.is_heavy and not _is_attention(op):
            most[op.block] = max(most.get(op.block, 0.0), _dearness(op))
    kept = {op.node for op in forward if op.is_heavy and not _is_attention(op)}
    kept |= {op.node for op in forward if _is_attention(op) and _dearness(op) > most.get(op.block, math.inf)}
    return {op.node for op in forward} - kept


@of_graph
def made_again(operators: Operators, mode: str) -> MadeAgain:
    """What ``mode`` (see the module) makes again. More blocks than there are means all of them."""
    blocks = frozenset(forward_blocks(operators)[: blocks_made_again(mode)])
    leaving = _leaving(operators)
    forward = [op for op in operators if not op.backward]
    cheap = _cheap(forward) if mode == "selective" else frozenset[fx.Node]()

    def again(op: Operator) -> bool:
        if op.is_view:
            return True
        return op.node not in leaving and (op.block in blocks or op.node in cheap)

    return MadeAgain(
        frozenset(op.node for op in forward if again(op)), frozenset(op.node for op in forward if op.block in blocks)
    )


def needed(operators: Operators, again: MadeAgain, in_place: Collection[fx.Node] | None = None) -> Kept:
    """`kept` before layouts are known. ``in_place`` are the views that read their operand as it is, None: all; any
    other is kept itself, unless its block moves its operands again."""
    found = Kept()
    whole = Layout(())
    stack = list(reversed(read_by_backward(operators)))
    seen: set[Value] = set()
    while stack:
        value = stack.pop()
        op = operators.by_node.get(value.node)
        if op is None or value in seen:
            continue
        seen.add(value)
        held = op.is_view and in_place is not None and op.node not in in_place and op.node not in again.moves
        if op.node not in again.operators or held:
            found.saved[value, whole] = None
            continue
        found.operators[op.node] = None
        stack.extend(reversed(op.operands))
    return found


@of_graph
def read_by_backward(operators: Operators) -> list[Value]:
    """The results of forward operators that the backward reads."""
    by_node = operators.by_node
    return [
        value
        for value, users in operators.consumers.items()
        if value.node in by_node and not by_node[value.node].backward and any(by_node[n].backward for n, _ in users)
    ]


def _read(operators: Operators, assignment: Assignment) -> list[tuple[Value, Layout]]:
    """The results of forward operators that the backward reads, in the layouts in which the forward hands them over: as
    they are made, or as the copy that serves both directions."""
    produced, found = result_layouts(operators, assignment), dict[tuple[Value, Layout], None]()
    for value in read_by_backward(operators):
        if direction(value, operators.specs[value], True):
            found[value, produced[value]] = None
            continue
        for node, place in operators.consumers[value]:
            if operators.by_node[node].backward:
                wanted, _ = assignment.layouts(operators.by_node[node])
                found[value, wanted[place]] = None
    return list(found)


def kept(operators: Operators, assignment: Assignment, again: MadeAgain) -> Kept:
    """What the backward of ``assignment`` takes over, and what it makes again.

    A value that is made again reads its operands in the layouts in which it read them in the forward. Where that is a
    redistributed copy, the copy is kept, or made again if it is one of a placeholder or ``again`` says so.
    """
    found, produced = Kept(), result_layouts(operators, assignment)
    moves = forward_moves(operators, assignment)
    stack = list(reversed(_read(operators, assignment)))
    seen: set[tuple[Value, Layout]] = set()
    while stack:
        value, layout = stack.pop()
        if (value, layout) in seen:
            continue
        seen.add((value, layout))
        op = operators.by_node.get(value.node)
        if layout != produced[value]:
            reader, source = moves[value, layout]
            if op is not None and reader.node not in again.moves:
                found.saved[value, layout] = None
                continue
            spec = operators.specs[value]
            shape, itemsize = spec.shape, spec.dtype.itemsize
            steps = redistribution(source, layout, assignment.mesh, shape, itemsize, spec.fixed)
            assert steps is not None
            found.transfers[value, layout] = Transfer(value, spec, False, source, layout, steps)
            stack.append((value, source))
        elif op is not None and op.node not in again.operators:
            found.saved[value, layout] = None
        elif op is not None:
            found.operators[op.node] = None
            wanted, _ = assignment.layouts(op)
            stack.extend(reversed(list(zip(op.operands, wanted, strict=True))))
    return found
