"""Seconds that a collective takes: alpha-beta formulas over a hierarchy of two links.

X is the **whole** tensor in bytes: what every rank holds after an all-gather, what every rank holds before a
reduce-scatter or an all-reduce, the sum over all ranks for an all-to-all, the message for p2p. A group has n ranks,
of which L lie in each of H hosts (n = L H). B is the bandwidth of the link within a host (NVLink, xGMI, PCIe), b that
of one device's share of the network; ``a`` and ``c`` are the latencies of a step on them, t0 what a call costs at any
size.

Within one host the volumes are the ring's (field_notes): V = (n-1)/n X/B for all-gather and reduce-scatter, twice
that for all-reduce, (n-1)/n X/n /B for all-to-all, each with its n-1 steps. An all-reduce that a switch carries out
(NVLink SHARP; S its bandwidth) moves (L+1)/L X a device; NCCL takes the faster. The published bus bandwidths of 5 to
8 H200 (414, 436, 460, 473 GB/s) follow this within 3 %, and the ring's are 363 to 366.

Across hosts each rank exchanges 1/L of the tensor with its counterparts in the other hosts over its own NIC while the
host exchanges it within. Long messages are pipelined in chunks, so the slower part counts (Max), not the sum.
Published all-reduces bear that out: on two hosts of H100 with 8 x 200 Gb/s a flat ring would be bound to a bus
bandwidth of 200 GB/s, two levels to 375, and 339 was measured. Between hosts an all-reduce takes 2 log2(H) steps,
since NCCL takes a double binary tree for short messages (NVIDIA developer blog, "Massively scale your deep learning
training with NCCL 2.4", 2019); gathers and reduce-scatters are rings, of one step a host. The messages of an all-to-all
are all on their way at once, in one step: as many bytes a rank take 192 us over 128 ranks and 194 us over 256
(deepseek-ai/DeepEP, docs/legacy.md, low-latency dispatch).

A pipeline also has to fill. Sending V seconds' worth in k chunks over s hops of latency r takes (k + s)(r + V/k), at
the best k (sqrt(s r) + sqrt(V))^2 = V + s r + 2 sqrt(s r V); the last term, with f = s r within a host and g between
hosts, is what makes NCCL's bandwidth rise so slowly with size. Fitting it halves the mean error on the published
curves (8 B200: 0.15 to 0.08, A100: 0.16 to 0.08) and removes its bias. f = 0 leaves plain alpha-beta.

Known limit: racks of 72 devices are assumed to use all their NICs; 20 such racks do not by far (published: half).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy
from sympy import Max, Min, Piecewise, log

from autopar.cluster import Group
from autopar.cost_model.hardware import COLLECTIVES, Device, nearest

Bytes = float | npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]
Seconds = float | npt.NDArray[np.float64]

SYMBOLS = sympy.symbols("X n L H B S f b g t0 a c", nonnegative=True)
_X, _n, _L, _H, _B, _S, _f, _b, _g, _t0, _a, _c = SYMBOLS


def _filled(volume: sympy.Expr, fill: sympy.Expr) -> sympy.Expr:
    """Seconds of a pipelined transfer that would take ``volume`` seconds at full bandwidth."""
    return volume + 2 * sympy.sqrt(fill * volume)


_WITHIN, _BETWEEN = (_L - 1) / _L * _X / _B, (_H - 1) / _H * _X / (_L * _b)
_GATHER = Max(_filled(_WITHIN, _f), _filled(_BETWEEN, _g)) + _t0 + (_L - 1) * _a + (_H - 1) * _c
_REDUCED_WITHIN = Min(2 * _WITHIN, (_L + 1) / _L * _X / _S)
_EXCHANGED_WITHIN, _EXCHANGED_BETWEEN = (_L - 1) / _n * _X / _n / _B, (_n - _L) / _n * _X / _n / _b

FORMULAS: dict[str, sympy.Expr] = {
    "all_gather": _GATHER,
    "reduce_scatter": _GATHER,
    "all_reduce": Max(_filled(_REDUCED_WITHIN, _f), _filled(2 * _BETWEEN, _g))
    + _t0 + 2 * (_L - 1) * _a + 2 * log(_H, 2) * _c,
    "all_to_all": Max(_filled(_EXCHANGED_WITHIN, _f), _filled(_EXCHANGED_BETWEEN, _g)) + _t0 + (_L - 1) * _a + _c,
    "p2p": _t0 + Piecewise((_filled(_X / _b, _g) + _c, _H > 1), (_filled(_X / _B, _f) + _a, True)),
}
"""Seconds of each collective, over ``SYMBOLS``."""

WIRE_BYTES: dict[str, sympy.Expr] = {
    "all_gather": (_n - 1) / _n * _X,
    "reduce_scatter": (_n - 1) / _n * _X,
    "all_reduce": 2 * (_n - 1) / _n * _X,
    "all_to_all": (_n - 1) / _n * _X / _n,
    "p2p": _X,
}
"""Bytes that one rank sends (ring algorithms), over X and n."""

NO_SWITCH = 1.0
"""S in bytes/s where no switch reduces: so slow that the ring is always taken."""


@functools.cache
def _compiled(kind: str) -> Callable[..., Any]:
    _check_kind(kind)
    return sympy.lambdify(SYMBOLS, FORMULAS[kind], "numpy")


@functools.cache
def _compiled_bytes(kind: str) -> Callable[..., Any]:
    _check_kind(kind)
    return sympy.lambdify((_X, _n), WIRE_BYTES[kind], "numpy")


def _check_kind(kind: str) -> None:
    if kind not in FORMULAS:
        raise ValueError(f"{kind!r} is no collective; {nearest(kind, COLLECTIVES)}")


def collective_seconds(kind: str, nbytes: Bytes, group: Group, device: Device) -> Seconds:
    """Seconds of the collective ``kind`` on a tensor of ``nbytes`` bytes (see the module: the whole tensor X).

    ``nbytes`` may be an array: the answer has its shape. A group of one rank costs nothing. The constants are those of
    ``device`` for the links of ``group``; links.toml names their sources.
    """
    compiled = _compiled(kind)
    x = np.asarray(nbytes, dtype=np.float64)
    if group.size == 1:
        return _plain(np.zeros_like(x))
    intra = device.constants(group.intra, kind)
    within = intra.efficiency * group.intra.bandwidth
    switch = intra.switch_efficiency * group.intra.bandwidth or NO_SWITCH
    between, fill, base, step = 1.0, 0.0, intra.base, 0.0  # within one host the terms of the network are zero
    if group.inter is not None:
        inter = device.constants(group.inter, kind)
        between, fill = inter.efficiency * group.inter.bandwidth, inter.fill
        base, step = intra.base + inter.base, inter.step
    seconds = compiled(x, group.size, group.per_host, group.hosts, within, switch, intra.fill, between, fill,
                       base, intra.step, step)
    return _plain(np.asarray(seconds, dtype=np.float64))


def wire_bytes(kind: str, nbytes: Bytes, n: int) -> Seconds:
    """Bytes that one of ``n`` ranks sends, for a whole tensor of ``nbytes`` bytes; an array gives an array."""
    x = np.asarray(nbytes, dtype=np.float64)
    return _plain(np.zeros_like(x) if n == 1 else np.asarray(_compiled_bytes(kind)(x, n), dtype=np.float64))


def _plain(value: npt.NDArray[np.float64]) -> Seconds:
    return float(value) if value.ndim == 0 else value
