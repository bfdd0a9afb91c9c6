"""``autopar::scan`` against the recurrence, against transformers, and as a node of a traced model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import causal_batch
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode
from zoo import GATED

from autopar.capture.hf_scan import chunk_scan, whole_scans
from autopar.ops.scan import scan
from autopar.runtime.reference import exact_float64
from autopar.specialize import capture_batch

#: Batch, length, heads, channels, groups, channels of the state, chunk.
SHAPES = [(2, 11, 8, 3, 2, 5, 4), (2, 8, 4, 3, 1, 5, 4), (1, 3, 4, 2, 4, 2, 8), (2, 6, 4, 3, 4, 5, 1)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, dt, a, b and c, leaves that require a gradient."""
    batch, length, heads, channels, groups, state, _ = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    found = [
        draw(batch, length, heads, channels),
        draw(batch, length, heads).abs(),
        -draw(heads).abs(),
        draw(batch, length, groups, state),
        draw(batch, length, groups, state),
    ]
    return [t.to(dtype).requires_grad_() for t in found]


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    out = function(*tensors)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


def recurrence(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The definition, step by step."""
    heads = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(heads, 2), c.repeat_interleave(heads, 2)
    state, out = torch.zeros(*x.shape[:1], *x.shape[2:], b.shape[3], dtype=x.dtype), []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * a).exp()[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        out.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(out, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_recurrence(shape: tuple[int, ...]) -> None:
    given = inputs(shape)
    found = with_gradients(lambda *t: scan(*t, shape[-1]), given)
    for ours, reference in zip(found, with_gradients(recurrence, given), strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.2, 1.0)])
def test_equals_transformers(shape: tuple[int, ...], limit: tuple[float, float]) -> None:
    from transformers.models.mamba2 import modeling_mamba2

    x, dt, *rest = inputs(shape)
    d, bias = (torch.linspace(-1, 1, shape[2], dtype=torch.float64).requires_grad_() for _ in range(2))

    def apply(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        options = {"chunk_size": shape[-1], "dt_softplus": True, "dt_limit": limit}
        return lambda x, dt, a, b, c, d, bias: function(x, dt, a, b, c, D=d, dt_bias=bias, **options)

    original = modeling_mamba2.mamba2_chunk_scan
    with exact_float64():
        ours = with_gradients(apply(lambda *t, **o: chunk_scan(original, *t, **o)), [x, dt, *rest, d, bias])
        reference = with_gradients(apply(original), [x, dt, *rest, d, bias])
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_float32_gradients_of_a_long_sequence_lose_nothing() -> None:
    """At most 1.5 times as far from float64 as autograd through transformers' own code, for every gradient."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    shape = (1, 512, 2, 4, 1, 4, 64)
    truth = with_gradients(lambda *t: scan(*t, 64), inputs(shape))
    wide = inputs(shape)
    ours, theirs = (
        with_gradients(lambda *t, f=f: f(*t, 64), [t.detach().float().requires_grad_() for t in wide])
        for f in (scan, mamba2_chunk_scan)
    )
    for a, b, exact in zip(ours, theirs, truth, strict=True):
        assert (a.double() - exact).norm() <= 1.5 * (b.double() - exact).norm() + 1e-7 * exact.norm()


def test_the_chunk_changes_only_the_rounding() -> None:
    given = inputs(SHAPES[0])
    results = [with_gradients(lambda *t, chunk=chunk: scan(*t, chunk), given) for chunk in (1, 2, 11, 100)]
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_an_empty_batch_and_wrong_arguments() -> None:
    x, dt, a, b, c = inputs((0, 4, 4, 3, 2, 5, 4))
    assert [t.shape[0] for t in with_gradients(lambda *t: scan(*t, 4), [x, dt, a, b, c])] == [0, 0, 0, 4, 0, 0]
    x, dt, a, b, c = inputs(SHAPES[0])
    for *bad, chunk in (
        (x, dt, a, b, c, 0), (x, dt[:, :4], a, b, c, 4), (x, dt, a, b[:, :, :1], c, 4), (x.float(), dt, a, b, c, 4)
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"scan expects|chunk"):
            scan(*bad, chunk)


def test_opcheck_and_flops() -> None:
    given = inputs((2, 8, 4, 3, 2, 5, 4), torch.float32)
    opcheck(torch.ops.autopar.scan.default, (*given, 4))
    opcheck(torch.ops.autopar.scan_backward.default, (torch.ones_like(given[0]), *(t.detach() for t in given), 4))
    with FlopCounterMode(display=False) as counter:
        scan(*given, 4)
    pairs, states = 4 * (2 * 5 + 4 * 3), 2 * 4 * 3 * 5
    assert counter.get_total_flops() == 2 * 2 * 8 * (pairs + states)


def _bamba() -> Any:
    config = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_n_groups": 2}
    return transformers.BambaForCausalLM(transformers.BambaConfig(**GATED, **config, attn_layer_indices=[1]))


def test_scans_of_other_models_are_whole_and_nothing_stays_replaced() -> None:
    """Bamba has Mamba-2's layers beside attention, in a modeling file of its own."""
    from transformers.models.bamba import modeling_bamba

    original, model = modeling_bamba.mamba2_chunk_scan, _bamba()
    targets = [n.target for n in capture_batch(model, (), causal_batch()).module.graph.nodes]
    ours = torch.ops.autopar
    assert [targets.count(t) for t in (ours.scan.default, ours.scan_backward.default)] == [1, 1]
    assert targets.count(ours.attention.default) == 1
    assert modeling_bamba.mamba2_chunk_scan is original
    with pytest.raises(RuntimeError, match="stop"), whole_scans():
        assert modeling_bamba.mamba2_chunk_scan is not original
        raise RuntimeError("stop")
    assert modeling_bamba.mamba2_chunk_scan is original
