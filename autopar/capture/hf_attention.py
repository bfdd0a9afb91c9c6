"""transformers' attention and mask registries.

transformers lets third parties register an attention function and the mask function that belongs to it. Ours calls the
operator ``autopar::attention`` and keeps padding as the 2-D mask that the user gave, so that no S x S mask exists for
causal, sliding, bidirectional and padded batches; any other mask (packing, chunks, prefixes) is built for real.

There are two, since a model's own implementation decides what a query gets that may attend nothing (a token of padding
on the left): nothing under "sdpa" and its kin, a little of everything under "eager", which adds large negative numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.hf_cache import CACHED
from autopar.errors import CaptureError
from autopar.ops.attention import attention
from autopar.ops.draws import active_draws
from autopar.ops.sinks import attention_with_sinks

#: The names under which attention and mask functions are registered, by the model's own implementation.
IMPLEMENTATION, LIKE_EAGER = "autopar", "autopar_like_eager"
#: Attribute of a 2-D mask that holds its `Pattern`.
PATTERN = "autopar_pattern"


@dataclass(frozen=True)
class Pattern:
    """What an attention mask hides besides padding: later keys (``causal``), and keys more than ``window`` - 1 earlier
    (0: none). ``padded`` is False where the 2-D mask only carries the pattern and is true throughout."""

    causal: bool
    window: int = 0
    padded: bool = True


def _pattern(mask_function: Callable[..., Any] | None) -> Pattern | None:
    """The pattern of a transformers mask function, or None for one that the operator has no arguments for.

    A sliding window is a closure made anew for every mask, so its code is what tells: ``and_masks`` of exactly the
    overlay and the causal function.
    """
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern(causal=False)
    sample = masking_utils.sliding_window_causal_mask_function(1)
    if mask_function is None or getattr(mask_function, "__code__", None) is not sample.__code__:
        return None
    overlay_sample, _ = inspect.getclosurevars(sample).nonlocals["mask_functions"]
    overlay, *others = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    if others != [masking_utils.causal_mask_function] or overlay.__code__ is not overlay_sample.__code__:
        return None
    return Pattern(causal=True, window=inspect.getclosurevars(overlay).nonlocals["sliding_window"])


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    *,
    like_eager: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask interface: None, a 2-D padding mask (whose `PATTERN` says what else is hidden), or a real
    boolean 4-D mask where the pattern is none that the operator knows.

    None where "sdpa" returns it, that is where the attention module itself knows whether it is causal.
    """
    from transformers import masking_utils

    pattern = _pattern(mask_function)
    at_start = isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0
    same_length = q_length == kv_length or (pattern is not None and not pattern.causal)
    whole = attention_mask is None or attention_mask.shape[-1] == kv_length
    if pattern is not None and at_start and same_length and whole:
        if attention_mask is None and not pattern.window and not like_eager:
            return None
        if attention_mask is None:
            mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=kwargs.get("device"))
        else:
            mask = attention_mask.to(torch.bool)
        setattr(mask, PATTERN, Pattern(pattern.causal, pattern.window, padded=attention_mask is not None))
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


def _masks(mask: Tensor | None, bias: Tensor | None, causal: bool) -> tuple[Tensor | None, Tensor | None, bool, int]:
    """A mask as it comes from `attention_mask` or from the user, and a position bias, as the operator's ``key_mask``,
    ``bias``, ``causal`` and ``window``. ``causal`` is what the module says, which counts only without a mask."""
    if mask is None:
        return None, bias, causal, 0
    if mask.dim() == 2:
        pattern: Pattern = getattr(mask, PATTERN)
        return mask if pattern.padded else None, bias, pattern.causal, pattern.window
    if bias is None:
        return None, mask, False, 0
    if mask.dtype == torch.bool:  # as transformers combines the two
        return None, torch.where(mask, bias, torch.finfo(bias.dtype).min), False, 0
    return None, bias + mask, False, 0


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
    *,
    like_eager: bool = False,
    **unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [B, H, S, D], k and v [B, KV, T, D] -> ([B, S, H, D], None).

    ``position_bias`` [B or 1, H, S, T] is added to the scores and may be learned; ``s_aux`` [H] are the sinks of heads.
    """
    if attention_mask is None and hasattr(key, CACHED):
        raise CaptureError(
            f"{type(module).__name__} attends keys of a cache without a mask",
            expected="a mask that hides the keys that are not written yet",
            found="attention_mask=None",
            change="generate with the model itself: its cache cannot be split",
        )
    if is_causal is None:
        # without a mask, written-out attention is never causal
        is_causal = not like_eager and getattr(module, "is_causal", True)
    key_mask, bias, causal, window = _masks(attention_mask, position_bias, bool(is_causal))
    causal = causal and query.shape[2] > 1
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # "sdpa" too adds a large negative number to a position bias; beside a sink all such numbers are nothing
    spread = s_aux is None and (like_eager or position_bias is not None)
    draws = _draws(query, key, dropout)
    arguments = (
        query,
        key,
        value,
        key_mask,
        bias,
        *draws[:2],
        scale,
        causal,
        window,
        spread,
        softcap or 0.0,
        dropout,
        *draws[2:],
    )
    out = attention(*arguments)[0] if s_aux is None else attention_with_sinks(s_aux, *arguments)
    return out.transpose(1, 2), None


def _draws(query: Tensor, key: Tensor, dropout: float) -> tuple[Tensor | None, Tensor | None, int, list[int]]:
    """Seed, starts, stream and extent of the dropout of attention weights."""
    if dropout == 0.0:
        return None, None, 0, []
    mode = active_draws()
    if mode is None:
        raise CaptureError(
            "attention dropout needs a seed",
            expected="a forward inside autopar.ops.counter_draws",
            found="none is active",
            change="run the model through autopar.parallelize or verify",
        )
    starts = torch.zeros(4, dtype=torch.int64, device=query.device)
    return mode.seed, starts, mode.next_stream(), [*query.shape[:3], key.shape[2]]


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, like_eager in ((IMPLEMENTATION, False), (LIKE_EAGER, True)):
        ALL_ATTENTION_FUNCTIONS.register(name, partial(attention_forward, like_eager=like_eager))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, partial(attention_mask, like_eager=like_eager))


def _names(config: Any) -> dict[str, Any]:
    """Our name for a config's own implementation and for those of the configs inside it."""
    own = LIKE_EAGER if config._attn_implementation == "eager" else IMPLEMENTATION
    inner = {key: sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None}
    return {"": own, **{key: _names(sub) for key, sub in inner.items()}}


def select(model: nn.Module) -> None:
    """Switch a transformers model to our attention. One that does not use the registries (Bloom, Falcon) keeps its own,
    which is traced as it is written."""
    _register()
    if model._can_set_attn_implementation():  # type: ignore[operator]
        model.set_attn_implementation(_names(model.config))  # type: ignore[operator]
