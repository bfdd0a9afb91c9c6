"""PyTorch's functions that draw random numbers, made from uniform ones: what `counter_draws` puts in their place.

A ``uniform(like)`` gives numbers in [0, 1) of the shape and dtype of ``like``. Every function here takes one and then
what the function of torch takes that it replaces; what it draws has the same distribution and other values. Numbers are
drawn in float32 where the dtype is narrower, but for uniform ones, which must not round up to 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.uniform import BITS

Uniform = Callable[[Tensor], Tensor]
Scalar = float | Tensor


def _wide(like: Tensor) -> Tensor:
    """Nothing yet, in the shape of ``like`` and in at least float32."""
    narrow = not like.is_floating_point() or torch.finfo(like.dtype).bits < 32
    return torch.empty_like(like, dtype=torch.float32 if narrow else like.dtype, requires_grad=False)


def _empty_like(input: Tensor, **options: Any) -> Tensor:
    return torch.empty_like(input.detach(), **options)


def _standard_normal(uniform: Uniform, like: Tensor) -> Tensor:
    """Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958."""
    wide = _wide(like)
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(wide)))
    return (radius * torch.cos(uniform(wide) * (2.0 * math.pi))).to(like.dtype)


def _standard_exponential(uniform: Uniform, like: Tensor) -> Tensor:
    """Positive, as torch's: of a uniform number half a step above what was drawn."""
    drawn = -torch.log(uniform(_wide(like)) + 2.0 ** -(BITS + 1))
    return drawn.clamp_min(torch.finfo(drawn.dtype).tiny).to(like.dtype)


def _below(uniform: Uniform, like: Tensor, p: Scalar) -> Tensor:
    return (uniform(_wide(like)) < p).to(like.dtype)


def _integers(uniform: Uniform, like: Tensor, low: int, high: int) -> Tensor:
    if not 0 < high - low <= 2**BITS:
        raise ValueError(f"random integers have to be in a range of 1 to 2**{BITS} numbers, found [{low}, {high})")
    wide = torch.empty_like(like, dtype=torch.float64)
    return (uniform(wide) * (high - low)).floor().add(low).to(like.dtype)


def _rand(uniform: Uniform, *size: Any, **options: Any) -> Tensor:
    return uniform(torch.empty(*size, **options))


def _rand_like(uniform: Uniform, input: Tensor, **options: Any) -> Tensor:
    return uniform(_empty_like(input, **options))


def _randn(uniform: Uniform, *size: Any, **options: Any) -> Tensor:
    return _standard_normal(uniform, torch.empty(*size, **options))


def _randn_like(uniform: Uniform, input: Tensor, **options: Any) -> Tensor:
    return _standard_normal(uniform, _empty_like(input, **options))


def _normal(uniform: Uniform, mean: Scalar, std: Scalar = 1.0, size: Any = None, **options: Any) -> Tensor:
    if isinstance(mean, Tensor) or isinstance(std, Tensor):
        shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
        given = mean if isinstance(mean, Tensor) else std
        assert isinstance(given, Tensor)
        return _standard_normal(uniform, given.detach().new_empty(shape)) * std + mean
    return _standard_normal(uniform, torch.empty(size, **options)) * std + mean


def _bernoulli(uniform: Uniform, input: Tensor, p: Scalar | None = None) -> Tensor:
    return _below(uniform, input.detach(), input.detach() if p is None else p)


def _range(numbers: list[int], options: dict[str, Any]) -> tuple[int, int]:
    """Low and high, of the positional ``([low,] high)`` and of the named ones, which leave ``options``."""
    low, high = options.pop("low", 0), options.pop("high", None)
    high = numbers.pop() if high is None else high
    return (numbers.pop() if numbers else low), high


def _randint(uniform: Uniform, *args: Any, **options: Any) -> Tensor:
    size = options.pop("size") if "size" in options else args[-1]
    low, high = _range([x for x in args if isinstance(x, int)], options)
    return _integers(uniform, torch.empty(size, **{"dtype": torch.int64, **options}), low, high)


def _randint_like(uniform: Uniform, input: Tensor, *bounds: int, **options: Any) -> Tensor:
    low, high = _range(list(bounds), options)
    return _integers(uniform, _empty_like(input, **options), low, high)


def _uniform_(uniform: Uniform, input: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    return input.copy_(uniform(_empty_like(input)) * (b - a) + a)


def _normal_(uniform: Uniform, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return input.copy_(_standard_normal(uniform, input.detach()) * std + mean)


def _exponential_(uniform: Uniform, input: Tensor, lambd: float = 1.0) -> Tensor:
    return input.copy_(_standard_exponential(uniform, input.detach()) / lambd)


def _bernoulli_(uniform: Uniform, input: Tensor, p: Scalar = 0.5) -> Tensor:
    return input.copy_(_below(uniform, input.detach(), p))


def _gumbel_softmax(
    uniform: Uniform, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Python that dispatches as a whole and draws with the mode off. ``eps`` does nothing, as in torch."""
    noise = -_standard_exponential(uniform, logits.detach()).log()
    soft = F.softmax((logits + noise) / tau, dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(logits).scatter_(dim, index, 1.0) - soft.detach() + soft


_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _rand,
    torch.rand_like: _rand_like,
    torch.randn: _randn,
    torch.randn_like: _randn_like,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    F.gumbel_softmax: _gumbel_softmax,
}


def replacements(uniform: Uniform) -> dict[Any, Callable[..., Tensor]]:
    """torch's function -> ours."""
    return {function: functools.partial(ours, uniform) for function, ours in _FUNCTIONS.items()}
