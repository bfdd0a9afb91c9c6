"""How near predictions are to what was published: errors, ranking within groups, regret, and what is not covered."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from published.predict import Prediction

#: Published times that differ by less are ties: repeats of one run differ by 1 % (median) to 9 %.
TIE = 0.05
#: Resamplings of the groups for the interval of the concordance, and its coverage.
BOOTSTRAPS, INTERVAL = 2000, 0.9


@dataclass(frozen=True)
class Errors:
    """Relative errors |predicted / published - 1| of ``count`` rows, and the median of predicted / published."""

    count: int
    median: float
    mean: float
    p90: float
    ratio: float


def errors(pairs: Iterable[tuple[float, float]]) -> Errors | None:
    """The errors of pairs (predicted, published); None without any."""
    ratios = np.array([predicted / published for predicted, published in pairs])
    if not len(ratios):
        return None
    off = np.abs(ratios - 1)
    return Errors(len(off), *(float(f(off)) for f in (np.median, np.mean)), float(np.quantile(off, 0.9)),
                  float(np.median(ratios)))  # fmt: skip


def timed(found: Iterable[Prediction]) -> list[Prediction]:
    """Those with a predicted and a published time."""
    return [p for p in found if p.seconds is not None and p.row.published_seconds is not None]


def time_errors(found: Iterable[Prediction]) -> Errors | None:
    """Errors of step times."""
    return errors((p.seconds or 0.0, p.row.published_seconds or 0.0) for p in timed(found))


def memory_errors(found: Iterable[Prediction]) -> Errors | None:
    """Errors of peak memory."""
    return errors((p.peak_gib, p.row.peak_mem_gib) for p in found if p.peak_gib and p.row.peak_mem_gib)


def groups(found: Iterable[Prediction]) -> dict[str, list[Prediction]]:
    """Timed predictions by rank group; those that mix frameworks are left out (README of the data, trap 7)."""
    by_group: dict[str, list[Prediction]] = defaultdict(list)
    for p in timed(found):
        if p.row.rank_group and "cross-framework" not in (p.row.rank_kind or ""):
            by_group[p.row.rank_group].append(p)
    return {name: rows for name, rows in by_group.items() if len(rows) > 1}


def ordered_rightly(rows: Sequence[Prediction]) -> tuple[int, int]:
    """Of all pairs whose published times differ by more than `TIE`, how many are ordered rightly, and how many there
    are. Equal predictions are not."""
    right = count = 0
    for a, b in itertools.combinations(rows, 2):
        first, second = a.row.published_seconds or 0.0, b.row.published_seconds or 0.0
        if max(first, second) / min(first, second) - 1 <= TIE:
            continue
        count += 1
        right += ((a.seconds or 0.0) - (b.seconds or 0.0)) * (first - second) > 0
    return right, count


@dataclass(frozen=True)
class Concordance:
    """The share of ``pairs`` ordered rightly, with the ends of its bootstrap interval over groups."""

    share: float
    low: float
    high: float
    pairs: int


def concordance(found: Iterable[Prediction]) -> Concordance | None:
    """Over all groups; None if no pair differs enough."""
    counts = np.array([ordered_rightly(rows) for rows in groups(found).values()], dtype=float).reshape(-1, 2)
    counts = counts[counts[:, 1] > 0]
    if not len(counts):
        return None
    drawn = counts[np.random.default_rng(0).integers(len(counts), size=(BOOTSTRAPS, len(counts)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    right, pairs = counts.sum(axis=0)
    return Concordance(float(right / pairs), float(low), float(high), int(pairs))


@dataclass(frozen=True)
class Regret:
    """In one group: the published plan that is predicted fastest takes ``regret`` (a fraction) longer than the one that
    really was. ``picked`` and ``best`` are their ids."""

    group: str
    regret: float
    picked: str
    best: str


def regrets(found: Iterable[Prediction]) -> list[Regret]:
    """The regret of every group, the worst first."""
    result = []
    for name, rows in groups(found).items():
        picked = min(rows, key=lambda p: p.seconds or math.inf)
        best = min(rows, key=lambda p: p.row.published_seconds or math.inf)
        lost = (picked.row.published_seconds or 0.0) / (best.row.published_seconds or 1.0) - 1
        result.append(Regret(name, lost, picked.row.run_id, best.row.run_id))
    return sorted(result, key=lambda r: -r.regret)


def out_of_memory(found: Iterable[Prediction]) -> dict[str, int]:
    """Published failures for memory that are ``predicted`` and ``missed``, and rows that ran and were predicted not to
    (``false``)."""
    judged = [p for p in found if p.fits is not None]
    failed, ran = ([p for p in judged if (p.row.status == "oom") == oom] for oom in (True, False))
    missed = sum(bool(p.fits) for p in failed)
    return {"predicted": len(failed) - missed, "missed": missed, "false": sum(not p.fits for p in ran)}


def coverage(found: Sequence[Prediction]) -> dict[str, Any]:
    """Rows, how many are predicted, and the reasons of the others with their numbers, which add up."""
    reasons = Counter(p.reason for p in found if p.reason is not None)
    return {
        "rows": len(found),
        "predicted": sum(p.reason is None for p in found),
        "share": sum(p.reason is None for p in found) / len(found) if found else 1.0,
        "reasons": dict(reasons.most_common()),
    }


def by(found: Iterable[Prediction], column: str) -> dict[str, list[Prediction]]:
    """Predictions by a column of their rows, sorted."""
    parts: dict[str, list[Prediction]] = defaultdict(list)
    for p in found:
        parts[getattr(p.row, column)].append(p)
    return dict(sorted(parts.items()))
