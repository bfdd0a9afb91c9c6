"""What is fitted to published rows: one level a chip; and the peer, one utilisation a chip, fitted on the same rows.

The level of a chip says how much slower its kernels run in a long training step than in the microbenchmarks that the
cost model is built on: a power limit lowers the clock, and a framework leaves gaps. It has no unit: 1.1 means that
compute takes 10 % longer. Left out of its fit is always the family that is judged with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost_model.hardware import Device
from published.clusters import cluster_of
from published.families import family_of
from published.models import is_gated, shape_of
from published.predict import Prediction
from published.rows import Row
from published.score import timed

#: The levels that are tried: from a tenth faster than the microbenchmarks to half as fast.
LEVELS = np.geomspace(0.9, 2.0, 161)

#: As so many families count the microbenchmarks, which say 1: their figures of one chip differ by some 5 %, the medians
#: of families by some 10 %, so that each of these has a quarter of their weight.
MICROBENCHMARKS = 4

#: Parts of a step that take longer where compute does.
SCALED = ("compute", "bubble", "optimizer")


def with_level(p: Prediction, level: float) -> Prediction:
    """The prediction on a chip whose compute takes ``level`` times as long; a bubble is compute of other ranks."""
    assert p.breakdown is not None
    parts = {kind: seconds * (level if kind in SCALED else 1.0) for kind, seconds in p.breakdown.items()}
    return replace(p, seconds=sum(parts.values()), breakdown=parts)


def best_level(found: Iterable[Prediction]) -> float:
    """The median over families of the level with which half a family's rows take longer than published, and half less
    long, drawn to 1 by `MICROBENCHMARKS`. Mixtures of experts count only without others: what they miss is not the
    chip's."""
    rows = timed(found)
    by_family: dict[str, list[Prediction]] = defaultdict(list)
    for p in [p for p in rows if not p.row.is_moe] or rows:
        by_family[p.row.source_family].append(p)

    def off(own: list[Prediction], level: float) -> float:
        ratios = [(with_level(p, level).seconds or 0.0) / (p.row.published_seconds or 1.0) for p in own]
        return abs(float(np.log(np.median(ratios))))

    found_levels = [min(LEVELS, key=lambda level: off(own, level)) for own in by_family.values()]
    weight = len(found_levels) / (len(found_levels) + MICROBENCHMARKS)
    return float(np.median(found_levels) ** weight)


def leave_one_out(
    found: Sequence[Prediction],
    fit: Callable[[Iterable[Prediction]], float],
    apply: Callable[[Prediction, float], Prediction],
) -> tuple[list[Prediction], dict[str, dict[str, float]]]:
    """Every family's timed predictions with a constant that is fitted to the other families' on the same hardware
    (without any such, to those on all hardware; of a file of one family, to its own, which then is no test); and the
    constants, by family and hardware."""
    usable = timed(found)
    constants: dict[str, dict[str, float]] = defaultdict(dict)
    for p in usable:
        family, hardware = p.row.source_family, p.row.hardware
        if hardware not in constants[family]:
            others = [q for q in usable if q.row.source_family != family] or usable
            constants[family][hardware] = fit([q for q in others if q.row.hardware == hardware] or others)
    return [apply(p, constants[p.row.source_family][p.row.hardware]) for p in usable], dict(constants)


def hardware_flops(row: Row) -> float:
    """FLOPs of a step: 6 a weight of a matrix and token, and causal attention; a third more with full recomputation."""
    family = family_of(row)
    shape = shape_of(row, gated=is_gated(row), written_out=family.written_out, dropout=0.0)
    length, tokens = row.seq_len or 0, (row.global_batch or 0) * (row.seq_len or 0)
    weights = shape.active - (0 if shape.tied else shape.vocab * shape.hidden)
    passes = 8.0 if (row.recompute or family.recompute) == "full" else 6.0
    width = shape.heads * (shape.head_dim or shape.hidden / shape.heads)
    return passes * tokens * (weights + shape.layers * width * length)


def peer_seconds(row: Row, device: Device) -> float:
    """Seconds of a step at the peak of all devices: what the peer divides by its utilisation."""
    return hardware_flops(row) / (row.n_gpus * device.peak_flops["fp16"])


def peer(found: Iterable[Prediction]) -> list[Prediction]:
    """The peer's predictions, at a utilisation of 1, of the same rows."""
    result = []
    for p in timed(found):
        cluster = cluster_of(p.row)
        assert cluster is not None
        seconds = peer_seconds(p.row, cluster.device)
        result.append(Prediction(p.row, seconds, {"compute": seconds}))
    return result


def best_slowdown(found: Iterable[Prediction]) -> float:
    """1 / utilisation: the median of published over ideal time."""
    return float(np.median([(p.row.published_seconds or 0.0) / (p.seconds or 1.0) for p in timed(found)]))
