"""Small random modules, composed from the operators that have rules: what `test_fuzz` plans and verifies.

A module is a chain of steps on one tensor; earlier tensors of the same shape may come back in. Sizes are small and odd
ones are among them, so that what does not divide is met as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

VOCABULARY = 12
SIZES = (4, 8, 2, 6, 3, 1, 5)
Shape = tuple[int, ...]
Function = Callable[[Tensor], Tensor]


class Draws:
    """Choices made by hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw

    def pick(self, options: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(list(options)))

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def flag(self) -> bool:
        return self._draw(st.booleans())

    def size(self) -> int:
        return self.pick(SIZES)

    def dim(self, shape: Shape, first: int = 0) -> int:
        return self.integer(first, len(shape) - 1)


class Apply(nn.Module):
    """A function as a module; ``text`` is for failures."""

    def __init__(self, text: str, function: Function) -> None:
        super().__init__()
        self.text, self.function = text, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.text


class Recurrence(nn.Module):
    """An LSTM or GRU over [batch, steps, features], its output alone."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Attention(nn.Module):
    """Self-attention over [batch, sequence, features] with one packed projection."""

    def __init__(self, features: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.packed, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.packed(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, features))


def _activation(d: Draws, shape: Shape) -> nn.Module:
    name = d.pick(["gelu", "silu", "tanh", "sigmoid", "softplus", "elu", "mish", "hardswish", "logsigmoid", "relu"])
    return Apply(name, getattr(F, name))


def _linear(d: Draws, shape: Shape) -> nn.Module:
    return nn.Linear(shape[-1], d.size(), bias=d.flag())


def _norm(d: Draws, shape: Shape) -> nn.Module:
    if len(shape) >= 3 and d.flag():
        groups = d.pick([g for g in (1, 2, 4) if shape[1] % g == 0])
        return nn.GroupNorm(groups, shape[1])
    if len(shape) in (3, 4) and d.flag():
        return (nn.BatchNorm1d if len(shape) == 3 else nn.BatchNorm2d)(shape[1], track_running_stats=d.flag())
    # a norm of one element is a constant, or a sign: gradients before it, and its weight's, are 0 in truth, and noise
    # in float64 eager too when the batch is reversed
    if shape[-1] == 1:
        return nn.LayerNorm(shape[1:]) if max(shape[1:]) > 1 else nn.Identity()
    return nn.LayerNorm(shape[-1], bias=d.flag()) if d.flag() else nn.RMSNorm(shape[-1])


def _softmax(d: Draws, shape: Shape) -> nn.Module:
    dim, function = d.dim(shape), d.pick([F.softmax, F.log_softmax])
    return Apply(f"{function.__name__} {dim}", lambda x: function(x, dim))


def _permute(d: Draws, shape: Shape) -> nn.Module:
    order = (0, *d._draw(st.permutations(range(1, len(shape)))))
    return Apply(f"permute {order}", lambda x: x.permute(order))


def _reshape(d: Draws, shape: Shape) -> nn.Module:
    """Merge two dims, open one, or add one."""
    dim = d.dim(shape)
    ways: dict[str, Function] = {"unsqueeze": lambda x: x.unsqueeze(dim + 1)}
    if dim + 1 < len(shape) and len(shape) > 2:
        ways["merge"] = lambda x: x.flatten(dim, dim + 1)
    if factors := [f for f in (2, 3, 4) if shape[dim] % f == 0]:
        factor = d.pick(factors)
        ways[f"open {factor}"] = lambda x: x.unflatten(dim, (factor, -1))
        ways[f"open into {factor}"] = lambda x: x.unflatten(dim, (-1, factor))
    name = d.pick(sorted(ways))
    return Apply(f"{name} {dim}", ways[name])


def _pieces(d: Draws, shape: Shape) -> nn.Module:
    """Cut a dim in pieces, work on them, and put them together in another order."""
    dim = d.dim(shape, 1)
    cut = d.integer(0, shape[dim])

    def rotate_half(x: Tensor) -> Tensor:
        a, b = x.split([cut, x.shape[dim] - cut], dim)
        return torch.cat([-b, a, b * 2.0], dim)

    ways: dict[str, Function] = {
        "rotate": rotate_half,
        "roll": lambda x: x.roll(1, dim),
        "flip": lambda x: x.flip(dim),
        "pad": lambda x: F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [1, 2]),
        "slice": lambda x: x.narrow(dim, 0, max(1, cut)),
        "stack": lambda x: torch.stack([x, x.cos()], dim),
        "repeat": lambda x: x.repeat_interleave(2, dim),
        "cumsum": lambda x: x.cumsum(dim) / x.shape[dim],
        "select": lambda x: x.index_select(dim, torch.arange(x.shape[dim]).flip(0)),
    }
    if shape[dim] % 2 == 0:
        ways["chunk"] = lambda x: x.chunk(2, dim)[0] * torch.sigmoid(x.chunk(2, dim)[1])
    name = d.pick(sorted(ways))
    return Apply(f"{name} {dim} {cut}", ways[name])


def _reduce(d: Draws, shape: Shape) -> nn.Module:
    dim, keep = d.dim(shape, 1), d.flag()
    keep = keep or len(shape) < 3
    ways: dict[str, Function] = {
        "sum": lambda x: x.sum(dim, keepdim=keep),
        "mean": lambda x: x.mean(dim, keepdim=keep),
        "amax": lambda x: x.amax(dim, keepdim=keep),
        "var": lambda x: x.var(dim, keepdim=keep, correction=0),
        "logsumexp": lambda x: x.logsumexp(dim, keepdim=keep),
        "center": lambda x: x - x.mean(dim, keepdim=True),
        "batch": lambda x: x - x.mean(0, keepdim=True) + x.sum() / x.numel(),
        "normalize": lambda x: F.normalize(x, dim=dim),
    }
    name = d.pick(sorted(ways))
    return Apply(f"{name} {dim} {keep}", ways[name])


def _convolution(d: Draws, shape: Shape) -> nn.Module:
    channels, ndim = shape[1], len(shape) - 2
    kind = (nn.Conv1d, nn.Conv2d)[ndim - 1]
    if d.flag():
        return kind(channels, d.size(), 3, padding=1, bias=d.flag(), stride=d.integer(1, 2))
    if d.flag():
        return kind(channels, channels * d.pick([1, 2]), 3, padding=1, groups=channels)
    return (nn.ConvTranspose1d, nn.ConvTranspose2d)[ndim - 1](channels, d.size(), 2, 2)


def _pool(d: Draws, shape: Shape) -> nn.Module:
    ways: dict[str, Function] = {
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, 2),
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "bilinear": lambda x: F.interpolate(x, size=(3, 3), mode="bilinear"),
        "replicate": lambda x: F.pad(x, (1, 0, 1, 1), mode="replicate"),
    }
    if min(shape[2:]) >= 2:
        ways |= {
            "max": lambda x: F.max_pool2d(x, 2),
            "average": lambda x: F.avg_pool2d(x, 2, stride=1),
            "reflect": lambda x: F.pad(x, (1, 1, 0, 1), mode="reflect"),
        }
    name = d.pick(sorted(ways))
    return Apply(name, ways[name])


def _attention(d: Draws, shape: Shape) -> nn.Module:
    heads = d.pick([h for h in (1, 2, 3, 4) if shape[-1] % h == 0])
    return Attention(shape[-1], heads, d.flag())


def _recurrence(d: Draws, shape: Shape) -> nn.Module:
    kind = d.pick([nn.LSTM, nn.GRU])
    return Recurrence(kind(shape[-1], d.pick([2, 4]), d.integer(1, 2), batch_first=True, bidirectional=d.flag()))


_ANYWHERE = (_activation, _linear, _linear, _norm, _softmax, _reshape, _pieces, _reduce, _permute)


def _possible(shape: Shape) -> list[Callable[[Draws, Shape], nn.Module]]:
    possible: list[Callable[[Draws, Shape], nn.Module]] = [*_ANYWHERE]
    if len(shape) == 3:
        possible += [_attention, _recurrence, _convolution]
    if len(shape) == 4:
        possible += [_convolution, _convolution, _pool, _pool]
    return possible


_JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "cat": lambda a, b: torch.cat([a, b], -1), "mul": torch.mul
}


class Chain(nn.Module):
    """The steps in order. ``joins`` maps a step to an earlier one whose tensor comes back after it, and how. Returns
    the tensor alone, or a loss with it."""

    def __init__(self, steps: list[nn.Module], joins: dict[int, tuple[int, str]], loss: str) -> None:
        super().__init__()
        self.steps, self.joins, self.loss = nn.ModuleList(steps), joins, loss

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        seen = []
        for i, step in enumerate(self.steps):
            x = step(x)
            if i in self.joins:
                earlier, how = self.joins[i]
                x = _JOINS[how](x, seen[earlier])
            seen.append(x)
        if self.loss == "square":
            return {"loss": x.square().mean(), "out": x}
        if self.loss == "entropy":
            logits = x.flatten(1)
            target = torch.arange(logits.shape[0]) % logits.shape[1]
            return {"loss": F.cross_entropy(logits, target), "logits": logits}
        return x

    def extra_repr(self) -> str:
        return f"joins={self.joins}, loss={self.loss!r}"


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)


def _undoes_bias(step: nn.Module) -> bool:
    """Whether a norm takes away what a bias before it adds to a channel: its gradient is 0 in truth, and float64 eager
    itself differs by up to 5e-9 of the others when the batch is reversed."""
    alone = isinstance(step, nn.GroupNorm) and step.num_groups == step.num_channels
    return alone or isinstance(step, (nn.BatchNorm1d, nn.BatchNorm2d))


@dataclass(frozen=True)
class Example:
    """A random module in float64, and its input."""

    model: nn.Module
    x: Tensor


def _first(d: Draws, batch: int) -> tuple[nn.Module, Tensor]:
    """A first step with parameters and an input for it."""
    kind = d.pick(["features", "sequence", "tokens", "image"])
    if kind == "tokens":
        return nn.Embedding(VOCABULARY, d.size()), torch.randint(0, VOCABULARY, (batch, d.size()))
    if kind == "image":
        channels = d.size()
        return nn.Conv2d(channels, d.size(), 3, padding=1), torch.randn(batch, channels, 4, d.pick([4, 5])).double()
    shape = (batch, d.size()) if kind == "features" else (batch, d.size(), d.size())
    return nn.Linear(shape[-1], d.size()), torch.randn(shape).double()


def example(data: st.DataObject) -> Example:
    """Draw a module of at most seven steps."""
    d = Draws(data)
    torch.manual_seed(d.integer(0, 1000))
    first, x = _first(d, d.pick([4, 8, 2, 6, 3]))
    steps, joins = [first.double()], {}
    with torch.no_grad():
        value = steps[0](x)
        seen = [value]
        for i in range(1, d.pick([5, 3, 6, 2, 4, 1]) + 1):
            step = d.pick(_possible(tuple(value.shape)))(d, tuple(value.shape)).double()
            if _undoes_bias(step) and isinstance(steps[-1], _CONVOLUTIONS):
                steps[-1].bias = None
            for p in step.parameters():
                if p.dim() < 2:  # a norm's bias of 0 has no gradient under a square loss, only noise
                    p.add_(0.1 * torch.randn_like(p))
            found = step(value)
            if found.numel() > 4096 or found.dim() > 5 or not bool(found.isfinite().all()):
                break
            same = [j for j, s in enumerate(seen) if s.shape == found.shape]
            if same and d.flag():
                joins[i] = (d.pick(same), d.pick(sorted(_JOINS)))
                found = _JOINS[joins[i][1]](found, seen[joins[i][0]])
            steps.append(step)
            seen.append(found)
            value = found
    return Example(Chain(steps, joins, d.pick(["square", "entropy", "none"])).train(), x)
