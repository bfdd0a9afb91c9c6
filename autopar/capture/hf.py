"""Everything that knows transformers: its attention and mask registries, its configs and its inputs.

Attention: transformers lets third parties register an attention function and the mask function that belongs to it. Ours
calls the operator ``autopar::attention`` and keeps padding as the 2-D mask that the user gave, so that no S x S mask
exists for causal, bidirectional and padded batches; any other mask (packing, chunks, prefixes) is built for real.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError, WorkloadError
from autopar.ops.attention import attention
from autopar.ops.dropout import active_dropout

#: The name under which attention and mask functions are registered.
IMPLEMENTATION = "autopar"
#: Attribute of a 2-D mask that says whether attention is causal besides.
CAUSAL = "autopar_causal"


def is_transformers_model(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers model (without importing transformers for others)."""
    return any(
        cls.__module__.startswith("transformers.") and cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__
    )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [B, H, S, D], k and v [B, KV, T, D] -> ([B, S, H, D], None)."""
    if s_aux is not None or position_bias is not None:
        raise CaptureError(
            f"{type(module).__name__} uses attention sinks or a position bias inside attention",
            expected="attention without `s_aux` and `position_bias`",
            found="one of them is set",
            change="use another architecture: this one cannot be captured yet",
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    key_mask = bias = None
    if attention_mask is not None and attention_mask.dim() == 2:
        key_mask, causal = attention_mask, getattr(attention_mask, CAUSAL)
    elif attention_mask is not None:
        bias, causal = attention_mask, False
    causal = bool(causal) and query.shape[2] > 1
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    seed = starts = None
    stream, extent = 0, []
    mode = active_dropout()
    if dropout > 0.0:
        if mode is None:
            raise CaptureError(
                "attention dropout needs a seed",
                expected="a forward inside autopar.ops.counter_dropout",
                found="none is active",
                change="run the model through autopar.parallelize or verify",
            )
        seed, stream = mode.seed, mode.next_stream()
        starts = torch.zeros(4, dtype=torch.int64, device=query.device)
        extent = [*query.shape[:3], key.shape[2]]
    out, _ = attention(
        query, key, value, key_mask, bias, seed, starts, scale, causal, 0, softcap or 0.0, dropout, stream, extent
    )
    return out.transpose(1, 2), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask interface: None, the 2-D padding mask (its ``autopar_causal`` says which kind), or a real
    boolean 4-D mask where the pattern is neither plain causal nor bidirectional."""
    from transformers import masking_utils

    plain = q_length == kv_length and isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0
    kinds = {masking_utils.causal_mask_function: True, masking_utils.bidirectional_mask_function: False}
    if plain and mask_function in kinds:
        causal = kinds[mask_function]
        if attention_mask is None and causal:
            return None
        if attention_mask is None or attention_mask.shape[-1] == kv_length:
            if attention_mask is None:
                return None
            mask = attention_mask.to(torch.bool)
            setattr(mask, CAUSAL, causal)
            return mask
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_mask)


def prepare(model: nn.Module) -> None:
    """Switch a (cloned) transformers model to our attention, its caches and its own recomputation off.

    Gradient checkpointing inside the model would be traced into the graph and draw other dropout masks the second time;
    what is recomputed is the plan's decision.
    """
    _register()
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = False
    model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]


def may_pack(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether eager mode would look for packed sequences: only in ``position_ids`` that the user gave (those that the
    model makes itself never restart), and only where no cache is made."""
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        use_cache = getattr(text_config(model), "use_cache", False)
    return kwargs.get("position_ids") is not None and not use_cache


@contextlib.contextmanager
def tracing(may_pack: bool) -> Iterator[None]:
    """For the length of a trace: no value checks, and the mask of packed sequences only if there may be some.

    While tracing transformers cannot see whether position ids restart, so it always builds that mask.
    """
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    variable, before = "TRANSFORMERS_DISABLE_TORCH_CHECK", os.environ.get("TRANSFORMERS_DISABLE_TORCH_CHECK")
    os.environ[variable] = "1"
    if not may_pack:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
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
