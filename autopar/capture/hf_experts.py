"""transformers' experts registry.

Third parties may register how a module of experts computes. Ours sorts the tokens by expert, multiplies all of an
expert's rows at once and adds them up again, each an operator of its own (`autopar.ops.experts`); the gate and the
activation between the products stay the module's own and are traced.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.ops.experts import combine, dispatch, expert_counts, group_of, grouped_bias, grouped_mm
from autopar.ops.gated import gated_mm

#: The name under which it is registered.
IMPLEMENTATION = "autopar"
#: The buffer in which a module of experts counts the tokens that each of them is sent in training, int64 [E].
COUNTS = "tokens_by_expert"
#: The buffer by which DeepSeek's routers and those like them keep their experts balanced, float [E].
BIAS = "e_score_correction_bias"


def _linear(module: nn.Module, rows: Tensor, name: str, index: Tensor) -> Tensor:
    """The rows through every expert's own linear layer ``name``; weights are [E, out, in] unless transposed."""
    weight = getattr(module, name)
    if not module.is_transposed:
        weight = weight.transpose(1, 2)
    rows = grouped_mm(rows, weight, index)
    return grouped_bias(rows, getattr(module, f"{name}_bias"), index) if module.has_bias else rows


def _has_plain_gate(module: nn.Module) -> bool:
    """Whether a module's gate and up are fused one after the other, [E, 2 x I, H], without a bias, and its gate is the
    usual one, the activation of the one times the other."""
    from transformers.integrations.moe import _default_apply_gate

    usual = type(module)._apply_gate is _default_apply_gate  # type: ignore[attr-defined]
    return bool(
        usual and module.has_gate and module.is_concatenated and not module.has_bias and not module.is_transposed
    )


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: hidden [T, H], index and weights [T, K] -> [T, H]."""
    experts = int(module.num_experts)  # type: ignore[arg-type]
    if module.training and hasattr(module, COUNTS):
        getattr(module, COUNTS).add_(expert_counts(top_k_index, experts))
    tokens, top_k = top_k_index.shape
    group = group_of(tokens, top_k, experts)
    rows = dispatch(hidden_states, top_k_index, None, experts, group)
    if _has_plain_gate(module):
        gate, up = gated_mm(rows, module.gate_up_proj.unflatten(1, (2, -1)), top_k_index)  # type: ignore[operator]
        rows = module.act_fn(gate) * up  # type: ignore[operator]
    elif module.has_gate:
        rows = module._apply_gate(_linear(module, rows, "gate_up_proj", top_k_index))  # type: ignore[operator]
    else:
        rows = module.act_fn(_linear(module, rows, "up_proj", top_k_index))  # type: ignore[operator]
    rows = _linear(module, rows, "down_proj", top_k_index)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)  # type: ignore[operator]
    return combine(rows, top_k_index, top_k_weights.to(rows.dtype), experts, group).to(hidden_states.dtype)


def mixtures(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of experts of a model that use the registry, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "num_experts") and hasattr(module, "is_transposed")
    }


def router_biases(model: nn.Module) -> dict[str, Tensor]:
    """The buffer `BIAS` of the router that stands beside each module of experts, by the name of that; of mixtures
    that have one."""
    found = {name.rpartition(".")[0]: b for name, b in model.named_buffers() if name.rpartition(".")[2] == BIAS}
    beside = {router.rpartition(".")[0]: bias for router, bias in found.items()}
    names = {name: name.rpartition(".")[0] for name in mixtures(model)}
    return {name: beside[parent] for name, parent in names.items() if parent in beside}


def count_tokens(model: nn.Module, device: torch.device) -> None:
    """Let every mixture of a model count its tokens from now on."""
    for module in mixtures(model).values():
        if not hasattr(module, COUNTS):
            counts = torch.zeros(int(module.num_experts), dtype=torch.int64, device=device)  # type: ignore[arg-type]
            module.register_buffer(COUNTS, counts, persistent=False)


def select(model: nn.Module) -> None:
    """Switch a transformers model, and the models inside it, to our experts, where they have some that use the
    registry."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    model.set_experts_implementation(IMPLEMENTATION)  # type: ignore[operator]
