"""transformers' own tensor and expert parallel plans, read as hints of how parameters are split.

A model names a style for modules and parameters: ``base_model_tp_plan`` and ``base_model_ep_plan`` of its config for
those of its base model, and ``_tp_plan`` of its class for its head. What a style does to the weight is what is taken;
how activations go around it is the planner's.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping

from torch import nn

from autopar.capture.hf import is_transformers_model, text_config
from autopar.capture.hf_adapters import core
from autopar.errors import HintError
from autopar.hint_checks import without_numbers

#: The dim of a weight [..., out, in], counted from its last, that a style splits over tp.
_DIM_OF_STYLE = {
    "colwise": -2, "colwise_gather_output": -2, "colwise_rep": -2, "local_colwise": -2, "packed_colwise": -2,
    "local_packed_colwise": -2, "rowwise": -1, "rowwise_split_input": -1, "rowwise_rep": -1, "local_rowwise": -1,
    "packed_rowwise": -1, "local_packed_rowwise": -1, "embedding_rowwise": -2, "embedding_colwise": -1,
}  # fmt: skip
#: The style of a module whose parameters are experts: those are for `ep`, or the planner.
_EXPERTS = "moe_tp_experts"
#: Styles that say nothing of how a weight rests: what goes on around a module.
_WITHOUT_WEIGHT = frozenset(
    {
        "replicated_with_grad_allreduce", "all_reduce", "sequence_parallel", "moe_identity_expert",
        "mla_kv_a_proj", "local", "local_params", "gather", "isolated", "replicate", _EXPERTS,
    }
)  # fmt: skip


def styles(model: nn.Module) -> dict[str, str]:
    """The styles of ``model``'s tensor parallel plan by pattern of module or parameter names. HintError for a model
    that has none."""
    inner = core(model)
    found: dict[str, str] = {}
    if is_transformers_model(inner):
        base = getattr(inner, "base_model_prefix", "")
        prefix = f"{base}." if base and hasattr(inner, base) else ""
        for pattern, style in (getattr(text_config(inner), "base_model_tp_plan", None) or {}).items():
            found[prefix + pattern] = style
        found.update(getattr(type(inner), "_tp_plan", None) or {})
    if not found:
        raise HintError(
            f"{type(inner).__name__} has no tensor parallel plan of transformers.",
            expected="a transformers model whose config has a base_model_tp_plan",
            found="none",
            change="leave these hints out: a plan needs none",
        )
    return found


def splits(model: nn.Module) -> dict[str, int]:
    """By pattern of parameter names, the dim that transformers splits over tp; experts are left out, and so are styles
    that are not known, with a warning that names them. HintError if two entries split a parameter along different dims,
    or if the model has no such plan."""
    inner, plan = core(model), styles(model)
    if unknown := sorted(set(plan.values()) - _DIM_OF_STYLE.keys() - _WITHOUT_WEIGHT):
        text = f"styles of transformers' tensor parallel plan that are not known are left out: {', '.join(unknown)}"
        warnings.warn(text, UserWarning, stacklevel=3)
    shapes = {name: tuple(p.shape) for name, p in inner.named_parameters(remove_duplicate=False)}
    own = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    whole = {name: own[id(p)] for name, p in inner.named_parameters(remove_duplicate=False)}
    found: dict[str, int] = {}
    for name, dim in _dims(plan, shapes):
        pattern = without_numbers(whole[name])
        if found.setdefault(pattern, dim) != dim:
            raise HintError(
                f"transformers' tensor parallel plan splits {name} in two ways.",
                expected="one dim a parameter",
                found=f"dims {found[pattern]} and {dim}",
                change="correct the plan in the model's config, or give Hints(shard=...) yourself",
            )
    return found


def _dims(plan: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Parameters, and the dim of each that an entry of the plan splits."""
    written = {pattern: re.escape(pattern).replace(r"\*", r"\d+") for pattern in plan}
    experts = [written[pattern] for pattern, style in plan.items() if style == _EXPERTS]
    for name, shape in shapes.items():
        if len(shape) < 2 or any(re.match(rf"{module}\.", name) for module in experts):
            continue
        for pattern, style in plan.items():
            if style in _DIM_OF_STYLE and re.fullmatch(rf"{written[pattern]}(\.weight)?", name):
                yield name, len(shape) + _DIM_OF_STYLE[style]
