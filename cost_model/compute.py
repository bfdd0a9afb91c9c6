"""Seconds that one operator takes on one device.

A matrix product of M x N x K, B of them, runs in tiles of the result, each on one of the device's S cores (SM, CU), in
waves of S tiles. With tiles of t x u, the contraction cut into c pieces, and all cores together doing P e FLOP/s,

    waves = ceil(B c ceil(M/t) ceil(N/u) / S)
    seconds = waves S 2 t u (K/c + k) (1 + a (1/t + 1/u)) / (P e)

where k is the length of a contraction that takes as long as a tile's prologue and epilogue, and a (1/t + 1/u) what a
core loses by loading the operands of small tiles more often (a tile of t x u reads t + u elements for t u products).
The library takes the fastest tile, and so do we. e is the efficiency of the largest tile on a long contraction, and
what is left of it in a long run at the power limit (``sustained``). Where rows do not begin at multiples of 16 bytes
the contraction runs at only the fraction ``unaligned`` of that: K counts as K/unaligned.

Attention runs at a published level A of the kernel, by head dim and direction, times S / (S + s) for S keys. Anything
else, and at least anything, takes the time of its bytes at the bandwidth W that a stream reaches:

    seconds = max(max(FLOPs, bytes / W) + n r, n l)

r is the device's own time to start and end each of n kernels (a product's ramp included), l the host's time to launch
one, hidden behind the queue unless the kernel is shorter. The numbers and their sources are in the preset's data file;
``benchmarks/fit_matmul.py`` compares with published matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import sympy
import torch

from autopar.cost_model.hardware import Device

Floats = npt.NDArray[np.float64]
Kind = Literal["matmul", "attention", "other"]

#: Bytes that tensor cores are fed at a time (NVIDIA, Matrix Multiplication Background User's Guide, section 2.2).
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Work:
    """What one operator does on one device, ``times`` times (once for each micro-batch that it runs on).

    ``flops`` and ``bytes`` (read and written) are those of one time. A "matmul" is ``batch`` products of ``m`` x ``n``
    x ``k``, ``aligned`` if the rows of all three matrices begin at multiples of `ALIGNMENT`; "attention" is of
    ``batch`` heads, ``m`` queries, ``n`` keys and a head dim of ``k``, and its FLOPs are those of the pairs that a
    causal mask or a window leaves. ``kernels`` are launched each time: none by a view, or by an operator that is
    computed inside another's kernel.
    """

    flops: float
    bytes: float
    dtype: torch.dtype
    kind: Kind = "other"
    batch: float = 1.0
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    causal: bool = False
    backward: bool = False
    kernels: int = 1
    times: int = 1
    aligned: bool = True


TILE_SYMBOLS = sympy.symbols("B M N K t u c S P e k a", positive=True)
_B, _M, _N, _K, _t, _u, _c, _S, _P, _e, _k, _a = TILE_SYMBOLS
WAVES: sympy.Expr = sympy.ceiling(_B * _c * sympy.ceiling(_M / _t) * sympy.ceiling(_N / _u) / _S)
"""Rounds in which all tiles of a product are computed."""
MATMUL: sympy.Expr = WAVES * _S * 2 * _t * _u * (_K / _c + _k) * (1 + _a * (1 / _t + 1 / _u)) / (_P * _e)
"""Seconds of the arithmetic of a product with one size of tiles, over ``TILE_SYMBOLS``."""

SYMBOLS = sympy.symbols("T M W n r l", nonnegative=True)
_T, _moved, _W, _kernels, _r, _l = SYMBOLS
FORMULA: sympy.Expr = sympy.Max(sympy.Max(_T, _moved / _W) + _kernels * _r, _kernels * _l)
"""Seconds of an operator whose arithmetic takes T, over ``SYMBOLS``."""

_matmul = sympy.lambdify(TILE_SYMBOLS, MATMUL, "numpy")
_seconds = sympy.lambdify(SYMBOLS, FORMULA, "numpy")

#: Into how many pieces a library cuts a long contraction whose tiles would not fill the device; the pieces are summed
#: in fp32.
SPLITS = (1, 2, 4, 8)
_SUMMED_BYTES = 8  # each piece written and read again


def work_seconds(work: Sequence[Work], device: Device) -> Floats:
    """Seconds of every piece of work, all its times together."""
    if not work:
        return np.zeros(0)
    arithmetic, moved = np.zeros(len(work)), _column(work, "bytes")
    kinds = np.array([w.kind for w in work])
    peaks = np.array([device.peak(w.dtype) for w in work])
    for kind, seconds in (("matmul", _matmul_seconds), ("attention", _attention_seconds)):
        rows = np.flatnonzero(kinds == kind)
        if len(rows):
            arithmetic[rows] = seconds([work[int(i)] for i in rows], peaks[rows], device)
    rest = kinds == "other"
    rate = peaks[rest] * device.matmul_efficiency * device.sustained
    arithmetic[rest] = _column(work, "flops")[rest] / rate
    overhead = device.kernel_overhead + device.matmul_ramp * (kinds == "matmul")
    once = _seconds(
        arithmetic, moved, device.memory_bandwidth * device.stream_efficiency, _column(work, "kernels"), overhead,
        device.launch_overhead,
    )
    return np.asarray(once * _column(work, "times"), dtype=np.float64)


def _column(work: Sequence[Work], name: str) -> Floats:
    return np.array([getattr(w, name) for w in work], dtype=np.float64)


def _matmul_seconds(work: Sequence[Work], peaks: Floats, device: Device) -> Floats:
    """Arithmetic of products with the tiles and the number of pieces that are fastest for each."""
    batch, m, n, k = (_column(work, name)[:, None, None] for name in ("batch", "m", "n", "k"))
    rows, columns = (np.array(side, dtype=np.float64)[None, :, None] for side in zip(*device.matmul_tiles, strict=True))
    pieces = np.array(SPLITS, dtype=np.float64)[None, None, :]
    best = min(1 + device.tile_loss * (1 / t + 1 / u) for t, u in device.matmul_tiles)
    rate = (peaks * device.matmul_efficiency * device.sustained * best)[:, None, None]
    slow = np.array([1.0 if w.aligned else device.unaligned for w in work])[:, None, None]
    seconds = _matmul(
        batch, m, n, k / slow, rows, columns, pieces, device.core_count, rate, 1.0, device.tile_overhead_k,
        device.tile_loss,
    )
    summed = _SUMMED_BYTES * pieces * batch * m * n / (device.memory_bandwidth * device.stream_efficiency)
    found = seconds + np.where(pieces > 1, summed, 0.0)
    return np.asarray(found.min(axis=(1, 2)), dtype=np.float64)


def _attention_seconds(work: Sequence[Work], peaks: Floats, device: Device) -> Floats:
    """Arithmetic of attention at the kernel's published level."""
    level = np.array([device.attention.efficiency(w.k, w.n, w.causal, w.backward) for w in work])
    return _column(work, "flops") / (peaks * level)


def stream_seconds(nbytes: float, device: Device, kernels: int = 1) -> float:
    """Seconds in which ``kernels`` kernels read and write ``nbytes`` in all and do no arithmetic worth counting: an
    accumulated gradient, a copy."""
    return float(work_seconds([Work(0.0, nbytes, torch.float32, kernels=kernels)], device)[0])


def optimizer_seconds(
    optimizer: str, parameters: float, gradients: float, state: float, device: Device, *, fused: bool = False
) -> float:
    """Seconds of an optimizer's step on one rank's bytes of parameters, gradients and state; "none" takes none.

    A ``fused`` one (apex, ``fused=True``) reads all three and writes parameters and state. torch's default for AdamW on
    GPUs makes a pass for every elementary operation (torch/optim/adamw.py, ``_multi_tensor_adamw``): parameters twice
    read and written, gradients read twice, the two moments read and written eight times together, and the denominator,
    as large as one moment, written and read six times.
    """
    if optimizer == "none" or not parameters:
        return 0.0
    passes = _FOREACH.get(optimizer, _FUSED) if not fused else _FUSED
    moved = sum(count * nbytes for count, nbytes in zip(passes, (parameters, gradients, state), strict=True))
    return stream_seconds(moved, device)


# times that (parameters, gradients, state) are read or written in a step
_FUSED = (2.0, 1.0, 2.0)
_FOREACH = {"adamw": (4.0, 2.0, 4.0 + 3.0), "sgd": (2.0, 1.0, 0.0), "sgd_momentum": (2.0, 1.0, 5.0)}
