"""The rows that experts make one by one (`selected`), as grouped operators of all of them (`autopar.ops.experts`).

What every expert does to its rows is the same program with other weights: it is run once, on the rows of all experts,
with the weights stacked. The numbers by which rows are scaled at the end are those of `combine`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.capture.selected import ADDS, CASTS, LINEAR, MATMUL, MULTIPLIES, NotRouted, Rows
from autopar.ops.experts import combine, dispatch, group_of, grouped_bias, grouped_mm


@dataclass(frozen=True, eq=False)
class Write:
    """Rows that are added to a tensor, or with ``put`` put into it, at the places of their selection along ``dims``;
    ``grad``: whether gradients were to be taken."""

    rows: Rows
    dims: tuple[int, ...]
    grad: bool
    put: bool = False

    @property
    def expert(self) -> int:
        """Whose rows they are."""
        return self.rows.selection.choice.expert


@dataclass(frozen=True, eq=False)
class Program:
    """What made rows: ``steps`` in order, the last one is written. Two with the same ``key`` differ in ``leaves``, the
    tensors that enter, alone."""

    steps: tuple[Rows, ...]
    leaves: tuple[Tensor, ...]
    key: Any


def _plain(value: Any) -> Any:
    """An argument that is no tensor, to compare and to hash."""
    return (value.start, value.stop, value.step) if isinstance(value, slice) else repr(value)


def program_of(write: Write) -> Program:
    """The program of a write."""
    steps: list[Rows] = []
    leaves: list[Tensor] = []
    keys: list[Any] = []
    place: dict[int, int] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, Rows):
            return "rows", visit(value)
        if isinstance(value, Tensor):
            leaves.append(value)
            return "tensor", tuple(value.shape), value.dtype
        return _plain(value)

    def visit(rows: Rows) -> int:
        if id(rows) not in place:
            leaves_of, spec = pytree.tree_flatten((rows.args, rows.kwargs))
            given = tuple(map(leaf, leaves_of))
            source = leaf(rows.source) if rows.func is None else None
            keys.append((rows.func, rows.item, given, str(spec), source, rows.dims, len(rows.rest)))
            place[id(rows)] = len(steps)
            steps.append(rows)
        return place[id(rows)]

    visit(write.rows)
    choice = write.rows.selection.choice
    key = tuple(keys), write.dims, write.put, write.grad, choice.labels, choice.any
    return Program(tuple(steps), tuple(leaves), key)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements: one tensor, or like views of one."""
    if a is b:
        return True
    alike = a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return alike and base_of(a) is base_of(b) and a.dtype == b.dtype


def base_of(tensor: Tensor) -> Tensor:
    """The tensor whose view a tensor is, or itself."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor a expert as one tensor: that of which they are the parts, if they are."""
    base, n = base_of(tensors[0]), len(tensors)
    parts = base.dim() == tensors[0].dim() + 1 and base.shape == (n, *tensors[0].shape) and base.is_contiguous()
    size = math.prod(tensors[0].shape)
    if parts and all(
        base_of(t) is base and t.is_contiguous() and t.storage_offset() == base.storage_offset() + e * size
        for e, t in enumerate(tensors)
    ):
        return base
    return torch.stack(list(tensors))


@dataclass(eq=False)
class Group:
    """The writes of experts ``first``, ``first + 1``, ... of one index into ``out``, by ``programs`` of one key."""

    writes: Sequence[Write]
    programs: Sequence[Program]
    out: Tensor
    rows: dict[int, Tensor] = field(default_factory=dict)
    scalars: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps, self.first = self.programs[0].steps, self.writes[0].expert
        self.experts, self.choice = len(self.writes), self.steps[0].selection.choice
        self.dims = self.writes[0].dims  # of the mask, those of the tokens
        self.tokens = math.prod(self.out.shape[: len(self.dims)])
        starts, total = {}, 0
        for step in self.steps:
            starts[id(step)] = total
            total += sum(isinstance(a, Tensor) for a in pytree.tree_leaves((step.args, step.kwargs, step.source)))
        self.starts = starts

    def refuse(self, what: str) -> NotRouted:
        """The error for what cannot be grouped."""
        return NotRouted(self.steps[0].selection.func, what)

    @functools.cached_property
    def labels(self) -> tuple[int, ...]:
        """The dims of the index that are tokens, in order, and then the others: the choices of a token."""
        own = tuple(self.choice.labels[d] for d in self.dims)
        return (*own, *(d for d in range(self.choice.index.dim()) if d not in own))

    @functools.cached_property
    def index(self) -> Tensor:
        """[T, K]: the experts of every token, counted from the first one."""
        index = self.choice.index.long()
        if self.labels != tuple(range(index.dim())):
            index = index.permute(self.labels)
        index = index.reshape(self.tokens, -1)
        return index - self.first if self.first else index

    @functools.cached_property
    def group(self) -> int:
        """How many tokens share a declared slot of an expert."""
        return group_of(self.tokens, self.index.shape[1], self.experts)

    def leaf(self, step: Rows, place: int = 0) -> list[Tensor]:
        """The tensor number ``place`` that enters a step, of every expert."""
        return [program.leaves[self.starts[id(step)] + place] for program in self.programs]

    def emit(self) -> None:
        """Add what all experts write to ``out``, in place."""
        if any(step.source is not None and base_of(step.source) is base_of(self.out) for step in self.steps):
            raise self.refuse("rows that depend on those that they take the place of")
        last, factors = self.steps[-1], []
        while last.func is not None and (last.views or last.func in CASTS or last.func in MULTIPLIES):
            given = [arg for arg in last.args if isinstance(arg, Rows)]
            scales = [arg for arg in given if arg.scalar]
            if last.func in MULTIPLIES and len(given) == 2 and len(scales) == 1:
                factors.append(self.scalar(scales[0]))
            elif last.func in MULTIPLIES:
                break
            last = next(arg for arg in given if arg not in scales or len(given) == 1)
        rows = self.run(last)
        weights = functools.reduce(torch.mul, factors).to(rows.dtype) if factors else None
        total = combine(rows, self.index, weights, self.experts, self.group).to(self.out.dtype)
        total = total.view(self.out.shape)
        if not self.writes[0].put:
            self.out.add_(total)
            return
        if self.index.shape[1] != 1:
            raise self.refuse("rows that take the place of others, of tokens with several experts")
        hit = ((self.index >= 0) & (self.index < self.experts)).view(*self.out.shape[: len(self.dims)], 1)
        self.out.copy_(torch.where(hit, total, self.out))

    # -- numbers by row, as [T, K] ------------------------------------------------------------------------------------

    def scalar(self, rows: Rows) -> Tensor:
        """One number for every token and choice."""
        if id(rows) not in self.scalars:
            self.scalars[id(rows)] = self._scalar(rows)
        return self.scalars[id(rows)]

    def _scalar(self, rows: Rows) -> Tensor:
        if rows.func is None:
            return self._looked_up(rows)
        if rows.views:
            return self.scalar(rows.args[0])
        return rows.func(*self._substituted(rows, rows.args, self.scalar), **rows.kwargs)

    def _looked_up(self, rows: Rows) -> Tensor:
        """The numbers that are gathered, of tokens or of tokens and choices."""
        sources, same = self._sources(rows)
        shape = self.index.shape
        if rows.dims == self.dims:  # numbers of tokens
            if same:
                return sources[0].reshape(-1, 1).expand(shape)
            table = torch.stack([source.reshape(-1) for source in sources], 1)
            return table.gather(1, self.index.clamp(0, self.experts - 1))
        if not same or len(rows.dims) != self.choice.index.dim():
            raise self.refuse("numbers of some of the dims of tokens, or others for every expert")
        own = [self.choice.labels[d] for d in rows.dims]
        numbers = sources[0].reshape(sources[0].shape[: len(own)])
        return numbers.permute([own.index(d) for d in self.labels]).reshape(shape)

    def _sources(self, rows: Rows) -> tuple[list[Tensor], bool]:
        """What is looked up in, of every expert, and whether it is the same for all."""
        found, rests = self.leaf(rows), [p.steps[self.steps.index(rows)].rest for p in self.programs]
        same = all(same_tensor(found[0], other) for other in found) and all(rest == rests[0] for rest in rests)
        whole = (slice(None),) * len(rows.dims)
        pairs = zip(found[: 1 if same else None], rests, strict=False)
        return [source[(*whole, *rest)] if rest else source for source, rest in pairs], same

    # -- rows of all experts, declared as [E, T / group, H] -----------------------------------------------------------

    def run(self, rows: Rows) -> Tensor:
        """The rows of all experts."""
        if id(rows) not in self.rows:
            self.rows[id(rows)] = self._run(rows)
        return self.rows[id(rows)]

    def _run(self, rows: Rows) -> Tensor:
        if rows.func is None:
            return self._dispatched(rows)
        if rows.views:
            return self.run(next(a for a in pytree.tree_leaves((rows.args, rows.kwargs)) if isinstance(a, Rows)))
        if rows.func in LINEAR or rows.func in MATMUL:
            return self._product(rows)
        if rows.func in ADDS and any(isinstance(arg, Tensor) for arg in rows.args):
            return self._added(rows)
        found = rows.func(*self._substituted(rows, rows.args, self.run), **rows.kwargs)
        return found if rows.item is None else found[rows.item]

    def _dispatched(self, rows: Rows) -> Tensor:
        (source, *_), same = self._sources(rows)
        if not same or rows.dims != self.dims or rows.scalar:
            raise self.refuse("rows that are looked up otherwise than they are written")
        for known in self.steps:  # gathered again and again, and dispatched once
            alike = known.func is None and (known.dims, known.rest) == (rows.dims, rows.rest)
            if alike and id(known) in self.rows and same_tensor(self.leaf(known)[0], self.leaf(rows)[0]):
                return self.rows[id(known)]
        return dispatch(source.reshape(self.tokens, -1), self.index, None, self.experts, self.group)

    def _product(self, rows: Rows) -> Tensor:
        given = [*rows.args, *(rows.kwargs.get(name) for name in ("weight", "bias") if name in rows.kwargs)]
        if not isinstance(given[1], Tensor) or given[1].dim() != 2:
            raise self.refuse("a product of rows with what is no matrix")
        weight = stacked(self.leaf(rows))
        if rows.func in LINEAR:
            weight = weight.transpose(1, 2)
        found = grouped_mm(self.run(given[0]), weight, self.index)
        biased = len(given) > 2 and given[2] is not None
        return grouped_bias(found, stacked(self.leaf(rows, 1)), self.index) if biased else found

    def _added(self, rows: Rows) -> Tensor:
        """Rows and a vector of every expert."""
        if rows.kwargs or len(rows.args) != 2 or next(a for a in rows.args if isinstance(a, Tensor)).dim() != 1:
            raise self.refuse("a sum of rows with a tensor that is no vector")
        own = next(arg for arg in rows.args if isinstance(arg, Rows))
        return grouped_bias(self.run(own), stacked(self.leaf(rows)), self.index)

    def _substituted(self, rows: Rows, args: Any, of: Callable[[Rows], Tensor]) -> Any:
        """Arguments with the rows of all experts in the place of those of one; tensors must be the same for all."""
        count = 0

        def swap(value: Any) -> Any:
            nonlocal count
            if isinstance(value, Rows):
                if of == self.run and value.scalar:
                    raise self.refuse("rows that are scaled before the last step of their expert")
                return of(value)
            if isinstance(value, Tensor):
                found = self.leaf(rows, count)
                count += 1
                same = all(same_tensor(found[0], other) for other in found)
                if not same or value.numel() not in (1, value.shape[-1]):
                    raise self.refuse(f"{getattr(rows.func, '__name__', rows.func)} with a tensor of every expert")
            return value

        return pytree.tree_map(swap, args)


def emit(out: Tensor, writes: Sequence[Write]) -> None:
    """Do all ``writes`` into ``out``: those of experts in a row, by programs of one key, together."""
    programs = [program_of(write) for write in writes]
    pairs = sorted(zip(writes, programs, strict=True), key=lambda pair: pair[0].expert)
    while pairs:
        own = [pairs.pop(0)]
        index = own[0][0].rows.selection.choice.index
        for pair in list(pairs):
            choice = pair[0].rows.selection.choice
            if choice.expert == own[-1][0].expert + 1 and choice.index is index and pair[1].key == own[0][1].key:
                own.append(pair)
                pairs.remove(pair)
        with torch.set_grad_enabled(own[0][0].grad):
            Group([w for w, _ in own], [p for _, p in own], out).emit()
