"""What experts are sent, and the bias by which DeepSeek's routers keep them balanced.

Mixtures count in a buffer of their own, as part of the step (`capture.hf_experts`): tokens of all ranks and all
micro-batches, each once, whatever is made again in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.capture.hf_experts import BIAS, COUNTS, mixtures, router_biases
from autopar.errors import InputError


@dataclass(frozen=True)
class ExpertLoad:
    """``tokens`` that every expert of a mixture was sent, int64 [E], on the CPU."""

    tokens: Tensor

    @property
    def imbalance(self) -> float:
        """What the busiest expert was sent over the mean; 1 where nobody was sent anything."""
        total = int(self.tokens.sum())
        return float(self.tokens.max()) * self.tokens.numel() / total if total else 1.0

    def __str__(self) -> str:
        return f"{int(self.tokens.sum())} tokens to {self.tokens.numel()} experts, imbalance {self.imbalance:.2f}"


def loads(model: nn.Module) -> dict[str, ExpertLoad]:
    """What the experts of every mixture have been sent, by module name. InputError for a model without mixtures."""
    found = mixtures(model)
    if not found:
        raise InputError(
            f"{type(model).__name__} has no experts whose tokens are counted",
            expected="a model with mixtures of experts of transformers",
            found="none",
            change="count them in the model itself, in a buffer",
        )
    return {name: ExpertLoad(getattr(module, COUNTS).cpu().clone()) for name, module in found.items()}


@torch.no_grad()
def update_biases(model: nn.Module, rate: float) -> None:
    """Add ``rate`` to the bias of every expert that was sent fewer tokens than the mean, subtract it from that of every
    one that was sent more, and count from nought (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). InputError for a model
    without such routers."""
    biases = router_biases(model)
    if not biases:
        raise InputError(
            f"{type(model).__name__} has no routers that a bias keeps balanced",
            expected=f"routers with a buffer {BIAS} beside their experts, as DeepSeek-V3 has them",
            found="none",
            change="leave router_bias_update out: such a model is balanced by its loss, if at all",
        )
    for name, bias in biases.items():
        counts = getattr(model.get_submodule(name), COUNTS)
        lacking = counts.sum() - counts * counts.numel()  # E times the mean less the count: exact in integers
        bias += rate * lacking.sign().to(bias.device, bias.dtype)
    for module in mixtures(model).values():
        getattr(module, COUNTS).zero_()
