"""Random bits that are a function of (seed, step, stream, global element index), and of nothing else.

So every layout, micro-batching and recomputation draws what one process would draw for the whole tensor: which elements
dropout keeps, and any other random number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _int64(unsigned: int) -> int:
    """The two's complement value of an unsigned 64-bit constant: torch's full integer arithmetic is signed only."""
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


# SplitMix64: G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with the
# constants of its reference implementation, https://prng.di.unimi.it/splitmix64.c. int64 products wrap modulo 2^64, and
# the low 64 bits do not depend on the sign.
_GAMMA = _int64(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _int64(0xBF58476D1CE4E5B9)), (27, _int64(0x94D049BB133111EB)))
_LAST_SHIFT = 31
_UNIFORM_BITS = 53  # of the 64: what a float64 probability can resolve


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(z: Tensor) -> Tensor:
    """SplitMix64's bijection of 64-bit integers, in place."""
    for bits, factor in _ROUNDS:
        z.bitwise_xor_(_shifted(z, bits)).mul_(factor)
    return z.bitwise_xor_(_shifted(z, _LAST_SHIFT))


def _key(seed: Tensor, stream: int) -> Tensor:
    """int64 scalar that mixes (seed, step, stream), each word folded in by a bijection of it."""
    key = _mix_(seed[0] + _GAMMA)
    key = _mix_(key.bitwise_xor_(seed[1]).add_(_GAMMA))
    return _mix_(key.bitwise_xor_(stream).add_(_GAMMA))


def _global_index(starts: Tensor, shape: Sequence[int], extent: Sequence[int], device: torch.device) -> Tensor:
    """int64 of ``shape``: the row-major index in the whole tensor of each element of the shard."""
    ndim = len(shape)
    index = torch.zeros([1] * ndim, dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        along = (torch.arange(size, device=device) + starts[dim]) * math.prod(extent[dim + 1 :])
        index = index + along.view([size if d == dim else 1 for d in range(ndim)])
    return index


def check(seed: Tensor, starts: Tensor, shape: Sequence[int], extent: Sequence[int]) -> None:
    """Raise ValueError where the arguments contradict the docstring of `random_bits`."""
    ndim = len(shape)
    if tuple(seed.shape) != (2,) or seed.dtype != torch.int64:
        raise ValueError(f"seed must be int64 [2] (seed, step), found {seed.dtype} {list(seed.shape)}")
    if tuple(starts.shape) != (ndim,) or starts.dtype != torch.int64 or len(extent) != ndim:
        raise ValueError(
            f"starts must be int64 [{ndim}] and extent have {ndim} entries, one per dim of the tensor; found "
            f"{starts.dtype} {list(starts.shape)} and {len(extent)} entries"
        )


def check_probability(p: float) -> None:
    """Raise ValueError where ``p`` is none."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def random_bits(
    seed: Tensor,
    starts: Tensor,
    stream: int,
    shape: Sequence[int],
    extent: Sequence[int],
    device: torch.device,
    count: int,
) -> Tensor:
    """``count`` random bits for every element of a shard: int64 of ``shape``, in [0, 2**count).

    With ``i`` the element's row-major index in the whole tensor and ``mix`` the finaliser of SplitMix64 (Steele, Lea
    and Flood, OOPSLA 2014), these are the top bits of ``mix(mix(i * gamma + key) ^ key)``; ``key`` mixes seed, step and
    stream. The second round with the key is what keeps streams from being shifted copies of one sequence. Integer
    arithmetic only, hence the same bits on every device.

    Args:
        seed: int64 [2], the seed and the step.
        starts: int64 [ndim], global index of the shard's first element.
        stream: number of the operator in the model; different streams are independent.
        shape: of the shard. extent: of the whole tensor.
        device: where they are made.
        count: 1 to 63.

    Raises:
        ValueError: the shapes or dtypes of seed, starts and extent are not as above.
    """
    check(seed, starts, shape, extent)
    key = _key(seed.to(device), stream)
    bits = _global_index(starts.to(device), shape, extent, device).mul_(_GAMMA).add_(key)
    bits = _mix_(_mix_(bits).bitwise_xor_(key))
    return _shifted(bits, 64 - count)


def keep_mask(
    seed: Tensor,
    starts: Tensor,
    p: float,
    stream: int,
    shape: Sequence[int],
    extent: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Which elements of a shard survive dropout: bool of ``shape``, True with probability ``1 - p``.

    An element is kept where its 53 `random_bits`, whose arguments are taken, are at least ``p * 2**53``. ``p`` is the
    probability of dropping an element, in [0, 1].

    Raises:
        ValueError: p is outside [0, 1], or as `random_bits`.
    """
    check_probability(p)
    bits = random_bits(seed, starts, stream, shape, extent, device, _UNIFORM_BITS)
    return bits >= math.ceil(p * 2**_UNIFORM_BITS)
