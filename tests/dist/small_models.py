"""Small models, batches and the measure of error that the tests of capture, planning and real processes share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS = 64, 32, 3, 4, 2


def llama(**changes: Any) -> Any:
    """A Llama with grouped-query attention and tied embeddings; 3 layers, so that the first and the last block of a
    class, which are the ones that may differ, are not all there is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).train()


def gpt2(dropout: float = 0.0, layers: int = LAYERS) -> Any:
    """A GPT-2 (learned positions, biases, tied embeddings) with ``dropout`` wherever it has one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=layers, n_head=HEADS, n_positions=64, bos_token_id=0,
        eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )).train()  # fmt: skip


def bert() -> Any:
    """A BERT masked language model without dropout."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )).train()  # fmt: skip


def mlp() -> nn.Sequential:
    """Two linear layers, [*, 16] -> [*, 8]; it returns a bare tensor."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8))


class Attention(nn.Module):
    """Causal self-attention with the heads made by hand, in place of a library's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, HIDDEN] -> the same shape."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 48), nn.GELU(), nn.Linear(48, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, HIDDEN] -> the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A decoder written by hand: ``forward(ids, labels)`` returns {"loss", "logits"}."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """ids and labels int64 [B, S]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def transformer() -> Transformer:
    """The hand-written decoder, with fixed weights."""
    torch.manual_seed(0)
    return Transformer()


def encoder(dropout: float = 0.0) -> nn.TransformerEncoder:
    """torch's own encoder, batch first, [B, S, HIDDEN] -> the same shape."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 48, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


class Encoded(nn.Module):
    """torch's encoder between two linear layers, so that its first and last layers are like the others."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, HIDDEN), nn.Linear(HIDDEN, 8)
        self.encoder = encoder(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, 16] -> [B, S, 8]."""
        return self.after(self.encoder(self.before(x)))


def encoded(dropout: float = 0.0) -> Encoded:
    """torch's encoder with layers before and after."""
    torch.manual_seed(0)
    return Encoded(dropout)


def tokens(batch: int = 4, seq_len: int = 8, *, seed: int = 0, ignored: bool = True, names: tuple[str, str] = (
        "input_ids", "labels"), vocabulary: int = VOCABULARY) -> dict[str, Tensor]:  # fmt: skip
    """Ids and labels, int64 [batch, seq_len]; with ``ignored`` labels of -100 spread unevenly over the batch, so that a
    mean over ranks is not the mean over tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (batch, seq_len), generator=generator)
    labels = ids.clone()
    if ignored:
        for row in range(batch):
            labels[row, : row * (seq_len - 2) // batch] = -100
    return {names[0]: ids, names[1]: labels}


def errors(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """||a - b|| / max(||b||, 1e-3 RMS sqrt(numel)) of every tensor, RMS over all of them (DESIGN section 9). Both must
    have the same names; a NaN is an error of inf."""
    assert found.keys() == truth.keys(), sorted(found.keys() ^ truth.keys())
    count = sum(b.numel() for b in truth.values())
    rms = math.sqrt(sum(float(b.double().square().sum()) for b in truth.values()) / count)
    every = {}
    for name, b in truth.items():
        assert found[name].shape == b.shape, (name, found[name].shape, b.shape)
        off = float((found[name].double() - b.double()).norm())
        error = off / max(float(b.double().norm()), 1e-3 * rms * math.sqrt(b.numel()), 1e-300)
        every[name] = math.inf if math.isnan(error) else error
    return every


def largest_error(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest of `errors`, and the tensor it belongs to."""
    return max(((error, name) for name, error in errors(found, truth).items()), default=(0.0, ""))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients that a model's parameters have."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
