"""What the user fixes of a plan: degrees, pipeline, ZeRO, micro-batches, recomputation, memory, and how named
parameters are split.

A parameter pattern is a name in which ``*`` stands for one or more characters of any kind, dots included; everything
else is literal. So ``*`` between dots stands for one path component or several: ``model.layers.*.weight`` matches
``model.layers.3.mlp.down_proj.weight``, and ``*`` alone matches every parameter.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from torch import nn

from autopar.errors import HintError
from autopar.hint_checks import (
    DEGREES,
    EXPERTS,
    INSIDE_EXPERTS,
    ZERO_STAGES,
    candidates,
    check_attention,
    check_axes,
    check_contradictions,
    check_group_divides,
    check_one_of,
    check_pipeline,
    check_recompute,
    check_zero_group,
    checked_activations,
    checked_axes,
    checked_shard,
    checked_stages,
    is_int,
    matches,
    nearest_names,
)
from autopar.sharding.axes import DATA_AXIS, TENSOR_AXIS
from autopar.sharding.rules.experts import DISPATCHERS

_BYTE_UNITS = (
    {"b": 1}
    | {f"{prefix}b": 1000**i for i, prefix in enumerate("kmgt", 1)}
    | {f"{prefix}ib": 1024**i for i, prefix in enumerate("kmgt", 1)}
)


def parse_bytes(size: int | str) -> int:
    """Bytes of a size given as an int or as text such as ``"70GiB"`` (2^30), ``"512MB"`` (10^6) or ``"4096"``; the
    case of the unit does not matter. HintError if it cannot be read or is less than one byte."""
    value: float = 0
    if isinstance(size, int) and not isinstance(size, bool):
        value = size
    elif isinstance(size, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)):
        value = float(match[1]) * _BYTE_UNITS.get(match[2].lower() or "b", 0)
    if value < 1:
        raise HintError(
            f"Cannot read {size!r} as a number of bytes.",
            expected="a positive int in bytes, or text with a unit (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)",
            found=repr(size),
            change='write for instance "70GiB"',
        )
    return int(value)


@dataclass(frozen=True, kw_only=True)
class Hints:
    """Decisions that the planner must keep; None leaves them to it.

    ``pp``, ``dp``, ``cp`` and ``tp`` are degrees (`sharding.axes`), ``ep`` says over how many of the ranks of dp, cp
    and tp the experts of a model are spread (1: every rank has all of them), ``etp`` over how many the matrices of each
    expert are split (Megatron's expert-tensor-parallel-size: those of tp, or 1, where tp is for other experts or
    tokens), ``schedule`` is a pipeline schedule (one of `autopar.schedule.ALL_SCHEDULES`), ``stages`` maps patterns of
    module paths (blocks, and modules outside of them that own parameters) to pipeline stages, ``zero`` is 0 to 3,
    ``zero_group_size`` says over how many ranks of dp (x cp) ZeRO splits state, of which the other ranks have replicas
    (hybrid ZeRO), ``reshard_after_forward=False`` (FSDP2's word) keeps what ZeRO-3 gathers for a forward until its
    backward (`sharding.zero`), ``micro_batch_size`` is in samples a rank, ``recompute`` is "none", "selective", "full",
    or "full:4" for the first four blocks alone (`sharding.recompute`), ``attention`` is how attention is computed where
    cp splits the sequence: with "heads" split instead (Ulysses), as a "ring" in which keys and values go round, or with
    all of them on every rank ("gather"), ``dispatch`` how tokens come to experts that are spread: each to the ranks of
    its experts alone ("exchange", pieces as large as routers make them), or all to all of those ranks ("gather",
    results summed up, of fixed size), ``memory_limit`` is bytes a device (as `parse_bytes` reads them), ``shard`` maps
    parameter patterns (see the module) to the dim that each axis splits, e.g. ``{"model.layers.*.mlp.down_proj.weight":
    {"tp": 1}}``, ``activations`` does so for the results of modules, by patterns of their paths, None for whole (as
    `autopar.constrain` in their code), ``within_host`` names axes whose groups of ranks may not span hosts, ``require``
    axes that must have more than one rank, and ``forbid`` axes that must not. HintError for bad values and for hints
    that contradict each other whatever the model; what depends on model and cluster is for `check_hints`.
    """

    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    tp: int | None = None
    ep: int | None = None
    etp: int | None = None
    schedule: str | None = None
    stages: Mapping[str, int] | None = None
    zero: int | None = None
    zero_group_size: int | None = None
    reshard_after_forward: bool | None = None
    micro_batch_size: int | None = None
    recompute: str | None = None
    attention: str | None = None
    dispatch: str | None = None
    memory_limit: int | str | None = None
    shard: Mapping[str, Mapping[str, int]] | None = None
    activations: Mapping[str, Mapping[str, int | None]] | None = None
    within_host: Collection[str] | None = None
    require: Collection[str] | None = None
    forbid: Collection[str] | None = None

    def __post_init__(self) -> None:
        for axis in (*DEGREES, EXPERTS, INSIDE_EXPERTS):
            if (degree := getattr(self, axis)) is not None and not is_int(degree, 1):
                raise HintError(
                    f"{axis}={degree!r} is no degree.",
                    expected="a whole number from 1, or None",
                    found=repr(degree),
                    change=f"give {axis} as a positive int, or leave it out",
                )
        if self.micro_batch_size is not None and not is_int(self.micro_batch_size, 1):
            raise HintError(
                f"micro_batch_size={self.micro_batch_size!r} is no number of samples.",
                expected="a whole number from 1, or None",
                found=repr(self.micro_batch_size),
                change="give micro_batch_size as a positive int, or leave it out",
            )
        if self.zero is not None and (not is_int(self.zero, 0) or self.zero not in ZERO_STAGES):
            raise HintError(
                f"zero={self.zero!r} is not available.",
                expected="0 (nothing is sharded), 1 (optimizer state), 2 (gradients too) or 3 (parameters too)",
                found=repr(self.zero),
                change="give zero as one of 0, 1, 2 and 3, or leave it out",
            )
        if self.zero_group_size is not None:
            check_zero_group(self)
        if self.reshard_after_forward is not None and self.zero != 3:
            raise HintError(
                f"The hint reshard_after_forward={self.reshard_after_forward!r} needs zero=3.",
                expected="True or False beside zero=3, which gathers parameters for every use",
                found=f"zero={self.zero}",
                change="give zero=3 as well, or leave reshard_after_forward out",
            )
        if self.recompute is not None:
            check_recompute(self.recompute)
        if self.attention is not None:
            check_attention(self)
        check_one_of("dispatch", self.dispatch, DISPATCHERS)
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)
        if self.shard is not None:
            object.__setattr__(self, "shard", checked_shard(self.shard))
        if self.activations is not None:
            object.__setattr__(self, "activations", checked_activations(self.activations))
        if self.stages is not None:
            object.__setattr__(self, "stages", checked_stages(self.stages))
        for name in ("within_host", "require", "forbid"):
            if (axes := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked_axes(name, axes))
        check_axes(self)
        check_pipeline(self)
        check_contradictions(self)

    def degree(self, axis: str) -> int | None:
        """The degree of ``axis`` that is given, or that ``forbid`` or ``etp`` leaves; None if it is open."""
        if axis in (self.forbid or ()):
            return 1
        given: int | None = getattr(self, axis)
        return self.etp if axis == TENSOR_AXIS and given is None and self.etp != 1 else given

    def asks_for(self, axis: str) -> bool:
        """Whether hints have more than one rank on ``axis``."""
        return (self.degree(axis) or 1) > 1 or axis in (self.require or ())

    @property
    def memory_bytes(self) -> int | None:
        """``memory_limit`` in bytes."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def to_dict(self) -> dict[str, Any]:
        """The hints that are given, as plain values that `from_dict` reads."""
        table = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.shard is not None:
            table["shard"] = {pattern: dict(dims) for pattern, dims in self.shard.items()}
        if self.activations is not None:
            table["activations"] = {pattern: dict(dims) for pattern, dims in self.activations.items()}
        if self.stages is not None:
            table["stages"] = dict(self.stages)
        table |= {name: list(axes) for name, axes in table.items() if isinstance(axes, tuple)}
        return {name: value for name, value in table.items() if value is not None}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`. HintError names an unknown key."""
        known = [field.name for field in fields(cls)]
        for key in table:
            if key not in known:
                raise HintError(
                    f"There is no hint {key!r}.", expected=", ".join(known), found=key, change=nearest_names(key, known)
                )
        return cls(**table)

    @staticmethod
    def from_transformers(model: nn.Module, **given: Any) -> Hints:
        """Hints that split weights over tp as transformers' own plan for ``model`` does (``base_model_tp_plan`` of its
        config): a plan to start from, or to compare with. ``given`` are further hints, of which a pattern in ``shard``
        takes the place of transformers' for the same pattern. With ``ep`` among them experts are spread as its
        ``base_model_ep_plan`` says; without, they are the planner's. HintError if the model has no such plan, and what
        `Hints` raises; warns of styles that are not known."""
        from autopar.capture.hf_plans import hints_of  # which needs this module

        theirs = hints_of(model, given.get("ep"))
        return Hints(**{**theirs, **given, "shard": {**theirs["shard"], **(given.get("shard") or {})} or None})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Hints:
        """The hints of a YAML file (`autopar.hints_file`). HintError names file and line of what is wrong."""
        from autopar.hints_file import load_hints  # which needs this class

        return load_hints(path)


def matching(hints: Hints, *names: str) -> dict[str, int]:
    """The dim that each axis must split of one parameter, by axis: all patterns that match any of its ``names`` (a tied
    parameter has several) taken together. HintError, naming both patterns, if two disagree on an axis."""
    found: dict[str, int] = {}
    origin: dict[str, str] = {}
    for pattern, dims in (hints.shard or {}).items():
        if not any(matches(pattern, name) for name in names):
            continue
        for axis, dim in dims.items():
            if found.setdefault(axis, dim) != dim:
                raise HintError(
                    f"Two hints disagree on how {axis} splits {names[0]}.",
                    expected="one dim an axis and parameter",
                    found=f"dim {found[axis]} in shard[{origin[axis]!r}], dim {dim} in shard[{pattern!r}]",
                    change="remove one of the two, or make its pattern narrower",
                )
            origin.setdefault(axis, pattern)
    return found


def check_hints(hints: Hints, world_size: int, parameter_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check hints against a cluster of ``world_size`` ranks and a model's parameters (name to global shape).

    HintError: degrees that do not multiply to or divide the world size, a pattern that matches no parameter (with the
    nearest names), a dim that does not exist or does not divide by the degrees that the hints give its axes, two
    patterns that disagree on a parameter, an axis to split that can only have degree 1.
    """
    degrees = _degrees(hints, world_size)
    for pattern in hints.shard or {}:
        if not any(matches(pattern, name) for name in parameter_shapes):
            raise HintError(
                f"The hint shard[{pattern!r}] matches no parameter.",
                expected="a parameter's name, * standing for any part of it",
                found=pattern,
                change=nearest_names(pattern, candidates(pattern, parameter_shapes)),
            )
    for axis, degree in degrees.items():
        for pattern, dims in (hints.shard or {}).items():
            if axis in dims and degree == 1:
                raise HintError(
                    f"The hint shard[{pattern!r}] splits a dim over {axis}, which has degree 1 here.",
                    expected=f"{axis} of at least 2",
                    found=f"{_given(hints)} on {world_size} ranks",
                    change=f"leave {axis} out of shard, or choose degrees with {axis} > 1",
                )
    for name, shape in parameter_shapes.items():
        _check_dims(name, shape, matching(hints, name), degrees)


def _given(hints: Hints) -> str:
    """The degrees that are hinted, as the user wrote them."""
    names = (*DEGREES, INSIDE_EXPERTS)
    given = [f"{axis}={getattr(hints, axis)}" for axis in names if getattr(hints, axis) is not None]
    return ", ".join(given) or "no degrees"


def _degrees(hints: Hints, world_size: int) -> dict[str, int]:
    """The degrees that the hints fix: those given, and those that pp x dp x cp x tp = ``world_size`` leaves no
    choice."""
    given = {axis: degree for axis in DEGREES if (degree := hints.degree(axis)) is not None}
    product, axes = math.prod(given.values()), " x ".join(DEGREES)
    if len(given) == len(DEGREES) and product != world_size:
        raise HintError(
            f"The hints {_given(hints)} do not match a cluster of {world_size} ranks.",
            expected=f"{axes} = {world_size}",
            found=f"{axes} = {product}",
            change="correct one of the two or leave it out, or change the number of ranks",
        )
    if world_size % product:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        names, many = " x ".join(given), len(given) > 1
        subject = f"The hints {_given(hints)} do" if many else f"The hint {_given(hints)} does"
        raise HintError(
            f"{subject} not divide a cluster of {world_size} ranks.",
            expected=f"{names}, one of {', '.join(map(str, divisors))}",
            found=f"{names} = {product}",
            change="correct one or leave it out" if many else "choose a degree that divides the number of ranks",
        )
    rest = [axis for axis in DEGREES if axis not in given]
    if len(rest) == 1 or world_size == product:
        given |= {axis: world_size // product for axis in rest}
    if DATA_AXIS in given:
        check_group_divides(hints.zero_group_size, given[DATA_AXIS])
    return given


def _check_dims(name: str, shape: tuple[int, ...], dims: Mapping[str, int], degrees: Mapping[str, int]) -> None:
    """HintError unless every hinted dim of one parameter exists and divides."""
    for axis, dim in dims.items():
        if dim >= len(shape):
            raise HintError(
                f"A hint splits dim {dim} of {name} over {axis}, which has no such dim.",
                expected=f"a dim from 0 to {len(shape) - 1}" if shape else "no hint: it is a scalar",
                found=f"dim {dim}; the shape is {tuple(shape)}",
                change="name another dim in shard",
            )
        over = [other for other in dims if dims[other] == dim and other in degrees]
        pieces = math.prod(degrees[other] for other in over)
        if shape[dim] % pieces:
            raise HintError(
                f"A hint splits dim {dim} of {name} in {pieces} pieces ({' x '.join(over)}), "
                "which it does not divide into.",
                expected=f"a size that {pieces} divides",
                found=f"{shape[dim]} in the shape {tuple(shape)}",
                change="name another dim in shard, or another degree",
            )
