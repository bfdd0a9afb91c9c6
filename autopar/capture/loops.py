"""Loops over experts that select their tokens by value, traced to the operators of a mixture of experts.

A mixture in plain PyTorch goes through its experts and lets each compute the tokens that a router chose it for::

    for e, expert in enumerate(self.experts):
        token, k = torch.where(chosen == e)              # or nonzero, or a mask as an index
        out.index_add_(0, token, expert(x[token]) * weight[token, k, None])      # or out[token] += ...

`RoutedLoops` sees every call of such a forward. Selections by a mask whose expert is known (`choices`) and what is made
of their rows are recorded (`selected`); what is written of them waits until the tensor it is written to is read, and is
then done for all experts at once (`grouped`). So nothing is recognised by its looks: the forward itself says what
happens to the rows, whatever its spelling, and what is not understood raises `NotRouted`, a `CaptureError` to the user.

An expert that no token chose gets a gradient of zeros here, where a loop that skips it leaves None.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar._compat import pytree
from autopar.capture.choices import Choices
from autopar.capture.grouped import Write, base_of, emit, program_of
from autopar.capture.selected import ADDS, Choice, NotRouted, Places, Rows, Selection, gather, record

aten = torch.ops.aten
_NONZERO = frozenset({torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere})
_INDEX_ADD = frozenset({torch.index_add, Tensor.index_add})
_INDEX_PUT = frozenset({torch.index_put, Tensor.index_put, torch.index_put_, Tensor.index_put_})
_SELECT = frozenset({torch.index_select, Tensor.index_select})
#: What may select rows, or write some, of tensors; everything else has to do with rows only if it is given some.
_OURS = _NONZERO | _INDEX_ADD | _INDEX_PUT | _SELECT | {torch.where, Tensor.__getitem__, Tensor.__setitem__,
                                                        Tensor.index_add_}  # fmt: skip
_LOOKS = frozenset({"__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "data_ptr"})


@dataclass(eq=False)
class _Waiting:
    """What is yet to be written to a tensor, and the annotation of the module that does."""

    out: Tensor
    annotation: dict[str, Any]
    writes: list[Write] = field(default_factory=list)


class RoutedLoops(TorchFunctionMode):
    """Context in which loops over experts trace to grouped operators (see the module)."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = Choices()
        self.guard = self.choices.guard
        self.waiting: dict[int, _Waiting] = {}
        self.recording = False
        self.early: dict[int, Rows] = {}  # gathered from what something waits to be written to
        self.conditional: dict[int, tuple[Tensor, int]] = {}

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        if kind is None:
            if self.guard.open:
                what = f"a branch on whether there are any tokens, without a use of them,{self.guard.place}"
                raise NotRouted(aten.nonzero.default, what)
            self._flush()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recording or func in _OURS:
            found = self._selected(func, args, kwargs)
            if found is not NotImplemented:
                return found
        if self.waiting and getattr(func, "__name__", "") not in _LOOKS:
            self._flush_read(func, args, kwargs)
        if self.guard.number:
            self._check_condition(func, args, kwargs)
        found = self.choices.run(func, args, kwargs) if self.choices.handles(func, args) else func(*args, **kwargs)
        if self.guard.open:
            for leaf in pytree.tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self.conditional[id(leaf)] = leaf, self.guard.number
        return found

    def _selected(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call gives that selects rows, or that has places or rows among its arguments; else NotImplemented."""
        if func is torch.where and len(args) == 1 and not kwargs:
            return self._places(args[0], True, aten.nonzero.default)
        if func in _NONZERO:
            as_tuple = kwargs.get("as_tuple", len(args) > 1 and args[1])
            return self._places(args[0], bool(as_tuple), aten.nonzero.default)
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            return self._looked_up(*args)
        if func is Tensor.__setitem__ and isinstance(args[0], Tensor):
            return self._set(*args)
        if func in _SELECT and len(args) == 3 and isinstance(args[2], Places):
            return self._looked_up(args[0], (*[slice(None)] * (args[1] % args[0].dim()), args[2]))
        if func is Tensor.index_add_ or func in _INDEX_ADD:
            return self._index_add(func, args, kwargs)
        if func in _INDEX_PUT and isinstance(args[2], Rows):
            return self._index_put(func, args, kwargs)
        if any(isinstance(a, Rows) for a in pytree.tree_leaves((args, kwargs))):
            return record(func, args, kwargs)
        return NotImplemented

    # -- reading ------------------------------------------------------------------------------------------------------

    def _selection(self, mask: Any, func: Any) -> Selection | None:
        tag = self.choices.of(mask)
        if not isinstance(tag, Choice) or None in tag.labels:
            return None
        return Selection(mask, tag, func, self.guard)

    def _places(self, mask: Any, as_tuple: bool, func: Any) -> Any:
        selection = self._selection(mask, func)
        if selection is None:
            return NotImplemented
        dims = tuple(range(mask.dim()))
        return tuple(Places(selection, (d,)) for d in dims) if as_tuple else Places(selection, dims, table=True)

    def _item(self, item: Any) -> tuple[Selection, tuple[int, ...], tuple[Any, ...], int] | None:
        """An index by places, or by the mask of an expert: the selection, its dims, what else is indexed behind them,
        and how many new dims stand before them."""
        items = item if isinstance(item, tuple) else (item,)
        front = next((i for i, part in enumerate(items) if part is not None), 0)
        places = list(itertools.takewhile(lambda part: isinstance(part, Places), items[front:]))
        mask = self._mask(items[front]) if not places and len(items) > front else None
        if not places and mask is None:
            return None
        selection = mask or places[0].selection
        dims = tuple(d for part in places for d in part.dims) if mask is None else tuple(range(mask.mask.dim()))
        rest = items[front + max(len(places), 1) :]
        if any(part.selection.mask is not selection.mask for part in places) or any(part.table for part in places):
            raise NotRouted(selection.func, "an index of places of several selections")
        if any(isinstance(part, (Places, Tensor)) for part in rest):
            raise NotRouted(selection.func, "an index of places and of something else")
        return selection, dims, rest, front

    def _mask(self, mask: Any) -> Selection | None:
        is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
        return self._selection(mask, aten.index.Tensor) if is_mask else None

    def _looked_up(self, source: Tensor, item: Any) -> Any:
        found = self._item(item)
        if found is None:
            return NotImplemented
        selection, dims, rest, front = found
        rows: Any = gather(selection, source, dims, rest)
        self.recording = True
        if id(base_of(source)) in self.waiting:
            self.early[id(rows)] = rows
        for _ in range(front):
            rows = rows.unsqueeze(0)
        return rows

    # -- writing ------------------------------------------------------------------------------------------------------

    def _set(self, out: Tensor, item: Any, value: Any) -> Any:
        """``out[places] = value``, what ``out[places] += rows`` ends with too."""
        found = self._item(item) if isinstance(value, Rows) else None
        if found is None:
            return NotImplemented
        selection, dims, rest, front = found
        if rest or front or value.selection.mask is not selection.mask:
            raise NotRouted(selection.func, "rows written elsewhere than where they were selected")
        others = [a for a in value.args if not self._reads(a, out, dims)] if value.func in ADDS else []
        adds = len(value.args) == 2 and len(others) == 1 and isinstance(others[0], Rows) and not value.kwargs
        self._write(out, Write(others[0] if adds else value, dims, torch.is_grad_enabled(), put=not adds))
        return None

    def _reads(self, rows: Any, out: Tensor, dims: tuple[int, ...]) -> bool:
        """Whether ``rows`` are those that ``out`` has where they are written."""
        read = isinstance(rows, Rows) and rows.source is not None and rows.dims == dims and not rows.rest
        return read and base_of(rows.source) is base_of(out)

    def _index_add(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``out.index_add_(dim, places, rows)``, in place or not."""
        names = ("self", "dim", "index", "source")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not isinstance(given.get("source"), Rows):
            return NotImplemented
        out, index, rows = given["self"], given["index"], given["source"]
        if given["dim"] != 0 or not isinstance(index, Places) or given.keys() - set(names):
            raise NotRouted(rows.selection.func, "index_add of rows otherwise than at their places along dim 0")
        return self._write(self._written(out, func), Write(rows, index.dims, torch.is_grad_enabled()))

    def _index_put(self, func: Any, args: Any, kwargs: Any) -> Any:
        out, places, rows = args[:3]
        accumulate = kwargs.get("accumulate", len(args) > 3 and args[3])
        found = self._item(tuple(places))
        if found is None or not accumulate or found[2] or found[3]:
            raise NotRouted(rows.selection.func, "index_put of rows otherwise than added at their places")
        return self._write(self._written(out, func), Write(rows, found[1], torch.is_grad_enabled()))

    def _written(self, out: Tensor, func: Any) -> Tensor:
        """The tensor that a call writes to: its operand, or without an underscore another one, which has what waits to
        be written to the operand too."""
        if func.__name__.endswith("_"):
            return out
        made, waiting = out.clone(), self.waiting.get(id(base_of(out)))
        if waiting is not None:
            self.waiting[id(made)] = _Waiting(made, waiting.annotation, list(waiting.writes))
        return made

    def _write(self, out: Tensor, write: Write) -> Tensor:
        self.guard.open = False
        choice = write.rows.selection.choice
        sizes = tuple(write.rows.selection.mask.shape[d] for d in write.dims)
        if tuple(out.shape[: len(sizes)]) != sizes or len(set(write.dims)) != len(write.dims):
            raise NotRouted(write.rows.selection.func, "rows written elsewhere than where they were selected")
        if choice.any and not self.choices.distinct(choice.index):
            raise NotRouted(write.rows.selection.func, "tokens that may have chosen an expert several times")
        base = id(base_of(out))
        for key, other in list(self.waiting.items()):
            if key != base and any(id(base_of(leaf)) == base for w in other.writes for leaf in program_of(w).leaves):
                self._flush(key)  # it reads what is written here
        if any(id(step) in self.early for step in program_of(write).steps):
            raise NotRouted(write.rows.selection.func, "rows of a tensor to which rows are being written")
        annotation = dict(fx_traceback.current_meta.get("custom") or {})
        waiting = self.waiting.setdefault(base, _Waiting(out, annotation))
        if waiting.out is not out and waiting.out.shape != out.shape:
            self._flush()
            waiting = self.waiting.setdefault(base, _Waiting(out, annotation))
        waiting.writes.append(write)
        return out

    def _flush_read(self, func: Any, args: Any, kwargs: Any) -> None:
        """Write what waits for a tensor that a call reads, and all of it before a call that changes a tensor."""
        name = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__":
            self._flush()
            return
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(base_of(leaf)) in self.waiting:
                self._flush(id(base_of(leaf)))

    def _flush(self, base: int | None = None) -> None:
        for key in list(self.waiting) if base is None else [base]:
            waiting = self.waiting.pop(key)
            with fx_traceback.annotate(waiting.annotation) if waiting.annotation else contextlib.nullcontext():
                emit(waiting.out, waiting.writes)

    def _check_condition(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise NotRouted where a forward changes something, or reads what it made, under a condition that it was told
        is met (`Guard`)."""
        name = getattr(func, "__name__", "")
        if self.guard.open and name.endswith("_") and not name.endswith("__"):
            raise NotRouted(aten.nonzero.default, f"{name} where an expert has tokens, besides what becomes of them")
        for leaf in pytree.tree_leaves((args, kwargs)):
            made = self.conditional.get(id(leaf))
            if made is not None and made[0] is leaf and not (self.guard.open and made[1] == self.guard.number):
                raise NotRouted(aten.nonzero.default, "a value that is made only where an expert has tokens")
