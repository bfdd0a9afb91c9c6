"""Values that single hints can have, hints that need or contradict one another, and one clear error for those that
cannot be; the names that hints know."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from autopar.errors import HintError
from autopar.schedule import ALL_SCHEDULES
from autopar.sharding.axes import CONTEXT_AXIS, DATA_AXIS, STATE_AXES, TENSOR_AXIS
from autopar.sharding.recompute import blocks_made_again
from autopar.sharding.rules.attention import WAYS

if TYPE_CHECKING:
    from autopar.hints import Hints

#: Axes that split tensors, and with that of the pipeline all that ranks are laid out on, outermost first.
AXES = (DATA_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
DEGREES = ("pp", *AXES)
#: Over how many ranks experts are spread: those of other axes, so that it is no factor of the number of ranks.
EXPERTS = "ep"
#: Over how many ranks the matrices of each expert are split: those of tp, or none.
INSIDE_EXPERTS = "etp"
ZERO_STAGES = (0, 1, 2, 3)


def nearest_names(name: str, known: Iterable[str]) -> str:
    """What to change, in words: the names closest to ``name``, or the first few where none is close."""
    names = list(dict.fromkeys(known))
    if close := difflib.get_close_matches(name, names, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(close)}?"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"there are: {', '.join(names[:5]) or 'none'}{more}"


def check_recompute(mode: object, blocks: int | None = None) -> None:
    """HintError unless ``mode`` is a way to recompute, for a model of that many repeated ``blocks`` if given."""
    try:
        wanted = blocks_made_again(mode)
    except ValueError:
        raise HintError(
            f"recompute={mode!r} is not available.",
            expected="none, selective, full, or full:N for the first N blocks alone",
            found=repr(mode),
            change=nearest_names(str(mode), ("none", "selective", "full", "full:1")),
        ) from None
    if blocks is not None and (1 if wanted is None else wanted) > blocks:
        raise HintError(
            f"recompute={mode!r} asks for more repeated blocks than the model has.",
            expected=f"at most {blocks} blocks" if blocks else "none or selective, for a model without repeated blocks",
            found=str(mode),
            change="lower the number" if blocks else 'give recompute="selective", or leave it out',
        )


def is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def checked_shard(shard: object) -> dict[str, dict[str, int]]:
    """A copy of ``shard`` that nobody else can change, or HintError if it is malformed."""
    example = 'write for instance shard={"model.layers.*.mlp.down_proj.weight": {"tp": 1}}'
    if not isinstance(shard, Mapping):
        raise HintError(
            "The hint shard is malformed.",
            expected="a mapping from parameter patterns to {axis: dim}",
            found=repr(shard),
            change=example,
        )
    for pattern, dims in shard.items():
        if not isinstance(pattern, str) or not isinstance(dims, Mapping):
            raise HintError(
                f"The hint shard[{pattern!r}] is malformed.",
                expected="a pattern (text) and {axis: dim}",
                found=f"{pattern!r}: {dims!r}",
                change=example,
            )
        for axis, dim in dims.items():
            if axis not in AXES:
                raise HintError(
                    f"The hint shard[{pattern!r}] names an unknown axis {axis!r}.",
                    expected=f"one of {', '.join(AXES)}",
                    found=repr(axis),
                    change=example,
                )
            if not is_int(dim, 0):
                raise HintError(
                    f"The hint shard[{pattern!r}] splits no dim over {axis}.",
                    expected="the number of a dim, counted from 0",
                    found=repr(dim),
                    change=example,
                )
    return {pattern: dict(dims) for pattern, dims in shard.items()}


def checked_stages(stages: object) -> dict[str, int]:
    """A copy of ``stages`` that nobody else can change, or HintError if it is malformed."""
    well_formed = isinstance(stages, Mapping) and all(isinstance(k, str) and is_int(v, 0) for k, v in stages.items())
    if not isinstance(stages, Mapping) or not well_formed:
        raise HintError(
            "The hint stages is malformed.",
            expected="a mapping from patterns of module paths to stages, numbered from 0",
            found=repr(stages),
            change='write for instance stages={"model.layers.0": 0, "model.layers.1": 1}',
        )
    return dict(stages)


def checked_axes(name: str, axes: object) -> tuple[str, ...]:
    """The axes of the hint ``name``, in the mesh's order, or HintError for what is none."""
    given = () if isinstance(axes, str) or not isinstance(axes, Iterable) else tuple(axes)
    unknown = [axis for axis in given if axis not in DEGREES]
    if not given or unknown:
        raise HintError(
            f"The hint {name} names {f'an unknown axis {unknown[0]!r}' if unknown else 'no axes'}.",
            expected=f"a set of {', '.join(DEGREES)}",
            found=repr(axes),
            change=f'write for instance {name}={{"tp"}}',
        )
    return tuple(axis for axis in DEGREES if axis in given)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern, in which ``*`` stands for one character or more, is that of a name."""
    return re.fullmatch(".+".join(map(re.escape, pattern.split("*"))), name) is not None


def candidates(pattern: str, names: Iterable[str]) -> list[str]:
    """What a misspelt pattern may have meant: names, with ``*`` for their numbers if the pattern has a ``*`` too."""
    return [without_numbers(name) if "*" in pattern else name for name in names]


def without_numbers(name: str) -> str:
    """A name with ``*`` for every number between its dots: the pattern of all that are called so."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def checked_activations(activations: object) -> dict[str, dict[str, int | None]]:
    """A copy of ``activations`` that nobody else can change, or HintError if it is malformed."""
    if not isinstance(activations, Mapping):
        raise _malformed_activations(repr(activations))
    found: dict[str, dict[str, int | None]] = {}
    for pattern, dims in activations.items():
        if not isinstance(pattern, str) or not isinstance(dims, Mapping) or not dims:
            raise _malformed_activations(f"{pattern!r}: {dims!r}")
        for axis, dim in dims.items():
            if axis not in AXES or isinstance(dim, bool) or not (dim is None or isinstance(dim, int)):
                raise _malformed_activations(f"{pattern!r}: {dims!r}")
        found[pattern] = dict(dims)
    return found


def _malformed_activations(found: str) -> HintError:
    return HintError(
        "The hint activations is malformed.",
        expected=f"a mapping from patterns of module paths to {{axis: dim}}, with {', '.join(AXES)} and None for whole",
        found=found,
        change='write for instance activations={"model.layers.*.mlp": {"tp": 1}}',
    )


def check_one_of(name: str, value: object, able: Collection[str]) -> None:
    """HintError for a value of the hint ``name`` that is none of those that there are."""
    if value is not None and value not in able:
        raise HintError(
            f"{name}={value!r} is not available.",
            expected=f"one of {', '.join(able)}",
            found=repr(value),
            change=nearest_names(str(value), able),
        )


def check_pipeline(hints: Hints) -> None:
    """HintError for a schedule that there is not, and for hints of a pipeline without one."""
    check_one_of("schedule", hints.schedule, ALL_SCHEDULES)
    for name in ("schedule", "stages"):
        if getattr(hints, name) is not None and hints.pp in (None, 1):
            raise HintError(
                f"The hint {name} asks for a pipeline, and there is none.",
                expected=f"pp of at least 2 beside {name}",
                found=f"pp={hints.pp}",
                change=f"give pp, or leave {name} out",
            )


def check_attention(hints: Hints) -> None:
    """HintError for a way to compute attention that there is not, or where no axis is there for it."""
    check_one_of("attention", hints.attention, WAYS)
    if hints.cp in (None, 1):
        raise HintError(
            f"The hint attention={hints.attention!r} asks for a sequence that is split, and it is not.",
            expected="cp of at least 2 beside attention",
            found=f"cp={hints.cp}",
            change="give cp, or leave attention out",
        )


def check_zero_group(hints: Hints) -> None:
    """HintError for a size of groups that is none, that nothing is split over, or that does not divide dp."""
    size = hints.zero_group_size
    if not is_int(size, 2):
        raise HintError(
            f"zero_group_size={size!r} is no number of ranks to split over.",
            expected="a whole number from 2, or None: ZeRO splits over all of dp",
            found=repr(size),
            change="give zero_group_size as an int from 2, for instance the devices of a host, or leave it out",
        )
    if hints.zero in (None, 0):
        raise HintError(
            f"The hint zero_group_size={size} needs ZeRO.",
            expected="zero=1, 2 or 3 beside zero_group_size",
            found=f"zero={hints.zero}",
            change="give zero as well, or leave zero_group_size out",
        )
    if hints.dp is not None:
        check_group_divides(size, hints.dp)


def check_group_divides(size: int | None, dp: int) -> None:
    """HintError for groups of ZeRO that do not make up dp."""
    if size is not None and dp % size:
        raise HintError(
            f"The hint zero_group_size={size} does not divide dp={dp}.",
            expected="groups of equal size that make up dp",
            found=f"dp={dp}",
            change=f"choose a zero_group_size that divides {dp}, or leave it out",
        )


def check_contradictions(hints: Hints) -> None:
    """HintError where two hints cannot both hold, whatever the model."""
    if (hints.etp or 1) > 1 and hints.degree(TENSOR_AXIS) != hints.etp:
        raise HintError(
            f"The hints etp={hints.etp} and tp={hints.degree(TENSOR_AXIS)} contradict each other.",
            expected="etp of 1, or all of tp: the matrices of an expert are split over tp, or over nothing",
            found=f"etp={hints.etp}, tp={hints.degree(TENSOR_AXIS)}",
            change=f"give etp=1 or tp={hints.etp}, or leave one of them out",
        )
    for pattern, dims in (hints.shard or {}).items():
        for axis in dims:
            if getattr(hints, axis) == 1:
                raise HintError(
                    f"The hints {axis}=1 and shard[{pattern!r}] contradict each other.",
                    expected=f"{axis} of at least 2 where a parameter is split over it",
                    found=f"{axis}=1 and shard={{{pattern!r}: {dict(dims)}}}",
                    change=f"remove {axis}=1, or leave {axis} out of shard",
                )
        for axis in STATE_AXES:
            if axis in dims and hints.zero == 0:
                raise HintError(
                    f"The hints zero=0 and shard[{pattern!r}] contradict each other.",
                    expected=f"zero of at least 1 where a parameter rests split over {axis}",
                    found=f"zero=0 and shard={{{pattern!r}: {dict(dims)}}}",
                    change=f"give zero=1, 2 or 3, or leave {axis} out of shard",
                )


def check_axes(hints: Hints) -> None:
    """HintError where degrees contradict what ``require`` and ``forbid`` ask for, or these each other."""
    for axis in hints.require or ():
        if axis in (hints.forbid or ()) or getattr(hints, axis) == 1:
            other = f"forbid={{{axis!r}}}" if axis in (hints.forbid or ()) else f"{axis}=1"
            raise _contradict(f"require={{{axis!r}}}", other)
    for axis in hints.forbid or ():
        if (degree := getattr(hints, axis)) not in (None, 1):
            raise _contradict(f"forbid={{{axis!r}}}", f"{axis}={degree}")


def _contradict(one: str, other: str) -> HintError:
    return HintError(
        f"The hints {one} and {other} contradict each other.",
        expected="required axes of at least 2 ranks, and forbidden ones of 1",
        found=f"{one}, {other}",
        change="remove one of the two",
    )
