"""Row -> model on the meta device: a transformers config of the row's shape; `gpt.Gpt` if attention is written out."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from published.gpt import Gpt
from published.rows import Row


@dataclass(frozen=True)
class Shape:
    """What a decoder is built from; ``gated`` perceptrons have three matrices, others two. ``positions`` is the longest
    sequence, in tokens; ``written_out`` attention holds all scores."""

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

    @property
    def parameters(self) -> int:
        """Weights of all matrices; norms and biases, a thousandth of them, are left out."""
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        layer = attention + (3 if self.gated else 2) * self.hidden * self.ffn
        return round(self.layers * layer + (1 if self.tied else 2) * self.vocab * self.hidden)


#: A model with a gate whose width is four times the model's is told by its name's number of parameters, to so much.
NAMED_WITHIN = 0.05


def is_gated(row: Row) -> bool:
    """Whether the row's perceptron has a gate, which no column says: its width is not four times the model's, or the
    number of parameters in the model's name is that of a model with one."""
    if row.ffn_hidden != 4 * row.hidden:
        return True
    named = re.search(r"(\d+(?:\.\d+)?)([bBmMtT])(?![a-zA-Z])", row.model_name)
    if named is None:
        return False
    wanted = float(named[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[named[2].lower()]
    found = shape_of(row, gated=True, written_out=False, dropout=0.0).parameters
    return abs(found / wanted - 1) < NAMED_WITHIN


def shape_of(row: Row, *, gated: bool, written_out: bool, dropout: float) -> Shape:
    """The shape of a row's model."""
    return Shape(
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
    )


def build(shape: Shape) -> nn.Module:
    """The model in float32, which is what its optimizer keeps, without storage."""
    with torch.device("meta"):
        if _kind(shape) == "Gpt":
            names = ("layers", "hidden", "ffn", "heads", "vocab", "positions", "tied", "dropout")
            return Gpt(**{name: getattr(shape, name) for name in names})
        return _transformers_model(shape)


def _transformers_model(shape: Shape) -> nn.Module:
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
    if shape.gated:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **sizes))
    config = transformers.Starcoder2Config(**common, **sizes, hidden_act="relu2", use_bias=False)
    return transformers.Starcoder2ForCausalLM(config)


def layers_of(shape: Shape) -> str:
    """The module that holds the layers."""
    return {"Gpt": "layers", "GPT2": "transformer.h"}.get(_kind(shape), "model.layers")


def after_layers(shape: Shape) -> tuple[str, str]:
    """The modules with parameters that come after the layers: the last norm and the head."""
    own = {"Gpt": ("norm", "head"), "GPT2": ("transformer.ln_f", "lm_head")}
    return own.get(_kind(shape), ("model.norm", "lm_head"))


def _kind(shape: Shape) -> str:
    if shape.gated or shape.kv_heads != shape.heads:
        return "Llama" if shape.gated else "Starcoder2"
    return "Gpt" if shape.written_out else "GPT2"


def batch(rows: int, length: int) -> dict[str, Tensor]:
    """Input ids and labels [rows, length] on the meta device."""
    return {name: torch.zeros(rows, length, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
