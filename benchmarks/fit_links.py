"""Fits the constants of the links to published curves and prints ``cost_model/data/links.toml``.

    python benchmarks/fit_links.py > cost_model/data/links.toml       # errors of every curve go to stderr

Input: ``data/nccl_curves.csv`` (published nccl-tests and similar sweeps, one source a row). For each kind of link and
collective, efficiency, base and step of ``cost_model/communication.py``'s formulas are chosen to minimise the mean squared
**logarithm** of predicted over published time, so that 1 KiB and 16 GiB weigh the same. Where the table has no rows the
entry says ``assumed`` and from what. Nothing is fitted on the rows under ``CHECKS``; their errors are printed.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sympy

from autopar.cost_model.communication import FORMULAS, SYMBOLS

TABLE = Path(__file__).parent / "data" / "nccl_curves.csv"
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
    """Achieved bandwidth (bytes/s), base and step (seconds) of one collective on one link."""

    bandwidth: float
    base: float
    step: float


def predict(sample: Sample, intra: Constants, inter: Constants) -> float:
    """Seconds that the cost model's formula gives for ``sample``."""
    per_host = sample.size / sample.hosts
    base = intra.base + (inter.base if sample.hosts > 1 else 0.0)
    return float(_compiled(sample.kind)(sample.nbytes, sample.size, per_host, sample.hosts, intra.bandwidth,
                                        inter.bandwidth, base, intra.step, inter.step))


_COMPILED: dict[str, Callable[..., float]] = {}


def _compiled(kind: str) -> Callable[..., float]:
    if kind not in _COMPILED:
        _COMPILED[kind] = sympy.lambdify(SYMBOLS, FORMULAS[kind], "math")
    return _COMPILED[kind]


def log_errors(samples: Sequence[Sample], intra: Constants, inter: Constants | None = None) -> Array:
    """log(predicted / measured) of each sample."""
    other = inter or Constants(1.0, 0.0, 0.0)
    return np.array([math.log(predict(s, intra, other) / s.seconds) for s in samples])


def minimise(loss: Callable[[Array], float], start: Sequence[float]) -> Array:
    """Pattern search over the logarithms of positive parameters: deterministic, and enough for three of them."""
    point, step = np.log(np.asarray(start, dtype=float)), 1.0
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


def fit_intra(samples: Sequence[Sample], step: float | None = None) -> Constants:
    """Constants within one host. ``step`` is given where all samples have the same number of ranks: then base and
    step cannot be told apart."""
    def constants(p: Array) -> Constants:
        return Constants(p[0], p[1], p[2] if step is None else step)

    start = (1e11, 1e-5, 1e-6) if step is None else (1e11, 1e-5)
    return constants(minimise(lambda p: float(np.mean(log_errors(samples, constants(p)) ** 2)), start))


def fit_inter(samples: Sequence[Sample], intra: Constants) -> Constants:
    """Constants of the network, given those within the hosts. The cost of a call is in ``intra`` already."""
    def constants(p: Array) -> Constants:
        return Constants(p[0], 0.0, p[1])

    return constants(minimise(lambda p: float(np.mean(log_errors(samples, intra, constants(p)) ** 2)), (4e10, 1e-5)))


def read_samples(*, gpu: str, source: str, kind: str, size: int | None = None) -> list[Sample]:
    """Rows of the table with that device and collective whose source contains ``source``, time from the bus bandwidth
    where the row has none (nccl-tests PERFORMANCE.md: all_reduce 2(n-1)/n size/busbw, the others (n-1)/n)."""
    samples = []
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            wanted = row["gpu"] == gpu and source in row["source"] and row["collective"] == kind
            if not wanted or not row["size_bytes"] or (size is not None and row["n_gpus"] != str(size)):
                continue
            n, nbytes = int(row["n_gpus"] or 0), float(row["size_bytes"])
            if not n:
                continue
            volume = (2 if kind == "all_reduce" else 1) * (n - 1) / n * nbytes
            seconds = float(row["time_us"]) * 1e-6 if row["time_us"] else volume / (float(row["busbw_gbs"]) * 1e9)
            hosts = max(1, n // int(row["gpus_per_node"]))
            # The hetu profiler's all-to-all size is what one rank holds; ours is the sum over all ranks.
            whole = nbytes * n if kind == "all_to_all" else nbytes
            samples.append(Sample(kind, whole, n, hosts, seconds, f"{row['source']} {row['hardware']}"))
    return samples
