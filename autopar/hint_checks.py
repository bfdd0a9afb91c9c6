"""Values that single hints can have, and one clear error for those that they cannot; the names that hints know."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from autopar.errors import HintError
from autopar.sharding.axes import CONTEXT_AXIS, DATA_AXIS, TENSOR_AXIS
from autopar.sharding.recompute import blocks_made_again

#: Axes that split tensors, and with that of the pipeline all that ranks are laid out on, outermost first.
AXES = (DATA_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
DEGREES = ("pp", *AXES)
#: Over how many ranks experts are spread: those of other axes, so that it is no factor of the number of ranks.
EXPERTS = "ep"
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
