"""Of how many micro-batches the stages of a pipeline hold activations, by its schedule, in closed forms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.schedule import V_SHAPED
from autopar.solver.program import Floats


def in_flight(
    schedule: str | None, pp: int, chunks: int, micro_batches: int, forwards_first: bool = False
) -> Floats:
    """How many micro-batches of all its stages a rank holds activations of at its fullest moment (Narayanan et al.,
    arXiv:2104.04473; Qi et al., arXiv:2401.10241 and arXiv:2405.15362): of all, where forwards come first."""
    if forwards_first:
        return np.full(pp, float(micro_batches))
    return np.minimum(_counts(schedule, pp, chunks, micro_batches)[0].mean(0), micro_batches)


class Held(NamedTuple):
    """By stage: of how many micro-batches it holds activations at the fullest moment of its rank (`in_flight`), for how
    many of these the backward of weights is put off meanwhile (``late``), by schedules that run it apart, and for how
    many at the ``end`` of a step, when no other activations are there."""

    most: Floats
    late: Floats
    end: Floats


def held_by_stage(
    schedule: str | None, pp: int, chunks: int, micro_batches: int, forwards_first: bool = False
) -> Held:
    """What the stages of a schedule hold."""
    every = np.stack(_counts(schedule, pp, chunks, micro_batches))
    if forwards_first:
        every[0] = micro_batches
    found = np.minimum(every, micro_batches)
    if schedule in V_SHAPED:
        found[:, 1::2] = found[:, 1::2, ::-1]
    return Held(*found.reshape(3, -1))


def _counts(schedule: str | None, pp: int, chunks: int, micro_batches: int) -> tuple[Floats, Floats, Floats]:
    """`Held` by a rank's first, second, ... stage and by rank, of as many micro-batches as a schedule can hold.
    Interleaved, forwards go round the stages of a rank, pp micro-batches at a time; the weights' backwards that wait
    are those of its last stage. V-shaped, the second stages have the fewest."""
    ranks, none = np.arange(pp, dtype=np.float64), np.zeros((chunks, pp))
    if schedule == "interleaved":
        begun = (chunks - 1) * pp + 2 * (pp - 1 - ranks) + 1
        held = np.minimum(pp, begun - pp * np.arange(chunks)[:, None])
        held[0] += np.maximum(begun - chunks * pp, 0)
        return held, none, none
    if schedule == "interleaved-zb":
        return np.full((chunks, pp), float(pp)), np.stack([*none[1:], ranks + 1]), none
    if schedule == "zbv":
        return np.stack([2 * pp - 1 - ranks, ranks + 1]), np.stack([ranks, ranks + 1]), none
    if schedule == "dualpipev":  # runs backwards whole but for the last ones
        return np.stack([2 * pp - ranks, ranks + 1]), none, np.stack([(ranks + 1) // 2, ranks // 2 + 1])
    if schedule == "v-half":
        second = ranks // 2 + 1
        return np.stack([2 * (pp // 2 + 1) - second, second]), none + 1, none
    if schedule == "zb-2p":
        return np.full((1, pp), 2.0 * pp - 1), (2 * ranks + 1)[None], none
    every = {None: np.ones(1), "gpipe": np.full(pp, float(micro_batches)), "1f1b": pp - ranks}
    return every[schedule][None], none, none
