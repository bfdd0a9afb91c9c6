"""The operators against eager torch, against themselves in pieces, and as nodes of traced graphs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from autopar._compat import FakeTensorMode, aot_export_joint_with_descriptors
from autopar.ops.attention import attention
from autopar.ops.attention_kernels import Call, cuda_backward, cuda_forward
from autopar.ops.coordinates import starts
from autopar.ops.draws import active_draws, counter_draws
from autopar.ops.dropout import dropout
from autopar.ops.mask import keep_mask
from autopar.ops.sdpa import scaled_dot_product_attention

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SEED = torch.tensor([1234, 7])


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """autopar::attention with everything off that is not named."""
    o = {"key_mask": None, "bias": None, "seed": None, "starts": None, "scale": q.shape[-1] ** -0.5, "causal": False,
         "window": 0, "spread": False, "softcap": 0.0, "dropout": 0.0, "stream": 0, "extent": []} | options  # fmt: skip
    return attention(q, k, v, *o.values())


def qkv(heads: int = 4, kv_heads: int = 4, queries: int = 6, keys: int = 6, dim: int = 8, value_dim: int = 8,
        batch: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = function(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def assert_same(ours: list[Tensor], reference: list[Tensor], tolerance: float) -> None:
    for a, b in zip(ours, reference, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)


def padding(batch: int, keys: int, side: str) -> Tensor:
    """Row 0 sees all keys, row 1 half of them, on the left or on the right."""
    mask = torch.ones(batch, keys, dtype=torch.bool)
    mask[1, slice(0, keys // 2) if side == "left" else slice(keys // 2, None)] = False
    return mask


# --------------------------------------------------------------------------------------------- attention, against SDPA


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kv_heads", "value_dim", "keys"), [(4, 8, 6), (2, 8, 6), (1, 8, 9), (2, 4, 6), (4, 12, 5)])
def test_attention_equals_sdpa(dtype: torch.dtype, causal: bool, kv_heads: int, value_dim: int, keys: int) -> None:
    inputs = qkv(kv_heads=kv_heads, value_dim=value_dim, keys=keys, dtype=dtype)
    ours = with_gradients(lambda *x: attend(*x, causal=causal)[0], inputs)
    assert_same(ours, with_gradients(functools.partial(eager, causal=causal), inputs), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value_dim", [8, 4], ids=["kernel", "math"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_key_mask_equals_the_mask_spelled_out(dtype: torch.dtype, value_dim: int, causal: bool, side: str) -> None:
    inputs = qkv(kv_heads=2, value_dim=value_dim, dtype=dtype)
    key_mask = padding(2, 6, side)
    full = key_mask[:, None, None, :].expand(2, 1, 6, 6)
    full = full & torch.ones(6, 6, dtype=torch.bool).tril() if causal else full
    ours = with_gradients(lambda *x: attend(*x, key_mask=key_mask, causal=causal)[0], inputs)
    assert_same(ours, with_gradients(functools.partial(eager, mask=full), inputs), TOLERANCE[dtype])
    dead = ~full.any(-1).expand(2, 4, 6)  # with left padding and causality, the padded queries
    lse = attend(*inputs, key_mask=key_mask, causal=causal)[1]
    assert dead.any() == (causal and side == "left")
    assert torch.equal(lse == -math.inf, dead) and not ours[0][dead].any() and not ours[1][dead].any()


def test_long_left_padding_spans_whole_tiles_of_the_kernel() -> None:
    inputs = qkv(heads=1, kv_heads=1, queries=1100, keys=1100, dtype=torch.float32)
    key_mask = torch.arange(1100)[None] >= torch.tensor([[0], [700]])
    full = key_mask[:, None, None, :] & torch.ones(1100, 1100, dtype=torch.bool).tril()
    ours = with_gradients(lambda *x: attend(*x, key_mask=key_mask, causal=True)[0], inputs)
    assert_same(ours, with_gradients(functools.partial(eager, mask=full), inputs), 1e-5)


@pytest.mark.parametrize("value_dim", [8, 4], ids=["kernel", "math"])
def test_a_batch_row_without_keys_gives_zeros_like_torch(value_dim: int) -> None:
    inputs = qkv(value_dim=value_dim)
    key_mask = torch.tensor([[True] * 6, [False] * 6])
    ours = with_gradients(lambda *x: attend(*x, key_mask=key_mask)[0], inputs)
    assert_same(ours, with_gradients(functools.partial(eager, mask=key_mask[:, None, None, :]), inputs), 1e-10)
    assert all(not x[1].any() for x in ours)
    assert (attend(*inputs, key_mask=key_mask)[1][1] == -math.inf).all()


@pytest.mark.parametrize("value_dim", [8, 4], ids=["kernel", "math"])
@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (1, 1, 6, 6), (2, 1, 1, 6), (1, 4, 6, 6), (2, 4, 1, 6)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_bias_with_causality_and_padding(value_dim: int, shape: tuple[int, ...], kind: str) -> None:
    inputs, key_mask = qkv(kv_heads=2, value_dim=value_dim), padding(2, 6, "left")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = noise > -0.5 if kind == "bool" else noise.masked_fill(noise < -0.5, -math.inf)
    allowed = key_mask[:, None, None, :] & torch.ones(6, 6, dtype=torch.bool).tril()
    mask = allowed & bias if kind == "bool" else torch.where(allowed, bias, -math.inf)
    ours = with_gradients(lambda *x: attend(*x, key_mask=key_mask, bias=bias, causal=True)[0], inputs)
    assert_same(ours, with_gradients(functools.partial(eager, mask=mask), inputs), 1e-10)
    dead = ~(mask.any(-1) if kind == "bool" else (mask != -math.inf).any(-1)).expand(2, 4, 6)
    assert torch.equal(attend(*inputs, key_mask=key_mask, bias=bias, causal=True)[1] == -math.inf, dead)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_bias_of_another_dtype(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    inputs = qkv(dtype=dtype)
    bias = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1)).to(bias_dtype)
    reference = with_gradients(functools.partial(eager, mask=bias.double()), [x.double() for x in inputs])
    for options in ({}, {"softcap": 1e9}):
        ours = with_gradients(lambda *x, o=options: attend(*x, bias=bias, **o)[0], inputs)
        assert_same(ours, [x.to(dtype) for x in reference], 3e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 6, 100])
@pytest.mark.parametrize("value_dim", [8, 4], ids=["kernel", "math"])
def test_window_equals_the_mask_spelled_out(causal: bool, window: int, value_dim: int) -> None:
    inputs, i, j = qkv(kv_heads=2, value_dim=value_dim), torch.arange(6)[:, None], torch.arange(6)
    mask = (j > i - window) & (j <= i if causal else True)
    ours = with_gradients(lambda *x: attend(*x, causal=causal, window=window)[0], inputs)
    assert_same(ours, with_gradients(functools.partial(eager, mask=mask), inputs), 1e-10)


@pytest.mark.parametrize("value_dim", [8, 4], ids=["kernel", "math"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_window_with_padding(side: str, value_dim: int) -> None:
    inputs, i, j = qkv(kv_heads=2, value_dim=value_dim), torch.arange(6)[:, None], torch.arange(6)
    key_mask = padding(2, 6, side)
    mask = key_mask[:, None, None, :] & (j > i - 2) & (j <= i)
    options = {"key_mask": key_mask, "causal": True, "window": 2}
    ours = with_gradients(lambda *x: attend(*x, **options)[0], inputs)
    assert_same(ours, with_gradients(functools.partial(eager, mask=mask), inputs), 1e-10)
    assert torch.equal(attend(*inputs, **options)[1] == -math.inf, ~mask.any(-1).expand(2, 4, 6))


def added_mask(allowed: Tensor) -> Tensor:
    """A mask as transformers' written-out attention adds it: a large negative number, not infinity."""
    return torch.zeros((), dtype=torch.float64).where(allowed, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("side", ["left", "right", "nothing left"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_spread_attends_everything_where_nothing_is_allowed(
    causal: bool, window: int, side: str, softcap: float
) -> None:
    inputs, i, j = qkv(kv_heads=2), torch.arange(6)[:, None], torch.arange(6)
    key_mask = padding(2, 6, side) & (torch.tensor([[True], [side != "nothing left"]]))
    allowed = key_mask[:, None, None, :] & (j <= i if causal else True) & (j > i - window if window else True)

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.mT / math.sqrt(8)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        return (scores + added_mask(allowed)).softmax(-1) @ v

    options = {"key_mask": key_mask, "causal": causal, "window": window, "softcap": softcap, "spread": True}
    ours = with_gradients(lambda *x: attend(*x, **options)[0], inputs)
    assert_same(ours, with_gradients(written_out, inputs), 1e-10)
    assert attend(*inputs, **options)[1].isfinite().all()


@pytest.mark.parametrize("shape", [(2, 4, 6, 5), (1, 4, 6, 5), (1, 1, 6, 5), (2, 1, 1, 5), (1, 4, 1, 5)])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"masks": True}], ids=["plain", "softcap", "masks"])
def test_gradient_of_a_learned_bias(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    masked = "masks" in options
    options = {"causal": True, "key_mask": padding(2, 5, "left"), "spread": True} if masked else options
    allowed = padding(2, 5, "left")[:, None, None, :] & torch.ones(6, 5, dtype=torch.bool).tril()

    def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.mT / math.sqrt(8)
        scores = 1.5 * torch.tanh(scores / 1.5) if "softcap" in options else scores
        return (scores + bias + (added_mask(allowed) if masked else 0.0)).softmax(-1) @ v

    inputs = qkv(kv_heads=2, keys=5)
    inputs.append(torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_())
    ours = with_gradients(lambda q, k, v, bias: attend(q, k, v, bias=bias, **options)[0], inputs)
    assert_same(ours, with_gradients(formula, inputs), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_a_bias_in_float32(dtype: torch.dtype) -> None:
    bias = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    inputs = [*qkv(dtype=dtype), bias]
    reference = with_gradients(eager, [x.detach().double().requires_grad_() for x in inputs])
    ours = with_gradients(lambda q, k, v, b: attend(q, k, v, bias=b)[0], inputs)
    reference = [x.to(o.dtype) for x, o in zip(reference, ours, strict=True)]
    assert_same(ours, reference, 3e-2 if dtype == torch.bfloat16 else 1e-5)


def test_gradients_of_a_learned_mask_through_the_drop_in() -> None:
    mask = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    inputs = [*qkv(), mask]
    ours = with_gradients(scaled_dot_product_attention, inputs)
    assert_same(ours, with_gradients(F.scaled_dot_product_attention, inputs), 1e-10)


def test_softcap_equals_the_formula() -> None:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = 1.5 * torch.tanh(0.7 * q @ k.mT / 1.5) + bias
        return scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf).softmax(-1) @ v

    inputs, bias = qkv(kv_heads=2), torch.randn(6, 6, dtype=torch.float64)
    ours = with_gradients(lambda *x: attend(*x, softcap=1.5, scale=0.7, causal=True, bias=bias[None, None])[0], inputs)
    assert_same(ours, with_gradients(formula, inputs), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"softcap": 1e9}], ids=["kernel", "window", "math"])
def test_lse_strides_and_dtype(dtype: torch.dtype, options: dict[str, Any]) -> None:
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(kv_heads=2, dtype=dtype))
    out, lse = attend(q, k, v, causal=True, **options)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / math.sqrt(8)
    scores = scores.masked_fill((j > i) | (j <= i - options.get("window", 6)), -math.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"softcap": 1e9}], ids=["kernel", "window", "math"])
def test_any_strides_are_taken(options: dict[str, Any]) -> None:
    inputs = [x.detach().mT.contiguous().mT.requires_grad_() for x in qkv(kv_heads=2)]  # last dim not contiguous
    dense = [x.detach().contiguous().requires_grad_() for x in inputs]
    results = []
    for given in (inputs, dense):
        out = attend(*given, causal=True, **options)[0]
        results.append([out, *torch.autograd.grad(out.sum(), given)])  # and an expanded gradient comes in
    assert_same(results[0], results[1], 1e-12)


def test_empty_batch() -> None:
    inputs = qkv(batch=0)
    assert [x.shape[0] for x in with_gradients(lambda *x: attend(*x, causal=True)[0], inputs)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": 2, "softcap": 2.0, "causal": True}, {"dropout": 0.3, "seed": SEED}],
    ids=["plain", "causal", "window and softcap", "dropout"],
)
def test_gradcheck(options: dict[str, Any]) -> None:
    inputs = qkv(heads=2, kv_heads=1, queries=3, keys=3, dim=2, value_dim=2)
    if "dropout" in options:
        options = options | {"starts": torch.zeros(4, dtype=torch.int64), "extent": [2, 2, 3, 3]}
    assert torch.autograd.gradcheck(lambda *x: attend(*x, **options)[0], inputs)


def test_errors_are_clear() -> None:
    q, k, v = qkv()
    for bad, match in (
        ({"key_mask": torch.ones(2, 6)}, "key_mask"),
        ({"bias": torch.zeros(2, 3, 6, 6)}, "bias"),
        ({"dropout": 0.5}, "seed"),
        ({"window": -1}, "window"),
    ):
        with pytest.raises(ValueError, match=match):
            attend(q, k, v, **bad)
    with pytest.raises(ValueError, match="dtype"):
        attend(q, k.float(), v)
    with pytest.raises(ValueError, match="Hkv"):
        attend(q, k[:, :3], v[:, :3])


def test_autocast_casts_as_torch_does() -> None:
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        ours, reference = attend(q, k.bfloat16(), v)[0], F.scaled_dot_product_attention(q, k.bfloat16(), v)
    assert ours.dtype == reference.dtype == torch.bfloat16
    torch.testing.assert_close(ours, reference)


def test_cuda_kernels_take_what_they_are_given() -> None:
    """Shapes alone, on the meta device: no CPU can run them."""
    q, k, v = (x.detach().to("meta") for x in qkv(kv_heads=2, dtype=torch.bfloat16))
    call = Call(q, k, v, None, None, None, None, 0.3, True, 0, False, 0.0, 0.0, 0, [])
    out, lse = cuda_forward(call)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [x.shape for x in cuda_backward(call, out, out, lse)] == [q.shape, k.shape, v.shape]


# ---------------------------------------------------------------------------------------------------- the SDPA drop-in


@pytest.mark.parametrize(
    ("shape", "kv_shape", "mask"),
    [
        ((2, 4, 6, 8), (2, 4, 6, 8), None),
        ((2, 4, 6, 8), (2, 2, 6, 8), None),
        ((2, 4, 6, 8), (2, 4, 6, 8), (2, 1, 1, 6)),
        ((2, 4, 6, 8), (2, 4, 6, 8), (1, 1, 1, 6)),
        ((2, 4, 6, 8), (2, 4, 5, 8), (6, 5)),
        ((2, 4, 6, 8), (2, 4, 5, 8), (4, 6, 1)),
        ((3, 6, 8), (3, 6, 8), None),
        ((3, 6, 8), (3, 5, 8), (3, 6, 5)),
        ((3, 6, 8), (3, 5, 8), (6, 5)),
    ],
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_drop_in(shape: tuple[int, ...], kv_shape: tuple[int, ...], mask: tuple[int, ...] | None, kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(s, dtype=torch.float64) for s in (shape, kv_shape, kv_shape))
    noise = None if mask is None else torch.randn(mask, dtype=torch.float64)
    options: dict[str, Any] = {"scale": 0.3, "is_causal": mask is None}
    options |= {"attn_mask": noise > -0.8 if noise is not None and kind == "bool" else noise}
    options |= {"enable_gqa": shape != kv_shape and mask is None}
    reference = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, **options), reference, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------------------------ the mask


def keep(seed: Tensor = SEED, p: float = 0.5, stream: int = 0, shape: tuple[int, ...] = (1 << 16,)) -> Tensor:
    return keep_mask(seed, torch.zeros(len(shape), dtype=torch.int64), p, stream, shape, shape, CPU)


def test_mask_is_the_documented_function() -> None:
    ones, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & ones
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & ones
        return z ^ z >> 31

    def expected(seed: int, step: int, stream: int, index: int, p: float) -> bool:
        key = mix(seed + gamma & ones)
        for word in (step, stream):
            key = mix((key ^ word & ones) + gamma & ones)
        return mix(mix(index * gamma + key & ones) ^ key) >> 11 >= math.ceil(p * 2**53)

    assert mix(1234567 + gamma & ones) == 6457827717110365317  # first output of splitmix64.c seeded with 1234567
    for seed, step, stream, start in ((0, 0, 0, 0), (-5, 3, 17, 1 << 40), (2**63 - 1, 9, 2, (1 << 62) + 3)):
        mask = keep_mask(torch.tensor([seed, step]), torch.tensor([start]), 0.3, stream, [64], [1 << 63], CPU)
        assert mask.tolist() == [expected(seed, step, stream, start + i, 0.3) for i in range(64)]


@pytest.mark.parametrize("splits", [(2, 1, 1), (2, 3, 1), (1, 2, 5), (4, 3, 2)])
def test_shards_draw_the_mask_of_the_whole(splits: tuple[int, ...]) -> None:
    shape = (8, 6, 10)
    whole = keep(p=0.4, shape=shape)
    sizes = [n // s for n, s in zip(shape, splits, strict=True)]
    for coordinates in itertools.product(*map(range, splits)):
        # The weights of a mesh with one axis a dim, as the emitted graph computes its starts.
        weights = [sizes[a] if a == d else 0 for a in range(3) for d in range(3)]
        begin = starts(torch.tensor(coordinates), weights)
        part = keep_mask(SEED, begin, 0.4, 0, sizes, shape, CPU)
        at = tuple(slice(c * n, (c + 1) * n) for c, n in zip(coordinates, sizes, strict=True))
        assert torch.equal(part, whole[at])


def test_starts_adds_axes_that_split_one_dim() -> None:
    assert starts(torch.tensor([1, 2]), [4, 0, 100, 1, 0, 10]).tolist() == [6, 0, 120]
    assert starts(torch.tensor([1, 2]), []).tolist() == []
    for coordinates, weights in ((torch.tensor([1, 2]), [1, 2, 3]), (torch.tensor([1.0]), [1])):
        with pytest.raises(ValueError, match="coordinates"):
            starts(coordinates, weights)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate(p: float) -> None:
    n = 1 << 18
    for seed, step, stream in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**40 + 1, 12345, 99), (-1, 0, 3)):
        rate = keep(torch.tensor([seed, step]), p, stream, (n,)).double().mean().item()
        assert abs(rate - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n), (seed, step, stream)


def test_extreme_rates() -> None:
    assert keep(p=0.0).all() and not keep(p=1.0).any()
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            keep(p=p)


def assert_uncorrelated(a: Tensor, b: Tensor) -> None:
    """Bits of mean 1/2: the correlation of n independent pairs has standard deviation 1 / sqrt(n)."""
    correlation = ((a.double() * 2 - 1) * (b.double() * 2 - 1)).mean().item()
    assert abs(correlation) < 5 / math.sqrt(a.numel())


def test_seeds_steps_and_streams_are_uncorrelated() -> None:
    draws = [keep(torch.tensor([seed, step]), stream=s) for seed in (0, 1) for step in (0, 1) for s in (0, 1, 2)]
    for a, b in itertools.combinations(draws, 2):
        assert_uncorrelated(a, b)
        for shift in (1, 2, 1024):
            assert_uncorrelated(a[:-shift], b[shift:])


@pytest.mark.parametrize("distance", [1, 2, 3, 7, 64, 1024, 4096])
def test_elements_are_uncorrelated(distance: int) -> None:
    for stream in range(4):
        bits = keep(stream=stream)
        assert_uncorrelated(bits[:-distance], bits[distance:])


def test_runs_of_eight_bits_are_uniform() -> None:
    bits = keep(shape=(1 << 20,)).view(-1, 8).long()
    counts = torch.bincount((bits << torch.arange(8)).sum(1), minlength=256).double()
    expected = bits.shape[0] / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


# ------------------------------------------------------------------------------------------------------------- dropout


def drop(x: Tensor, p: float, stream: int = 0) -> Tensor:
    return dropout(x, SEED, torch.zeros(x.dim(), dtype=torch.int64), p, stream, x.shape)


def test_dropout_and_its_gradient_use_one_mask() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    mask = keep(p=0.3, stream=4, shape=(5, 7))
    out = drop(x, 0.3, stream=4)
    grad = torch.randn(5, 7, dtype=torch.float64)
    torch.testing.assert_close(out, torch.where(mask, x / 0.7, 0.0), rtol=0, atol=0)
    (dx,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(dx, torch.where(mask, grad / 0.7, 0.0), rtol=0, atol=0)
    assert torch.autograd.gradcheck(lambda y: drop(y, 0.3), x)


def test_dropout_at_its_ends() -> None:
    x = torch.tensor([1.0, -2.0, math.inf, math.nan])
    copy = drop(x, 0.0)
    assert copy.data_ptr() != x.data_ptr() and torch.equal(copy[:3], x[:3])
    assert torch.equal(drop(x, 1.0), torch.zeros(4))
    assert drop(torch.tensor(3.0), 0.0).item() == 3.0


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dropout_keeps_dtype_and_memory_format(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 5).to(dtype).transpose(0, 2)
    out = drop(x, 0.5)
    assert (out.dtype, out.stride()) == (dtype, x.stride())
    assert torch.equal(out != 0, keep(shape=(5, 4, 3)))


@pytest.mark.parametrize("splits", [(2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("p", [0.2, 1.0])
def test_attention_dropout_of_a_shard_is_a_slice(splits: tuple[int, int], p: float) -> None:
    options: dict[str, Any] = {"dropout": p, "seed": SEED, "stream": 3, "extent": [2, 4, 6, 6], "causal": True}
    inputs = qkv()
    whole = with_gradients(lambda *x: attend(*x, starts=torch.zeros(4, dtype=torch.int64), **options)[0], inputs)
    sizes = 2 // splits[0], 4 // splits[1]
    weights = torch.linspace(-1, 1, whole[0].numel(), dtype=torch.float64).view(whole[0].shape)
    for b, h in itertools.product(*map(range, splits)):
        at = slice(b * sizes[0], (b + 1) * sizes[0]), slice(h * sizes[1], (h + 1) * sizes[1])
        parts = [x.detach()[at].requires_grad_() for x in inputs]
        out, _ = attend(*parts, starts=torch.tensor([b * sizes[0], h * sizes[1], 0, 0]), **options)
        ours = [out, *torch.autograd.grad((out * weights[at]).sum(), parts)]
        assert_same(ours, [x[at] for x in whole], 1e-12)


def test_attention_dropout_drops_probabilities() -> None:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        probabilities = (q @ k.mT / math.sqrt(8)).softmax(-1)
        return torch.where(keep(p=0.4, stream=2, shape=(2, 4, 6, 6)), probabilities / 0.6, 0.0) @ v

    inputs = qkv()
    ours = with_gradients(lambda q, k, v: scaled_dot_product_attention(q, k, v, None, 0.4, seed=SEED, stream=2), inputs)
    assert_same(ours, with_gradients(formula, inputs), 1e-10)


# ----------------------------------------------------------------------------------------------------- counter_draws


def encoder_layer(p: float) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=p, batch_first=True)


def test_each_dropout_call_is_replaced_once() -> None:
    x = torch.ones(64)
    with counter_draws(SEED) as mode:
        results = [F.dropout(x, 0.5), torch.dropout(x, 0.5, True), nn.Dropout(0.5)(x)]
        assert mode.streams == 3
        unchanged = [F.dropout(x, 0.5, training=False), F.dropout(x, 0.0), nn.Dropout(0.5).eval()(x)]
        assert mode.streams == 3
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, 1.5)
    for stream, result in enumerate(results):
        assert torch.equal(result, drop(x, 0.5, stream))
    assert all(torch.equal(x, y) for y in unchanged)
    with mode:
        assert mode.streams == 0


def test_active_draws_is_the_innermost() -> None:
    assert active_draws() is None
    with counter_draws(SEED) as outer:
        with counter_draws(SEED) as inner:
            assert active_draws() is inner
        assert active_draws() is outer and (outer.next_stream(), outer.next_stream(), outer.streams) == (0, 1, 2)
    with pytest.raises(RuntimeError, match="stop"), outer:
        raise RuntimeError("stop")
    assert active_draws() is None


def test_dropout_in_place() -> None:
    for replaced in (lambda y: F.dropout(y, 0.5, inplace=True), lambda y: torch.dropout_(y, 0.5, True)):
        leaf = torch.randn(64, requires_grad=True)
        x = leaf * 1.0
        with counter_draws(SEED) as mode:
            out = replaced(x)
        assert out is x and mode.streams == 1
        assert torch.equal(x, drop(leaf, 0.5))
        (grad,) = torch.autograd.grad(x.sum(), leaf)
        assert torch.equal(grad, drop(torch.ones(64), 0.5))


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_is_reached(need_weights: bool) -> None:
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True), torch.randn(2, 5, 16)
    torch.manual_seed(1)
    with counter_draws(SEED) as mode:
        first = module(x, x, x, need_weights=need_weights)[0]
    torch.manual_seed(2)
    with counter_draws(SEED):
        second = module(x, x, x, need_weights=need_weights)[0]
    assert mode.streams == 1 and torch.equal(first, second)
    assert F.dropout.__module__ == "torch.nn.functional" and F.scaled_dot_product_attention(x, x, x).shape == x.shape


def test_encoder_layer() -> None:
    module, x = encoder_layer(0.3), torch.randn(2, 5, 16)
    outputs = []
    for seed in (SEED, SEED, torch.tensor([1234, 8])):
        with counter_draws(seed) as mode:
            outputs.append(module(x))
        assert mode.streams == 4  # attention, both residual branches, the feed-forward's inside
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    module = encoder_layer(0.0)
    with counter_draws(SEED) as mode:
        ours = module(x)
    assert mode.streams == 0
    torch.testing.assert_close(ours, module(x))


def bert(p: float, implementation: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=p, attention_probs_dropout_prob=p, attn_implementation=implementation,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).train()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_bert(implementation: str) -> None:
    ids, mask = torch.arange(16).view(2, 8), padding(2, 8, "right").long()
    model = bert(0.2, implementation)
    losses = []
    for _ in range(2):
        with counter_draws(SEED) as mode:
            losses.append(model(ids, attention_mask=mask, labels=torch.tensor([0, 1])).loss)
        assert mode.streams == 1 + 2 * 3 + 1  # embeddings, three a layer, classifier
    assert torch.equal(losses[0], losses[1])
    model = bert(0.0, implementation)
    with counter_draws(SEED) as mode:
        ours = model(ids, attention_mask=mask).logits
    assert mode.streams == 0
    torch.testing.assert_close(ours, model(ids, attention_mask=mask).logits)


def test_eager_and_sdpa_attention_draw_the_same_masks() -> None:
    ids = torch.arange(16).view(2, 8)
    logits = []
    for implementation in ("eager", "sdpa"):
        with counter_draws(SEED):
            logits.append(bert(0.2, implementation)(ids).logits)
    torch.testing.assert_close(logits[0], logits[1])


# ------------------------------------------------------------------------------------------------- as nodes of a graph


def test_opcheck() -> None:
    zeros = torch.zeros(4, dtype=torch.int64)
    opcheck(torch.ops.autopar.starts.default, (torch.tensor([1, 2]), [4, 0, 1, 0]))
    x = torch.randn(3, 4, requires_grad=True)
    opcheck(torch.ops.autopar.dropout.default, (x, SEED, zeros[:2], 0.3, 1, [3, 4]))
    opcheck(torch.ops.autopar.dropout.default, (x.mT, SEED, zeros[:2], 0.3, 1, [4, 3]))
    key_mask, bias = padding(2, 6, "left"), torch.randn(1, 4, 6, 6)
    plain: tuple[Any, ...] = (0.3, True, 0, False, 0.0, 0.0, 0, [])
    drawn = (0.3, True, 2, False, 1.5, 0.2, 0, [2, 4, 6, 6])
    for arguments in (
        (None, None, None, None, *plain),
        (key_mask, bias, None, None, *plain),
        (key_mask, bias, SEED, zeros, *drawn),
    ):
        inputs = qkv(kv_heads=2, dtype=torch.float32)
        opcheck(torch.ops.autopar.attention.default, (*inputs, *arguments))
        q, k, v = (x.detach() for x in inputs)
        out, lse = attention(q, k, v, *arguments)
        backward = (torch.ones_like(out), q, k, v, *arguments[:2], out, lse, *arguments[2:])
        opcheck(torch.ops.autopar.attention_backward.default, backward)
        if arguments[1] is not None:
            opcheck(torch.ops.autopar.attention_bias_backward.default, backward)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, q: Tensor, seed: Tensor, coordinates: Tensor) -> Tensor:
        begin = starts(coordinates, [2, 0, 0, 0])
        x = dropout(q @ self.weight, seed, begin, 0.1, 0, q.shape)
        return attend(x, q, q, causal=True)[0].sum()


def names(graph: torch.fx.GraphModule) -> list[str]:
    return [n.target.name() for n in graph.graph.nodes if getattr(n.target, "namespace", "") == "autopar"]


EXPECTED = ["starts", "dropout", "attention", "attention_backward", "dropout"]


def test_single_nodes_in_joint_graphs() -> None:
    with FakeTensorMode(), ExitStack() as stack:
        arguments = torch.randn(2, 2, 6, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        joint = aot_export_joint_with_descriptors(stack, Small(), arguments)
    assert names(joint.graph_module) == [f"autopar::{name}" for name in EXPECTED]


def test_single_nodes_in_make_fx() -> None:
    def step(weight: Tensor, q: Tensor, seed: Tensor, coordinates: Tensor) -> tuple[Tensor, ...]:
        module = Small()
        loss = torch.func.functional_call(module, {"weight": weight}, (q, seed, coordinates))
        return torch.autograd.grad(loss, (weight,))

    arguments = torch.randn(8, 8, requires_grad=True), torch.randn(2, 2, 6, 8), SEED, torch.zeros(1, dtype=torch.int64)
    for tracing in ("real", "fake", "symbolic"):
        graph = make_fx(step, tracing_mode=tracing)(*arguments)
        assert names(graph) == [f"autopar::{name}" for name in EXPECTED]
        torch.testing.assert_close(graph(*arguments), step(*arguments))


def test_counter_draws_in_a_traced_graph() -> None:
    module, x = encoder_layer(0.3), torch.randn(2, 5, 16)

    def forward(x: Tensor, seed: Tensor) -> Tensor:
        with counter_draws(seed):
            return module(x)

    graph = make_fx(forward)(x, SEED)
    assert names(graph) == ["autopar::attention"] + ["autopar::dropout"] * 3
    torch.testing.assert_close(graph(x, SEED), forward(x, SEED))


def test_flops_are_those_of_torch_s_attention() -> None:
    def count(function: Callable[..., Tensor]) -> int:
        inputs = [torch.empty_like(x, device="meta", requires_grad=True) for x in qkv(kv_heads=2, keys=5)]
        with FlopCounterMode(display=False) as counter:
            function(*inputs).sum().backward()
        return counter.get_total_flops()

    forward = 4 * 2 * 4 * 6 * 5 * 8
    assert count(lambda *x: attend(*x, causal=True)[0]) == forward + forward * 5 // 2
