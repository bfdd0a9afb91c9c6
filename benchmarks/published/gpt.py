"""A GPT as Megatron-LM built it before flash attention: scores and probabilities of attention are written out.

transformers' models reach autopar's attention operator, which never holds them; the runs of 2021 and 2022, and those of
the Zero Bubble paper, did hold them, and their time and memory tell (Korthikanti et al., arXiv:2205.05198, section 4).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention of ``heads`` heads over [batch, sequence, hidden]."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, hidden_keys: Tensor) -> Tensor:
        """``hidden_keys`` [sequence, sequence] is true where a query may not look."""
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (project(x).view(split).transpose(1, 2) for project in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        weights = F.softmax(scores.masked_fill(hidden_keys, float("-inf")), dim=-1)
        weights = F.dropout(weights, self.dropout, self.training)
        return self.out(torch.matmul(weights, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer: attention and a GELU perceptron, each with its norm before it and dropout after it."""

    def __init__(self, hidden: int, ffn: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor, hidden_keys: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + F.dropout(self.attention(self.before_attention(x), hidden_keys), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.before_mlp(x)))), self.dropout, self.training)


class Gpt(nn.Module):
    """The language model with its loss. Input and output embeddings are tied if ``tied``."""

    def __init__(
        self, *, layers: int, hidden: int, ffn: int, heads: int, vocab: int, positions: int, tied: bool, dropout: float
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        self.layers = nn.ModuleList(Block(hidden, ffn, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss over all tokens of [batch, sequence]."""
        length = input_ids.shape[1]
        places = torch.arange(length, device=input_ids.device)
        x = F.dropout(self.embedding(input_ids) + self.positions(places), self.dropout, self.training)
        hidden_keys = places[None, :] > places[:, None]
        for layer in self.layers:
            x = layer(x, hidden_keys)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())
