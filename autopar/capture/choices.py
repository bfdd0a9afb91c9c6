"""Which expert a mask stands for: followed from where indices are compared with a number, or made one-hot.

A mask that a forward selects rows by is a tensor like any other; what makes it the mask of an expert is where it comes
from. `Choices` remembers it of tensors while a forward runs, and answers in their place where a loop over experts asks
whether an expert has any tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar._compat import pytree, without_modes
from autopar.capture.selected import Choice, Guard, Some

aten = torch.ops.aten
_PRIMES = (2, 3, 5, 7, 11, 13)
#: The label of a dim that stands for the experts, and of one that stands for nothing (of size 1).
_EXPERTS, _NONE = -1, None


@dataclass(frozen=True)
class OneHot:
    """A tensor that is not 0 for at most one of ``experts`` along the dim labelled -1; its other dims are labelled by
    those of ``index()``, which says for which (``experts`` where for none)."""

    index: Callable[[], Tensor]
    experts: int
    labels: tuple[int | None, ...]


@dataclass(frozen=True)
class Counts:
    """How many tokens each of ``experts`` has, or whether any; of a single one with None. ``found`` is what it is as a
    condition: whether there are some."""

    experts: int | None
    found: bool = True


class Number(int):
    """The number of an expert, as a tensor of one element has it."""

    def __getitem__(self, item: Any) -> int:
        return int(self)

    def item(self) -> int:
        """A plain number."""
        return int(self)

    squeeze = item


class Numbers(list[Number]):
    """What ``nonzero`` gives of the experts that have tokens: all, as those without add nothing."""

    def __init__(self, experts: int, guard: Guard) -> None:
        super().__init__(map(Number, range(experts)))
        self._guard = guard

    def __iter__(self) -> Iterator[Number]:
        for number in super().__iter__():
            self._guard.answer(True)
            yield number

    def _flat(self, *_: Any) -> Numbers:
        return self

    squeeze = flatten = view = reshape = _flat

    tolist = squeeze


class Loads:
    """How many tokens experts have, ``counts`` [E], where it may be asked for as a list: of numbers not known."""

    def __init__(self, counts: Tensor, some: Some) -> None:
        self._counts, self._some = counts, some

    def tolist(self) -> list[Some]:
        """Some, for each."""
        return [self._some] * self._counts.shape[0]

    def __getitem__(self, item: Any) -> Any:
        return self._counts[item]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._counts, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda a: a._counts if isinstance(a, Loads) else a, (args, kwargs or {}))
        return func(*args, **kwargs)


Tag = OneHot | Choice | Counts

_PERMUTE = {torch.permute, Tensor.permute, torch.transpose, Tensor.transpose, Tensor.t, torch.t, torch.movedim,
            Tensor.movedim, Tensor.squeeze, torch.squeeze, Tensor.contiguous}  # fmt: skip
_TO_MASK = {Tensor.bool, Tensor.to, Tensor.int, Tensor.long, Tensor.float, Tensor.type}
_COMPARE = {Tensor.gt: 0, torch.gt: 0, Tensor.__gt__: 0, torch.greater: 0, Tensor.ne: 0, torch.ne: 0, Tensor.__ne__: 0,
            Tensor.eq: 1, torch.eq: 1, Tensor.__eq__: 1}  # fmt: skip
_EQUAL = {Tensor.eq, torch.eq, Tensor.__eq__}
#: What comparing a number of tokens, of which there are some, with 0 gives.
_WITH_ZERO = {**{f: True for f, with_what in _COMPARE.items() if with_what == 0}, Tensor.eq: False, torch.eq: False,
              Tensor.__eq__: False, Tensor.le: False, Tensor.__le__: False}  # fmt: skip
_REDUCE = {Tensor.any, torch.any, Tensor.sum, torch.sum, torch.count_nonzero, Tensor.count_nonzero}
_VIEW = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}
_MULTIPLY = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_TOPK = {torch.topk, Tensor.topk}
_NONZERO = {torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere}
_INDICES = (torch.int64, torch.int32)


class Choices:
    """What is known of the tensors of a running forward."""

    def __init__(self) -> None:
        self.guard = Guard()
        self._known: dict[int, tuple[Tensor, Tag]] = {}
        self._distinct: dict[int, Tensor] = {}
        self._viewed: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Any) -> Tag | None:
        """What is known of a tensor."""
        found = self._known.get(id(tensor))
        return found[1] if found is not None and found[0] is tensor else None

    def note(self, tensor: Tensor, tag: Tag | None) -> Tensor:
        """Remember what is known of a tensor, which is returned."""
        if tag is not None:
            self._known[id(tensor)] = tensor, tag
        return tensor

    def distinct(self, index: Tensor) -> bool:
        """Whether a token chooses an expert once at most: the index is what ``topk`` found, or has one choice."""
        base = index._base if index._is_view() and index._base is not None else index
        return index.shape[-1] == 1 or (id(base) in self._distinct and index.shape[-1] == base.shape[-1])

    def handles(self, func: Any, args: Any) -> bool:
        """Whether `run` has something to say about a call."""
        if func in _EQUAL or func in _TOPK or func in (F.one_hot, torch.bincount, Tensor.bincount):
            return True
        return bool(self._known) and any(id(arg) in self._known for arg in args[:2])

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What ``func`` gives: itself, with a note of what is known of it, or where that is enough for an answer, the
        answer."""
        if func in (torch.bincount, Tensor.bincount) and (kwargs.get("minlength") or len(args) > 2):
            experts = kwargs["minlength"] if "minlength" in kwargs else args[2]
            counts = self.note(F.one_hot(args[0].long(), experts).sum(0), Counts(experts))
            return Loads(counts, Some(aten.nonzero.default, self.guard))
        if func in _TOPK:
            found = func(*args, **kwargs)
            self._distinct[id(found[1])] = found[1]
            return found
        tag = next((t for arg in args[:2] if (t := self.of(arg)) is not None), None)
        if isinstance(tag, Counts):
            return self._counted(tag, func, args, kwargs)
        if isinstance(tag, OneHot) and func is Tensor.__getitem__:
            args = (args[0], _without_numbers(args[1]))
        found = func(*args, **kwargs)
        return self.note(found, self._tag(tag, found, func, args, kwargs)) if isinstance(found, Tensor) else found

    def _tag(self, tag: Tag | None, found: Tensor, func: Any, args: Any, kwargs: Any) -> Tag | None:
        """What is known of ``found``, which ``func`` made of a tensor with ``tag``."""
        if func is F.one_hot:
            experts = found.shape[-1]
            return OneHot(lambda: args[0], experts, (*range(found.dim() - 1), _EXPERTS))
        if tag is None or isinstance(tag, Counts):
            plain = func in _EQUAL and type(args[1]) in (int, Number) and args[0].dtype in _INDICES
            return Choice(args[0], int(args[1]), tuple(range(args[0].dim()))) if plain else None
        if func in _PERMUTE:
            return _relabelled(tag, found, func, args, kwargs)
        if func in _TO_MASK or (func in _COMPARE and type(args[1]) is int and args[1] == _COMPARE[func]):
            return tag
        if isinstance(tag, OneHot):
            return self._of_one_hot(tag, found, func, args, kwargs)
        if func in _VIEW:
            return self._of_view(tag, found)
        return _reduced(tag, found, func, args, kwargs)

    def _of_view(self, tag: Choice, found: Tensor) -> Choice | None:
        """The tag of a mask in another shape: its index in that shape too, the same tensor for all experts."""
        kept = tag.index.dim() - len(tag.labels)
        if tag.labels != tuple(range(len(tag.labels))) or kept > 1:
            return None
        shape = (*found.shape, *tag.index.shape[tag.index.dim() - kept :])
        key = id(tag.index), tuple(shape)
        if key not in self._viewed:
            self._viewed[key] = tag.index, tag.index.reshape(shape)
        return Choice(self._viewed[key][1], tag.expert, tuple(range(found.dim())), tag.any)

    def _of_one_hot(self, tag: OneHot, found: Tensor, func: Any, args: Any, kwargs: Any) -> Tag | None:
        """The tag of what is made of a one-hot tensor."""
        if func is Tensor.__getitem__:
            return _picked(tag, args[1])
        masked = func in _MULTIPLY and any(isinstance(a, Tensor) and a.dtype == torch.bool for a in args[:2])
        same = masked and found.shape == args[0].shape and self.of(args[0]) is tag
        viewed = func in _VIEW and tag.labels[-1] == _EXPERTS and found.shape[-1] == tag.experts
        if (same and tag.labels[-1] == _EXPERTS) or viewed:  # an index of its own
            labels = (*range(found.dim() - 1), _EXPERTS)
            return OneHot(functools.cache(lambda: _index_of(found, tag.experts)), tag.experts, labels)
        if func in _REDUCE and found.dim() == 1 and found.shape[0] == tag.experts and len(tag.labels) > 1:
            over = _dims(args, kwargs, len(tag.labels))
            kept = [label for d, label in enumerate(tag.labels) if d not in over]
            return Counts(tag.experts) if kept == [_EXPERTS] else None
        return None

    def _counted(self, tag: Counts, func: Any, args: Any, kwargs: Any) -> Any:
        """What a loop is told of how many tokens experts have."""
        some = Some(aten.nonzero.default, self.guard)
        if tag.experts is None and func is Tensor.__bool__:
            return self.guard.answer(tag.found)
        if tag.experts is None and func is Tensor.item:
            return some
        if tag.experts is not None and func in _NONZERO:
            return Numbers(tag.experts, self.guard)
        found = func(*args, **kwargs)
        return self.note(found, _count(tag, found, func, args)) if isinstance(found, Tensor) else found


def _count(tag: Counts, found: Tensor, func: Any, args: Any) -> Counts | None:
    """What is known of what is made of numbers of tokens."""
    if func is Tensor.__getitem__ and found.dim() == 0:
        return Counts(None)
    if func in _WITH_ZERO and type(args[1]) is int and args[1] == 0:
        return Counts(tag.experts, tag.found == _WITH_ZERO[func]) if tag.experts is None or _WITH_ZERO[func] else None
    return tag if func in _TO_MASK or func in _VIEW or func in (Tensor.cpu, Tensor.detach) else None


def _without_numbers(item: Any) -> Any:
    """An index in which the numbers of experts are lists of one, as tensors of one element are."""
    items = item if isinstance(item, tuple) else (item,)
    changed = tuple([int(i)] if isinstance(i, Number) else i for i in items)
    return changed if isinstance(item, tuple) else changed[0]


def _index_of(hot: Tensor, experts: int) -> Tensor:
    """The index of a tensor that is not 0 once at most along its last dim."""
    hot = hot.ne(0).long()
    return torch.where(hot.sum(-1) > 0, hot.argmax(-1), experts)


def _dims(args: Any, kwargs: Any, ndim: int) -> tuple[int, ...]:
    """The dims over which a reduction goes."""
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    every = tuple(range(ndim))
    return every if dims is None else tuple(d % ndim for d in (dims if isinstance(dims, (tuple, list)) else (dims,)))


def _relabelled(tag: OneHot | Choice, found: Tensor, func: Any, args: Any, kwargs: Any) -> Tag | None:
    """The tag with its labels in another order, as ``func`` leaves dims."""
    sizes = [1 if label is _NONE else _PRIMES[d] for d, label in enumerate(tag.labels)]
    with without_modes(), torch._C.DisableTorchFunction():
        shape = func(torch.empty(sizes, device="meta"), *args[1:], **kwargs).shape
    if len(shape) != found.dim():
        return None
    labels = tuple(_NONE if n == 1 else tag.labels[_PRIMES.index(n)] for n in shape)
    return type(tag)(**{**vars(tag), "labels": labels})


def _picked(tag: OneHot, item: Any) -> Choice | None:
    """The mask of one expert of a one-hot tensor."""
    items = list(item) if isinstance(item, tuple) else [item]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(tag.labels) - len(items) + 1)
    items += [slice(None)] * (len(tag.labels) - len(items))
    at = tag.labels.index(_EXPERTS)
    own, others = items[at], items[:at] + items[at + 1 :]
    if len(items) != len(tag.labels) or any(i != slice(None) for i in others):
        return None
    kept = tag.labels[:at] + ((_NONE,) if isinstance(own, list) else ()) + tag.labels[at + 1 :]
    expert = own[0] if isinstance(own, list) and len(own) == 1 else own
    return Choice(tag.index(), int(expert), kept) if isinstance(expert, int) else None  # type: ignore[arg-type]


def _reduced(tag: Choice, found: Tensor, func: Any, args: Any, kwargs: Any) -> Tag | None:
    """The tag of whether a mask is true anywhere, along a dim or at all."""
    if func not in _REDUCE:
        return None
    if found.dim() == 0:
        return Counts(None)
    over = _dims(args, kwargs, len(tag.labels))
    labels = tuple(label for d, label in enumerate(tag.labels) if d not in over)
    return Choice(tag.index, tag.expert, labels, any=True) if len(labels) == found.dim() else None
