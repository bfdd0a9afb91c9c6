"""Rows that a forward selects by value, as a hand-written mixture of experts does: recorded, and not computed.

``x[torch.where(chosen == e)[0]]`` has as many rows as a router happens to send to an expert, so no graph of fixed
shapes has it. Here such a selection, its places and what is made of its rows are objects in the place of tensors, which
remember what was asked of them. `loops` makes grouped operators of all experts from what was recorded of each. How many
rows there are is never known: they are taken to be some, since rows that do not exist add nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar._compat import TorchDispatchMode, pytree, without_modes

aten = torch.ops.aten

_HERE = str(Path(__file__).parent)
#: As many rows a selection is taken to have while shapes are followed: no dim of a model has this prime as its size.
ROWS = 1_000_003
_LAST = {aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.cat.default: 1, aten.slice.Tensor: 1,
         aten.glu.default: 1}  # fmt: skip
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
          aten.squeeze.dim, aten.alias.default, aten.detach.default, aten.clone.default}  # fmt: skip
LINEAR = frozenset({F.linear})
MATMUL = frozenset({torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__})
CASTS = frozenset({Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16})
MULTIPLIES = frozenset({torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply})
ADDS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_})


class NotRouted(Exception):
    """Something is done to selected rows that is not understood; ``func`` is the operator that selected them."""

    def __init__(self, func: Any, what: str) -> None:
        super().__init__(what)
        self.func = func


@dataclass(eq=False)
class Guard:
    """Whether what runs is to run only if an expert has rows (``open``), since a forward was told that there are some,
    until it writes the rows: whatever else it makes in between, that is read later, is `NotRouted`. ``number`` counts
    them, ``place`` is the line that asked."""

    open: bool = False
    number: int = 0
    place: str = ""

    def answer(self, found: bool) -> bool:
        """Tell a forward that asks for a condition."""
        if not self.open:
            frames = reversed(traceback.extract_stack(limit=8))
            asks = next((f for f in frames if "/torch/" not in f.filename and _HERE not in f.filename), None)
            self.place = f" at {asks.filename}:{asks.lineno}: {asks.line}" if asks else ""
        self.number += not self.open
        self.open = True
        return found


class Some:
    """A number of rows that is not known: some. It compares with zero, and is the rows' size in views of them."""

    def __init__(self, func: Any, guard: Guard) -> None:
        self._func, self._guard = func, guard

    def item(self) -> Some:
        """Itself."""
        return self

    def __bool__(self) -> bool:
        return self._guard.answer(True)

    def _with_zero(self, other: object, found: bool) -> bool:
        if type(other) is not int or other != 0:
            raise NotRouted(self._func, f"the number of selected rows is compared with {other}")
        return self._guard.answer(found)

    def __eq__(self, other: object) -> bool:
        return self is other or self._with_zero(other, False)

    def __ne__(self, other: object) -> bool:
        return self is not other and self._with_zero(other, True)

    def __gt__(self, other: object) -> bool:
        return self._with_zero(other, True)

    def __le__(self, other: object) -> bool:
        return self._with_zero(other, False)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Choice:
    """What a mask says: that ``index`` is ``expert``. ``labels`` gives for every dim of the mask that of the index;
    the last dim of the index has the choices of one token, which ``any`` of the mask has joined."""

    index: Tensor
    expert: int
    labels: tuple[int, ...]
    any: bool = False


@dataclass(frozen=True, eq=False)
class Selection:
    """The true places of ``mask``, found by the operator ``func``."""

    mask: Tensor
    choice: Choice
    func: Any
    guard: Guard

    @property
    def some(self) -> Some:
        """How many there are."""
        return Some(self.func, self.guard)


@dataclass(frozen=True, eq=False)
class Places:
    """Where a selection is along ``dims`` of its mask: [N] for a single one, [N, len(dims)] with ``table``."""

    selection: Selection
    dims: tuple[int, ...]
    table: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.selection.some, len(self.dims)) if self.table else (self.selection.some,)

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Some:
        """Some."""
        return self.selection.some

    nelement = numel

    def __len__(self) -> int:
        raise NotRouted(self.selection.func, "len() of selected places (their numel() can be compared with 0)")

    def __iter__(self) -> Iterator[Places]:
        raise NotRouted(self.selection.func, "a loop over selected places")

    def _flat(self, *_: Any) -> Places:
        if len(self.dims) > 1:
            raise NotRouted(self.selection.func, "places in several dims as one")
        return Places(self.selection, self.dims)

    squeeze = flatten = view = reshape = _flat

    def unbind(self, dim: int = 0) -> tuple[Places, ...]:
        """The places along every dim."""
        if not self.table or dim not in (1, -1):
            raise NotRouted(self.selection.func, "a loop over selected places")
        return tuple(Places(self.selection, (d,)) for d in self.dims)

    def t(self) -> tuple[Places, ...]:
        """The places along every dim, which is all that a transposed table is good for."""
        return self.unbind(1)

    def __getitem__(self, item: Any) -> Places:
        if self.table and isinstance(item, tuple) and len(item) == 2 and item[0] == slice(None):
            return Places(self.selection, (self.dims[item[1]],))
        raise NotRouted(self.selection.func, "a part of selected places")

    def __getattr__(self, name: str) -> Any:
        raise NotRouted(self.selection.func, f"{name} of selected places")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Only `loops` knows what to do with places."""
        place = next(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Places))
        raise NotRouted(place.selection.func, f"{getattr(func, '__name__', func)} of selected places")


@dataclass(frozen=True, eq=False)
class Rows:
    """A value with one row for every place of a selection, as it was made: gathered (``func`` None) from ``source``,
    indexed by ``rest`` besides the places along ``dims``, or by ``func``, of whose results it is number ``item``.
    ``like`` is a meta tensor of its shape, with `ROWS` rows. ``scalar``: one number a row, whatever its shape."""

    selection: Selection
    like: Tensor
    scalar: bool
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    item: int | None = None
    source: Tensor | None = None
    dims: tuple[int, ...] = ()
    rest: tuple[Any, ...] = ()
    views: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.selection.some if n == ROWS else n for n in self.like.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.source is None else self.source.device

    @property
    def ndim(self) -> int:
        return self.like.dim()

    def dim(self) -> int:
        """As of a tensor."""
        return self.like.dim()

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Some:
        """Some."""
        return self.selection.some

    def __len__(self) -> int:
        raise NotRouted(self.selection.func, "len() of selected rows")

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if not callable(method):
            raise NotRouted(self.selection.func, f"{name} of selected rows")
        return lambda *args, **kwargs: record(method, (self, *args), kwargs)

    def __getitem__(self, item: Any) -> Any:
        return record(Tensor.__getitem__, (self, item), {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return record(func, args, kwargs or {})


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def apply(self: Rows, *args: Any) -> Any:
        return record(method, (self, *args), {})

    return apply


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    for _prefix in ("", "r", "i"):
        if hasattr(Tensor, f"__{_prefix}{_name}__"):
            setattr(Rows, f"__{_prefix}{_name}__", _operator(f"__{_prefix}{_name}__"))
setattr(Rows, "__neg__", _operator("__neg__"))  # noqa: B010


class _Seen(TorchDispatchMode):
    """Which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def _as_meta(value: Any) -> Any:
    if isinstance(value, Rows):
        return value.like
    if isinstance(value, Some):
        return ROWS
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _row_by_row(call: tuple[Any, tuple[Any, ...]]) -> bool:
    """Whether an operator treats every row by itself, in a way that rows of experts can follow (`routed`)."""
    func, args = call
    if func in _LAST:
        place, first = _LAST[func], args[0][0] if func is aten.cat.default else args[0]
        dim = args[place] if len(args) > place else -1 if func is aten.glu.default else 0
        whole = func is aten.slice.Tensor and args[2:4] in ((None, None), (0, 2**63 - 1))
        return whole or dim % first.dim() == first.dim() - 1 > 0
    return func in _VIEWS or func is aten._to_copy.default or torch.Tag.pointwise in func.tags


def _follow(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[tuple[Any, tuple[Any, ...]]]]:
    """What ``func`` gives, on meta, and which operators it runs."""
    with without_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), _Seen() as seen:
        found = func(*pytree.tree_map(_as_meta, args), **pytree.tree_map(_as_meta, kwargs))
    return found, seen.calls


def _negative_dims(func: Any, args: Any, kwargs: Any, ndim: int) -> tuple[Any, Any]:
    """The same call, its last dim counted from the end: rows of experts have one dim more."""
    if kwargs.get("dim") == ndim - 1:
        kwargs = {**kwargs, "dim": -1}
    name = getattr(func, "__name__", "")
    place = {"chunk": 2, "split": 2, "cat": 1, "narrow": 1, "glu": 1}.get(name)
    if place is not None and len(args) > place and args[place] == ndim - 1:
        args = (*args[:place], -1, *args[place + 1 :])
    if func is Tensor.__getitem__ and isinstance(args[1], tuple) and args[1][0] == slice(None):
        args = (args[0], (..., *args[1][1:]))
    return args, kwargs


def record(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What ``func`` makes of rows. Raises NotRouted where not every row is by itself."""
    given = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Rows)]
    selection = given[0].selection
    name = getattr(func, "__name__", str(func))
    if any(rows.selection.mask is not selection.mask for rows in given):
        raise NotRouted(selection.func, f"{name} of rows that two selections made")
    args, kwargs = _negative_dims(func, tuple(args), kwargs, given[0].ndim)
    found, calls = _follow(func, args, kwargs)
    product = func in LINEAR or func in MATMUL
    if not (product and isinstance(args[0], Rows)) and not all(map(_row_by_row, calls)):
        raise NotRouted(selection.func, f"{name} of selected rows")
    views = not product and all(call[0] in _VIEWS for call in calls) and len(given) == 1
    several = isinstance(found, (tuple, list))
    made = []
    for i, like in enumerate(found if several else [found]):
        if not isinstance(like, Tensor) or list(like.shape).count(ROWS) != 1:
            raise NotRouted(selection.func, f"{name} of selected rows, which gives no rows")
        last = like.shape[-1] == given[0].like.shape[-1] or given[0].scalar
        if views and not last:
            raise NotRouted(selection.func, f"{name} of selected rows, which cuts them")
        scalar = like.numel() == ROWS and all(rows.scalar for rows in given) and not product
        item = i if several else None
        made.append(Rows(selection, like, scalar, func, tuple(args), kwargs, item, views=views))
    return tuple(made) if several else made[0]


def gather(selection: Selection, source: Tensor, dims: tuple[int, ...], rest: tuple[Any, ...]) -> Rows:
    """The rows ``source[places along dims, *rest]``, their dims in front. Raises NotRouted for other sizes."""
    sizes = tuple(selection.mask.shape[d] for d in dims)
    if tuple(source.shape[: len(dims)]) != sizes:
        raise NotRouted(selection.func, f"a look-up in a tensor of shape {list(source.shape)} of places in {sizes}")
    with without_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        index = (torch.zeros(ROWS, dtype=torch.int64, device="meta"),) * len(dims)
        like = torch.empty(source.shape, dtype=source.dtype, device="meta")[(*index, *rest)]
    return Rows(selection, like, like.numel() == ROWS, source=source, dims=dims, rest=rest)
