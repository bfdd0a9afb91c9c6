"""Constants of the cost model from measured times.

All fits minimise **logarithms** of predicted over measured seconds, so that short and long ones weigh the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import sympy

from autopar.cost_model.communication import FORMULAS, NO_SWITCH, SYMBOLS
from autopar.cost_model.compute import Work, work_seconds
from autopar.cost_model.hardware import Device

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One measured collective: whole tensor of ``nbytes``, ``size`` ranks over ``hosts``, ``seconds``."""

    kind: str
    nbytes: float
    size: int
    hosts: int
    seconds: float
    source: str


@dataclass(frozen=True)
class Constants:
    """Of one collective on one link: achieved bandwidth (bytes/s); base, step and fill (seconds); ``switch``, the
    bandwidth of a reduction inside the switch."""

    bandwidth: float
    base: float
    step: float
    fill: float
    switch: float = NO_SWITCH


def predict(sample: Sample, intra: Constants, inter: Constants | None) -> float:
    """Seconds that the cost model's formula gives for ``sample``; ``inter`` is the network, if it spans hosts."""
    other = inter or Constants(1.0, 0.0, 0.0, 0.0)
    return float(_compiled(sample.kind)(
        sample.nbytes, sample.size, sample.size / sample.hosts, sample.hosts, intra.bandwidth, intra.switch, intra.fill,
        other.bandwidth, other.fill, intra.base + other.base, intra.step, other.step,
    ))  # fmt: skip


@functools.cache
def _compiled(kind: str) -> Callable[..., float]:
    return sympy.lambdify(SYMBOLS, FORMULAS[kind], "math")


def log_errors(samples: Sequence[Sample], intra: Constants, inter: Constants | None = None) -> Array:
    """log(predicted / measured) of each sample."""
    return np.array([math.log(predict(s, intra, inter) / s.seconds) for s in samples])


def minimise(loss: Callable[[Array], float], start: Sequence[float]) -> Array:
    """Pattern search over the logarithms of positive parameters: deterministic, and enough for three of them."""
    point, step = np.log(np.asarray(start, dtype=float)), 0.25
    best = loss(np.exp(point))
    while step > 1e-3:
        moves = [point + sign * step * unit for unit in np.eye(len(point)) for sign in (1, -1)]
        losses = [loss(np.exp(move)) for move in moves]
        index = int(np.argmin(losses))
        if losses[index] < best:
            point, best = moves[index], losses[index]
        else:
            step /= 2
    return np.exp(point)


def loss(samples: Sequence[Sample], intra: Constants, inter: Constants | None = None) -> float:
    """Mean squared error of the logarithms."""
    return float(np.mean(log_errors(samples, intra, inter) ** 2))


def fit(samples: Sequence[Sample], make: Callable[..., Constants], *seconds: float) -> Constants:
    """``make(bandwidth, ...)`` with the arguments that fit best, the search starting from ``seconds`` for those after
    the bandwidth. It starts from a bandwidth that is too high: a switch slower than the ring would never be taken,
    and the loss would not see it."""
    return make(*minimise(lambda p: loss(samples, make(*p)), (1e12, *seconds)).tolist())


def product_errors(work: Sequence[Work], measured: Sequence[float], device: Device) -> Array:
    """log(predicted / measured seconds) of matrix products."""
    return np.asarray(np.log(work_seconds(work, device) / np.array(measured)))


def at_level(work: Sequence[Work], measured: Sequence[float], device: Device) -> Device:
    """The device with the ``matmul_efficiency`` at which the median error of the products is 0."""
    for _ in range(8):  # what is bound by bytes or by the ramp does not move with the level, so one step may fall short
        error = float(np.median(product_errors(work, measured, device)))
        device = replace(device, matmul_efficiency=device.matmul_efficiency * math.exp(error))
    return device
