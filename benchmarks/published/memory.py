"""Bytes at the fullest moment of a step as frameworks hold them, which is otherwise than what autopar's graphs hold:

* gradients of all micro-batches are added up in one buffer, parameter by parameter (torch's AccumulateGrad, Megatron's
  main_grad), where a graph of autopar returns all gradients of a micro-batch before they are added;
* fused kernels keep for the backward what enters a chain of pointwise operators, and what products keep of it, where
  an emitted graph keeps every value that its backward reads; with Megatron's sequence parallelism what was gathered
  over tp is gathered again in the backward (Korthikanti et al., arXiv:2205.05198, section 4.2.2);
* dropout keeps its mask, a byte an element, which autopar draws again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from autopar.cost_model.bubble import script
from autopar.schedule import Step
from autopar.sharding.assignment import Assignment, result_layouts
from autopar.sharding.axes import TENSOR_AXIS
from autopar.sharding.layout import Layout
from autopar.sharding.operators import Operators, Value
from autopar.sharding.recompute import Kept, MadeAgain, kept, made_again
from autopar.sharding.stages import homes
from autopar.sharding.zero import Keeping
from autopar.solver.memory import memory_of
from autopar.solver.peaks import (
    ACTIVATIONS,
    COPIES,
    GRADIENTS,
    Moment,
    StageLife,
    fullest,
    optimizer_moment,
    stage_lives,
    step_life,
)
from autopar.solver.pipeline import Pipeline
from autopar.solver.setting import Setting

_DROPOUT = torch.ops.autopar.dropout.default


def framework_peak(
    setting: Setting,
    assignment: Assignment,
    keep: Mapping[str, Keeping],
    micro_batches: int,
    pipeline: Pipeline | None,
    fused: bool,
    sequence_parallel: bool,
) -> dict[str, int]:
    """Bytes a device by kind at the fullest moment of the fullest rank: the kinds of `peaks.peak_of`. Of ``fused``
    kernels what enters is kept; with ``sequence_parallel`` tp splits the tokens of what it does not split otherwise."""
    share = kept_share(setting.operators, assignment, setting.recompute, fused, sequence_parallel)
    if pipeline is None:
        lives, steps = [step_life(setting, assignment, keep, micro_batches)], script(None, 1, 1, micro_batches)
    else:
        lives = stage_lives(setting, assignment, keep, micro_batches, pipeline)
        steps = script(pipeline.schedule, pipeline.pp, len(pipeline.stages), micro_batches)
    lives = [_shared(life, share) for life in lives]
    ranks = []
    for row, stages in zip(steps.rows, steps.of_rank, strict=True):
        part = setting if pipeline is None else _part(setting, pipeline, stages)
        memory = memory_of(part, assignment, Kept(), keep, micro_batches)
        moments = [optimizer_moment(part, assignment, memory[GRADIENTS]), *_moments(row, lives, stages)]
        ranks.append(fullest(setting.cluster.device, memory, moments))
    return max(ranks, key=lambda kinds: sum(kinds.values()))


def _part(setting: Setting, pipeline: Pipeline, stages: Sequence[int]) -> Setting:
    """The setting with the parameters of some stages."""
    captured = setting.captured
    own = tuple(p for p in captured.parameters if homes((p.name, *p.aliases), pipeline.stages).intersection(stages))
    return replace(setting, captured=replace(captured, parameters=own))


def _moments(row: Sequence[Step], lives: Sequence[StageLife], stages: Sequence[int]) -> Iterator[Moment]:
    """The moments of one rank's row of actions, `peaks.row_moments` with one buffer for gradients."""
    sums = sum(lives[s].sums for s in stages)
    resting = {GRADIENTS: sums, COPIES: sum(lives[s].copies for s in stages)}
    held: dict[tuple[int, int], int] = {}
    seen = set[tuple[int, str, int]]()
    for action in (action for step in row for action in step):
        own, key = lives[action.stage], (action.stage, action.micro_batch)
        held.pop(key, None)
        total = sum(held.values())
        if (action.stage, action.kind, total) not in seen:
            seen.add((action.stage, action.kind, total))
            moment = {"F": own.forward, "B": own.backward, "I": own.input, "W": own.weight}[action.kind]
            yield _sum(_without_gradients(moment) if sums else moment, {**resting, ACTIVATIONS: total})
        if left := {"F": own.saved, "I": own.between}.get(action.kind, 0):
            held[key] = left
    for s in stages:
        yield _sum(lives[s].finish, resting)


def _without_gradients(moment: Moment) -> Moment:
    return {kind: n for kind, n in moment.items() if kind != GRADIENTS}


def _sum(*moments: Moment) -> Moment:
    kinds = dict.fromkeys(kind for moment in moments for kind in moment)
    return {kind: sum(moment.get(kind, 0) for moment in moments) for kind in kinds}


def _shared(life: StageLife, share: float) -> StageLife:
    """A stage that keeps a share of its activations."""

    def of(moment: Moment) -> Moment:
        return {kind: int(n * share) if kind == ACTIVATIONS else n for kind, n in moment.items()}

    return replace(
        life, forward=of(life.forward), backward=of(life.backward), input=of(life.input), weight=of(life.weight),
        saved=int(life.saved * share), between=int(life.between * share),
    )  # fmt: skip


def kept_share(
    operators: Operators, assignment: Assignment, recompute: str, fused: bool, sequence_parallel: bool
) -> float:
    """What a framework keeps for the backward over what an emitted graph keeps."""
    again = made_again(operators, recompute)
    plain = sum(_kept(operators, assignment, again).values())
    if fused:
        again = MadeAgain(again.operators | _inside_kernels(operators), again.moves)
    own = _kept(operators, assignment, again)
    if sequence_parallel:
        own = _split_over_tp(operators, assignment, own)
    return (sum(own.values()) + _masks(operators, assignment, again)) / plain if plain else 1.0


def _kept(operators: Operators, assignment: Assignment, again: MadeAgain) -> dict[tuple[Value, Layout], float]:
    """Bytes a rank of every value, by layout, that the forward of a whole batch keeps."""
    saved = kept(operators, assignment, again).saved
    return {key: float(key[1].local_bytes(assignment.mesh, operators.specs[key[0]])) for key in saved}


def _split_over_tp(
    operators: Operators, assignment: Assignment, found: Mapping[tuple[Value, Layout], float]
) -> dict[tuple[Value, Layout], float]:
    """The same if every value of tokens is kept in pieces over tp: a copy that was gathered is made again."""
    degree, split = assignment.mesh.degree(TENSOR_AXIS), dict[tuple[Value, Layout], float]()
    for (value, layout), nbytes in found.items():
        whole = not any(TENSOR_AXIS in axes for axes in layout.dims)
        of_tokens = bool(operators.batch_dims[value] or operators.sequence.dims[value])
        key = (value, layout) if not whole or not of_tokens else (value, Layout(()))
        split[key] = nbytes / (degree if whole and of_tokens else 1)
    pieces = {value for value, layout in split if layout != Layout(())}
    return {key: n for key, n in split.items() if key[1] != Layout(()) or key[0] not in pieces}


def _inside_kernels(operators: Operators) -> frozenset[object]:
    """The forward operators whose results a fused kernel makes again: all that cost no product, but for those that a
    product of the backward reads and those that leave their block."""
    read = {
        operators.base(value).node
        for op in operators
        if op.backward and op.is_heavy
        for value in op.operands
    }
    kept_whole = made_again(operators, "selective").operators
    return frozenset(
        op.node for op in operators if not op.backward and not op.is_heavy and op.node in kept_whole
        and op.node not in read and op.call.target is not _DROPOUT
    )


def _masks(operators: Operators, assignment: Assignment, again: MadeAgain) -> float:
    """Bytes a rank of the masks of dropout that is not made again: one an element."""
    produced = result_layouts(operators, assignment)
    found = 0.0
    for op in operators:
        if op.call.target is _DROPOUT and not op.backward and op.node not in again.operators:
            value, spec = Value(op.node), operators.specs[Value(op.node)]
            found += produced[value].local_bytes(assignment.mesh, spec) / spec.dtype.itemsize
    return found
