"""The loss of transformers' causal language models where all scores of a sequence are too many to exist at once.

A loss is given the logits, and has no way to do without them. So the head is watched while a model is traced: where the
loss is given what the head has returned, it is computed from what the head was given (`autopar.ops.vocabulary`). The
logits are then only an output, which nobody computes unless it is asked for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ops.vocabulary import token_scores

#: Bytes of one sample's logits in float32 from which on they are not all made: a step needs them several times over,
#: and no micro-batch is smaller than a sample.
WHOLE_LOGITS_BYTES = 8 * 2**30


def select(model: Any) -> None:
    """Let the loss of a (cloned) causal language model do without large logits. Models with another loss, or a head
    that is no plain product, keep theirs."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        return
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return
    seen: list[tuple[Tensor, Tensor]] = []

    def watch(module: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
        seen[:] = [(args[0], logits)]

    head.register_forward_hook(watch)
    model.loss_function = partial(_loss, ForCausalLMLoss, head, seen)


def _loss(
    whole: Any,
    head: nn.Linear,
    seen: list[tuple[Tensor, Tensor]],
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """``ForCausalLMLoss`` (``whole``), from what the ``head`` has ``seen`` last if its logits are large."""
    direct = bool(seen) and seen[0][1] is logits and logits.dim() == 3 and vocab_size == logits.shape[-1]
    large = 4 * logits.shape[-2] * logits.shape[-1] >= WHOLE_LOGITS_BYTES
    if not (direct and large) or torch.is_autocast_enabled(logits.device.type):
        found: Tensor = whole(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **kwargs
        )
        return found
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    counts = shift_labels != ignore_index
    lse, score = token_scores(seen[0][0], head.weight, torch.where(counts, shift_labels, -1), None)
    total = torch.where(counts, lse - score, 0.0).sum()
    return total / (counts.to(total.dtype).sum() if num_items_in_batch is None else num_items_in_batch)
