"""An FX graph read as operator calls with rules: the common ground of the solver and the shard pass."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import fx

import autopar.ops.cache  # noqa: F401  defines an operator
from autopar._compat import pytree
from autopar.ops.rows import MAKE_ROWS
from autopar.sharding.axes import BATCH_AXES, CONTEXT_AXES
from autopar.sharding.flops import count_flops, has_flops
from autopar.sharding.layout import TensorSpec
from autopar.sharding.rule import Arg, Choice, OpCall, Rule, op_call
from autopar.sharding.rules import replicated_rule, rule_for
from autopar.sharding.rules.attention import ATTENTION, HEADS, POSITIONS, RING
from autopar.sharding.rules.scan import SCANS

aten = torch.ops.aten
Asked = ParamSpec("Asked")
Found = TypeVar("Found")

#: Operators whose result shares the storage of their first operand: no time, no memory of their own.
VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        aten.detach.default,
        aten.alias.default,
        torch.ops.autopar.cache_write.default,  # in place, where it runs
        torch.ops.autopar.constrain.default,
    }
)


#: Operators that shift or cut along dims that they cannot be split in: a result's dim is what the operand's was. So
#: labels still have a sequence once they are shifted.
_MOVES = frozenset({aten.constant_pad_nd.default, aten.slice.Tensor, aten.roll.default, aten.flip.default})


#: Key of a node's ``meta``: whether its tensors are rows of experts (`TensorSpec.routed`).
ROUTED = "routed"
#: The same of `TensorSpec.by_expert`, of what is no rows.
BY_EXPERT = "by_expert"


class Value(NamedTuple):
    """One tensor of the graph: result ``index`` of ``node``. A key of many tables, hence a tuple."""

    node: fx.Node
    index: int = 0  # type: ignore[assignment]  # in the place of tuple.index, which nobody asks for


@dataclass(frozen=True)
class Operator:
    """A call node with its rule. ``has_rule`` is False where no rule covers it: it then runs replicated."""

    node: fx.Node
    call: OpCall
    rule: Rule
    operands: tuple[Value, ...]
    has_rule: bool
    flops: float

    @cached_property
    def backward(self) -> bool:
        """Whether it belongs to the backward."""
        return bool(self.node.meta["backward"])

    @cached_property
    def block(self) -> str | None:
        """Path of its block."""
        return self.node.meta["block"]

    @property
    def is_view(self) -> bool:
        """Whether the result shares the operand's storage."""
        return self.call.target in VIEWS

    @property
    def is_heavy(self) -> bool:
        """Whether it does floating point work worth splitting: matrix products and attention."""
        return self.flops > 0


class Carried(NamedTuple):
    """Where a dim of the inputs is in a graph: the factors of every operator and the dims of every value that carry
    it."""

    factors: dict[fx.Node, frozenset[str]]
    dims: dict[Value, frozenset[int]]


@dataclass(frozen=True, eq=False)
class Operators:
    """All operators of a graph, in order, and which dims carry the batch."""

    by_node: dict[fx.Node, Operator]
    specs: dict[Value, TensorSpec]
    batch_factors: dict[fx.Node, frozenset[str]]
    consumers: dict[Value, tuple[tuple[fx.Node, int], ...]]
    batch_dims: dict[Value, frozenset[int]] = field(repr=False, default_factory=dict)
    #: The output that each tangent placeholder belongs to.
    tangents: Mapping[fx.Node, fx.Node] = field(repr=False, default_factory=dict)
    #: The inputs that have a sequence, which is their dim 1.
    sequences: tuple[fx.Node, ...] = field(repr=False, default=())

    @cached_property
    def sequence(self) -> Carried:
        """Where dim 1 of the inputs is, followed when first asked for."""
        return _carried(self.by_node, self.batch_dims, dict.fromkeys(self.sequences, 1), self.tangents, _MOVES)

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.by_node.values())

    def base(self, value: Value) -> Value:
        """The value whose storage ``value`` shares, seen through views."""
        while (op := self.by_node.get(value.node)) is not None and op.is_view:
            value = op.operands[0]
        return value


def of_graph(find: Callable[Asked, Found]) -> Callable[Asked, Found]:
    """A function of a graph, whose answers are kept as long as the operators that it is given: every mesh of a search
    asks. What it is given behind them tells its answers apart, what stands before them belongs to the graph; all by
    position. What it returns is not to be changed."""
    known: WeakKeyDictionary[Operators, dict[tuple[object, ...], Found]] = WeakKeyDictionary()

    @functools.wraps(find)
    def found(*args: Asked.args, **kwargs: Asked.kwargs) -> Found:
        place, operators = next((i, arg) for i, arg in enumerate(args) if isinstance(arg, Operators))
        answers, asked = known.setdefault(operators, {}), args[place + 1 :]
        if asked not in answers:
            answers[asked] = find(*args, **kwargs)
        return answers[asked]

    return found


def value_of(node: fx.Node) -> Value:
    """The value a node stands for: a getitem names a result of its source."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return Value(source, _tensor_index(source.meta["val"], index))
    return Value(node)


def _tensor_index(val: Any, index: int) -> int:
    """Results are numbered among the tensors: a place that holds None has no number."""
    return sum(isinstance(v, torch.Tensor) for v in val[:index])


def _spec(value: Any, imbalance: float = 1.0) -> TensorSpec | None:
    routed = by_expert = False
    if isinstance(value, fx.Node):
        routed, by_expert = _kinds(value)
        value = value.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return TensorSpec(tuple(value.shape), value.dtype, routed, by_expert, imbalance if routed else 1.0)


def _kinds(node: fx.Node) -> tuple[bool, bool]:
    """Whether what a node makes is rows of experts, and whether its dim 0 are the experts."""
    routed = bool(node.meta.get(ROUTED))
    return routed, routed or bool(node.meta.get(BY_EXPERT))


def flops_of(call: OpCall, rule: Rule) -> float:
    """Floating point operations of a whole call, as ``torch.utils.flop_counter`` counts them: a product of factors for
    an einsum (2 a multiply-add), `count_flops` for everything else."""
    if call.target is aten.einsum.default:
        total = 2.0
        for size in rule.sizes.values():
            total *= size
        return total
    if not has_flops(call.target):
        return 0.0
    metas = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in call.operands]
    args, kwargs = pytree.tree_map(
        lambda a: metas[a.index] if isinstance(a, Arg) else a,
        (call.args, dict(call.kwargs)),
        is_leaf=lambda a: isinstance(a, Arg),
    )
    outs = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in call.results]
    return float(count_flops(call.target, args, kwargs, outs[0] if len(outs) == 1 else tuple(outs)))


def expert_factors(call: OpCall, rule: Rule) -> frozenset[str]:
    """The factors of a call that are experts: the outermost of dim 0 of what has its experts there."""
    tensors = [*zip(call.operands, rule.operands, strict=True), *zip(call.results, rule.results, strict=True)]
    return frozenset(dims[0][0] for spec, dims in tensors if spec.by_expert and dims[0])


def inside_experts(op: Operator) -> frozenset[str]:
    """The factors of an operator that are dims of the matrices of each expert: those of weights and their gradients."""
    call, rule = op.call, op.rule
    tensors = [*zip(call.operands, rule.operands, strict=True), *zip(call.results, rule.results, strict=True)]
    weights = [dims for spec, dims in tensors if spec.by_expert and not spec.routed]
    return frozenset(f for dims in weights for factors in dims for f in factors) - rule.inward


def read_operator(node: fx.Node, imbalance: float = 1.0) -> Operator:
    """One call node as an operator; ``imbalance`` is that of rows of experts."""
    routed, by_expert = _kinds(node)
    results = [
        replace(s, routed=routed, by_expert=by_expert, imbalance=imbalance if routed else 1.0)
        for v in pytree.tree_leaves(node.meta["val"])
        if (s := _spec(v)) is not None
    ]
    spec_of = functools.partial(_spec, imbalance=imbalance)
    call, leaves = op_call(node.target, node.args, node.kwargs, results, spec_of)
    found = rule_for(call)
    rule = found if found is not None else replicated_rule(call)
    if inward := expert_factors(call, rule):
        rule = replace(rule, inward=inward)
    return Operator(node, call, rule, tuple(value_of(leaf) for leaf in leaves), found is not None, flops_of(call, rule))


def _read_copy(node: fx.Node, first: Operator) -> Operator:
    """A node of a block as its counterpart in the first block of the class, with operands of its own."""
    inputs = node.all_input_nodes  # in the order of the arguments, each once
    if len(inputs) == len(first.operands):
        return Operator(node, first.call, first.rule, tuple(map(value_of, inputs)), first.has_rule, first.flops)
    operands: list[Value] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            operands.append(value_of(leaf))
        return leaf

    fx.node.map_aggregate((node.args, node.kwargs), collect)
    return Operator(node, first.call, first.rule, tuple(operands), first.has_rule, first.flops)


def _read_all(graph: fx.Graph, first_of: Mapping[fx.Node, fx.Node], imbalance: float) -> dict[fx.Node, Operator]:
    """All operators in order; rules are made once for all blocks of a class."""
    first: dict[fx.Node, Operator] = {}

    def read(node: fx.Node) -> Operator:
        if node not in first:
            first[node] = read_operator(node, imbalance)
        return first[node]

    return {
        node: _read_copy(node, read(first_of[node])) if node in first_of else read(node)
        for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    }


def _batch_of(rule: Rule, batch_dims: Sequence[frozenset[int]]) -> tuple[frozenset[str], list[frozenset[int]]]:
    """The factors that carry the batch, and the dims of the results that do, given those of the operands."""
    batch = frozenset(
        factors[0]
        for carries, dims in zip(batch_dims, rule.operands, strict=True)
        for d, factors in enumerate(dims)
        if factors and d in carries
    )
    return batch, [frozenset(d for d, f in enumerate(dims) if f and f[0] in batch) for dims in rule.results]


def _follow(
    by_node: dict[fx.Node, Operator], batch_dims: dict[Value, frozenset[int]], moves: Collection[Any]
) -> dict[fx.Node, frozenset[str]]:
    """Follow the batch from the placeholders in ``batch_dims`` (filled for all other values) through the rules, and
    through the operators ``moves`` dim by dim."""
    batch_factors: dict[fx.Node, frozenset[str]] = {}
    known: dict[Any, tuple[frozenset[str], list[frozenset[int]]]] = {}
    for node, op in by_node.items():
        given = tuple([batch_dims[value] for value in op.operands])
        key = (id(op.rule), given)
        if key not in known:
            known[key] = _batch_of(op.rule, given)
        batch_factors[node], results = known[key]
        if op.call.target in moves:
            results = [given[0]]
        for i, dims in enumerate(results):
            batch_dims[Value(node, i)] = dims
    return batch_factors


def _carried(
    by_node: dict[fx.Node, Operator],
    values: Iterable[Value],
    inputs: Mapping[fx.Node, int],
    tangents: Mapping[fx.Node, fx.Node],
    moves: Collection[Any] = (),
) -> Carried:
    """Follow the dim that ``inputs`` gives of every placeholder that has it; ``values`` has all placeholders."""
    dims = {v: frozenset({inputs[v.node]} if v.node in inputs else ()) for v in values if v.node.op == "placeholder"}
    _follow(by_node, dims, moves)
    dims.update({Value(tangent): dims[value_of(output)] for tangent, output in tangents.items()})
    return Carried(_follow(by_node, dims, moves), dims)


def read_operators(
    graph: fx.Graph,
    batch_inputs: Mapping[fx.Node, int],
    tangents: Mapping[fx.Node, fx.Node],
    first_of: Mapping[fx.Node, fx.Node] | None = None,
    imbalance: float = 1.0,
) -> Operators:
    """Read a labelled graph. ``batch_inputs`` gives the batch dim of the placeholders that have one, ``tangents`` the
    output that each tangent placeholder belongs to (whose batch it shares), ``first_of`` the counterpart of a node in
    the first block of its class, where that is the same call of the same operator, and ``imbalance`` is that of rows of
    experts (`TensorSpec`)."""
    by_node = _read_all(graph, first_of or {}, imbalance)
    placeholders = {node: spec for node in graph.find_nodes(op="placeholder") if (spec := _spec(node)) is not None}
    specs = {Value(node): spec for node, spec in placeholders.items()}
    consumers: dict[Value, list[tuple[fx.Node, int]]] = {}
    for node, op in by_node.items():
        for i, spec in enumerate(op.call.results):
            specs[Value(node, i)] = spec
        for i, value in enumerate(op.operands):
            consumers.setdefault(value, []).append((node, i))
    batch = _carried(by_node, map(Value, placeholders), batch_inputs, tangents)
    sequences = tuple(n for n in batch_inputs if len(placeholders[n].shape) > 1)
    read = {v: tuple(c) for v, c in consumers.items()}
    return Operators(by_node, specs, batch.factors, read, batch.dims, tangents, sequences)


def own_factors(operators: Operators, op: Operator, axis: str) -> frozenset[str]:
    """The factors that an axis is there to split: those of the batch, those of the sequence and, of attention and of
    scans, those of heads and of its ring, or any. Besides, those of `spread_axes` may split experts (`Rule.inward`)."""
    if axis in BATCH_AXES:
        return operators.batch_factors[op.node]
    if axis in CONTEXT_AXES:
        inside = HEADS | {RING} if op.call.target in ATTENTION else HEADS if op.call.target in SCANS else frozenset()
        return operators.sequence.factors[op.node] | (inside & op.rule.sizes.keys())
    return frozenset(op.rule.sizes) - {POSITIONS, RING}


def routing(operators: Operators, rows: Value) -> Value:
    """The index [T, K] by which a value that is `ROUTED` was made."""
    while True:
        op = operators.by_node[rows.node]
        if op.call.target in MAKE_ROWS:
            place = next(i for i, spec in enumerate(op.call.operands) if not spec.dtype.is_floating_point)
            return op.operands[place]
        rows = next(v for v, spec in zip(op.operands, op.call.operands, strict=True) if spec.routed)


def splits_batch(choice: Choice, batch: frozenset[str]) -> bool:
    """Whether a choice splits the batch."""
    return choice.factor is not None and choice.factor in batch
