"""What `step_time` compares with where experts or sequences are spread, by hand: Mixtral with an all-to-all to the
ranks that have the experts and back, and Llama with one around attention from sequence to heads and back (Ulysses)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

LAYERS, HIDDEN, HEADS, VOCABULARY, EXPERTS, TOP_K = 4, 256, 8, 1024, 8, 2
SAMPLES, SEQUENCE, LONG = 8, 128, 2048

Step = Callable[[], Tensor]


def mixtral() -> MixtralForCausalLM:
    """A mixture of experts, the same on every rank."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
        use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def long_llama() -> LlamaForCausalLM:
    """A decoder, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=LONG, use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _ids(samples: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def short_batch() -> dict[str, Tensor]:
    """Many samples of few tokens."""
    return _ids(SAMPLES, SEQUENCE)


def long_batch() -> dict[str, Tensor]:
    """One sample of many tokens."""
    return _ids(1, LONG)


# -- experts -----------------------------------------------------------------------------------------------------------


def _spread_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts interface on one of n ranks that have the experts in equal parts: pairs of token and choice
    sorted by expert go to the ranks that have them, and their results back."""
    ranks, pairs = dist.get_world_size(), index.reshape(-1)
    order = pairs.argsort(stable=True)
    sent = torch.bincount(pairs, minlength=EXPERTS).view(ranks, -1)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    out_sizes, in_sizes = sent.sum(1).tolist(), came.sum(1).tolist()
    group = dist.group.WORLD
    rows = all_to_all_single_autograd(hidden[order // TOP_K], in_sizes, out_sizes, group)
    by_expert = came.T.reshape(-1).tolist()  # they came by rank, and in each rank by expert
    pieces = rows.split(came.reshape(-1).tolist())
    local, made = came.shape[1], []
    for e in range(local):
        mine = torch.cat(pieces[e::local])
        gate, up = F.linear(mine, module.gate_up_proj[e]).chunk(2, -1)
        made += F.linear(module.act_fn(gate) * up, module.down_proj[e]).split(by_expert[e * ranks : (e + 1) * ranks])
    back = torch.cat([made[e * ranks + rank] for rank in range(ranks) for e in range(local)])
    back = all_to_all_single_autograd(back, out_sizes, in_sizes, group)
    scaled = back * weights.reshape(-1)[order, None]
    return torch.zeros_like(hidden).index_add(0, order // TOP_K, scaled)


def moe(compiled: bool) -> tuple[nn.Module, Step]:
    """`DistributedDataParallel` over all but the experts, of which every rank has its part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = mixtral()
    ALL_EXPERTS_FUNCTIONS.register("by_hand", _spread_experts)
    model.set_experts_implementation("by_hand")
    for block in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            own = nn.Parameter(getattr(block.mlp.experts, name).detach().chunk(ranks)[rank].clone())
            own.register_hook(lambda grad: grad / ranks)  # the loss is a mean over ranks
            setattr(block.mlp.experts, name, own)
    experts = [name for name, _ in model.named_parameters() if ".experts." in name]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    spread = nn.parallel.DistributedDataParallel(model)
    own = {name: t.chunk(ranks)[rank] for name, t in short_batch().items()}

    def step() -> Tensor:
        loss: Tensor = spread(**own).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return spread, step


# -- long sequences ----------------------------------------------------------------------------------------------------


def _swap(x: Tensor, split: int, joined: int) -> Tensor:
    """All-to-all: dim ``split`` of x is cut over the ranks, dim ``joined`` made whole."""
    ranks = dist.get_world_size()
    pieces = torch.stack(x.chunk(ranks, split))
    came = all_to_all_single_autograd(pieces.flatten(0, 1), None, None, dist.group.WORLD)
    return torch.cat(came.view(pieces.shape).unbind(0), joined)


def _by_heads(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """transformers' attention interface, of a part of the sequence [B, heads, S / n, D]: some heads of the whole."""
    q, k, v = (_swap(x, 1, 2) for x in (q, k, v))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scaling"])
    return _swap(found, 2, 1).transpose(1, 2), None


def ulysses(compiled: bool) -> tuple[nn.Module, Step]:
    """`DistributedDataParallel`, every rank with its part of the sequence."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    AttentionInterface.register("by_hand", _by_heads)
    model = long_llama()
    model.set_attn_implementation("by_hand")
    spread = nn.parallel.DistributedDataParallel(model)
    ids = long_batch()["input_ids"]
    later = F.pad(ids[:, 1:], (0, 1), value=-100)
    own = {"input_ids": ids, "shift_labels": later, "position_ids": torch.arange(LONG)[None]}
    own = {name: t.chunk(ranks, 1)[rank] for name, t in own.items()}

    def step() -> Tensor:
        logits = spread(input_ids=own["input_ids"], position_ids=own["position_ids"]).logits
        total = F.cross_entropy(logits.flatten(0, 1), own["shift_labels"].flatten(), reduction="sum")
        loss = total * (ranks / (LONG - 1))  # of which the gradients' mean over ranks is that of the mean over tokens
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return spread, step
