"""Seconds that a collective takes: alpha-beta formulas over a hierarchy of two links.

X is the **whole** tensor in bytes: what every rank holds after an all-gather, what every rank holds before a
reduce-scatter or an all-reduce, the sum over all ranks for an all-to-all, the message for p2p. A group has n ranks, of
which L lie in each of H hosts (n = L H); B is the bandwidth of the link within a host (NVLink, xGMI, PCIe), b that of one
device's share of the network. Within one host (H = 1) the formulas are the ring's of field_notes: (n-1)/n X/B plus n-1
steps. Across hosts they are the two-level ones: each rank exchanges 1/L of the tensor with its counterparts in the
other hosts over its own NIC, and the host exchanges it within; large messages are pipelined in chunks, so the slower
part counts (Max), not the sum. Checked against nccl_curves.csv: for two hosts of H100 with 8 x 200 Gb/s a flat ring could
reach a bus bandwidth of 200 GB/s, two levels 375, published 339; with 8 x 400 Gb/s 400 and 514 for 487
(benchmarks/fit_links.py prints them all).

An all-reduce takes 2 log2(H) steps between hosts since NCCL takes a double binary tree for short messages (NVIDIA
developer blog, "Massively scale your deep learning training with NCCL 2.4", 2019); the others are rings there too.
An all-to-all sends to all hosts at once; that its latency grows by one step a host is an assumption without data.
t0 is what a call costs whatever its size, ``a`` and ``c`` the step within a host and between hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy
from sympy import Max, Piecewise, log

from autopar.cluster import Group
from autopar.cost_model.hardware import COLLECTIVES, Device, nearest

Bytes = float | npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]
Seconds = float | npt.NDArray[np.float64]

SYMBOLS = sympy.symbols("X n L H B b t0 a c", nonnegative=True)
_X, _n, _L, _H, _B, _b, _t0, _a, _c = SYMBOLS

_RING = Max((_L - 1) / _L * _X / _B, (_H - 1) / _H * _X / (_L * _b))
_RING_STEPS = (_L - 1) * _a + (_H - 1) * _c

FORMULAS: dict[str, sympy.Expr] = {
    "all_gather": _RING + _t0 + _RING_STEPS,
    "reduce_scatter": _RING + _t0 + _RING_STEPS,
    "all_reduce": 2 * _RING + _t0 + 2 * (_L - 1) * _a + 2 * log(_H, 2) * _c,
    "all_to_all": Max((_L - 1) / _n * _X / _n / _B, (_n - _L) / _n * _X / _n / _b) + _t0 + _RING_STEPS,
    "p2p": Piecewise((_X / _b + _t0 + _c, _H > 1), (_X / _B + _t0 + _a, True)),
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
    ``device`` for the links of ``group``; links.toml names their sources. Known limit: the efficiency of an all-reduce
    on NVSwitch was measured on all 8 devices of a host, where the switch reduces; groups of 2 or 4 are a little slower.
    """
    compiled = _compiled(kind)
    x = np.asarray(nbytes, dtype=np.float64)
    if group.size == 1:
        return _plain(np.zeros_like(x))
    intra = device.constants(group.intra, kind)
    b, base, c = 1.0, intra.base, 0.0  # within one host the terms of b and c are zero
    if group.inter is not None:
        inter = device.constants(group.inter, kind)
        b, base, c = inter.efficiency * group.inter.bandwidth, intra.base + inter.base, inter.step
    seconds = compiled(x, group.size, group.per_host, group.hosts, intra.efficiency * group.intra.bandwidth, b,
                       base, intra.step, c)
    return _plain(np.asarray(seconds, dtype=np.float64))


def wire_bytes(kind: str, nbytes: Bytes, n: int) -> Seconds:
    """Bytes that one of ``n`` ranks sends, for a whole tensor of ``nbytes`` bytes; an array gives an array."""
    x = np.asarray(nbytes, dtype=np.float64)
    return _plain(np.zeros_like(x) if n == 1 else np.asarray(_compiled_bytes(kind)(x, n), dtype=np.float64))


def _plain(value: npt.NDArray[np.float64]) -> Seconds:
    return float(value) if value.ndim == 0 else value
