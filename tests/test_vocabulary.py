"""The loss of long sequences: never all scores of a vocabulary at once, split by batch, sequence or words."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from dist.small_models import tokens
from test_axes import LENGTH, SAMPLES, uncached_llama

import autopar
from autopar import Hints, Workload
from autopar.capture import hf_loss
from autopar.ops import vocabulary
from autopar.ops.vocabulary import token_scores
from autopar.runtime.reference import exact_float64
from autopar.specialize import capture_batch

OPERATORS = (torch.ops.autopar.token_scores.default, torch.ops.autopar.token_scores_backward.default)


def whole_scores(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from all scores."""
    scores = (x @ weight.t()).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    here = labels >= 0
    return scores.logsumexp(-1), torch.where(here, scores.gather(2, labels.clamp(min=0)[..., None])[..., 0], 0.0)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_chunks_are_the_whole(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Tokens in chunks that divide their number or do not; results and gradients, of labels that count and others."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    labels = torch.randint(-1, 7, (2, 5))
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", chunk * 7 * 8)
    found = []
    for compute in (lambda a, b: token_scores(a, b, labels, None), lambda a, b: whole_scores(a, b, labels)):
        inputs = [t.clone().requires_grad_() for t in (x, weight)]
        lse, score = compute(*inputs)
        (lse * torch.arange(10.0).view(2, 5) - 3 * score).sum().backward()
        found.append([lse, score, *(t.grad for t in inputs)])
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


def test_half_precision_is_as_exact_as_whole_scores() -> None:
    """In bf16 scores are rounded as a head rounds them; what chunks add up, the weight's gradient, is in float32."""
    torch.manual_seed(0)
    x, weight, labels = torch.randn(1, 64, 32), torch.randn(128, 32) / 6, torch.randint(0, 128, (1, 64))
    truth, errors = None, []
    for dtype, whole in ((torch.float64, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        a, b = inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        lse, score = whole_scores(a, b, labels) if whole else token_scores(a, b, labels, None)
        (lse - score).mean().backward()
        found = torch.cat([t.grad.double().flatten() for t in inputs])
        truth = found if truth is None else truth
        errors.append(float((found - truth).norm() / truth.norm()))
    assert 0 < errors[1] < 0.02 and errors[2] <= 1.5 * errors[1]


CASES: dict[str, dict[str, Any]] = {
    "cp x tp": {"cp": 2, "tp": 2, "dp": 1},
    "tp": {"tp": 4, "dp": 1},
    "dp x cp, micro-batches": {"dp": 2, "cp": 2, "tp": 1, "zero": 3, "micro_batch_size": 1},
    "pp x tp": {"pp": 2, "tp": 2, "dp": 1, "micro_batch_size": 2},
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "cp x tp")) for c in CASES])
def test_a_model_without_its_logits(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """As if logits were large: loss and gradients are eager's, some tokens do not count, and the work is split."""
    monkeypatch.setattr(hf_loss, "WHOLE_LOGITS_BYTES", 1)
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", 5 * 64 * 8)
    batch = tokens(SAMPLES, LENGTH)
    batch["labels"][:3, 2:5] = -100
    with exact_float64():
        plan, report = models.planned_and_compared(
            uncached_llama().double(), batch, "h100-sxm:1x4", Hints(**CASES[case]), 1)  # fmt: skip
    assert report.ok and report.bound == 1e-10, str(report)
    assert sum("token_scores" in key for key in plan.operators) == 2
    if "pp" not in CASES[case]:
        assert report.flops_share <= 1.1 / 4, str(report)


def test_small_logits_are_made() -> None:
    """Other losses and small logits stay as they are."""
    graph = capture_batch(uncached_llama(), (), tokens(SAMPLES, LENGTH)).graph
    assert not any(node.target in OPERATORS for node in graph.nodes)


@pytest.mark.slow
def test_a_million_tokens_on_eight_gpus() -> None:
    """Llama-3-8B at 1,048,576 tokens on a host of H100. The logits of a rank's eighth of the sequence would be 67 GB in
    float32; nothing of that size is ever there, and the step fits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    length = 2**20
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=length, use_cache=False, tie_word_embeddings=False)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    workload = Workload(global_batch=1, seq_len=length, param_dtype="bfloat16")
    plan = autopar.plan(model, "h100-sxm:1x8", workload=workload)
    assert plan.degrees["cp"] * plan.degrees["tp"] == 8
    assert plan.peak_memory < 80 * 2**30 and max(k["transients"] for k in plan.peaks) < length // 8 * 128256 * 4
