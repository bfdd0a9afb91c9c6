"""``autopar::delta_rule`` against the recurrence, against transformers, and as a node of a traced model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Batch, causal_batch
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode
from zoo_wide import WIDER

import autopar
from autopar import Hints
from autopar.capture.hf_scan import gated_delta_rule
from autopar.ops.delta import delta_rule
from autopar.runtime.reference import exact_float64
from autopar.specialize import capture_batch

#: Batch, length, groups, heads, channels of keys, channels of values, chunk.
SHAPES = [(2, 7, 2, 4, 3, 5, 4), (1, 16, 1, 3, 4, 2, 4), (2, 5, 2, 2, 3, 3, 64), (1, 9, 3, 3, 4, 4, 1)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, g and beta, leaves that require a gradient; keys of length 1."""
    batch, length, groups, heads, state, channels, _ = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    found = [
        draw(batch, length, groups, state),
        F.normalize(draw(batch, length, groups, state), dim=-1),
        draw(batch, length, heads, channels),
        -draw(batch, length, heads).abs(),
        draw(batch, length, heads).sigmoid(),
    ]
    return [t.to(dtype).requires_grad_() for t in found]


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    out = function(*tensors)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The definition, step by step."""
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    state, out = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[3], dtype=v.dtype), []
    for t in range(v.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        found = (state * k[:, t, :, :, None]).sum(2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - found))[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(out, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_recurrence(shape: tuple[int, ...]) -> None:
    given = inputs(shape)
    found = with_gradients(lambda *t: delta_rule(*t, shape[-1]), given)
    for ours, reference in zip(found, with_gradients(recurrence, given), strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("unit", [True, False])
def test_equals_transformers(shape: tuple[int, ...], unit: bool) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as original

    def apply(function: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *t: function(*t, chunk_size=shape[-1], use_qk_l2norm_in_kernel=unit)[0]

    with exact_float64():
        ours = with_gradients(apply(lambda *t, **o: gated_delta_rule(original, *t, **o)), inputs(shape))
        reference = with_gradients(apply(original), inputs(shape))
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_float32_of_a_long_sequence_loses_nothing() -> None:
    """At most 1.5 times as far from float64 as autograd through transformers' own code, for the result and every
    gradient."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as original

    shape = (1, 512, 2, 2, 8, 8, 64)
    scale = shape[4] ** -0.5  # of the queries, in transformers' function
    truth = with_gradients(lambda q, *t: delta_rule(q * scale, *t, 64), inputs(shape))
    ours = with_gradients(lambda q, *t: delta_rule(q * scale, *t, 64), inputs(shape, torch.float32))
    theirs = with_gradients(lambda *t: original(*t, chunk_size=64)[0], inputs(shape, torch.float32))
    for a, b, exact in zip(ours, theirs, truth, strict=True):
        assert (a.double() - exact).norm() <= 1.5 * (b.double() - exact).norm() + 1e-7 * exact.norm()


def test_an_empty_batch_and_wrong_arguments() -> None:
    found = with_gradients(lambda *t: delta_rule(*t, 4), inputs((0, 4, 2, 4, 3, 5, 4)))
    assert [t.shape[0] for t in found] == [0] * 6
    q, k, v, g, beta = inputs(SHAPES[0])
    for *bad, chunk in (
        (q, k, v, g, beta, 0), (q[:, :4], k, v, g, beta, 4), (q, k, v, g[:, :, :1], beta, 4),
        (q.float(), k, v, g, beta, 4), (q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3], 4),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"delta_rule expects|chunk"):
            delta_rule(*bad, chunk)


def test_opcheck_and_flops() -> None:
    """FLOPs of 8 positions in chunks of 4, 2 samples, 2 groups, 4 heads, 3 channels of keys and 5 of values: scores and
    keys by group; by head u out of scores, half as much for the triangular solve, and three products with the state."""
    given = inputs((2, 8, 2, 4, 3, 5, 4), torch.float32)
    opcheck(torch.ops.autopar.delta_rule.default, (*given, 4))
    plain = [t.detach() for t in given]
    opcheck(torch.ops.autopar.delta_rule_backward.default, (torch.ones_like(plain[2]), *plain, 4))
    with FlopCounterMode(display=False) as counter:
        delta_rule(*given, 4)
    by_group, by_head = 2 * 2 * 4 * 3, 4 * (4 * 5 * 1.5 + 3 * 3 * 5)
    assert counter.get_total_flops() == 2 * 2 * 8 * (by_group + by_head)


def long_batch() -> Batch:
    """`causal_batch` twenty times as long: several chunks."""
    return {name: t.repeat(1, 20) for name, t in causal_batch().items()}


def test_qwen3_next_is_as_long_as_its_layers() -> None:
    """One operator a direction, however long the sequence, and nothing stays replaced."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    original = modeling_qwen3_next.torch_chunk_gated_delta_rule
    model = next(a for a in WIDER if a.name == "qwen3-next").make()[0]
    counts = []
    for batch in (causal_batch(), long_batch()):
        targets = [n.target for n in capture_batch(model, (), batch).graph.nodes]
        counts.append(len(targets))
        ours = torch.ops.autopar
        assert [targets.count(t) for t in (ours.delta_rule.default, ours.delta_rule_backward.default)] == [1, 1]
    assert counts[0] == counts[1]
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule is original


@pytest.mark.parametrize("hints", [Hints(pp=1, dp=1, tp=2), Hints(pp=1, dp=1, tp=1, cp=2)], ids=["tp", "cp"])
def test_several_chunks_of_qwen3_5(hints: Hints) -> None:
    """The delta rule by heads, under cp too; there attention may be a ring, where the rank with most does 3/4."""
    model = next(a for a in WIDER if a.name == "qwen3.5").make(torch.float64)[0]
    with exact_float64():
        report = autopar.verify(model, "cpu:1x2", hints=hints, example_inputs=long_batch())
    assert report.ok and report.max_error < 1e-10 and report.flops_share < 0.55, report
