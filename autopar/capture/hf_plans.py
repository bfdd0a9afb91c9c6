"""transformers' own tensor and expert parallel plans, read as hints of how parameters are split.

A model names a style for modules and parameters: ``base_model_tp_plan`` and ``base_model_ep_plan`` of its config for
those of its base model, and ``_tp_plan`` and ``_ep_plan`` of its class for its head. What a style does to the weight is
what is taken; how activations go around it is the planner's.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from autopar.capture.hf import is_transformers_model, text_config
from autopar.capture.hf_adapters import core
from autopar.errors import HintError
from autopar.hint_checks import without_numbers
from autopar.sharding.axes import TENSOR_AXIS

#: The dim of a weight [..., out, in], counted from its last, that a style splits over tp.
_DIM_OF_STYLE = {
    "colwise": -2, "colwise_gather_output": -2, "colwise_rep": -2, "local_colwise": -2, "packed_colwise": -2,
    "local_packed_colwise": -2, "rowwise": -1, "rowwise_split_input": -1, "rowwise_rep": -1, "local_rowwise": -1,
    "packed_rowwise": -1, "local_packed_rowwise": -1, "embedding_rowwise": -2, "embedding_colwise": -1,
}  # fmt: skip
#: The style of a module whose parameters are experts: those are for `ep`, or the planner.
_EXPERTS = "moe_tp_experts"
#: Styles of expert parallel plans that split experts over ranks, each of which has some of them whole: of a parameter,
#: of a module that tokens are sent to, and (in plans of earlier versions) of a module that works on all tokens.
_SPREAD = frozenset({"grouped_gemm", "ep_dispatch_experts", _EXPERTS})
#: The style of a router in plans of earlier versions, for which every rank works on all tokens with its own experts and
#: results are summed up: our dispatch "gather" (transformers/distributed/mixin.py on what took its place).
_ROUTER = "ep_router"
#: Styles that say nothing of how a weight rests: what goes on around a module.
_WITHOUT_WEIGHT = frozenset(
    {
        "replicated_with_grad_allreduce", "all_reduce", "sequence_parallel", "moe_identity_expert",
        "mla_kv_a_proj", "local", "local_params", "gather", "isolated", "replicate", _EXPERTS,
    }
)  # fmt: skip


def styles(model: nn.Module, kind: str) -> dict[str, str]:
    """The styles of ``model``'s plan of a ``kind``, "tp" or "ep", by pattern of module or parameter names; none if it
    has no such plan."""
    inner = core(model)
    found: dict[str, str] = {}
    if is_transformers_model(inner):
        base = getattr(inner, "base_model_prefix", "")
        prefix = f"{base}." if base and hasattr(inner, base) else ""
        for pattern, style in (getattr(text_config(inner), f"base_model_{kind}_plan", None) or {}).items():
            found[prefix + pattern] = style
        found.update(getattr(type(inner), f"_{kind}_plan", None) or {})
    return found


def hints_of(model: nn.Module, ep: int | None) -> dict[str, Any]:
    """transformers' own plans as fields of `Hints`: ``shard`` has the dims that its tensor parallel plan splits over
    tp, by pattern of parameter names; of a model whose experts are to be spread over ``ep`` ranks its expert parallel
    plan is read too, and ``dispatch`` is "gather" where that says so. Experts are left out of ``shard``, and so are
    styles that hints have no word for, with a warning that names them. HintError if two entries split a parameter along
    different dims, or if the model has no such plan."""
    theirs = styles(model, "tp")
    spread, more = _spread(model, ep)
    if not theirs and not spread:
        raise _no_plan(model, "tensor", "tp", "leave these hints out: a plan needs none")
    _warn_of(theirs, "tensor", _DIM_OF_STYLE.keys() | _WITHOUT_WEIGHT)
    return {"shard": {name: {TENSOR_AXIS: dim} for name, dim in _splits(model, theirs, spread).items()}, **more}


def _spread(model: nn.Module, ep: int | None) -> tuple[list[str], dict[str, str]]:
    """The modules whose experts transformers spreads over ``ep`` ranks, as regular expressions, and what its plan says
    of them besides; none where ``ep`` asks for none."""
    if ep is None or ep == 1:
        return [], {}
    theirs = styles(model, "ep")
    found = [_written(pattern) for pattern, style in theirs.items() if style in _SPREAD]
    if not found:
        raise _no_plan(model, "expert", "ep", "leave ep out, or give Hints(ep=...) without these hints")
    _warn_of(theirs, "expert", _SPREAD | _WITHOUT_WEIGHT | {_ROUTER})
    return found, {"dispatch": "gather"} if _ROUTER in theirs.values() else {}


def _warn_of(theirs: Mapping[str, str], kind: str, known: Collection[str]) -> None:
    """Name the styles of a plan that are left out."""
    if unknown := sorted(set(theirs.values()) - set(known)):
        what = f"styles of transformers' {kind} parallel plan that hints have no word for are left out"
        warnings.warn(f"{what}: {', '.join(unknown)}", UserWarning, stacklevel=4)


def _no_plan(model: nn.Module, kind: str, name: str, change: str) -> HintError:
    return HintError(
        f"{type(core(model)).__name__} has no {kind} parallel plan of transformers.",
        expected=f"a transformers model whose config has a base_model_{name}_plan",
        found="none",
        change=change,
    )


def _splits(model: nn.Module, theirs: Mapping[str, str], spread: Sequence[str]) -> dict[str, int]:
    """By pattern of parameter names, the dim that a tensor parallel plan splits, without what is ``spread`` by expert.
    HintError if two entries split a parameter along different dims."""
    inner = core(model)
    shapes = {name: tuple(p.shape) for name, p in inner.named_parameters(remove_duplicate=False)}
    own = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    whole = {name: own[id(p)] for name, p in inner.named_parameters(remove_duplicate=False)}
    found: dict[str, int] = {}
    for name, dim in _dims(theirs, shapes, spread):
        pattern = without_numbers(whole[name])
        if found.setdefault(pattern, dim) != dim:
            raise HintError(
                f"transformers' tensor parallel plan splits {name} in two ways.",
                expected="one dim a parameter",
                found=f"dims {found[pattern]} and {dim}",
                change="correct the plan in the model's config, or give Hints(shard=...) yourself",
            )
    return found


def _written(pattern: str) -> str:
    """A pattern of names as a regular expression."""
    return re.escape(pattern).replace(r"\*", r"\d+")


def _dims(
    plan: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], spread: Sequence[str]
) -> Iterator[tuple[str, int]]:
    """Parameters, and the dim of each that an entry of the plan splits."""
    experts = [*spread, *(_written(pattern) for pattern, style in plan.items() if style == _EXPERTS)]
    for name, shape in shapes.items():
        if len(shape) < 2 or any(re.match(rf"{module}(\.|$)", name) for module in experts):
            continue
        for pattern, style in plan.items():
            if style in _DIM_OF_STYLE and re.fullmatch(rf"{_written(pattern)}(\.weight)?", name):
                yield name, len(shape) + _DIM_OF_STYLE[style]
