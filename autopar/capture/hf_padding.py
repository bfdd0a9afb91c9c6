"""Pads a batch of a transformers text model on the right, so that nothing that counts changes.

Padding is hidden from real tokens by the attention mask (made if there is none) and from the loss by labels of -100.
Inputs are known by name, which is what transformers goes by; whatever else might have a sequence dim is refused. Only
dropout notices: its masks are drawn for the padded shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.hf import text_config
from autopar.errors import InputError

#: What labels are on tokens that do not count.
IGNORED = -100


def padded(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], buckets: Sequence[int]
) -> tuple[dict[str, Any], int]:
    """The batch as keyword arguments, its sequences padded to the smallest of ``buckets`` (tokens) that holds them, and
    their true length. InputError if none does, or if an input may have a sequence dim and is not known."""
    given = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    length = _length(given)
    bucket = next((b for b in sorted(buckets) if b >= length), None)
    if bucket is None:
        raise InputError(
            f"a sequence of {length} tokens is longer than the largest bucket",
            expected=f"at most {max(buckets)} tokens: pad_to={list(buckets)}",
            found=f"{length} tokens",
            change="truncate the batch, or give the Workload a larger bucket in pad_to",
        )
    if given.get("attention_mask") is None and _needs_mask(model, given):
        rows = next(given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None)
        given["attention_mask"] = torch.ones(rows.shape[:2], dtype=torch.int64, device=rows.device)
    return {name: _pad(model, name, value, length, bucket) for name, value in given.items()}, length


def _length(given: Mapping[str, Any]) -> int:
    for name in ("input_ids", "inputs_embeds"):
        value = given.get(name)
        if isinstance(value, Tensor) and value.dim() >= 2:
            return int(value.shape[1])
    raise InputError(
        "pad_to cannot tell how long the sequences of this batch are",
        expected="input_ids [batch, sequence] or inputs_embeds [batch, sequence, hidden]",
        found=", ".join(given) or "nothing",
        change="pass one of them, or leave pad_to out of the Workload",
    )


def _needs_mask(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a mask has to be made. Position ids without a mask may be those of packed sequences, which a mask would
    put an end to: there causality must hide the padding."""
    accepted = "attention_mask" in inspect.signature(model.forward).parameters
    if accepted and given.get("position_ids") is None:
        return True
    kinds = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    if kinds and all(kinds):
        return False
    raise InputError(
        f"padding cannot be hidden from the tokens of {type(model).__name__}",
        expected="an attention_mask, or a model in which all attention is causal",
        found="position_ids without attention_mask" if accepted else "a model that takes no attention_mask",
        change="pass attention_mask, or leave pad_to out of the Workload",
    )


def _pad(model: nn.Module, name: str, value: Any, length: int, bucket: int) -> Any:
    """One input of the batch, padded if it has a sequence dim."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    more = bucket - length
    if name == "labels" and (value.is_floating_point() or tuple(value.shape[1:]) != (length,)):
        return value  # classes of whole sequences
    if name == "position_ids" and value.dim() == 2 and value.shape[1] == length:
        following = torch.arange(1, more + 1, device=value.device, dtype=value.dtype)
        return torch.cat([value, value[:, -1:] + following], dim=1)
    if name == "inputs_embeds" and value.dim() == 3 and value.shape[1] == length:
        return F.pad(value, (0, 0, 0, more))
    pad_token = getattr(text_config(model), "pad_token_id", None)
    fill = {
        "input_ids": pad_token if isinstance(pad_token, int) and pad_token >= 0 else 0,
        "attention_mask": 0,
        "token_type_ids": 0,
        "labels": IGNORED,
    }
    if name in fill and tuple(value.shape[1:]) == (length,):
        return F.pad(value, (0, more), value=fill[name])
    raise InputError(
        f"pad_to does not know how to pad {name}",
        expected=f"{', '.join(fill)}, position_ids of shape [batch, {length}], inputs_embeds [batch, {length}, hidden]",
        found=f"{name} of shape {list(value.shape)}",
        change="pad the batch yourself and leave pad_to out of the Workload",
    )
