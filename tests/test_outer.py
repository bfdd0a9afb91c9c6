"""The outer search: cuts, candidates, closed forms and bounds against what can be enumerated or simulated."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zoo
from dist import small_models as models
from torch.distributed.pipelining import schedules

import autopar
from autopar import Cluster, Hints, Workload
from autopar._compat import pipeline_order
from autopar.cost_model.bubble import script, simulate
from autopar.cost_model.communication import collective_seconds
from autopar.cost_model.simulate import COMPUTE
from autopar.cost_model.step import tasks_of
from autopar.report.progress import progress
from autopar.schedule import runs, stage_ranks
from autopar.solver.actions import programs as write_programs
from autopar.solver.ahead import Crew
from autopar.solver.attempt import Attempt, peaks, task_of
from autopar.solver.candidates import Candidate, Degrees, Limits, all_degrees, candidates
from autopar.solver.cuts import NEAR, TIE, Units, best_cuts, even_cuts, fair_cuts
from autopar.solver.estimate import Estimate, Estimator, bubble, by_rank, least_share
from autopar.solver.estimates import Estimates
from autopar.solver.frame import Frame
from autopar.solver.held import held_by_stage, in_flight
from autopar.solver.outer import DEGREES_SOLVED, ORDINARY, Solver
from autopar.solver.pipeline import Pipeline
from autopar.solver.profile import Replica
from autopar.solver.search import make_frame
from autopar.solver.spmd import Solved
from autopar.solver.staged import Stages
from autopar.specialize import capture_batch

# ---- cuts ----


def every_cut(n: int, count: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in itertools.combinations(range(1, n), count - 1)]


def loads(values: np.ndarray, cut: tuple[int, ...], ranks: tuple[int, ...]) -> np.ndarray:
    return np.bincount(ranks, np.add.reduceat(values, cut), max(ranks) + 1)


@pytest.mark.parametrize("seed", range(6))
def test_even_cuts_are_about_the_best(seed: int) -> None:
    """Of all cuts of ten random units none has a costliest stage that costs a percent less."""
    seconds = np.random.default_rng(seed).uniform(0.1, 3.0, size=10)
    for count in (1, 2, 3, 5, 10):
        best = min(np.add.reduceat(seconds, cut).max() for cut in every_cut(10, count))
        assert np.add.reduceat(seconds, even_cuts(seconds, count)).max() <= best * 1.01


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_best_cuts_are_the_best_that_fit(seed: int, schedule: str) -> None:
    """Of all cuts of nine random units into four stages the one found is the best, with and without a budget that rules
    some of them out; and where nothing fits, bytes do not count. The best has the least work of the busiest rank; of
    interleaved stages the least mean of that and of the longest first and the longest second stage together, and of
    equal ones the one where these differ less."""
    draw = np.random.default_rng(seed)
    units = Units(*(draw.uniform(0.1, 3.0, size=9) for _ in range(4)))
    pp = 4 if schedule == "1f1b" else 2
    ranks, (held, late, _) = stage_ranks(schedule, pp, 4), held_by_stage(schedule, pp, 4 // pp, 8)

    def kept(cut: tuple[int, ...]) -> float:
        rest, saves, more = (np.add.reduceat(x, cut) for x in (units.rest, units.saves, units.more))
        return float(np.bincount(ranks, rest + held * saves + late * more).max())

    def worth(cut: tuple[int, ...]) -> float:
        of_rank = loads(units.seconds, cut, ranks).max()
        stages = np.add.reduceat(units.seconds, cut)
        if schedule == "interleaved":
            rows = stages[:2].max(), stages[2:].max()
            return float((of_rank + sum(rows)) / 2 + TIE * abs(rows[0] - rows[1]))
        return float(of_rank + TIE * stages.max())

    every = every_cut(9, 4)
    budget = float(np.quantile([kept(cut) for cut in every], 0.2))
    for limit in (budget, float("inf"), 0.01):
        found = tuple(best_cuts(units, ranks, held, late, limit))
        fitting = [cut for cut in every if kept(cut) <= limit * (1 - 1e-3)] or every  # CP-SAT counts whole numbers
        assert worth(found) <= min(map(worth, fitting)) * (1 + NEAR)
        if limit == budget:
            assert kept(found) <= limit * (1 + 1e-4)


@pytest.mark.parametrize(("schedule", "pp", "chunks"), [
    ("1f1b", 4, 1), ("interleaved", 4, 2), ("interleaved", 4, 4), ("interleaved", 2, 8), ("interleaved-zb", 4, 8),
    ("zbv", 4, 2), ("dualpipev", 4, 2),
])  # fmt: skip
def test_stages_are_cut_so_that_ranks_do_not_wait_for_one_another(schedule: str, pp: int, chunks: int) -> None:
    """A Llama of 32 blocks, a small embedding and a head of 2.4 blocks. No rank can have less than the average, or
    where that is not a number of blocks, the next one; of what an even pipeline waits besides, cuts make it 5 % more at
    most. With the least work of the busiest rank alone it was up to 30 % more: stages of one row were uneven."""
    seconds = np.array([0.05, *[1.0] * 32, 2.4])
    ranks, m = stage_ranks(schedule, pp, pp * chunks), 32
    one = np.ones(pp * chunks)
    cut = best_cuts(Units(seconds, seconds, seconds, seconds), ranks, one, one, float("inf"))
    stages = np.add.reduceat(seconds, cut)
    shares = {"F": 0.3 * stages, "I": 0.35 * stages, "W": 0.35 * stages, "B": 0.7 * stages}
    took = simulate(script(schedule, pp, pp * chunks, m), pp * chunks, lambda s, kind: shares[kind][s]).makespan
    even = np.full(pp, np.ceil(seconds.sum() / pp))
    least = m * even[0] + bubble(schedule, chunks, m, 0.3 * even, 0.35 * even, 0.35 * even)
    assert took <= 1.05 * least
    busiest = [np.bincount(ranks, np.add.reduceat(seconds, c)).max() for c in (cut, fair_cuts(seconds, ranks))]
    assert busiest[1] <= 1.05 * busiest[0]  # what estimates are made of


# ---- closed forms ----


@pytest.mark.parametrize(("schedule", "pp", "chunks", "count"), [
    ("gpipe", 4, 1, 8), ("1f1b", 4, 1, 8), ("interleaved", 4, 2, 8), ("interleaved-zb", 4, 2, 8),
])  # fmt: skip
def test_closed_forms_are_what_schedules_give(schedule: str, pp: int, chunks: int, count: int) -> None:
    """Equal stages, F = I = W = 1: the bubble, the activations held, and the least share, by simulation."""
    one = np.full(pp, float(chunks))
    steps = script(schedule, pp, pp * chunks, count, True)
    took = simulate(steps, steps.stages, lambda stage, kind: {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[kind])
    assert bubble(schedule, chunks, count, one, one, one) == pytest.approx(took.makespan - 3 * chunks * count, abs=1.01)
    alone = script(schedule, pp, pp * chunks, 1, True) if schedule in ("gpipe", "interleaved") else None
    if alone is not None:  # nothing is beside a single micro-batch
        single = simulate(alone, alone.stages, lambda stage, kind: {"F": 1.0, "B": 2.0}[kind])
        assert bubble(schedule, chunks, 1, one, one, one) == pytest.approx(single.makespan - 3 * chunks)
    held = in_flight(schedule, pp, chunks, count)
    assert held == pytest.approx(np.array(took.in_flight) / chunks, abs=1.01)
    assert least_share(schedule, pp, chunks, count) * 3 * chunks * count <= took.makespan * (1 + 1e-9)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_simulated_schedules_hold_what_they_are_known_for(pp: int) -> None:
    """ZB-2p holds 2 pp - 1 micro-batches on every rank, V-Half half of what 1F1B does and one more, fewer if there are
    not as many; by simulation."""
    for schedule, chunks, held in (("zb-2p", 1, 2 * pp - 1), ("v-half", 2, pp // 2 + 1)):
        simulated = script(schedule, pp, pp * chunks, 4 * pp, True).in_flight
        assert in_flight(schedule, pp, chunks, 4 * pp).tolist() == [n / chunks for n in simulated] == [held] * pp
        assert in_flight(schedule, pp, chunks, 2).max() == 2


@pytest.mark.parametrize(("schedule", "chunks"), [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved-zb", 2), ("interleaved-zb", 4),
    ("zbv", 2), ("dualpipev", 2), ("zb-2p", 1), ("v-half", 2),
])  # fmt: skip
@pytest.mark.parametrize("pp", [2, 4, 6])
def test_stages_hold_what_schedules_let_them(schedule: str, chunks: int, pp: int) -> None:
    """By simulation: when a rank holds most, its stages hold as many micro-batches each as is said (the last stage of
    interleaved ones a single one, its backward follows at once), and the weights' backwards that it puts off are about
    as many as it ever puts off, within one of each stage's."""
    held, late, end = held_by_stage(schedule, pp, chunks, 8 * pp)
    found = script(schedule, pp, pp * chunks, 8 * pp)
    for own, row in zip(found.of_rank, found.rows, strict=True):
        now, waits = dict.fromkeys(own, 0), dict.fromkeys(own, 0)
        most, most_late, there = 0, 0, dict(now)
        for action in (action for step in row for action in step):
            now[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
            waits[action.stage] += {"I": 1, "W": -1}.get(action.kind, 0)
            most_late = max(most_late, sum(waits.values()))
            if sum(now.values()) > most:
                most, there = sum(now.values()), dict(now)
        assert there == {s: held[s] for s in own}
        assert abs(sum(late[s] + end[s] for s in own) - most_late) <= chunks
    assert in_flight(schedule, pp, chunks, 8 * pp) == pytest.approx(by_rank(schedule, pp, held) / chunks)
    if schedule == "interleaved":
        assert held[-1] == 1


# ---- kinds of ZeRO ----


@functools.cache
def zero_frame(optimizer: str, reshard: bool | None) -> Frame:
    """A Llama with frozen embeddings on eight H100, whose parameters rest in float32 and are used in bfloat16."""
    config = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4,
              "num_hidden_layers": 4, "vocab_size": 8192, "tie_word_embeddings": False}  # fmt: skip
    with torch.device("meta"):
        model = models.llama(**config)
    model.model.embed_tokens.requires_grad_(False)
    ids = torch.zeros(32, 512, dtype=torch.int64, device="meta")
    workload = Workload(global_batch=32, seq_len=512, param_dtype="bfloat16", optimizer=optimizer)
    captured = capture_batch(model, (), {"input_ids": ids, "labels": ids}, precision=workload.precision)
    hints = Hints(zero=3, reshard_after_forward=reshard) if reshard is not None else Hints()
    return make_frame(captured, Cluster.parse("h100-sxm:8"), workload, hints, True)


def solved_and_estimated(frame: Frame, c: Candidate) -> tuple[Solved, Estimate, Estimator]:
    """A candidate as it is solved, and as it is estimated."""
    with progress() as line:
        estimates = Estimates(frame, line)
        e = estimates.estimator(c).estimate(c, ("none",), float("inf"))
        solved = task_of(frame, estimates, e).solve(float("inf"))
    assert solved is not None
    return solved, e, estimates.estimator(c)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd_momentum", marks=pytest.mark.slow)])
def test_the_optimizer_is_estimated_as_it_is_priced(optimizer: str) -> None:
    """The seconds of the optimizer that an estimate has are those of the solved candidate's account."""
    for zero in (0, 3):
        c = Candidate(Degrees(1, 8, 1, 1), zero, None, 1, None, 1)
        solved, _, estimator = solved_and_estimated(zero_frame(optimizer, None), c)
        assert estimator.optimizer(c) == pytest.approx(solved.breakdown["optimizer"], rel=0.02)


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_kinds_of_zero_are_estimated_as_they_are_priced(micro_batches: int) -> None:
    """Bytes of parameters, gradients, optimizer state and copies are those of the account, and seconds about; of ZeRO-3
    without resharding too, which gathers half as often and keeps what it gathered."""
    solved, estimated = {}, {}
    for kind, zero, reshard in (("0", 0, None), ("1", 1, None), ("2", 2, None), ("3", 3, True), ("kept", 3, False)):
        c = Candidate(Degrees(1, 8, 1, 1), zero, None, micro_batches, None, 1)
        solved[kind], estimated[kind], estimator = solved_and_estimated(zero_frame("adamw", reshard), c)
        memory = {**solved[kind].memory, "activations": 0}
        gathered = estimator.rest(c).max() - sum(memory.values())
        if kind == "3":  # two blocks are there at once, but no copy lives for longer than its use
            assert 0 < gathered < 0.5 * solved["2"].memory["copies"]
        else:
            assert gathered == pytest.approx(0, abs=0.01 * sum(memory.values()))
        assert estimated[kind].seconds == pytest.approx(solved[kind].step_time, rel=0.25)
    for found in ([s.step_time for s in solved.values()], [e.seconds for e in estimated.values()]):
        assert found[4] < 0.99 * found[3]


@pytest.mark.parametrize("c", [
    Candidate(Degrees(1, 8, 1, 1), 1, None, 4, None, 1),
    pytest.param(Candidate(Degrees(1, 8, 1, 1), 2, None, 2, None, 1), marks=pytest.mark.slow),
    pytest.param(Candidate(Degrees(1, 8, 1, 1), 3, 4, 4, None, 1), marks=pytest.mark.slow),
    pytest.param(Candidate(Degrees(2, 4, 1, 1), 1, None, 8, "1f1b", 1), marks=pytest.mark.slow),
    pytest.param(Candidate(Degrees(2, 4, 1, 1), 0, None, 8, "interleaved", 3), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_estimates_are_near(c: Candidate) -> None:
    """A step is estimated as it is solved, within 3 %: a Llama of 16 blocks whose matrices are large enough that time
    goes by bytes and FLOPs. Adding up the gradients of micro-batches is a tenth of it with ZeRO-1; what every
    micro-batch does with parameters alone (casts of their gradients) is not divided by dp."""
    solved, estimate, _ = solved_and_estimated(larger_frame(), c)
    assert estimate.seconds == pytest.approx(solved.step_time, rel=0.03)


def test_the_fastest_way_to_recompute_that_fits() -> None:
    """For every budget none of all ways that fit is faster: a few blocks made again whole, rather than the cheap
    operators of all where these fit as well."""
    c = Candidate(Degrees(1, 8, 1, 1), 1, None, 1, None, 1)
    with progress() as line:
        estimates = Estimates(larger_frame(), line)
        estimator, modes = estimates.estimator(c), estimates.frame.modes
        every = [estimator.estimate(c, (mode,), math.inf) for mode in (*modes, *(f"full:{n}" for n in range(1, 16)))]
        none, selective, full = every[:3]
        chosen = []
        for share in (0.05, 0.2, 0.4, 0.6, 0.8, 0.95):
            budget = full.memory + share * (none.memory - full.memory)
            chosen.append(estimator.estimate(c, modes, budget))
            fits = [e.seconds for e in every if e.memory <= budget]
            assert chosen[-1].memory <= budget and chosen[-1].seconds == pytest.approx(min(fits), rel=1e-6)
    assert any(e.recompute.startswith("full:") and e.memory > selective.memory for e in chosen)
    assert estimator.estimate(c, modes, none.memory) == none


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("schedule", "pp", "chunks"), [
    ("1f1b", 4, 1), ("interleaved", 4, 4), ("interleaved-zb", 4, 2), ("zbv", 4, 2), ("dualpipev", 2, 2),
])  # fmt: skip
def test_memory_of_pipelines_is_estimated_as_it_is_found(
    schedule: str, pp: int, chunks: int, recompute: str
) -> None:
    """The bytes of the fullest rank, within 8 %, of a model with few words. What zero bubble makes again it keeps, with
    the gradients that come with it, until the weights have theirs."""
    frame = larger_frame(words=8192)
    c = Candidate(Degrees(pp, 8 // pp, 1, 1), 1, None, 64 // (8 // pp), schedule, chunks)
    with progress() as line:
        estimates = Estimates(frame, line)
        e = estimates.estimator(c).estimate(c, (recompute,), float("inf"))
        task = task_of(frame, estimates, e)
        solved = task.solve(float("inf"))
    assert solved is not None and e.recompute == recompute
    needed = max(sum(kinds.values()) for kinds in peaks(task, solved, c.micro_batches))
    assert e.memory == pytest.approx(needed, rel=0.08)


@functools.cache
def larger_frame(words: int = 128256) -> Frame:
    """A Llama of 1.2 billion parameters on eight H100, 64 sequences of 4096."""
    config = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
              "num_hidden_layers": 16, "vocab_size": words, "max_position_embeddings": 4096,
              "tie_word_embeddings": False}  # fmt: skip
    with torch.device("meta"):
        model = models.llama(**config)
    ids = torch.zeros(64, 4096, dtype=torch.int64, device="meta")
    workload = Workload(global_batch=64, seq_len=4096, param_dtype="bfloat16")
    captured = capture_batch(model, (), {"input_ids": ids, "labels": ids}, precision=workload.precision)
    return make_frame(captured, Cluster.parse("h100-sxm:8"), workload, Hints(), True)


@pytest.mark.parametrize("micro_batches", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_hybrid_zero_is_priced_behind_the_backward(micro_batches: int) -> None:
    """Four blocks, and what is around them: each has one all-reduce across the groups. In the one backward of a step
    the first of them, that of the head, starts when its reduce-scatter is waited for, after the last block: three are
    left to compute. Of several micro-batches none does, all come at the end of the step."""
    c = Candidate(Degrees(1, 8, 1, 1), 3, 4, micro_batches, None, 1)
    solved, estimate, _ = solved_and_estimated(zero_frame("adamw", None), c)
    timing = solved.timing
    backward, end = (tasks_of(timing.programs[timing.actions[kind][0]]) for kind in ("B", "end"))
    across = [[i for i, task in enumerate(tasks) if task.stream == "dp_replicate"] for tasks in (backward, end)]
    assert [len(found) for found in across] == ([5, 0] if micro_batches == 1 else [0, 5])
    if micro_batches == 1:
        work = [task.seconds if task.stream == COMPUTE else 0.0 for task in backward]
        block = sum(work) / 5  # the head takes about as long as a block
        assert 2.5 * block < sum(work[across[0][0] :]) < 3.5 * block
    told = sum(x.count for x in solved.collectives if (x.kind, x.axis) == ("all_reduce", "dp_replicate"))
    assert told == 5
    assert estimate.seconds == pytest.approx(solved.step_time, rel=0.25)


def test_stages_of_ranks() -> None:
    """Sums by rank follow each schedule's own places of stages."""
    values = np.array([1.0, 10.0, 100.0, 1000.0])
    assert by_rank("interleaved", 2, values).tolist() == [101.0, 1010.0]
    assert by_rank("zbv", 2, values).tolist() == [1001.0, 110.0]
    assert by_rank(None, 1, values[:1]).tolist() == [1.0]


# ---- candidates ----


def test_candidates_are_all_that_can_run() -> None:
    """All ranks are used, the batch divides, schedules can run their micro-batches; every factorisation is there."""
    cluster, limits = Cluster.parse("h100-sxm:2x8"), Limits(batch=32, sequence=4096, units=12, parts=True)
    degrees = list(all_degrees(cluster, Hints(), limits))
    tables = {tuple(d.table().values()) for d in degrees}
    powers = [1, 2, 4, 8, 16]
    expected = {t for t in itertools.product(powers, repeat=4) if np.prod(t) == 16 and t[0] <= 12}
    assert tables == expected and len(degrees) == len(expected)
    for d in degrees:
        for c in candidates(d, cluster, Hints(), limits):
            assert 32 % (d.dp * c.micro_batches) == 0
            assert (c.schedule is None) == (d.pp == 1)
            assert c.schedule is None or runs(c.schedule, d.pp, d.pp * c.chunks, c.micro_batches)
            assert c.group is None or (c.zero and d.dp % c.group == 0 and c.group < d.dp)


def test_candidates_keep_hints() -> None:
    """Hinted degrees, schedule, ZeRO and micro-batch size are all that is left."""
    cluster, limits = Cluster.parse("h100-sxm:2x8"), Limits(batch=32, sequence=4096, units=12, parts=True)
    hints = Hints(pp=4, tp=2, schedule="interleaved", zero=1, micro_batch_size=2)
    found = [c for d in all_degrees(cluster, hints, limits) for c in candidates(d, cluster, hints, limits)]
    assert {(c.degrees.pp, c.degrees.tp, c.schedule, c.zero) for c in found} == {(4, 2, "interleaved", 1)}
    assert all(32 // (c.degrees.dp * c.micro_batches) == 2 for c in found)
    whole = replace(limits, parts=False)
    free = [c for d in all_degrees(cluster, Hints(), whole) for c in candidates(d, cluster, Hints(), whole)]
    assert {(c.degrees.pp, c.micro_batches) for c in free} == {(1, 1)}


@pytest.mark.parametrize(("blocks", "pp", "expected"), [
    (80, 4, [2, 4, 5, 10]),  # NVIDIA's 70B: five stages a rank
    (126, 8, [2, 4, 8]),  # the 405B, whose embedding and head take the place of a block each
    (126, 16, [2, 4, 8]),
    (126, 14, [2, 3, 9]),
    (32, 4, [2, 4, 8]),
    (8, 4, [2]),
    (4, 4, []),
])  # fmt: skip
def test_stages_a_rank_divide_its_blocks(blocks: int, pp: int, expected: list[int]) -> None:
    """Of a schedule that leaves them open: what divides the blocks of a rank, and two."""
    cluster, limits = Cluster.parse(f"h100-sxm:{pp}x8"), Limits(64, 4096, blocks + 3, True, blocks=blocks)
    hints = Hints(pp=pp, tp=8, cp=1, schedule="interleaved", zero=0, micro_batch_size=1)
    found = [c for d in all_degrees(cluster, hints, limits) for c in candidates(d, cluster, hints, limits)]
    assert [c.chunks for c in found] == expected


# ---- what all micro-batches share ----


def test_what_micro_batches_share_is_kept_whole() -> None:
    """Cosines and sines are saved once for all micro-batches: a pipeline of one stage keeps what a step without one
    keeps, and a replica's profile adds up to the same."""
    captured = capture_batch(models.llama(), (), models.tokens())
    frame = make_frame(captured, Cluster.parse("cpu:1"), Workload(global_batch=4), Hints(), False)
    replica = Replica(frame.setting, 1, 1, frame.replica_pins, 4, 4)
    for count in (1, 2, 4):
        whole = Stages(frame.setting, replica.assignment, count)
        staged = Stages(frame.setting, replica.assignment, count, Pipeline(1, "1f1b", (replica.row,)))
        _, shared = staged.saved
        assert shared.sum() > 0
        assert staged.memory(0)["activations"] == whole.memory(0)["activations"]
        profile = replica.profile(4 // count)
        saved = profile.saved["none"].sum() + profile.constant["none"].sum()
        assert saved == pytest.approx(whole.memory(0)["activations"])


def test_equal_stages_share_their_programs() -> None:
    """Of eight stages of one block each and what is around them, the inner ones are written once, and every stage has
    the programs that it would be written by itself."""
    captured = capture_batch(models.llama(num_hidden_layers=8), (), models.tokens())
    frame = make_frame(captured, Cluster.parse("cpu:4"), Workload(global_batch=4), Hints(), False)
    replica = Replica(frame.setting, 1, 1, frame.replica_pins, 4, 4)
    row = (replica.row[:2], *((unit,) for unit in replica.row[2:8]), replica.row[8:])
    stages = Stages(frame.setting, replica.assignment, 4, Pipeline(4, "interleaved-zb", row))
    found = [stages.programs(s) for s in range(8)]
    assert len({id(programs) for programs in found}) < 8 and found[3] is found[4]
    kinds = {kind for _, kind in stages.script.kinds}
    for s, programs in enumerate(found):
        assert programs == write_programs(stages.work[s], stages.prices, kinds) and {"F", "I", "W"} <= programs.keys()


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb", "zbv", "dualpipev"])
def test_orders_are_torchs_own(schedule: str) -> None:
    """What is left out of writing a schedule changes nothing of its order."""
    kinds = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "interleaved-zb": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }
    places = [SimpleNamespace(group_size=4, group_rank=0, num_stages=8, submod=None) for _ in range(2)]
    order = kinds[schedule](places, 8).pipeline_order
    assert pipeline_order(schedule, 4, 8, 8) == order and len(order) == 4


# ---- models whose batch cannot be cut ----


def parts_of(model: torch.nn.Module, batch: object) -> bool:
    args, kwargs = ((), batch) if isinstance(batch, dict) else ((batch,), {})
    captured = capture_batch(model, args, kwargs)
    frame = make_frame(captured, Cluster.parse("cpu:2"), Workload(global_batch=4), Hints(), False)
    return frame.limits.parts


def test_what_can_run_in_parts() -> None:
    """A language model can; not one that returns no loss, nor CLIP, whose samples are compared with one another."""
    assert parts_of(models.llama(), models.tokens())
    assert not parts_of(models.mlp(), torch.randn(4, 16))
    clip = next(a for a in zoo.VISION if a.name == "clip")
    assert not parts_of(*clip.make())


def test_what_stages_send_is_split_where_sending_is_slow() -> None:
    """Two hosts of two H100s over 1 Gb/s a device, pp 2 across hosts and tp 2 inside: an activation that is whole on
    both ranks of tp would be sent by both. Split along the sequence, each sends half of a micro-batch's samples x 128
    tokens x 64 numbers of 4 bytes."""
    table = Cluster.parse("h100-sxm:2x2").to_dict()
    slow = Cluster.from_dict({**table, "device": {**table["device"], "network_gbs": 0.125}})
    model = models.llama(hidden_size=64, intermediate_size=128, num_hidden_layers=4, max_position_embeddings=128)
    plan = autopar.plan(model, slow, example_inputs=models.tokens(32, 128), hints=Hints(pp=2, tp=2, schedule="1f1b"))
    whole = plan.micro_batch_size * 128 * 64 * 4
    seconds = [float(collective_seconds("p2p", whole / n, slow.group(2, 2), slow.device)) for n in (1, 2)]
    assert plan.timing is not None and plan.timing.up[0] == pytest.approx(seconds[1]) and seconds[0] > 1.5 * seconds[1]


# ---- bounds and answers ----


def test_bounds_hold_and_estimates_are_near() -> None:
    """Everything solved for a small Llama on eight H100 takes at least its bound, and about what was estimated."""
    config = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8,
              "num_hidden_layers": 4, "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip
    with torch.device("meta"):
        model = models.llama(**config).to(torch.bfloat16)
    ids = torch.zeros(16, 2048, dtype=torch.int64, device="meta")
    captured = capture_batch(model, (), {"input_ids": ids, "labels": ids})
    workload = Workload(global_batch=16, seq_len=2048)
    frame = make_frame(captured, Cluster.parse("h100-sxm:8"), workload, Hints(), True)
    with progress() as line:
        estimates = Estimates(frame, line)
        solver = Solver(frame, estimates, None, line)
        every = estimates.all(preferred=True)
        solver.run(every)
    assert len({e.candidate.degrees for e in every}) >= 5 and len(solver.found) >= 4
    ratios = []
    for found in solver.found:
        assert found.solved.step_time >= found.estimate.bound * (1 - 1e-9)
        ratios.append(found.estimate.seconds / found.solved.step_time)
    assert 0.7 < np.median(ratios) < 1.2
    assert solver.best().solved.step_time <= min(f.solved.step_time for f in solver.found) * 1.03


def test_bounds_know_what_cannot_be_hidden() -> None:
    """One process has nothing to choose: its bound is the plan. Of four that exchange over Gloo the bound has the
    messages between stages or the reduction of gradients, and the optimizer, so that it is not the compute alone: a
    quarter of one process' 2 ms, where steps of such a small model wait for messages; and everything solved takes
    at least its own."""
    captured = capture_batch(models.llama(), (), models.tokens())
    for cluster in ("cpu:1", "cpu:4"):
        frame = make_frame(captured, Cluster.parse(cluster), Workload(global_batch=4), Hints(), False)
        with progress() as line:
            estimates = Estimates(frame, line)
            solver = Solver(frame, estimates, None, line)
            every = estimates.all(preferred=True)
            solver.run(every)
        bound, best = min(e.bound for e in every), solver.best().solved.step_time
        assert all(f.solved.step_time >= f.estimate.bound * (1 - 1e-9) for f in solver.found)
        if cluster == "cpu:1":
            assert bound == pytest.approx(best, rel=1e-6)
            alone = best
        else:
            assert bound > 1.5 * alone / 4 and best < 4.5 * bound


class Told(Solver):
    """A solver that takes estimates for the truth."""

    def solve(self, e: Estimate) -> float:
        found = SimpleNamespace(candidate=e.candidate, estimate=e, pipeline=None, step_time=e.seconds,
                                zero=e.candidate.zero, needed=e.memory)  # fmt: skip
        return self._take(e, Attempt(found, 0.0, e.seconds, False))


def test_what_does_not_fit_takes_no_turn() -> None:
    """As many degrees as are solved at all are fastest where they do not fit, and slow where they do; the best that
    fits comes after them. DeepSeek-V3 on 256 H100: data parallelism is fastest in memory that there is not."""

    def one(dp: int, zero: int, seconds: float, memory: float) -> Estimate:
        return Estimate(Candidate(Degrees(1, dp, 1, 1), zero, None, 1, None, 1), "none", seconds, memory, 0.1)

    crowd = range(2, 2 + DEGREES_SOLVED)
    every = [one(n, 1, 1.0, 200.0) for n in crowd] + [one(1, 3, 10.0, 90.0)] + [one(n, 3, 10.5, 90.0) for n in crowd]
    frame = SimpleNamespace(budget=100.0, hints=Hints(zero=3), crew=Crew(1), shared=list)
    with progress() as line:
        solver = Told(frame, SimpleNamespace(again=lambda e, budget: None), None, line)
        solver.run(every)
    assert solver.best().estimate == one(1, 3, 10.0, 90.0)
    assert all(f.needed <= 100.0 for f in solver.found)


def test_a_budget_of_seconds_still_gives_a_plan() -> None:
    """With no time at all the first plan that fits is taken, and its gap is not smaller than the free search's."""
    free = autopar.plan(models.llama(), "cpu:4", example_inputs=models.tokens())
    hasty = autopar.plan(models.llama(), "cpu:4", example_inputs=models.tokens(), search_seconds=1e-6)
    assert hasty.step_time >= free.step_time * (1 - 1e-9) and hasty.gap >= free.gap - 1e-9
    assert free.gap >= 0 and free.gap_space == hasty.gap_space


def test_alternatives_say_why_they_lost() -> None:
    """The runners-up are slower, or do not fit, and differ from the plan."""
    plan = autopar.plan(models.llama(), "cpu:4", example_inputs=models.tokens())
    assert len(plan.alternatives) >= 3
    own = (plan.degrees, plan.zero, plan.zero_group_size, plan.num_micro_batches, plan.schedule, plan.recompute)
    for a in plan.alternatives:
        assert a.step_time * (1 + ORDINARY) >= plan.step_time or "fits" in a.reason
        assert (a.degrees, a.zero, a.zero_group_size, a.micro_batches, a.schedule, a.recompute) != own and a.reason
