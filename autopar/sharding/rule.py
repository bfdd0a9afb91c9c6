"""Operator rules: which factors each dim of each tensor carries.

An operator's iteration space is spanned by *factors*, as in einsum. Splitting the operator over an axis means giving
each rank one piece of one factor. A rule is an annotation, one term a tensor, dims separated by blanks::

    rule(call, "b s k, n k -> b s n", reduced={"k": "sum"})        # a linear layer
    rule(call, "b (h d) -> b h d", sizes={"h": 9})                 # a view that opens a compound dim

A dim is a factor name, a compound ``(major minor ...)`` of factors, or ``_``: nothing here can be split. A factor that
is in no result must be declared ``reduced``: split, it leaves each rank with a part of the result (`Partial`). Of a
compound only the outermost factor can be split, or the next one once those outside it are wholly split. ``fixed``
factors are named for clarity only and never split. Where several axes split one factor they are nested as in the mesh;
``inward`` factors, which are those of experts, the other way round: so ranks that have the tokens of more and more axes
together, one collective an axis from the innermost on, come to have fewer and fewer experts. ``linear`` lists groups
of operands in which the operator is linear with all other operands held: if exactly those are `Partial` on an axis, so
are the results. A ``joint`` factor stands for several others, which it splits at once, on one axis or on several that
one collective goes over (`sharding.axes.joint_axes`), and nothing else splits any of them; these may be ``fixed``, and
a rank gets from the others what it lacks by `Passing`.

From the rule follow the strategies, their layouts, and the scaling of the local work. What the local computation needs
beyond running the same operator on the pieces (a shape argument, an index made local) is in ``localize``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar._compat import pytree
from autopar.sharding.axes import joint_axes
from autopar.sharding.layout import Layout, Mesh, TensorSpec


@dataclass(frozen=True)
class Arg:
    """Stands for the ``index``-th tensor operand in the arguments of an `OpCall`."""

    index: int


@dataclass(frozen=True)
class OpCall:
    """One call of an operator: its arguments with every tensor replaced by `Arg`, and the tensors' global specs."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at ``position`` or called ``name``, or ``default`` if the call leaves it out."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


@dataclass(frozen=True)
class Local:
    """What a rule's ``localize`` is given to write the computation of one rank.

    ``emit(target, *args)`` adds an operator (to a graph, or runs it at once in the property tests) and returns its
    value; ``operands`` are the local pieces; ``starts(layout, shape)`` is the int64 [ndim] tensor with the global index
    of the first element of this rank's piece. What comes of it is what the operator returns, or a list of that where
    its parts are values of their own.
    """

    call: OpCall
    mesh: Mesh
    operands: tuple[Any, ...]
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]
    emit: Callable[..., Any]
    starts: Callable[[Layout, Sequence[int]], Any]

    def result_shape(self, index: int = 0) -> list[int]:
        """Local shape of a result."""
        return list(self.result_layouts[index].local_shape(self.mesh, self.call.results[index].shape))

    def operand_shape(self, index: int) -> list[int]:
        """Local shape of an operand."""
        return list(self.operand_layouts[index].local_shape(self.mesh, self.call.operands[index].shape))

    def substitute(self, value: Any) -> Any:
        """``value`` with every `Arg` replaced by the local operand."""
        return pytree.tree_map(
            lambda a: self.operands[a.index] if isinstance(a, Arg) else a, value, is_leaf=lambda a: isinstance(a, Arg)
        )

    def default(self, **replaced: Any) -> Any:
        """The same operator on the local pieces; ``replaced`` gives arguments by position (``arg1=...``) or name."""
        args, kwargs = list(self.call.args), dict(self.call.kwargs)
        for name, value in replaced.items():
            if (position := re.fullmatch(r"arg(\d+)", name)) is not None:
                args[int(position[1])] = value
            else:
                kwargs[name] = value
        return self.emit(self.call.target, *self.substitute(tuple(args)), **self.substitute(kwargs))


@dataclass(frozen=True)
class Hop:
    """One message that every rank sends to another one of ``axis``, or a collective of another ``kind``, of ``nbytes``
    bytes of the whole batch (`cost_model.communication`'s X). It travels
    beside the part in place ``beside`` of the operator's work, with None beside nothing. Where it is only for one of
    the results, ``result`` is the place of that."""

    axis: str
    nbytes: int
    beside: int | None
    result: int | None = None
    kind: str = "p2p"


@dataclass(frozen=True)
class Passing:
    """What ranks send each other while they compute an operator, in ``parts`` that are alike. Of what `work_share` says
    a rank computes ``share``: less where what nobody needs is left out. Of attention, in each part, of so many
    ``kernels``, its ``queries`` meet keys, in products of so many ``keys``."""

    parts: int
    hops: tuple[Hop, ...]
    share: float = 1.0
    kernels: int = 1
    queries: int = 0
    keys: int = 0


Localize = Callable[[Local], Any]
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Rule:
    """The factors of one operator call. ``operands`` and ``results`` give the factors of every dim, major first."""

    sizes: Mapping[str, int]
    reduced: Mapping[str, str]
    fixed: frozenset[str]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: tuple[frozenset[int], ...] = ()
    localize: Localize | None = field(default=None, compare=False)
    inward: frozenset[str] = frozenset()
    joint: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: What ranks send each other under a strategy; None where it is nothing.
    passing: Callable[[Strategy, Mesh], Passing | None] = field(default=lambda strategy, mesh: None, compare=False)
    #: What `layouts` has found already: equal blocks share their rules, and every step from space to emission asks.
    known_layouts: dict[tuple[Strategy, Mesh], tuple[tuple[Layout, ...], tuple[Layout, ...]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )


def _parse(annotation: str) -> tuple[list[Dims], list[Dims]]:
    def term(text: str) -> Dims:
        return tuple(() if dim == "_" else tuple(dim.strip("()").split()) for dim in re.findall(r"\([^)]*\)|\S+", text))

    left, arrow, right = annotation.partition("->")
    if not arrow:
        raise ValueError(f"a rule needs '->': {annotation!r}")
    return ([term(t) for t in left.split(",")] if left.strip() else []), [term(t) for t in right.split(",")]


def rule(
    call: OpCall,
    annotation: str,
    *,
    reduced: Mapping[str, str] | None = None,
    fixed: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    linear: Sequence[Sequence[int]] = (),
    localize: Localize | None = None,
    joint: Mapping[str, tuple[str, ...]] | None = None,
    passing: Callable[[Strategy, Mesh], Passing | None] = lambda strategy, mesh: None,
) -> Rule:
    """Build the rule of ``call`` from an annotation (see the module's docstring).

    Sizes of factors that stand alone in a dim come from the specs; one factor of each compound may be left out of
    ``sizes`` and is derived. Raises ValueError if the annotation does not fit the call.
    """
    operands, results = _parse(annotation)
    return make_rule(
        call, operands, results, reduced=reduced, fixed=fixed, sizes=sizes, linear=linear, localize=localize,
        joint=joint, passing=passing,
    )  # fmt: skip


def make_rule(
    call: OpCall,
    operands: Sequence[Dims],
    results: Sequence[Dims],
    *,
    reduced: Mapping[str, str] | None = None,
    fixed: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    linear: Sequence[Sequence[int]] = (),
    localize: Localize | None = None,
    joint: Mapping[str, tuple[str, ...]] | None = None,
    passing: Callable[[Strategy, Mesh], Passing | None] = lambda strategy, mesh: None,
) -> Rule:
    """`rule` for factors already given by dim; the size of a ``joint`` factor is what divides all of its parts."""
    reduced = dict(reduced or {})
    known = dict(sizes or {})
    tensors = list(zip(operands, call.operands, strict=True)) + list(zip(results, call.results, strict=True))
    for _ in range(2):  # a compound may need sizes that a later tensor gives
        for dims, spec in tensors:
            if len(dims) != len(spec.shape):
                raise ValueError(f"{call.target}: {dims} does not describe a tensor of shape {spec.shape}")
            for factors, size in zip(dims, spec.shape, strict=True):
                unknown = [f for f in factors if f not in known]
                if len(unknown) == 1:
                    inner = math.prod(known[f] for f in factors if f in known)
                    known[unknown[0]] = size // inner if inner else 0
    for dims, spec in tensors:
        for factors, size in zip(dims, spec.shape, strict=True):
            if factors and math.prod(known[f] for f in factors) != size:
                raise ValueError(f"{call.target}: factors {factors} of sizes {known} do not make a dim of {size}")
    in_results = {f for dims in results for factors in dims for f in factors}
    lost = {f for dims in operands for factors in dims for f in factors} - in_results - set(reduced) - set(fixed)
    if lost:
        raise ValueError(f"{call.target}: factors {sorted(lost)} are in no result and not declared reduced or fixed")
    known |= {f: math.gcd(*(known[part] for part in parts)) for f, parts in (joint or {}).items()}
    return Rule(
        known,
        reduced,
        frozenset(fixed),
        tuple(operands),
        tuple(results),
        tuple(frozenset(group) for group in linear),
        localize,
        joint=dict(joint or {}),
        passing=passing,
    )


class Choice(NamedTuple):
    """What an operator does on one axis: split ``factor``, pass partial sums of operands ``linear`` through, or
    (neither) run replicated."""

    factor: str | None = None
    linear: frozenset[int] | None = None

    def __str__(self) -> str:
        return self.factor or ("partial" if self.linear is not None else "-")


REPLICATE = Choice()
Strategy = tuple[Choice, ...]  # one choice an axis, in the mesh's order


def choices(rule: Rule) -> list[Choice]:
    """Every choice on one axis, divisibility aside: replicated first, then factors in order, then partial."""
    split = [Choice(factor=f) for f, size in rule.sizes.items() if f not in rule.fixed and size > 1]
    return [REPLICATE, *split, *(Choice(linear=group) for group in rule.linear)]


def _axes_by_factor(rule: Rule, strategy: Strategy, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    taken: dict[str, tuple[str, ...]] = {}
    for axis, choice in zip(mesh.names, strategy, strict=True):
        for f in rule.joint.get(choice.factor, (choice.factor,)) if choice.factor is not None else ():
            taken[f] = (axis, *taken.get(f, ())) if f in rule.inward else (*taken.get(f, ()), axis)
    return taken


def is_valid(rule: Rule, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether every split factor divides, compound dims are split from the outside in, and no result would be owed two
    different reductions."""
    taken = _axes_by_factor(rule, strategy, mesh)
    for joint, parts in rule.joint.items():
        own = tuple(axis for axis, c in zip(mesh.names, strategy, strict=True) if c.factor == joint)
        if (own and any(taken[f] != own for f in parts)) or (len(own) > 1 and own not in joint_axes(mesh)):
            return False
    pieces = {f: math.prod(mesh.degree(a) for a in axes) for f, axes in taken.items()}
    if any(rule.sizes[f] % n or rule.sizes[f] == 0 for f, n in pieces.items()):
        return False
    for dims in (*rule.operands, *rule.results):
        for factors in dims:
            wholly = True
            for f in factors:
                if f in pieces and not wholly:
                    return False
                wholly = wholly and pieces.get(f, 1) == rule.sizes[f]
    ops = {rule.reduced[f] for f in taken if f in rule.reduced} | {"sum" for c in strategy if c.linear}
    return len(ops) <= 1


def strategies(
    rule: Rule, mesh: Mesh, allowed: Callable[[str, Choice], bool] = lambda axis, choice: True
) -> list[Strategy]:
    """Every valid strategy whose choice on each axis is ``allowed(axis, choice)``; all replicated comes first."""
    every = choices(rule)
    per_axis = [[c for c in every if allowed(axis, c)] for axis in mesh.names]
    return [s for s in itertools.product(*per_axis) if is_valid(rule, s, mesh)]


def layouts(rule: Rule, strategy: Strategy, mesh: Mesh) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The layouts of operands and results under a valid strategy. Operands that lack a split factor are whole."""
    key = (strategy, mesh)
    if key not in rule.known_layouts:
        rule.known_layouts[key] = _layouts(rule, strategy, mesh)
    return rule.known_layouts[key]


def _layouts(rule: Rule, strategy: Strategy, mesh: Mesh) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    taken = _axes_by_factor(rule, strategy, mesh)

    def dims(tensor: Dims) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(a for f in factors for a in taken.get(f, ())) for factors in tensor)

    def owed(tensor: Dims) -> tuple[tuple[str, str], ...]:
        present = {f for factors in tensor for f in factors}
        pairs = []
        for axis, choice in zip(mesh.names, strategy, strict=True):
            if choice.factor is not None and choice.factor in rule.reduced and choice.factor not in present:
                pairs.append((axis, rule.reduced[choice.factor]))
            elif choice.linear is not None:
                pairs.append((axis, "sum"))
        return tuple(sorted(pairs))

    def passed(index: int) -> tuple[tuple[str, str], ...]:
        return tuple(
            sorted(
                (axis, "sum")
                for axis, choice in zip(mesh.names, strategy, strict=True)
                if choice.linear is not None and index in choice.linear
            )
        )

    ins = tuple(Layout(dims(t), passed(i)) for i, t in enumerate(rule.operands))
    outs = tuple(Layout(dims(t), owed(t)) for t in rule.results)
    return ins, outs


def work_share(rule: Rule, strategy: Strategy, mesh: Mesh) -> float:
    """Share of the operator's work that one rank does: 1 over the degrees of the axes that split a factor."""
    return 1.0 / math.prod(n for (_, n), c in zip(mesh.axes, strategy, strict=True) if c.factor is not None)


def run_local(rule: Rule, local: Local) -> Any:
    """Write (or run) one rank's computation."""
    return rule.localize(local) if rule.localize is not None else local.default()


def op_call(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[TensorSpec],
    spec_of: Callable[[Any], TensorSpec | None],
) -> tuple[OpCall, list[Any]]:
    """A call as an `OpCall`, and the leaves that are its operands, in order.

    ``spec_of(leaf)`` is the spec of a tensor among the arguments (a tensor, an ``fx.Node``, ...), else None.
    ``results`` are the tensors that the operator returns, flattened; places that hold None in its output are left out.
    """
    leaves: list[Any] = []
    specs: list[TensorSpec] = []

    def replace(leaf: Any) -> Any:
        if (spec := spec_of(leaf)) is None:
            return leaf
        leaves.append(leaf)
        specs.append(spec)
        return Arg(len(leaves) - 1)

    new_args, new_kwargs = pytree.tree_map(replace, (tuple(args), dict(kwargs)))
    return OpCall(target, new_args, new_kwargs, tuple(specs), tuple(results)), leaves
