"""More of transformers' architectures, for breadth: what `zoo` has of every kind, here of everything that is not rare.

As small and seeded as there; layers that a config drops at random (``layerdrop``) are kept, since a graph has all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from models import BATCH, VOCABULARY, Batch, causal_batch, masked_batch, seeded
from torch import nn
from zoo import GATED, WIDE, Architecture, causal, decoder_inputs_batch, image_batch, model

HEADS_OF_8 = {**GATED, "head_dim": 8}
#: State-space layers of hybrids.
SCAN = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
#: Gated delta rules, in the layers that are no attention.
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
SEQ2SEQ = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
           "max_position_embeddings": 32, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}  # fmt: skip
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "image_size": 16, "patch_size": 4}  # fmt: skip
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
WAVES = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "layerdrop": 0.0,
         "intermediate_size": 64, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
         "apply_spec_augment": False}  # fmt: skip
IMAGE = VOCABULARY - 1  # the token that stands for a patch of an image


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(4321)


def _pixels() -> Batch:
    """Images without classes."""
    return {"pixel_values": image_batch()["pixel_values"]}


def picture_batch() -> Batch:
    """Texts [batch, 24] with the 16 patches of an image in them, whose labels do not count."""
    ids = torch.randint(3, 60, (BATCH, 24), generator=_generator())
    ids[:, 1:17] = IMAGE
    labels = torch.where(torch.arange(24) < 17, -100, ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **_pixels()}


def _wave_batch() -> Batch:
    """Sound [batch, samples]."""
    return {"input_values": torch.randn(BATCH, 400, generator=_generator())}


def _series_batch() -> Batch:
    """The past and the future [batch, steps, channels] of series."""
    past, future = (torch.randn(BATCH, steps, 2, generator=_generator()) for steps in (32, 4))
    return {"past_values": past, "future_values": future}


def _sized(kind: str, name: str, **config: Any) -> Architecture:
    return Architecture(name, model(f"{kind}ForMaskedLM", kind, **{**WIDE, **config}), masked_batch, "encoder")


def _pair(kind: str, name: str, sizes: Mapping[str, Any], head: str = "ForConditionalGeneration") -> Architecture:
    return Architecture(name, model(f"{kind}{head}", kind, **sizes), decoder_inputs_batch, "encoder-decoder")


def _classifier(kind: str, name: str, **config: Any) -> Architecture:
    return Architecture(name, model(f"{kind}ForImageClassification", kind, **config), image_batch, "vision")


def _built(name: str, family: str, batch: Callable[[], Batch], build: Callable[[], nn.Module]) -> Architecture:
    return Architecture(name, seeded(build), batch, family)


def _siglip() -> nn.Module:
    config = transformers.SiglipConfig(text_config=WIDE, vision_config=TOWER, num_labels=3)
    return transformers.SiglipForImageClassification(config)


def _llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER), text_config=transformers.LlamaConfig(**GATED),
        image_token_id=IMAGE, vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def _paligemma() -> nn.Module:
    vision = transformers.SiglipVisionConfig(**TOWER, projection_dim=32)
    config = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=transformers.GemmaConfig(**HEADS_OF_8), image_token_index=IMAGE,
        projection_dim=32,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config)


def _prefix_batch() -> Batch:
    batch = picture_batch()
    return {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}


def _speech_commands() -> Batch:
    """Spectrograms [batch, frames, bins] and a class for each."""
    return {"input_values": torch.randn(BATCH, 16, 8, generator=_generator()), "labels": torch.arange(BATCH) % 3}


WIDER_DECODERS = (
    *(causal(name, family, **GATED) for name, family in (
        ("apertus", "Apertus"), ("arcee", "Arcee"), ("cohere", "Cohere"), ("cohere2", "Cohere2"),
        ("diffllama", "DiffLlama"), ("exaone4", "Exaone4"), ("nemotron", "Nemotron"), ("olmo", "Olmo"),
        ("olmo3", "Olmo3"), ("phi", "Phi"), ("smollm3", "SmolLM3"), ("stablelm", "StableLm"),
        ("starcoder2", "Starcoder2"))),
    *(causal(name, family, **HEADS_OF_8) for name, family in (
        ("ernie4.5", "Ernie4_5"), ("gemma", "Gemma"), ("glm", "Glm"), ("glm4", "Glm4"), ("helium", "Helium"),
        ("hunyuan", "HunYuanDenseV1"), ("seed-oss", "SeedOss"), ("vaultgemma", "VaultGemma"))),
    causal("biogpt", "BioGpt", **WIDE),
    causal("codegen", "CodeGen", **GPT, rotary_dim=4, n_ctx=32),
    Architecture("ctrl", model("CTRLLMHeadModel", "CTRL", **GPT, dff=64), causal_batch),
    causal("gpt-bigcode", "GPTBigCode", **GPT),
    causal("gpt-neo", "GPTNeo", vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64,
           max_position_embeddings=32, attention_types=[[["global", "local"], 1]], window_size=4),
    causal("mpt", "Mpt", d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY, max_seq_len=32),
    Architecture("openai-gpt", model("OpenAIGPTLMHeadModel", "OpenAIGPT", **GPT), causal_batch),
    causal("persimmon", "Persimmon", **WIDE),
    causal("xglm", "XGLM", vocab_size=VOCABULARY, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4,
           max_position_embeddings=32),
)  # fmt: skip
WIDER_STATE_SPACE = tuple(
    causal(name, family, "state space", **config) for name, family, config in (
        ("bamba", "Bamba", {**GATED, **SCAN, "attn_layer_indices": [1]}),
        ("falcon-mamba", "FalconMamba", MAMBA),
        ("granite-hybrid", "GraniteMoeHybrid", {**GATED, **SCAN, "layer_types": ["mamba", "attention"],
                                                "num_local_experts": 0, "shared_intermediate_size": 64}),
        ("jamba", "Jamba", {**GATED, "num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2,
                            "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False}),
        ("lfm2", "Lfm2", {**GATED, "layer_types": ["conv", "full_attention"]}),
        ("mamba", "Mamba", MAMBA),
        ("recurrent-gemma", "RecurrentGemma", {**HEADS_OF_8, "num_hidden_layers": 3, "lru_width": 32,
                                               "attention_window_size": 6}),
        ("rwkv", "Rwkv", {**{k: v for k, v in MAMBA.items() if k != "state_size"}, "attention_hidden_size": 32,
                          "intermediate_size": 64, "context_length": 32}),
        ("zamba2", "Zamba2", {**GATED, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 4,
                              "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "use_mem_rope": True}),
    )
)  # fmt: skip
WIDER_MIXTURES = tuple(
    causal(name, family, "mixture of experts", **config) for name, family, config in (
        ("dots1", "Dots1", {**GATED, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}),
        ("ernie4.5-moe", "Ernie4_5_Moe", {**GATED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
                                          "moe_layer_start_index": 0}),
        ("hunyuan-moe", "HunYuanMoEV1", {**HEADS_OF_8, "num_experts": 4, "moe_topk": 2}),
        ("minimax", "MiniMax", {**HEADS_OF_8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4}),
        ("minimax-m2", "MiniMaxM2", {**HEADS_OF_8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("phimoe", "Phimoe", {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3-next", "Qwen3Next", {**HEADS_OF_8, **DELTA, "num_experts": 4, "num_experts_per_tok": 2,
                                     "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    )
)  # fmt: skip
WIDER_LINEAR = (
    Architecture("qwen3.5", model("Qwen3_5ForCausalLM", "Qwen3_5Text", **HEADS_OF_8, **DELTA), causal_batch),
    Architecture("llama4", model("Llama4ForCausalLM", "Llama4Text", **HEADS_OF_8, intermediate_size_mlp=64,
                                 num_local_experts=2, attention_chunk_size=8), causal_batch),
)  # fmt: skip
WIDER_ENCODERS = (
    *(_sized(kind, name) for name, kind in (
        ("camembert", "Camembert"), ("data2vec-text", "Data2VecText"), ("deberta", "Deberta"), ("ernie", "Ernie"),
        ("eurobert", "EuroBert"), ("fnet", "FNet"), ("layoutlm", "LayoutLM"), ("megatron-bert", "MegatronBert"),
        ("modernbert", "ModernBert"), ("mpnet", "MPNet"), ("nomic-bert", "NomicBert"), ("roformer", "RoFormer"),
        ("xlm-roberta", "XLMRoberta"))),
    _sized("Albert", "albert", embedding_size=16),
    _sized("ConvBert", "convbert", embedding_size=32),
    _sized("DebertaV2", "deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    _sized("Electra", "electra", embedding_size=32),
    _sized("Esm", "esm", mask_token_id=3, position_embedding_type="rotary"),
    _sized("MobileBert", "mobilebert", intra_bottleneck_size=32, embedding_size=32, true_hidden_size=32),
    _sized("RemBert", "rembert", input_embedding_size=32, output_embedding_size=32),
    _sized("SqueezeBert", "squeezebert", embedding_size=32, q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2,
           output_groups=2),
    Architecture("funnel", model("FunnelForMaskedLM", "Funnel", vocab_size=VOCABULARY, d_model=32, n_head=4, d_head=8,
                                 d_inner=64, block_sizes=[1, 1]), masked_batch, "encoder"),
    Architecture("xlnet", model("XLNetLMHeadModel", "XLNet", vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4,
                                d_inner=64), masked_batch, "encoder"),
)  # fmt: skip
WIDER_ENCODER_DECODERS = (
    *(_pair(kind, name, SEQ2SEQ) for name, kind in (
        ("blenderbot", "Blenderbot"), ("m2m100", "M2M100"), ("mbart", "MBart"), ("pegasus", "Pegasus"),
        ("plbart", "PLBart"))),
    _pair("Marian", "marian", {**SEQ2SEQ, "pad_token_id": 0, "decoder_start_token_id": 1}, "MTModel"),
    _pair("SwitchTransformers", "switch", {**T5, "num_experts": 2, "dropout_rate": 0.0}),  # a loop over experts
    *(_pair(kind, name, T5) for name, kind in (("longt5", "LongT5"), ("mt5", "MT5"), ("umt5", "UMT5"))),
)  # fmt: skip
WIDER_VISION = (
    *(_classifier(kind, name, **TOWER, num_labels=3) for name, kind in (
        ("beit", "Beit"), ("data2vec-vision", "Data2VecVision"), ("deit", "DeiT"), ("dinov2", "Dinov2"),
        ("ijepa", "IJepa"), ("vit-msn", "ViTMSN"))),
    _classifier("ConvNext", "convnext", **STAGES, num_stages=2, patch_size=2, image_size=16, drop_path_rate=0.2),
    _classifier("ConvNextV2", "convnextv2", **STAGES, num_stages=2, patch_size=2, image_size=16),
    _classifier("Hiera", "hiera", embed_dim=8, image_size=[16, 16], patch_size=[3, 3], patch_stride=[2, 2],
                patch_padding=[1, 1], depths=[1, 1], num_heads=[1, 2], masked_unit_size=[2, 2], query_stride=[2, 2],
                num_query_pool=1, num_labels=3),
    _classifier("MobileViT", "mobilevit", image_size=32, hidden_sizes=[16, 16, 16], num_attention_heads=2, num_labels=3,
                neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 16]),
    _classifier("PoolFormer", "poolformer", **STAGES, num_encoder_blocks=2, strides=[2, 2], patch_sizes=[3, 3],
                padding=[1, 1]),
    _classifier("RegNet", "regnet", **STAGES, embedding_size=8, groups_width=8),
    _classifier("ResNet", "resnet", **STAGES, embedding_size=8),
    _classifier("Segformer", "segformer", **STAGES, num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[3, 3],
                strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    *(_classifier(kind, name, embed_dim=16, depths=[2], num_heads=[2], window_size=2, image_size=16, patch_size=2,
                  num_labels=3) for name, kind in (("swin", "Swin"), ("swinv2", "Swinv2"))),
    Architecture("dinov3", model("DINOv3ViTModel", "DINOv3ViT", **TOWER), _pixels, "vision"),
    Architecture("vit-mae", model("ViTMAEForPreTraining", "ViTMAE", **TOWER, decoder_hidden_size=32,
                                  decoder_num_hidden_layers=1, decoder_num_attention_heads=4,
                                  decoder_intermediate_size=64), _pixels, "vision"),
    Architecture("yolos", model("YolosModel", "Yolos", **{**TOWER, "image_size": [16, 16]}, num_detection_tokens=4),
                 _pixels, "vision"),
    _built("siglip", "vision", image_batch, _siglip),
)  # fmt: skip
WIDER_MIXED = (
    _built("llava", "vision-language", picture_batch, _llava),
    _built("paligemma", "vision-language", _prefix_batch, _paligemma),
    Architecture("ast", model("ASTForAudioClassification", "AST", hidden_size=32, intermediate_size=64,
                              num_hidden_layers=2, num_attention_heads=4, patch_size=4, frequency_stride=4,
                              time_stride=4, max_length=16, num_mel_bins=8, num_labels=3), _speech_commands, "speech"),
    Architecture("hubert", model("HubertModel", "Hubert", **WAVES), _wave_batch, "speech"),
    Architecture("wav2vec2", model("Wav2Vec2Model", "Wav2Vec2", **WAVES), _wave_batch, "speech"),
    Architecture("patchtst", model("PatchTSTForPrediction", "PatchTST", num_input_channels=2, context_length=32,
                                   patch_length=4, patch_stride=4, prediction_length=4, d_model=32,
                                   num_hidden_layers=2, num_attention_heads=4, ffn_dim=64), _series_batch, "series"),
)  # fmt: skip

def _qwen2_vl() -> nn.Module:
    text = {**GATED, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return transformers.Qwen2VLForConditionalGeneration(config)


def _grid_batch() -> Batch:
    """`picture_batch` with images as rows of patches, and the numbers of patches in a tensor."""
    pixels = torch.randn(BATCH * 64, 24, generator=_generator())
    return {**picture_batch(), "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, 8]] * BATCH)}


#: What cannot be captured yet, with a `CaptureError` that says why: values decide what is computed.
REFUSED = (
    causal("jetmoe", "JetMoe", "mixture of experts", **GATED, kv_channels=8, num_local_experts=4,
           num_experts_per_tok=2),
    _sized("IBert", "ibert"),
    _built("qwen2-vl", "vision-language", _grid_batch, _qwen2_vl),
)  # fmt: skip

WIDER = (
    *WIDER_DECODERS, *WIDER_LINEAR, *WIDER_MIXTURES, *WIDER_STATE_SPACE, *WIDER_ENCODERS, *WIDER_ENCODER_DECODERS,
    *WIDER_VISION, *WIDER_MIXED,
)  # fmt: skip
