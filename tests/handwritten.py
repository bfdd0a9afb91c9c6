"""Mixtures of experts as people write them in plain PyTorch: loops over experts that select their tokens by value, in
their common spellings, and dispatch by one-hot einsums with a capacity."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import Batch, Case, seeded
from torch import Tensor, nn

WIDTH, INNER, EXPERTS, TOP_K, WORDS = 16, 24, 4, 2, 32


class Gated(nn.Module):
    """One expert: three linear layers."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias=bias), nn.Linear(WIDTH, INNER, bias=bias)
        self.w2 = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """A router of ``top_k`` experts, which subclasses loop over."""

    def __init__(self, bias: bool = False, top_k: int = TOP_K) -> None:
        super().__init__()
        self.gate, self.top_k = nn.Linear(WIDTH, EXPERTS, bias=False), top_k
        self.experts = nn.ModuleList([Gated(bias) for _ in range(EXPERTS)])

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of every token."""
        weights, chosen = torch.topk(self.gate(x).softmax(-1), self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Where(Mixture):
    """torch.where and index_add_."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        flat = x.view(-1, WIDTH)
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, k = torch.where(chosen == e)
            out.index_add_(0, token, expert(flat[token]) * weights[token, k, None])
        return out.view(x.shape)


class Counting(Mixture):
    """As DeepSeek's own code: experts without tokens are skipped, by a list of counts."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        flat = x.view(-1, WIDTH)
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        for e in range(EXPERTS):
            if counts[e] == 0:
                continue
            token, k = torch.where(chosen == e)
            out[token] += self.experts[e](flat[token]) * weights[token, k, None]
        return out.view(x.shape)


class OneHot(Mixture):
    """As Mixtral was in transformers 4: a one-hot mask by expert."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        flat = x.view(-1, WIDTH)
        weights, chosen = self.route(flat)
        out = torch.zeros(flat.shape, dtype=flat.dtype, device=flat.device)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            k, token = torch.where(mask[e])
            if token.shape[0] == 0:
                continue
            rows = self.experts[e](flat[None, token].reshape(-1, WIDTH)) * weights[token, k, None]
            out.index_add_(0, token, rows.to(flat.dtype))
        return out.reshape(x.shape)


class Hit(Mixture):
    """As Mixtral was later: a loop over the experts that have tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        flat = x.view(-1, WIDTH)
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            k, token = torch.where(mask[e].squeeze(0))
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, k, None])
        return out.view(x.shape)


class Masked(Mixture):
    """Boolean masks as indices, and a weight of every token that is a sum over its choices."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        flat, flat_out = x.view(-1, WIDTH), out.view(-1, WIDTH)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(dim=-1).view(-1)
            if mask.any():
                weight = (weights * (chosen == e)).sum(-1).view(-1)
                flat_out[mask] += expert(flat[mask]) * weight[mask].unsqueeze(1)
        return out


class InPlace(Mixture):
    """Batch and sequence apart."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            sample, token, k = torch.where(chosen == e)
            if sample.numel() > 0:
                out[sample, token] += expert(x[sample, token]) * weights[sample, token, k].unsqueeze(-1)
        return out


class Columns(Mixture):
    """A column of dense weights for every expert, and a shared expert beside."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.shared = Gated(bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        flat = x.view(-1, WIDTH)
        dense = self.gate(flat).softmax(-1)
        chosen = dense.topk(self.top_k, dim=-1).indices
        out = self.shared(flat)
        for e, expert in enumerate(self.experts):
            token, _ = torch.where(chosen == e)
            out = out.index_add(0, token, dense[token, e, None] * expert(flat[token]))
        return out.view(x.shape)


class Single(Mixture):
    """One expert for every token, whose rows are put where they belong."""

    def __init__(self) -> None:
        super().__init__(bias=True, top_k=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        flat = x.view(-1, WIDTH)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            mask = chosen == e
            if not mask.any():
                continue
            out[mask] = expert(flat[mask]) * weight[mask].unsqueeze(-1)
        return out.view(x.shape)


class Stacked(nn.Module):
    """Experts as parts of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(0.2 * torch.randn(EXPERTS, WIDTH, INNER))
        self.w2 = nn.Parameter(0.2 * torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        flat = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(self.gate(flat).softmax(-1), TOP_K, dim=-1)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, k = (chosen == e).nonzero().unbind(1)
            rows = F.gelu(flat[token] @ self.w1[e]) @ self.w2[e]
            out = out.index_add(0, token, rows * weights[token, k].unsqueeze(-1))
        return out.view(x.shape)


class Einsum(nn.Module):
    """GShard's: one-hot dispatch to ``capacity`` places of every expert in a sample; tokens without a place go on
    unchanged."""

    def __init__(self, capacity: int = 3) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(WIDTH, EXPERTS, bias=False), capacity
        self.w1 = nn.Parameter(0.2 * torch.randn(EXPERTS, WIDTH, INNER))
        self.w2 = nn.Parameter(0.2 * torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        hot = F.one_hot(chosen, EXPERTS)
        place = (hot.cumsum(1) - 1) * hot
        dispatch = F.one_hot(place.sum(-1).clamp(max=self.capacity), self.capacity + 1)[..., :-1].to(x.dtype)
        dispatch = hot.to(x.dtype)[..., None] * dispatch[..., None, :]
        rows = torch.einsum("bsec,bsh->ebch", dispatch, x)
        rows = F.relu(torch.einsum("ebch,ehf->ebcf", rows, self.w1))
        rows = torch.einsum("ebcf,efh->ebch", rows, self.w2)
        return torch.einsum("bsec,ebch->bsh", dispatch * weights[..., None, None], rows)


class Network(nn.Module):
    """A small model around mixtures; its result has a loss."""

    def __init__(self, mixture: type[nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(layers)])
        self.layers = nn.ModuleList([mixture() for _ in range(layers)])

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """ids and labels [B, S]."""
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def token_batch() -> Batch:
    """ids and labels [8, 8]."""
    ids = torch.randint(0, WORDS, (8, 8), generator=torch.Generator().manual_seed(4321))
    return {"ids": ids, "labels": ids.roll(1, 1)}


LOOPS = tuple(
    Case(kind.__name__, seeded(lambda kind=kind: Network(kind)), token_batch)  # type: ignore[misc]
    for kind in (Where, Counting, OneHot, Hit, Masked, InPlace, Columns, Single, Stacked)
)
DISPATCH = Case("Einsum", seeded(lambda: Network(Einsum)), token_batch)
