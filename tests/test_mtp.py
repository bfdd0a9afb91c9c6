"""Multi-token prediction as DeepSeek-V3 has it, written by hand: a module behind the trunk predicts the token after the
next from the trunk's hidden states and the embeddings of the tokens shifted by one, with the trunk's own embedding and
head; the loss is the main one and a part of the module's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import Batch, Case, planned_and_compared, seeded, uneven_labels
from torch import Tensor, nn

import autopar
from autopar import Hints
from autopar.runtime.reference import exact_float64

WIDTH, HEADS, WORDS, LAMBDA = 32, 4, 64, 0.3


class Block(nn.Module):
    """Causal attention and a gated MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Ahead(nn.Module):
    """An MTP module: norms of both, joined, projected, and a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_norm, self.token_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.join, self.block = nn.Linear(2 * WIDTH, WIDTH, bias=False), Block()

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Hidden states and embeddings of the tokens after, [B, S, H] each -> [B, S, H]."""
        return self.block(self.join(torch.cat([self.hidden_norm(hidden), self.token_norm(tokens)], -1)))


def shifted(ids: Tensor, by: int, fill: int) -> Tensor:
    """The tokens ``by`` places later, [B, S]; ``fill`` where there are none."""
    return F.pad(ids[:, by:], (0, by), value=fill)


class Predictor(nn.Module):
    """The trunk, and ``depth`` modules one behind the other; embedding and head belong to all."""

    def __init__(self, layers: int = 2, depth: int = 1) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.mtp = nn.ModuleList([Ahead() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """input_ids and labels [B, S]; labels of -100 do not count."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        loss = self.loss(x, shifted(labels, 1, -100))
        for k, module in enumerate(self.mtp, 1):
            x = module(x, self.embed(shifted(input_ids, k, 0)))
            loss = loss + LAMBDA / len(self.mtp) * self.loss(x, shifted(labels, k + 1, -100))
        return {"loss": loss}

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean over tokens that count, by the shared head."""
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch() -> Batch:
    """Token ids [8, 8], of whose labels uneven numbers count; every sample keeps some for both losses."""
    ids = torch.randint(0, WORDS, (8, 8), generator=torch.Generator().manual_seed(4321))
    return {"input_ids": ids, "labels": uneven_labels(ids)}


MTP = Case("mtp", seeded(Predictor), batch)
DEEP = Case("mtp-2", seeded(lambda: Predictor(layers=6, depth=2)), batch)
PLANS: dict[str, tuple[int, Hints]] = {
    "tp2": (2, Hints(tp=2, pp=1)),
    "dp2": (2, Hints(dp=2, pp=1)),
    "cp2": (2, Hints(cp=2, pp=1)),
    "dp2-zero3": (2, Hints(dp=2, pp=1, zero=3)),
    "dp2-tp2-zero1": (4, Hints(dp=2, tp=2, pp=1, zero=1)),
    "pp2": (2, Hints(pp=2, micro_batch_size=2)),
    "pp2-dp2-zero1": (4, Hints(pp=2, dp=2, zero=1, micro_batch_size=1)),
    "pp2-tp2": (4, Hints(pp=2, tp=2, micro_batch_size=2, schedule="gpipe")),
    "dp2-micro-batches-full": (2, Hints(dp=2, pp=1, zero=3, micro_batch_size=1, recompute="full")),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", [MTP, DEEP], ids=lambda c: c.name)
def test_predictors_of_later_tokens(case: Case, plan: str) -> None:
    """Loss, every gradient (those of embedding and head are sums of both uses) and two steps, against eager."""
    ranks, hints = PLANS[plan]
    model, given = case.make(torch.float64)
    with exact_float64():
        found, report = planned_and_compared(model, given, f"cpu:{ranks}", hints, steps=2)
    assert report.ok and report.max_error < 1e-10, report
    again = 4 / 3 if hints.recompute == "full" else 1  # the forward twice
    assert report.flops_share < (0.75 if hints.pp == 2 else 1.1 / ranks * again), report
    if hints.pp == 2:
        assert found.num_micro_batches == 8 // (hints.micro_batch_size * (hints.dp or 1))


@pytest.mark.slow
def test_later_tokens_on_a_cluster() -> None:
    """The search needs no hints."""
    model, given = DEEP.make()
    plan = autopar.plan(model, "h100-sxm:1x4", example_inputs=given)
    assert plan.world_size == 4 and max(plan.degrees.values()) > 1
