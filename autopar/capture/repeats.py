"""Repeated blocks of a module, most of which are traced as one marker operator each instead of node by node.

A container of alike blocks is found by structure: class, parameters, buffers and plain attributes of every submodule.
Of a run of blocks that repeat with some period, the first block, two periods and the last blocks are traced as they
are; the blocks between them become the operator ``autopar::block`` forward and ``autopar::block_backward`` backward.
The model's own forward still calls every block, at its own place and with its own arguments, so whatever it does
between blocks is in the graph. `replicate` then puts the nodes of the second period in the place of the markers.

Anything doubtful raises `Differs`, and the model is traced whole.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.ops.dropout import active_dropout

#: Blocks of a run that are traced besides the two periods: the first one and the last one, which have other neighbours.
_ENDS = 2
#: Kept by ``nn.Module`` itself, and compared tensor by tensor and module by module.
_HELD = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


class Differs(Exception):
    """Blocks are not, or may not be, alike: the model has to be traced whole."""


@dataclass(frozen=True)
class Repeat:
    """Blocks ``first`` to ``first + count - 1`` of the container ``path`` are markers in the trace; the ``period``
    blocks before them stand for them, and the ``period`` blocks before those prove it. ``streams`` is filled by the
    trace: the number of the first random operator of every block; ``parameters`` are those of the markers, by their
    names in the model, which the trace does without."""

    path: str
    period: int
    first: int
    count: int
    streams: dict[int, int] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def markers(self) -> range:
        """The blocks that are traced as markers."""
        return range(self.first, self.first + self.count)

    def template(self, index: int) -> int:
        """The block whose nodes stand for those of marker ``index``."""
        return self.first - self.period + (index - self.first) % self.period

    def block(self, index: int) -> str:
        """Path of a block."""
        return f"{self.path}.{index}".removeprefix(".")


@torch.library.custom_op("autopar::block", mutates_args=())
def marker(x: Tensor, index: int) -> Tensor:
    """Stands for block ``index`` in a trace: from what flows into it to what flows out, of the same shape and dtype."""
    raise NotImplementedError("a marker is replaced by the nodes of a block and never runs")


@torch.library.custom_op("autopar::block_backward", mutates_args=())
def marker_backward(grad: Tensor, index: int) -> Tensor:
    """Stands for the backward of block ``index``."""
    raise NotImplementedError("a marker is replaced by the nodes of a block and never runs")


@marker.register_fake
@marker_backward.register_fake
def _(x: Tensor, index: int) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.index = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return marker_backward(grad, ctx.index), None


marker.register_autograd(_backward, setup_context=_setup_context)


# -- which blocks are alike -------------------------------------------------------------------------------------------


def _tensor_form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)


#: Attributes that count blocks: submodule and name.
_Numbered = set[tuple[str, str]]


class _Comparison:
    """Compares block i with block i + ``step``; collects in ``numbered`` the attributes that count the blocks."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.numbered: _Numbered = set()

    def blocks(self, a: nn.Module, b: nn.Module) -> bool:
        """Whether two blocks are the same function of their tensors, as far as attributes tell."""
        left, right = list(a.named_modules()), list(b.named_modules())
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(n == m and self._modules(n, x, y) for (n, x), (m, y) in pairs)

    def _modules(self, path: str, a: nn.Module, b: nn.Module) -> bool:
        if type(a) is not type(b) or list(a._modules) != list(b._modules):
            return False
        left, right = vars(a), vars(b)
        if left.keys() != right.keys():
            return False
        held = all(self._values(left[name], right[name], a, b) for name in ("_parameters", "_buffers"))
        return held and all(self._attribute(path, name, a, b) for name in left if name not in _HELD)

    def _attribute(self, path: str, name: str, a: nn.Module, b: nn.Module) -> bool:
        x, y = vars(a)[name], vars(b)[name]
        if type(x) is int and type(y) is int and y - x == self.step:
            self.numbered.add((path, name))
            return True
        return self._values(x, y, a, b)

    def _values(self, x: Any, y: Any, a: nn.Module, b: nn.Module) -> bool:
        """Whether two attributes, of modules ``a`` and ``b``, are alike; False for kinds that are not understood."""
        if type(x) is not type(y):
            return False
        if isinstance(x, Tensor):
            return _tensor_form(x) == _tensor_form(y)
        if x is y:
            return True
        if isinstance(x, _PLAIN):
            return bool(x == y)
        if isinstance(x, types.MethodType):
            return x.__func__ is y.__func__ and x.__self__ is a and y.__self__ is b
        if isinstance(x, functools.partial):
            return x.func is y.func and self._values((x.args, x.keywords), (y.args, y.keywords), a, b)
        if isinstance(x, (list, tuple)):
            return len(x) == len(y) and all(self._values(v, w, a, b) for v, w in zip(x, y, strict=True))
        if isinstance(x, dict):
            return list(x) == list(y) and all(self._values(x[k], y[k], a, b) for k in x)
        return isinstance(x, (set, frozenset)) and x == y and all(isinstance(v, _PLAIN) for v in x)


def _run(blocks: Sequence[nn.Module], period: int) -> tuple[int, int, _Numbered]:
    """First block and length of the longest run in which every block is like the one ``period`` later, and the
    attributes that count its blocks."""
    best: tuple[int, int, _Numbered] = (0, 0, set())
    start = 0
    numbered: _Numbered = set()
    for i, (a, b) in enumerate(zip(blocks, blocks[period:], strict=False)):
        comparison = _Comparison(period)
        if not comparison.blocks(a, b):
            start, numbered = i + 1, set()
            continue
        numbered = numbered | comparison.numbered
        if i + 1 + period - start > best[1]:
            best = start, i + 1 + period - start, numbered
    return best


def _owned_alone(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Says of a block whether its modules and tensors belong to it alone, at one place each."""
    modules = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    tensors = Counter(id(t) for _, t in held)

    def alone(block: nn.Module) -> bool:
        mine = all(modules[id(m)] == 1 for m in block.modules())
        return mine and all(tensors[id(t)] == 1 for t in (*block.parameters(), *block.buffers()))

    return alone


def _containers(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """The containers of repeated blocks that lie in no other block."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(p.isdigit() for p in path.split(".")):
            yield path, list(module)


def _find(path: str, blocks: list[nn.Module]) -> tuple[Repeat, _Numbered] | None:
    """The run of ``blocks`` that saves most, if any saves something."""
    best: tuple[Repeat, _Numbered] | None = None
    for period in range(1, (len(blocks) - _ENDS) // 3 + 1):
        if best is not None and best[0].count >= len(blocks) - _ENDS - 2 * period:
            break
        start, length, numbered = _run(blocks, period)
        count = max(0, length - _ENDS - 2 * period) // period * period
        if count and (best is None or count > best[0].count):
            best = Repeat(path, period, start + 1 + 2 * period, count), numbered
    return best


# -- markers ----------------------------------------------------------------------------------------------------------


class _Number:
    """In the place of an attribute that counts blocks. A forward that calculates with it, branches on it or looks
    something up by it fails, since its blocks may differ where none is traced."""

    def __eq__(self, other: object) -> bool:
        raise Differs("the forward looks at the number of its block")

    def __bool__(self) -> bool:
        raise Differs("the forward looks at the number of its block")

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class _Call:
    """One call of a block: leaves and structure of its arguments and of its result, random operators drawn."""

    leaves: list[Any]
    spec: Any
    result: list[Any]
    result_spec: Any
    streams: int


def _drawn() -> int:
    mode = active_dropout()
    return 0 if mode is None else mode.streams


def _equal(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Tensor) and type(a) is type(b) and bool(a == b))


def _flows(call: _Call) -> int:
    """Where among the leaves of a call's result its one tensor is."""
    places = [k for k, leaf in enumerate(call.result) if isinstance(leaf, Tensor)]
    if len(places) != 1:
        raise Differs(f"a block returns {len(places)} tensors")
    return places[0]


def _record(repeat: Repeat, index: int, block: nn.Module, calls: dict[int, _Call]) -> None:
    """Let a block that is traced note how it is called."""
    original = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        before = repeat.streams[index] = _drawn()
        result = original(*args, **kwargs)
        calls[index] = _Call(
            *pytree.tree_flatten((args, kwargs)), *pytree.tree_flatten(result), streams=_drawn() - before
        )
        return result

    block.forward = forward


def _mark(repeat: Repeat, index: int, block: nn.Module, calls: dict[int, _Call]) -> None:
    """Let a block be one marker. It must be called as its template is, but for the one tensor that flows through."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = calls[repeat.template(index)]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != call.spec:
            raise Differs("blocks are called differently")
        changed = [k for k, leaf in enumerate(leaves) if not _equal(leaf, call.leaves[k])]
        if len(changed) != 1 or not isinstance(leaves[changed[0]], Tensor):
            raise Differs("blocks are called with different arguments")
        x, place, counter = leaves[changed[0]], _flows(call), active_dropout()
        if not _tensor_form(x) == _tensor_form(call.leaves[changed[0]]) == _tensor_form(call.result[place]):
            raise Differs("a block changes the shape or dtype of what flows through")
        repeat.streams[index] = _drawn()
        if counter is not None:
            counter.streams += call.streams
        result = [*call.result[:place], marker(x, index), *call.result[place + 1 :]]
        return pytree.tree_unflatten(result, call.result_spec)

    block.forward = forward
    repeat.parameters.update(block.named_parameters(prefix=repeat.block(index)))
    for module in block.modules():  # to carry hundreds of unused inputs through a trace takes as long as some blocks
        module._parameters.update(dict.fromkeys(module._parameters))


def mark_repeats(model: nn.Module) -> tuple[Repeat, ...]:
    """Turn blocks of ``model`` (a copy made for tracing) into markers, wherever four or more are alike."""
    alone = _owned_alone(model)
    found = []
    for path, blocks in _containers(model):
        best = _find(path, blocks)
        if best is None:
            continue
        repeat, numbered = best
        run = range(repeat.first - 2 * repeat.period - 1, repeat.first + repeat.count + 1)
        if not all(alone(blocks[i]) for i in run):
            continue
        calls: dict[int, _Call] = {}
        for i in run:
            for at, name in numbered:
                setattr(blocks[i].get_submodule(at), name, _Number())
            (_mark if i in repeat.markers else _record)(repeat, i, blocks[i], calls)
        found.append(repeat)
    return tuple(found)
