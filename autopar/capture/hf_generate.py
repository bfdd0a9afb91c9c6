"""transformers' generation loop over another forward: its sampling, beams, stopping criteria and streamers as they are.

The loop asks a model for logits and hands on a cache that it never looks into. So a copy of the model that shares
everything with it, but for its forward and for how its cache is made, generates with whatever is behind those.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.hf import is_transformers_model, text_config
from autopar.capture.hf_cache import TracedCache, kept
from autopar.capture.hf_padding import padded
from autopar.capture.trace import fake_forward
from autopar.errors import InputError
from autopar.workload import Precision

#: Ways to generate in which each step needs the logits of the last token, and the cache of all before it.
MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
#: Kinds of attention whose keys and values are kept by token.
_KEPT_BY_TOKEN = ("full_attention", "sliding_attention", "chunked_attention")
#: Inputs of one number a token.
_BY_TOKEN = ("input_ids", "position_ids")
#: Prompts are padded to powers of two from here on: one program for all that are as long.
SHORTEST = 16


def decodes(model: nn.Module) -> bool:
    """Whether a model generates text token by token, with a cache of keys and values."""
    return is_transformers_model(model) and why_not(model) is None


def why_not(model: nn.Module) -> str | None:
    """Why a model cannot generate over ranks, None if it can."""
    if not is_transformers_model(model):
        return f"{type(model).__name__} is no model of transformers"
    if not model.can_generate():  # type: ignore[operator]
        return f"{type(model).__name__} has no generate()"
    config: Any = model.config
    if config.is_encoder_decoder:
        return f"{type(model).__name__} has an encoder, which generate() runs by itself"
    others = sorted(set(getattr(text_config(model), "layer_types", None) or ()) - set(_KEPT_BY_TOKEN))
    if others:
        return f"{type(model).__name__} has layers of {others[0]}, whose state is none of keys and values by token"
    if "cache" not in inspect.signature(model.forward).parameters:
        return f"the forward of {type(model).__name__} takes no cache"
    return None


def generating(model: nn.Module, forward: Callable[..., Any], make_cache: Callable[..., Any]) -> Any:
    """A model that shares all with ``model`` and generates by ``forward``. ``make_cache(config, kwargs, length)`` is
    asked once a generation for what is handed on from step to step: ``config`` is transformers' GenerationConfig,
    ``kwargs`` what else every forward is given, ``length`` the number of tokens to keep."""
    found = copy.copy(model)

    def prepare(config: Any, kwargs: dict[str, Any], mode: Any, batch_size: int, length: int) -> None:
        refuse(config, kwargs, str(getattr(mode, "value", mode)))
        kwargs["cache"] = make_cache(config, kwargs, length)

    def step(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    step.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    found.__dict__.update(forward=step, _prepare_cache_for_generation=prepare)
    return found


def refuse(config: Any, kwargs: Mapping[str, Any], mode: str) -> None:
    """InputError for what a generation over ranks cannot do."""
    asked = {
        f"cache_implementation={config.cache_implementation!r}": config.cache_implementation
        not in (None, "dynamic", "static", "hybrid"),
        "use_cache=False": config.use_cache is False,
        "a cache of one's own": kwargs.get("cache") is not None,
        f"generation by {mode}": mode not in MODES,
        "output_attentions=True": bool(config.output_attentions),
        "output_hidden_states=True": bool(config.output_hidden_states),
    }
    found = [what for what, is_asked in asked.items() if is_asked]
    if found:
        raise InputError(
            "generate() cannot do that over several ranks",
            expected=f"{', '.join(MODES)}, with the cache that autopar keeps",
            found=", ".join(found),
            change="leave it out, or generate with the original model",
        )


def decoding_batch(model: nn.Module, batch: int, length: int, precision: Precision | None) -> dict[str, Any]:
    """The inputs of a forward of one token of each of ``batch`` samples, with a cache of ``length`` tokens; on the meta
    device. CaptureError for a model that cannot be given a cache."""
    accepted = inspect.signature(model.forward).parameters

    def tokens(count: int) -> dict[str, Any]:
        ids = torch.empty(batch, count, dtype=torch.int64, device="meta")
        return {**{name: ids for name in _BY_TOKEN if name in accepted}, "use_cache": True}

    dtype = None if precision is None else precision.param_dtype
    first = fake_forward(model, {**tokens(1), "cache": TracedCache()}, dtype)
    specs = [(batch, k.shape[1], length, k.shape[3], k.dtype) for k in kept(first)]
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for *shape, dtype in specs]
    half = len(tensors) // 2
    filled = torch.empty((), dtype=torch.int64, device="meta")
    return {**tokens(1), "cache": TracedCache(tensors[:half], tensors[half:], filled)}


def prompt_batch(model: nn.Module, batch: int, length: int) -> dict[str, Any]:
    """The inputs of a forward of prompts of ``length`` tokens that asks for the logits of the last; on the meta
    device."""
    accepted = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    return {"input_ids": torch.empty(batch, length, dtype=torch.int64, device="meta"), **last}


def bucket_of(length: int) -> int:
    """The power of two that holds so many tokens, from `SHORTEST` on."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def prompt(model: nn.Module, kwargs: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The inputs of a first forward, padded on the right to the next power of two, at most to ``most`` tokens or to
    what the model has positions for. What is kept of padding is hidden, and written over by the tokens that come."""
    rows = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    length = int(rows.shape[1])
    config = text_config(model)
    limit = min(most, getattr(config, "max_position_embeddings", None) or most)
    bucket = max(length, min(bucket_of(length), limit))
    found, _ = padded(model, (), kwargs, [bucket])
    if "logits_to_keep" in found:
        found["logits_to_keep"] = rows.new_full((1,), length - 1, dtype=torch.int64)
    return found


def following(kwargs: Mapping[str, Any], kept: int) -> dict[str, Any]:
    """The inputs of a forward with a cache of ``kept`` tokens: a mask of all of them, of which causality hides those
    that are still to come."""
    found = dict(kwargs)
    mask = found.get("attention_mask")
    if isinstance(mask, Tensor):
        found["attention_mask"] = F.pad(mask, (0, kept - mask.shape[1]), value=1)
    return found
