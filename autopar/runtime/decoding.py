"""The forwards of a generation, whoever runs them: what transformers' loop hands over, made into a program's inputs.

The first forward, of the prompt, returns the keys and values of its tokens; every later one writes those of its own
where they rest. `runtime.generate` runs them on this process, `runtime.verify_generation` on simulated ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from autopar.capture.hf_cache import TracedCache
from autopar.capture.hf_generate import following, prompt


@dataclass(kw_only=True)
class KeptTokens:
    """What transformers' loop hands from forward to forward: the keys and values of all layers, keys first, of
    ``length`` tokens, of which ``filled`` are known; whose pieces, a subclass says."""

    length: int
    filled: int = 0
    #: Of the whole tensors.
    shapes: list[torch.Size] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)

    # what transformers' loop asks
    is_compileable = False

    @property
    def is_linear(self) -> list[bool]:
        """It keeps tokens, for every layer."""
        return [False]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that are known."""
        return self.filled

    # what a forward takes and leaves
    def whole(self) -> list[Tensor]:
        """The whole tensors, on the meta device."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in pairs]

    def room(self, new: Tensor) -> Tensor:
        """The piece of a prompt's keys or values with room for all tokens."""
        kept = new.new_zeros((*new.shape[:2], self.length, new.shape[3]))
        length = min(self.length, new.shape[2])
        kept[:, :, :length] = new[:, :, :length]
        return kept

    def note(self, spec: Tensor) -> None:
        """Another tensor is kept, which the forward of the prompt returned as ``spec`` says."""
        self.shapes.append(torch.Size((*spec.shape[:2], self.length, spec.shape[3])))
        self.dtypes.append(spec.dtype)


def traced(tensors: Sequence[Tensor], filled: Tensor) -> TracedCache:
    """A cache as a forward takes it, of keys and then values."""
    layers = len(tensors) // 2
    return TracedCache(tensors[:layers], tensors[layers:], filled)


C = TypeVar("C", bound=KeptTokens)


class Forwards(ABC, Generic[C]):
    """The forwards of one generation by ``model``, whose caches are ``C``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abstractmethod
    def first(self, cache: C, given: dict[str, Any]) -> Any:
        """What the model returns for a prompt (``given["cache"]`` is empty), with whole logits; its keys and values go
        to ``cache``."""

    @abstractmethod
    def later(self, cache: C, shapes: dict[str, Any], given: dict[str, Any], filled: Tensor) -> Any:
        """What the model returns for more tokens, with whole logits; their keys and values are written into ``cache``.
        ``shapes`` has the cache whole and on the meta device, ``given`` has none."""

    def forward(self, *, cache: C, **kwargs: Any) -> Any:
        """What the model returns for new tokens."""
        given = {name: value for name, value in kwargs.items() if value is not None}
        rows = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
        positions, count = given.get("position_ids"), rows.shape[1]
        if positions is not None and positions.dim() == 2:  # one row for all samples has no batch to split
            given["position_ids"] = positions.expand(rows.shape[0], -1)
        if cache.filled == 0:
            found = self.first(cache, {**prompt(self.model, given, cache.length), "cache": TracedCache()})
        else:
            given, filled = following(given, cache.length), torch.tensor(cache.filled, device=rows.device)
            found = self.later(cache, {**given, "cache": traced(cache.whole(), filled)}, given, filled)
        cache.filled += count
        for name in [name for name, value in found.items() if isinstance(value, TracedCache)]:
            found[name] = cache
        found["logits"] = found["logits"][:, :count]
        return found
