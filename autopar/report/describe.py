"""An assignment in words: what is split in each kind of layer, and what is not split at all.

The words are found by following dims through the rules: all dims that carry one factor of one operator are the same
thing, so what an embedding, an attention or the loss knows of a dim holds for the whole class. Where nobody knows
anything, the words are "output features" and "input features", which are always true.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from networkx.utils import UnionFind
from torch import fx

import autopar.ops.attention  # noqa: F401  defines the operators
from autopar.capture.blocks import pattern
from autopar.capture.graph import Captured
from autopar.plan import LayerSummary, ReplicatedOperator
from autopar.report.names import layer_of
from autopar.sharding.assignment import Assignment
from autopar.sharding.axes import BATCH_AXES, spread_axes
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operator, Operators, Value, own_factors
from autopar.sharding.rule import Choice, Strategy, choices, is_valid
from autopar.sharding.rules.attention import RING
from autopar.sharding.rules.vocabulary import WORDS

aten = torch.ops.aten

#: An operator that does no FLOPs is named as replicated only if it moves at least this share of all bytes.
BYTES_WORTH_NAMING = 0.01

# Of two meanings that meet in one class the earlier is kept: a residual stream cut into heads is split by heads.
_PRECEDENCE = ("sequence", "heads", "head features", "vocabulary", "hidden", "experts")

#: The words for factors of which no dim knows.
_JOINT = {RING: "sequence as a ring", WORDS: "vocabulary"}

_Member = tuple[object, int | str]  # (Value, dim) or (node, factor)


@dataclass(frozen=True)
class _Features:
    """The factors of a linear layer's weight: those it contracts and those it makes."""

    inputs: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()


def describe_layers(captured: Captured, operators: Operators, assignment: Assignment) -> tuple[LayerSummary, ...]:
    """What the forward matrix products, attentions and token embeddings of each kind of layer split.

    A layer is a child of a block ("model.layers.*.mlp", all blocks together), or a module outside of the blocks. Its
    splits are ordered by the mesh; axes of degree 1 split nothing. The words are batch, sequence (as a ring), heads,
    head features, ffn, hidden, vocabulary and experts; else output features and input features of a parameter, inner
    dim of a product without one, and rows. Layers are in the order of the graph.
    """
    words = _words(captured, operators)
    modules: dict[str, dict[str, None]] = {}
    splits: dict[str, dict[tuple[str, str], None]] = {}
    for op in _described(operators):
        layer = layer_of(op.node.meta["module"])
        modules.setdefault(pattern(layer), {})[layer] = None
        found = splits.setdefault(pattern(layer), {})
        for (axis, degree), choice in zip(assignment.mesh.axes, assignment.strategies[op.node], strict=True):
            if degree > 1 and choice.factor is not None:
                found[words[op.node, choice.factor], axis] = None
    order = assignment.mesh.names
    return tuple(
        LayerSummary(name, len(paths), tuple(sorted(splits[name], key=lambda split: order.index(split[1]))))
        for name, paths in modules.items()
    )


def describe_replicated(operators: Operators, assignment: Assignment) -> tuple[ReplicatedOperator, ...]:
    """The operators whose work is repeated, most FLOPs first, then most bytes: those with floating point work on any
    axis of degree > 1 that does not split them; others only if no axis splits them and all calls together move more
    than 1% of the bytes. The reason is "no rule", "the batch does not reach it" (behind an operator without a rule),
    "nothing divides" or "cheaper than splitting"."""
    mesh = assignment.mesh
    wide = [axis for axis, degree in mesh.axes if degree > 1]
    groups: dict[tuple[str, tuple[str, ...], str], list[Operator]] = defaultdict(list)
    for op in operators:
        strategy = assignment.strategies[op.node]
        whole = tuple(axis for axis in wide if strategy[mesh.names.index(axis)].factor is None)
        if whole and not op.is_view and (op.is_heavy or len(whole) == len(wide)):
            reason = _reason(op, strategy, whole, mesh, operators)
            groups[str(op.call.target).removesuffix(".default"), whole, reason].append(op)
    all_flops, all_bytes = sum(op.flops for op in operators), sum(map(_bytes, operators))
    found = []
    for (name, axes, reason), ops in groups.items():
        flops, moved = sum(op.flops for op in ops) / (all_flops or 1), sum(map(_bytes, ops)) / (all_bytes or 1)
        if flops > 0 or moved > BYTES_WORTH_NAMING:
            found.append(ReplicatedOperator(name, axes, len(ops), flops, moved, reason))
    return tuple(sorted(found, key=lambda r: (-r.flops_share, -r.bytes_share, r.operator, r.axes, r.reason)))


def _bytes(op: Operator) -> int:
    """Bytes read and written."""
    return 0 if op.is_view else sum(spec.bytes for spec in (*op.call.operands, *op.call.results))


def _reason(op: Operator, strategy: Strategy, whole: tuple[str, ...], mesh: Mesh, operators: Operators) -> str:
    """Why ``op`` is not split on the axes ``whole``, of what they are there to split."""
    if not op.has_rule:
        return "no rule"

    def could(axis: str, choice: Choice) -> bool:
        i = mesh.names.index(axis)
        spread = op.rule.inward if axis in spread_axes(mesh) else frozenset()
        wanted = choice.factor in own_factors(operators, op, axis) | spread
        return wanted and is_valid(op.rule, (*strategy[:i], choice, *strategy[i + 1 :]), mesh)

    if not op.rule.inward and not any(own_factors(operators, op, axis) for axis in whole):
        return f"the {'sequence' if set(whole).isdisjoint(BATCH_AXES) else 'batch'} does not reach it"
    possible = any(could(axis, choice) for axis in whole for choice in choices(op.rule))
    return "cheaper than splitting" if possible else "nothing divides"


def _described(operators: Operators) -> Iterator[Operator]:
    return (op for op in operators if not op.backward and (op.is_heavy or _looks_up_tokens(op, operators)))


def _looks_up_tokens(op: Operator, operators: Operators) -> bool:
    """Whether ``op`` is an embedding of the batch, not of positions, which are the same for all sequences."""
    return op.call.target is aten.embedding.default and bool(operators.batch_factors[op.node])


def factor_words(captured: Captured, operators: Operators) -> dict[tuple[fx.Node, str], str]:
    """The word for every factor of every operator of both directions; "dim of 64" where nothing is known of it."""
    features = {op.node: _features(captured, operators, op) for op in _described(operators)}
    classes = _classes(operators)
    known = _meanings(operators, features, classes)
    words = {}
    for op in operators:
        batch = operators.batch_factors[op.node]
        for factor, size in op.rule.sizes.items():
            meaning = "batch" if factor in batch else known.get(classes[op.node, factor])
            words[op.node, factor] = _JOINT.get(factor) or meaning or f"dim of {size}"
    return words


def _words(captured: Captured, operators: Operators) -> dict[tuple[fx.Node, str], str]:
    """The word for every factor of the operators that are described."""
    features = {op.node: _features(captured, operators, op) for op in _described(operators)}
    classes = _classes(op for op in operators if not op.backward)
    known = _meanings(operators, features, classes)
    words = {}
    for op in _described(operators):
        for factor in op.rule.sizes:
            batch = factor in operators.batch_factors[op.node]
            meaning = "batch" if batch else known.get(classes[op.node, factor])
            words[op.node, factor] = _JOINT.get(factor) or meaning or _plain(op, factor, features[op.node])
    return words


def _meanings(
    operators: Operators, features: Mapping[fx.Node, _Features], classes: UnionFind
) -> dict[_Member, str]:
    """What is known of classes of dims, by their roots."""
    forward = [op for op in operators if not op.backward]
    known: dict[_Member, str] = {}
    for member, word in sorted(_seeds(forward, operators), key=lambda seed: _PRECEDENCE.index(seed[1])):
        known.setdefault(classes[member], word)
    for root in _ffn(operators, features, classes):
        known.setdefault(root, "ffn")
    return known


def _plain(op: Operator, factor: str, features: _Features) -> str:
    """The word for a factor of which nothing is known but its place in the operator."""
    if factor in features.inputs:
        return "input features"
    if factor in features.outputs:
        return "output features"
    return "inner dim" if factor in op.rule.reduced else "rows"


def _classes(calls: Iterable[Operator]) -> UnionFind:
    """Every dim joined with its outermost factor: the inner ones of a compound dim are other things."""
    classes = UnionFind()
    for op in calls:
        results = [Value(op.node, i) for i in range(len(op.rule.results))]
        for value, dims in zip((*op.operands, *results), (*op.rule.operands, *op.rule.results), strict=True):
            for d, factors in enumerate(dims):
                if factors:
                    classes.union((value, d), (op.node, factors[0]))
        if op.call.target is aten.native_layer_norm.default:  # the normalised dim stays what it is
            for d in range(len(op.call.results[0].shape)):
                classes.union((op.operands[0], d), (results[0], d))
    return classes


def _seeds(forward: Iterable[Operator], operators: Operators) -> Iterator[tuple[_Member, str]]:
    """What single operators know of their dims."""
    for op in forward:
        batch = operators.batch_factors[op.node]
        if _looks_up_tokens(op, operators):
            _, tokens = op.rule.operands
            yield (op.node, "v"), "vocabulary"
            yield (op.node, "h"), "hidden"
            yield from (((op.node, dim[0]), "sequence") for dim in tokens if dim and dim[0] not in batch)
        elif op.call.target is aten.gather.default and batch:
            yield (op.node, "v"), "vocabulary"  # the score of the right class, in the loss
        elif op.call.target in (torch.ops.autopar.grouped_mm.default, torch.ops.autopar.gated_mm.default):
            yield (op.node, "e"), "experts"
        elif op.call.target is torch.ops.autopar.attention.default:
            yield from (((op.node, factor), "heads") for factor in ("g", "r"))
            # q, k, v and the output are [batch, heads, sequence, features]
            for value in (*op.operands[:3], Value(op.node)):
                yield (value, 2), "sequence"
                yield (value, 3), "head features"


def _features(captured: Captured, operators: Operators, op: Operator) -> _Features:
    """The features of ``op`` if it is a product with a parameter, in whatever shape or dtype; else none."""
    parameters = {parameter.placeholder for parameter in captured.parameters}

    def is_parameter(value: Value) -> bool:
        while (source := operators.by_node.get(value.node)) is not None and len(source.operands) == 1:
            value = source.operands[0]
        return value.node in parameters

    for value, dims in zip(op.operands, op.rule.operands, strict=True):
        factors = frozenset(f for dim in dims for f in dim)
        if op.is_heavy and factors & set(op.rule.reduced) and is_parameter(value):
            return _Features(factors & set(op.rule.reduced), factors - set(op.rule.reduced))
    return _Features()


def _ffn(operators: Operators, features: Mapping[fx.Node, _Features], classes: UnionFind) -> set[_Member]:
    """The classes between a linear layer that widens and one that narrows."""
    widened: set[_Member] = set()
    narrowed: set[_Member] = set()
    for node, found in features.items():
        sizes = operators.by_node[node].rule.sizes
        into, out_of = (math.prod(sizes[f] for f in factors) for factors in (found.inputs, found.outputs))
        if out_of > into:
            widened |= {classes[node, f] for f in found.outputs}
        elif out_of < into:
            narrowed |= {classes[node, f] for f in found.inputs}
    return widened & narrowed
