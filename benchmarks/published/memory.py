"""Bytes at the fullest moment of a step as frameworks hold them, which is otherwise than what autopar's graphs hold:

* fused kernels keep for the backward what enters a chain of pointwise operators, and what products keep of it, where
  an emitted graph keeps every value that its backward reads; with Megatron's sequence parallelism what was gathered
  over tp is gathered again in the backward (Korthikanti et al., arXiv:2205.05198, section 4.2.2);
* dropout keeps its mask, a byte an element, which autopar draws again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.cost_model.bubble import script
from autopar.sharding.assignment import Assignment, result_layouts
from autopar.sharding.axes import TENSOR_AXIS
from autopar.sharding.layout import Layout
from autopar.sharding.operators import Operators, Value
from autopar.sharding.recompute import Kept, MadeAgain, kept, made_again
from autopar.sharding.zero import Keeping
from autopar.solver.memory import memory_of
from autopar.solver.peaks import (
    ACTIVATIONS,
    GRADIENTS,
    Moment,
    StageLife,
    fullest,
    of_ranks,
    optimizer_moment,
    row_moments,
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
    inside: frozenset[fx.Node] = frozenset(),
) -> dict[str, int]:
    """Bytes a device by kind at the fullest moment of the fullest rank: the kinds of `peaks.peaks_of`. Of ``fused``
    kernels what enters is kept; with ``sequence_parallel`` tp splits the tokens of what it does not split otherwise;
    what the operators ``inside`` a kernel make takes no bytes."""
    share = kept_share(setting.operators, assignment, setting.recompute, fused, sequence_parallel, inside)
    if pipeline is not None:
        lives = stage_lives(setting, assignment, keep, micro_batches, pipeline, inside)
        lives = [_shared(life, share) for life in lives]
        ranks = of_ranks(setting, assignment, keep, micro_batches, pipeline, lives)
        return max(ranks, key=lambda kinds: sum(kinds.values()))
    lives = [_shared(step_life(setting, assignment, keep, micro_batches, inside), share)]
    memory = memory_of(setting, assignment, Kept(), keep, micro_batches)
    (row,) = script(None, 1, 1, micro_batches).rows
    moments = [optimizer_moment(setting, assignment, memory[GRADIENTS]), *row_moments(row, lives, [0])]
    return fullest(setting.cluster.device, memory, moments)


def _shared(life: StageLife, share: float) -> StageLife:
    """A stage that keeps a share of its activations."""

    def of(moment: Moment) -> Moment:
        return {kind: int(n * share) if kind == ACTIVATIONS else n for kind, n in moment.items()}

    moments = ("forward", "backward", "input", "weight", "adding", "adding_weight")
    changes: dict[str, Any] = {name: of(getattr(life, name)) for name in moments}
    return replace(life, **changes, saved=int(life.saved * share), between=int(life.between * share))


def kept_share(
    operators: Operators,
    assignment: Assignment,
    recompute: str,
    fused: bool,
    sequence_parallel: bool,
    inside: frozenset[fx.Node] = frozenset(),
) -> float:
    """What a framework keeps for the backward over what an emitted graph keeps, which makes what is ``inside`` a kernel
    again in both."""
    again = made_again(operators, recompute)
    again = MadeAgain(again.operators | inside, again.moves)
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
