"""Repeated blocks of a module, most of which are traced as one marker operator together instead of node by node.

A container of alike blocks is found by structure: class, parameters, buffers and plain attributes of every submodule.
Of a run of blocks that repeat with some period, the first block, two periods and the last blocks are traced as they
are; the blocks between them become one operator, ``autopar::blocks`` forward and ``autopar::blocks_backward`` backward.
The model's own forward still calls every block, at its own place and with its own arguments: each must be called with
what the one before returned, and every block's result is a result of the operator, so whatever else happens to it is in
the graph. `replicate` then puts the nodes of the second period in the place of the markers.

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
from autopar.ops.draws import active_draws

#: Blocks of a run that are traced besides the two periods: the first one and the last one, which have other neighbours.
_ENDS = 2
#: Kept by ``nn.Module`` itself, and compared tensor by tensor and module by module.
_HELD = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


class Differs(Exception):
    """Blocks are not, or may not be, alike: the model has to be traced whole."""


@dataclass(frozen=True)
class Repeat:
    """Blocks ``first`` to ``first + count - 1`` of the container ``path`` are a marker in the trace; the ``period``
    blocks before them stand for them, and the ``period`` blocks before those prove it. ``streams`` is filled by the
    trace: the number of the first random operator of every block; ``parameters`` are those of the marked blocks, by
    their names in the model, which the trace does without."""

    path: str
    period: int
    first: int
    count: int
    streams: dict[int, int] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def markers(self) -> range:
        """The blocks that are not traced."""
        return range(self.first, self.first + self.count)

    def template(self, index: int) -> int:
        """The block whose nodes stand for those of the marked block ``index``."""
        return self.first - self.period + (index - self.first) % self.period

    def block(self, index: int) -> str:
        """Path of a block."""
        return f"{self.path}.{index}".removeprefix(".")


@torch.library.custom_op("autopar::blocks", mutates_args=())
def marker(x: Tensor, count: int) -> list[Tensor]:
    """Stands for ``count`` blocks in a row: from what flows into the first to what flows out of each, of the same shape
    and dtype. One operator for all, since to trace an operator takes a millisecond."""
    raise NotImplementedError("a marker is replaced by the nodes of blocks and never runs")


@torch.library.custom_op("autopar::blocks_backward", mutates_args=())
def marker_backward(grad: Tensor, count: int) -> Tensor:
    """Stands for the backward of the same blocks."""
    raise NotImplementedError("a marker is replaced by the nodes of blocks and never runs")


@marker.register_fake
def _(x: Tensor, count: int) -> list[Tensor]:
    return [torch.empty_like(x) for _ in range(count)]


@marker_backward.register_fake
def _(grad: Tensor, count: int) -> Tensor:
    return torch.empty_like(grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.count = inputs[1]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor, None]:
    *between, last = grads
    if last is None or any(grad is not None for grad in between):
        raise Differs("gradients flow into the middle of a run of blocks")
    return marker_backward(last, ctx.count), None


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
    mode = active_draws()
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
        leaves, spec = pytree.tree_flatten((args, kwargs))
        versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
        result = original(*args, **kwargs)
        if versions != [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]:
            raise Differs("a block changes what it is called with")
        calls[index] = _Call(leaves, spec, *pytree.tree_flatten(result), streams=_drawn() - before)
        return result

    block.forward = forward


class _Run:
    """The marked blocks of a container while they are called: the results that the marker has for them."""

    def __init__(self, repeat: Repeat) -> None:
        self.repeat, self.called = repeat, 0
        self.results: list[Tensor] = []
        self.version = 0  # of the last result, which no one may change in place

    def call(self, index: int, x: Tensor) -> Tensor:
        """What block ``index`` returns for ``x``, which must be what the one before returned, and as it was."""
        if index == self.repeat.first:  # AOTAutograd calls a forward twice; a model that does leaves two markers
            self.called, self.results = 0, marker(x, self.repeat.count)
        elif index != self.repeat.first + self.called:
            raise Differs("blocks are not called one after the other")
        elif x is not self.results[self.called - 1] or x._version != self.version:
            raise Differs("something happens between blocks")
        result = self.results[self.called]
        self.called, self.version = self.called + 1, result._version
        return result


def _mark(run: _Run, index: int, block: nn.Module, calls: dict[int, _Call]) -> None:
    """Let a block be part of the marker. It must be called as its template is, but for the one tensor that flows
    through."""
    repeat = run.repeat

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = calls[repeat.template(index)]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != call.spec:
            raise Differs("blocks are called differently")
        changed = [k for k, leaf in enumerate(leaves) if not _equal(leaf, call.leaves[k])]
        if len(changed) != 1 or not isinstance(leaves[changed[0]], Tensor):
            raise Differs("blocks are called with different arguments")
        x, place, counter = leaves[changed[0]], _flows(call), active_draws()
        if not _tensor_form(x) == _tensor_form(call.leaves[changed[0]]) == _tensor_form(call.result[place]):
            raise Differs("a block changes the shape or dtype of what flows through")
        repeat.streams[index] = _drawn()
        if counter is not None:
            counter.streams += call.streams
        result = [*call.result[:place], run.call(index, x), *call.result[place + 1 :]]
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
        alike = range(repeat.first - 2 * repeat.period - 1, repeat.first + repeat.count + 1)
        if not all(alone(blocks[i]) for i in alike):
            continue
        calls: dict[int, _Call] = {}
        run = _Run(repeat)
        for i in alike:
            for at, name in numbered:
                setattr(blocks[i].get_submodule(at), name, _Number())
            if i in repeat.markers:
                _mark(run, i, blocks[i], calls)
            else:
                _record(repeat, i, blocks[i], calls)
        found.append(repeat)
    return tuple(found)
