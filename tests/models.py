"""Small seeded models with batches that are hard to split: what the tests of whole programs run.

Every batch has labels of -100 spread unevenly over its rows (one row keeps a single label), and padding on either side
where the model takes a mask, so that a mean taken rank by rank, or a mask cut at the wrong place, shows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import Cluster, Hints, Plan, VerifyReport, Workload
from autopar.arguments import one_batch
from autopar.capture.graph import Captured
from autopar.runtime.reference import exact_float64
from autopar.runtime.verify import compare
from autopar.solver.search import search
from autopar.specialize import capture_batch, specialize, specialize_step

VOCABULARY, LARGE_VOCABULARY = 64, 16384
BATCH, SEQUENCE = 8, 8

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and a batch for it; ``build()`` and ``batch()`` give equal ones every time. ``name`` is for test ids."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]

    def make(self, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Batch]:
        """The model and its batch, floating point tensors in ``dtype``."""
        model = self.build().to(dtype)
        batch = {n: t.to(dtype) if t.is_floating_point() else t for n, t in self.batch().items()}
        return model, batch


@functools.cache
def captured_case(case: Case, dtype: torch.dtype = torch.float32) -> Captured:
    """The graph of a case, traced once in a test process, which is most of what a plan of a small model takes; that of
    float64 in float64 throughout."""
    with exact_float64() if dtype == torch.float64 else contextlib.nullcontext():
        model, batch = case.make(dtype)
        return capture_batch(model, (), batch)


def plan_captured(
    model: nn.Module, batch: dict[str, Any], captured: Captured, cluster: str, hints: Hints, workload: Workload
) -> Plan:
    """What `autopar.plan` finds, of a graph that is there already."""
    where = Cluster.parse(cluster)
    workload, _, _ = one_batch(model, workload, batch, where.size)
    return search(model, captured, where, workload, hints)


def compared(
    model: nn.Module, batch: dict[str, Any], plan: Plan, captured: Captured | None = None, steps: int = 1
) -> VerifyReport:
    """All ranks of ``plan`` against eager; `autopar.verify` would make it smaller."""
    whole = plan.num_micro_batches == 1 and plan.schedule is None
    special = (specialize if whole else specialize_step)(model, plan, (), batch, captured=captured)
    return compare(model, special, (), batch, steps=steps, optimizer=plan.workload["optimizer"])


def planned_and_compared(
    model: nn.Module, batch: dict[str, Any], cluster: str, hints: Hints, steps: int = 1
) -> tuple[Plan, VerifyReport]:
    """`autopar.plan`, and what `autopar.verify` says of the same cluster and hints, by one trace and one search."""
    captured = capture_batch(model, (), batch)
    plan = plan_captured(model, batch, captured, cluster, hints, Workload())
    return plan, compared(model, batch, plan, captured, steps)


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Run ``build`` with a fixed seed, leaving the global generator as it was; norms and biases made random too, since
    at 1 and 0 they hide mistakes."""

    def build_seeded() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            model = build()
            with torch.no_grad():
                for p in model.parameters():
                    if p.dim() < 2:
                        p.add_(0.1 * torch.randn_like(p))
        return model.train()

    return build_seeded


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(4321)


def uneven_labels(ids: Tensor) -> Tensor:
    """Labels that count unevenly: row 0 keeps one, row 1 all, the others lose more and more of their front."""
    labels = ids.clone()
    labels[0, :] = -100
    labels[0, 3] = ids[0, 3]
    for row in range(2, ids.shape[0]):
        labels[row, : (row * 5) % ids.shape[1]] = -100
    return labels


def causal_batch() -> Batch:
    """Token ids, a mask padded left in row 2, right in rows 1 and 5, and uneven labels (none on padding)."""
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=_generator())
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    mask[2, :3] = 0
    mask[5, 7:] = 0
    labels = uneven_labels(ids)
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def masked_batch() -> Batch:
    """As `causal_batch`, with two token types and labels on about a third of the tokens only."""
    batch = causal_batch()
    drop = torch.rand(batch["labels"].shape, generator=_generator()) < 0.6
    drop[0] = False  # its single label stays
    batch["labels"][drop] = -100
    batch["token_type_ids"] = (torch.arange(SEQUENCE) >= SEQUENCE // 2).long().expand(BATCH, SEQUENCE).contiguous()
    return batch


def plain_batch() -> Batch:
    """Token ids and uneven labels, for models without a mask."""
    batch = causal_batch()
    return {"ids": batch["input_ids"], "labels": uneven_labels(batch["input_ids"])}


def odd_batch() -> Batch:
    """Three rows of seven ids of `LARGE_VOCABULARY`: no dim divides, so that logits can only be split by vocabulary."""
    ids = torch.randint(0, LARGE_VOCABULARY, (3, 7), generator=_generator())
    return {"ids": ids, "labels": uneven_labels(ids)}


def mlp_batch() -> Batch:
    """Features [batch, 16]."""
    return {"x": torch.randn(BATCH, 16, generator=_generator(), dtype=torch.float64).float()}


def llama(heads: int = 8, kv_heads: int = 4, hidden: int = 32, ffn: int = 64, layers: int = 2) -> nn.Module:
    """Llama with grouped-query attention and tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def gpt2(implementation: str = "sdpa") -> nn.Module:
    """GPT-2 with every dropout on. With ``implementation="eager"`` the reference is transformers' written-out
    attention, in which a query that may attend nothing attends everything; under "sdpa" it gives 0."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=8,
            n_positions=32,
            resid_pdrop=0.1,
            embd_pdrop=0.2,
            attn_pdrop=0.3,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation=implementation,
        )
    )


def bert() -> nn.Module:
    """BERT for masked language modelling with every dropout on."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=8,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.2,
        )
    )


class MLP(nn.Module):
    """Two hidden layers; returns its output, so that gradients come from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.middle = nn.Linear(64, 64, bias=False)
        self.down = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16] -> [batch, 8]."""
        return self.down(torch.tanh(self.middle(F.gelu(self.up(x)))))


class _Attention(nn.Module):
    """Causal self-attention, written out or by ``F.scaled_dot_product_attention``."""

    def __init__(self, hidden: int, heads: int, fused: bool, dropout: float, key_bias: bool) -> None:
        super().__init__()
        self.heads, self.fused, self.dropout = heads, fused, dropout
        self.query, self.value = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden, bias=key_bias)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        if self.fused:
            rate = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        else:
            scores = (q @ k.transpose(-2, -1)) * (hidden // self.heads) ** -0.5
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            y = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, fused: bool, dropout: float, key_bias: bool) -> None:
        super().__init__()
        self.attention = _Attention(hidden, heads, fused, dropout, key_bias)
        self.before_attention, self.before_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.before_attention(x)))
        return x + self.drop(self.down(F.relu(self.up(self.before_mlp(x)))))


class Transformer(nn.Module):
    """A decoder as one writes it by hand: ids and labels [batch, sequence] -> loss and logits.

    ``key_bias`` is a parameter that does nothing: softmax does not see it. Its gradient is 0 in truth.
    """

    def __init__(
        self,
        fused: bool,
        dropout: float,
        hidden: int = 32,
        heads: int = 4,
        layers: int = 2,
        vocabulary: int = VOCABULARY,
        key_bias: bool = True,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(32, hidden)
        self.layers = nn.ModuleList(_Layer(hidden, heads, fused, dropout, key_bias) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


LLAMA = Case("llama", seeded(llama), causal_batch)
#: SmolLM2's proportions: 9 heads, 3 KV heads, a hidden size of 9 x 8. No degree but 3 divides its heads.
SMOLLM2 = Case("smollm2", seeded(lambda: llama(heads=9, kv_heads=3, hidden=72, ffn=192)), causal_batch)
GPT2 = Case("gpt2", seeded(gpt2), causal_batch)
GPT2_EAGER = Case("gpt2-eager", seeded(lambda: gpt2("eager")), causal_batch)
BERT = Case("bert", seeded(bert), masked_batch)
PERCEPTRON = Case("mlp", seeded(MLP), mlp_batch)
WRITTEN_OUT = Case("written-out", seeded(lambda: Transformer(fused=False, dropout=0.0)), plain_batch)
FUSED = Case("fused-dropout", seeded(lambda: Transformer(fused=True, dropout=0.2)), plain_batch)
#: One layer with a head so large that its logits are better not gathered.
LARGE_HEAD = Case(
    "large-head",
    seeded(
        lambda: Transformer(
            fused=False, dropout=0.0, hidden=16, layers=1, vocabulary=LARGE_VOCABULARY, key_bias=False
        )
    ),
    odd_batch,
)

CASES = (LLAMA, SMOLLM2, GPT2, GPT2_EAGER, BERT, PERCEPTRON, WRITTEN_OUT, FUSED)
