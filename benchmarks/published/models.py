"""Row -> model on the meta device: a transformers config of the row's shape; `gpt.Gpt` if attention is written out."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from published.gpt import Gpt
from published.rows import Row


@dataclass(frozen=True)
class Mixture:
    """The experts of every ``step``-th layer: how many there are, of which every token goes to ``top_k``, the width of
    one, and how many more are ``shared`` by all tokens; ``dense`` is the number of first layers without experts, and
    ``latent`` whether attention is DeepSeek's."""

    experts: int
    top_k: int
    ffn: int
    shared: int
    step: int = 1
    dense: int = 0
    latent: bool = False


@dataclass(frozen=True)
class Shape:
    """What a decoder is built from; ``gated`` perceptrons have three matrices, others two. ``positions`` is the longest
    sequence, in tokens; ``written_out`` attention holds all scores. ``head_dim`` is ``hidden`` over ``heads`` if it is
    not said."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    gated: bool
    positions: int
    written_out: bool
    dropout: float
    head_dim: int | None = None
    mixture: Mixture | None = None

    @property
    def parameters(self) -> int:
        """Weights of all matrices; norms and biases, a thousandth of them, are left out."""
        return self._weights(self.mixture.experts if self.mixture else 0)

    @property
    def active(self) -> int:
        """Those of them that a token meets."""
        return self._weights(self.mixture.top_k if self.mixture else 0)

    def _weights(self, experts: int) -> int:
        width = self.heads * (self.head_dim or self.hidden / self.heads)
        attention = 2 * self.hidden * width * (1 + self.kv_heads / self.heads)
        if self.mixture is not None and self.mixture.latent:
            attention = sum(a * b for a, b in _latent(self))
        perceptron = (3 if self.gated else 2) * self.hidden * self.ffn
        routed = 0
        if self.mixture is not None:
            routed = (self.layers - self.mixture.dense) // self.mixture.step
            found = 3 * routed * self.hidden * self.mixture.ffn * (experts + self.mixture.shared)
        else:
            found = 0
        layers = self.layers * attention + (self.layers - routed) * perceptron + found
        return round(layers + (1 if self.tied else 2) * self.vocab * self.hidden)


def _latent(shape: Shape) -> list[tuple[int, int]]:
    """The matrices of one of DeepSeek-V3's attentions, whose latent sizes are not printed."""
    h, n = shape.hidden, shape.heads
    return [(h, 1536), (1536, n * 192), (h, 512 + 64), (512, n * 256), (n * 128, h)]


#: A model with a gate whose width is four times the model's is told by its name's number of parameters, to so much.
NAMED_WITHIN = 0.05


#: What a query of DeepSeek's attention has: 128, and 64 with positions.
LATENT_HEAD = 192


def is_gated(row: Row) -> bool:
    """Whether the row's perceptron has a gate, which no column says: its width is not four times the model's, or the
    number of parameters in the model's name is that of a model with one."""
    if row.ffn_hidden != 4 * row.hidden:
        return True
    wanted = _named(row)
    if wanted is None:
        return False
    found = shape_of(row, gated=True, written_out=False, dropout=0.0).parameters
    return abs(found / wanted - 1) < NAMED_WITHIN


def _named(row: Row) -> float | None:
    """The number of parameters that the model's name says."""
    named = re.search(r"(\d+(?:\.\d+)?)([bBmMtT])(?![a-zA-Z])", row.model_name)
    return None if named is None else float(named[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[named[2].lower()]


def shape_of(row: Row, *, gated: bool, written_out: bool, dropout: float) -> Shape:
    """The shape of a row's model. A mixture with shared experts has them in every layer or in every other, whichever is
    nearer to the number of parameters in its name (Llama 4 has both kinds)."""
    shape = Shape(
        layers=row.n_layers,
        hidden=row.hidden,
        ffn=row.ffn_hidden,
        heads=row.n_heads,
        kv_heads=row.n_kv_heads,
        vocab=row.vocab,
        tied=row.tied_embeddings == "y",
        gated=gated,
        positions=row.seq_len or 1,
        written_out=written_out,
        dropout=dropout,
        head_dim=row.head_dim,
    )
    if not row.is_moe:
        return replace(shape, head_dim=None)
    latent = row.head_dim == LATENT_HEAD
    mixture = Mixture(
        row.n_experts or 1, row.top_k or 1, row.moe_ffn_hidden or row.ffn_hidden, row.n_shared_experts or 0,
        dense=(3 if "DeepSeek" in row.model_name else 1) if latent else 0, latent=latent,
    )  # fmt: skip
    steps = (1, 2) if mixture.shared and not latent else (1,)
    found = [replace(shape, gated=True, mixture=replace(mixture, step=step)) for step in steps]
    wanted = _named(row)
    return min(found, key=lambda s: abs(s.parameters - wanted)) if wanted else found[0]


def build(shape: Shape) -> nn.Module:
    """The model in float32, which is what its optimizer keeps, without storage."""
    with torch.device("meta"):
        if _kind(shape) == "Gpt":
            names = ("layers", "hidden", "ffn", "heads", "vocab", "positions", "tied", "dropout")
            return Gpt(**{name: getattr(shape, name) for name in names})
        model = _transformers_model(shape)
    # a loss of their own: that of transformers would do without long sequences' logits, which frameworks all make
    model.loss_function = functools.partial(model.loss_function)
    return model


def _transformers_model(shape: Shape) -> Any:
    import transformers

    common = {"vocab_size": shape.vocab, "tie_word_embeddings": shape.tied, "use_cache": False}
    if _kind(shape) == "GPT2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout)
        sizes = {"n_embd": shape.hidden, "n_layer": shape.layers, "n_head": shape.heads, "n_inner": shape.ffn}
        config = transformers.GPT2Config(
            **common, **sizes, **dropouts, n_positions=shape.positions, activation_function="gelu"
        )
        return transformers.GPT2LMHeadModel(config)
    sizes = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.positions,
    }
    if shape.mixture is not None:
        return _mixture_model(shape.mixture, {**common, **sizes}, shape.head_dim)
    if shape.gated:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **sizes))
    config = transformers.Starcoder2Config(**common, **sizes, hidden_act="relu2", use_bias=False)
    return transformers.Starcoder2ForCausalLM(config)


def _mixture_model(mixture: Mixture, sizes: dict[str, Any], head_dim: int | None) -> Any:
    """A mixture of experts: DeepSeek-V3's, Qwen2's where experts are shared, else Qwen3's."""
    import transformers

    own = {"num_experts_per_tok": mixture.top_k, "moe_intermediate_size": mixture.ffn}
    if mixture.latent:
        config = transformers.DeepseekV3Config(
            **sizes, **own, n_routed_experts=mixture.experts, n_shared_experts=mixture.shared,
            first_k_dense_replace=mixture.dense,
        )  # fmt: skip
        return transformers.DeepseekV3ForCausalLM(config)
    own |= {"num_experts": mixture.experts, "decoder_sparse_step": mixture.step}
    if mixture.shared:
        width = mixture.shared * mixture.ffn
        return transformers.Qwen2MoeForCausalLM(
            transformers.Qwen2MoeConfig(**sizes, **own, shared_expert_intermediate_size=width)
        )
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **own, head_dim=head_dim))


def layers_of(shape: Shape) -> str:
    """The module that holds the layers."""
    return {"Gpt": "layers", "GPT2": "transformer.h"}.get(_kind(shape), "model.layers")


def after_layers(shape: Shape) -> tuple[str, str]:
    """The modules with parameters that come after the layers: the last norm and the head."""
    own = {"Gpt": ("norm", "head"), "GPT2": ("transformer.ln_f", "lm_head")}
    return own.get(_kind(shape), ("model.norm", "lm_head"))


def _kind(shape: Shape) -> str:
    if shape.mixture is not None:
        return "mixture"
    if shape.gated or shape.kv_heads != shape.heads:
        return "Llama" if shape.gated else "Starcoder2"
    return "Gpt" if shape.written_out else "GPT2"


def batch(rows: int, length: int) -> dict[str, Tensor]:
    """Input ids and labels [rows, length] on the meta device."""
    return {name: torch.zeros(rows, length, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
