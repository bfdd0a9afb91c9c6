"""What knows transformers: its configs, its inputs, and how a model of its is prepared (`hf_attention`: attention)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import hf_attention, hf_experts, hf_loss
from autopar.capture.hf_scan import whole_scans
from autopar.errors import WorkloadError


def is_transformers_model(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers model (without importing transformers for others)."""
    return any(
        cls.__module__.startswith("transformers.") and cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__
    )


def prepare(model: nn.Module) -> None:
    """Switch a (cloned) transformers model to our attention, experts and losses, and its caches and its own
    recomputation off.

    Gradient checkpointing inside the model would be traced into the graph and draw other dropout masks the second time;
    what is recomputed is the plan's decision.
    """
    if recomputes(model):
        name = "activation_checkpointing_disable"
        getattr(model, name if hasattr(model, name) else "gradient_checkpointing_disable")()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = False
    hf_attention.select(model)
    hf_experts.select(model)
    hf_loss.select(model)


def recomputes(model: nn.Module) -> bool:
    """Whether a transformers model is set to recompute activations by itself, by either of the names that it has had
    for that."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return is_transformers_model(model) and bool(next((getattr(model, n) for n in names if hasattr(model, n)), False))


def may_pack(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether eager mode would look for packed sequences: only in ``position_ids`` that the user gave (those that the
    model makes itself never restart), and only where no cache is made."""
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        use_cache = getattr(text_config(model), "use_cache", False)
    return kwargs.get("position_ids") is not None and not use_cache


@contextlib.contextmanager
def tracing(may_pack: bool) -> Iterator[None]:
    """For the length of a trace: no value checks, scans as single operators, and the mask of packed sequences only if
    there may be some.

    While tracing transformers cannot see whether position ids restart, so it always builds that mask.
    """
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    variable, before = "TRANSFORMERS_DISABLE_TORCH_CHECK", os.environ.get("TRANSFORMERS_DISABLE_TORCH_CHECK")
    os.environ[variable] = "1"
    if not may_pack:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        with whole_scans():
            yield
    finally:
        masking_utils.find_packed_sequence_indices = original
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def text_config(model: nn.Module) -> Any:
    """The config that describes the text part of the model."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def default_seq_len(model: nn.Module) -> int:
    """The sequence length a model was made for, at most 4096 tokens."""
    limit = getattr(text_config(model), "max_position_embeddings", None) or getattr(
        text_config(model), "n_positions", None
    )
    return min(int(limit), 4096) if limit else 2048


def example_batch(model: nn.Module, global_batch: int, seq_len: int) -> dict[str, Tensor]:
    """A batch for a text model of shape [global_batch, seq_len], on the meta device: input ids and labels.

    Raises WorkloadError if the model does not take ``input_ids`` and ``labels``.
    """
    import inspect

    accepted = inspect.signature(model.forward).parameters
    names = [name for name in ("input_ids", "labels") if name in accepted]
    if names != ["input_ids", "labels"]:
        raise WorkloadError(
            f"{type(model).__name__} does not take input_ids and labels, so no batch can be made up",
            expected="a text model with input_ids and labels",
            found=", ".join(list(accepted)[:8]),
            change="pass example_inputs=dict(...) with one batch (meta tensors are enough)",
        )
    return {name: torch.zeros(global_batch, seq_len, dtype=torch.int64, device="meta") for name in names}
