"""The cost model against closed forms worked out by hand and against published measurements."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sympy
import torch

from autopar.cluster import Cluster, Group
from autopar.cost_model import communication, compute, memory
from autopar.cost_model.communication import collective_seconds, wire_bytes
from autopar.cost_model.compute import Work, optimizer_seconds, stream_seconds, work_seconds
from autopar.cost_model.hardware import (
    COLLECTIVES,
    Device,
    Link,
    LinkConstants,
    device_from_spec,
    load_device,
    preset_spec,
)
from autopar.errors import WorkloadError
from autopar.solver.costs import state_bytes

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

GIB = 2**30
INTRA, INTER = Link("wire", 100e9), Link("net", 10e9)


def ideal(intra: LinkConstants, inter: LinkConstants) -> Device:
    """A device whose links have the given constants for every collective."""
    links = {"wire": dict.fromkeys(COLLECTIVES, intra), "net": dict.fromkeys(COLLECTIVES, inter)}
    return replace(load_device("cpu"), links=links)


ALPHA_BETA = ideal(
    LinkConstants(efficiency=0.5, base=0.0, step=1e-6, fill=0.0, source="", switch_efficiency=0.0),
    LinkConstants(efficiency=0.8, base=0.0, step=1e-5, fill=0.0, source="", switch_efficiency=0.0),
)


@pytest.mark.parametrize("kind, seconds", [
    # 4 ranks, 4 GB whole, 50 GB/s achieved, 1 us a step: field_notes' ring formulas
    ("all_gather", 3 / 4 * 4e9 / 50e9 + 3e-6),
    ("reduce_scatter", 3 / 4 * 4e9 / 50e9 + 3e-6),
    ("all_reduce", 2 * (3 / 4 * 4e9 / 50e9 + 3e-6)),
    ("all_to_all", 3 / 4 * 1e9 / 50e9 + 3e-6),
    ("p2p", 4e9 / 50e9 + 1e-6),
])
def test_alpha_beta_within_a_host(kind: str, seconds: float) -> None:
    assert collective_seconds(kind, 4e9, Group(4, 1, 4, INTRA, None), ALPHA_BETA) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("kind, seconds", [
    # 2 hosts of 4: the network takes 1/2 X over 4 NICs of 8 GB/s, the host 3/4 X at 50 GB/s: X/64 against X/66.7
    ("all_gather", 4e9 / 64e9 + 3e-6 + 1e-5),
    ("all_reduce", 2 * 4e9 / 64e9 + 6e-6 + 2e-5),
    # each rank holds X/8 and sends half of it to the other host over its own NIC
    ("all_to_all", 0.5e9 / 2 / 8e9 + 3e-6 + 1e-5),
    ("p2p", 4e9 / 8e9 + 1e-5),
])
def test_alpha_beta_across_hosts(kind: str, seconds: float) -> None:
    assert collective_seconds(kind, 4e9, Group(8, 2, 4, INTRA, INTER), ALPHA_BETA) == pytest.approx(seconds, rel=1e-12)


def test_a_fast_network_leaves_the_host_as_the_bottleneck() -> None:
    group = Group(8, 2, 4, INTRA, Link("net", 1000e9))
    assert collective_seconds("all_gather", 4e9, group, ALPHA_BETA) == pytest.approx(3e9 / 50e9 + 1.3e-5, rel=1e-12)


def test_one_rank_a_host_is_a_ring_over_the_network() -> None:
    group = Group(4, 4, 1, INTRA, INTER)
    assert collective_seconds("all_gather", 4e9, group, ALPHA_BETA) == pytest.approx(3e9 / 8e9 + 3e-5, rel=1e-12)


def test_a_switch_reduces_where_it_is_faster_than_the_ring() -> None:
    constants = LinkConstants(efficiency=0.5, base=0.0, step=0.0, fill=0.0, source="", switch_efficiency=0.4)
    device = ideal(constants, constants)
    eight, two = (collective_seconds("all_reduce", 8e9, Group(n, 1, n, INTRA, None), device) for n in (8, 2))
    assert eight == pytest.approx(9e9 / 40e9)  # (8+1)/8 X at 40 GB/s, less than 2 x 7/8 X at 50
    assert two == pytest.approx(8e9 / 50e9)  # the ring: X at 50, less than 3/2 X at 40


def test_fill_and_base() -> None:
    constants = LinkConstants(efficiency=1.0, base=1e-3, step=0.0, fill=0.04, source="", switch_efficiency=0.0)
    seconds = collective_seconds("all_gather", 2e9, Group(2, 1, 2, INTRA, None), ideal(constants, constants))
    assert seconds == pytest.approx(0.01 + 2 * 0.02 + 1e-3)  # V = 10 ms, 2 sqrt(40 ms x 10 ms) = 40 ms


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_arrays_zero_bytes_and_groups_of_one(kind: str) -> None:
    cluster = Cluster.parse("h100-sxm:2x8")
    group = cluster.group(1, 16)
    sizes = np.array([[0, 2**10], [2**20, 2**30]])
    seconds = collective_seconds(kind, sizes, group, cluster.device)
    assert isinstance(seconds, np.ndarray) and seconds.shape == (2, 2)
    assert seconds[1, 1] == collective_seconds(kind, 2**30, group, cluster.device)
    assert (np.diff(seconds.ravel()) > 0).all() and seconds[0, 0] > 0
    alone = collective_seconds(kind, sizes, cluster.group(1, 1), cluster.device)
    assert isinstance(alone, np.ndarray) and alone.shape == (2, 2) and not alone.any()
    assert collective_seconds(kind, 5.0, cluster.group(1, 1), cluster.device) == 0.0


def test_unknown_collective() -> None:
    group = Group(2, 1, 2, INTRA, None)
    with pytest.raises(ValueError, match="did you mean all_gather"):
        collective_seconds("allgather", 1, group, ALPHA_BETA)
    with pytest.raises(ValueError, match="'broadcast' is no collective"):
        wire_bytes("broadcast", 1, 2)


@pytest.mark.parametrize("kind, nbytes", [
    ("all_gather", 300), ("reduce_scatter", 300), ("all_reduce", 600), ("all_to_all", 75), ("p2p", 400),
])
def test_wire_bytes(kind: str, nbytes: float) -> None:
    assert wire_bytes(kind, 400, 4) == nbytes
    assert wire_bytes(kind, 400, 1) == 0
    assert np.array_equal(np.asarray(wire_bytes(kind, np.array([400, 800]), 4)), [nbytes, 2 * nbytes])


def test_formulas_are_expressions_over_the_named_symbols() -> None:
    assert set(communication.FORMULAS) == set(COLLECTIVES)
    for formula in communication.FORMULAS.values():
        assert isinstance(formula, sympy.Expr) and formula.free_symbols <= set(communication.SYMBOLS)
    assert compute.FORMULA.free_symbols == set(compute.SYMBOLS)
    assert compute.MATMUL.free_symbols == set(compute.TILE_SYMBOLS)


@pytest.mark.parametrize("text, size, kind, nbytes, busbw, tolerance", [
    # rows of nccl_curves.csv: bus bandwidth in GB/s, which is (n-1)/n X / time, twice that for all_reduce
    ("h100-sxm:8", 8, "all_reduce", 1 * GIB, 466.33, 0.10),  # NVIDIA dgxc-benchmarking
    ("h100-sxm:8", 8, "all_reduce", 16 * 2**20, 237.21, 0.15),  # NVIDIA dgxc-benchmarking
    ("h100-sxm:8", 8, "all_reduce", 16 * GIB, 479.9, 0.05),  # NVIDIA dgxc-benchmarking
    ("h200-sxm:8", 4, "all_reduce", 8 * GIB, 363.3, 0.05),  # stas00, ring
    ("h200-sxm:8", 8, "all_gather", 16 * GIB, 361.4, 0.05),  # stas00
    ("h200-sxm:8", 8, "reduce_scatter", 16 * GIB, 362.9, 0.05),  # stas00
    ("a100-80g-sxm:8", 8, "all_reduce", 1 * GIB, 228.1, 0.10),  # Azure
    ("a100-80g-sxm:8", 2, "all_reduce", 1 * GIB, 208.11, 0.20),  # Hetu-Galvatron
    ("b200-sxm:8", 8, "all_reduce", 8 * GIB, 838.0, 0.05),  # stas00
    ("gb200:18x4", 72, "all_reduce", 8 * GIB, 834.57, 0.10),  # coreweave, one rack
    ("mi300x:8", 8, "all_reduce", 4 * GIB, 312.9, 0.10),  # stas00
    ("mi300x:8", 2, "all_reduce", 4 * GIB, 47.67, 0.10),  # stas00
    ("h100-sxm:2x8", 16, "all_reduce", 8 * GIB, 479.28, 0.15),  # AWS, EFA
    ("h100-sxm:2x8", 16, "all_reduce", 8 * GIB, 440.58, 0.20),  # coreweave, InfiniBand: the same machines, 9 % slower
    ("h100-sxm:12x8", 96, "all_reduce", 8 * GIB, 386.56, 0.20),  # coreweave: not fitted
])
def test_published_collectives(text: str, size: int, kind: str, nbytes: int, busbw: float, tolerance: float) -> None:
    cluster = Cluster.parse(text)
    volume = (size - 1) / size * nbytes * (2 if kind == "all_reduce" else 1)
    seconds = collective_seconds(kind, nbytes, cluster.group(1, size), cluster.device)
    assert isinstance(seconds, float)
    assert volume / seconds / 1e9 == pytest.approx(busbw, rel=tolerance)


def test_small_messages_cost_latency() -> None:
    cluster = Cluster.parse("h100-sxm:8")
    seconds = collective_seconds("all_reduce", 1024, cluster.group(1, 8), cluster.device)
    assert 15e-6 < seconds < 30e-6  # published: 16.4 (AWS), 16.9 (NVIDIA), 25.6 us (Azure)


def matmul(m: float, n: float, k: float, dtype: torch.dtype = torch.bfloat16, batch: float = 1) -> Work:
    """Products of two matrices, read and written once."""
    moved = batch * dtype.itemsize * (m * k + k * n + m * n)
    return Work(2 * batch * m * n * k, moved, dtype, "matmul", batch, m, n, k)


def seconds(work: Work, device: Device) -> float:
    return float(work_seconds([work], device)[0])


def rate(work: Work, device: Device) -> float:
    """TFLOP/s."""
    return work.flops / seconds(work, device) / 1e12


def published(gpu: str, dtypes: tuple[str, ...], source: str) -> list[tuple[tuple[int, int, int], float]]:
    """Shapes and TFLOP/s of single products of matmul.csv."""
    rows = Path(__file__).parents[1] / "benchmarks" / "data" / "matmul.csv"
    with rows.open(newline="", encoding="utf-8") as file:
        return [
            ((int(r["M"]), int(r["N"]), int(r["K"])), float(r["tflops"]))
            for r in csv.DictReader(file)
            if r["gpu"] == gpu and r["dtype"] in dtypes and source in r["source"] and r["M"] and r["K"]
        ]


def test_steady_products_of_an_a100() -> None:
    """Azure's superbench in fp16, 1024 to 16384 and rectangular: from 2048 on within a tenth, but for one."""
    device = load_device("a100-80g-sxm")
    rows = published("A100-80GB-SXM", ("fp16",), "Azure")
    errors = {shape: rate(matmul(*shape, torch.float16), device) / tflops - 1 for shape, tflops in rows}
    assert len(errors) == 8
    large = sorted(abs(e) for shape, e in errors.items() if min(shape[0], shape[2]) > 1024 or shape[1] == 192)
    assert large[-2] < 0.10 and large[-1] < 0.30, errors


def test_shapes_of_fp8_on_hopper() -> None:
    """Tiles, waves and ramp carry the shape: at the level of the largest square, the others follow within a sixth,
    although they reach from 0.14 to 0.70 of the peak; 802816 x 192 x 768 within a fifth on the H100, and not on the
    H200, whose faster memory does not help it."""
    for name, gpu in (("h100-sxm", "H100-80GB-SXM"), ("h200-sxm", "H200-SXM")):
        rows = dict(published(gpu, ("fp8",), "Azure"))
        device = load_device(name)
        tall = rows.pop((802816, 192, 768))
        largest = (32768, 32768, 32768)
        level = rows[largest] / rate(matmul(*largest, torch.float8_e4m3fn), device)
        for shape in rows:
            found = rate(matmul(*shape, torch.float8_e4m3fn), device) * (level if shape[0] > 2048 else 1)
            assert found == pytest.approx(rows[shape], rel=0.17), (name, shape)
        if name == "h100-sxm":
            assert level * rate(matmul(802816, 192, 768, torch.float8_e4m3fn), device) == pytest.approx(tall, rel=0.2)


def test_bf16_of_an_h100() -> None:
    """A product that runs for long stays below the best of a short run, 794.5 TFLOP/s (matmul.csv), which comes out
    without the power limit. cuBLAS is reported at 716 for 8192 (P. Shankhdhar, "Outperforming cuBLAS on H100")."""
    device = load_device("h100-sxm")
    short = rate(matmul(2048, 2048, 13312), replace(device, sustained=1.0))
    assert short == pytest.approx(794.5, rel=0.01)
    assert rate(matmul(8192, 8192, 8192), device) == pytest.approx(716, rel=0.04)


SIMPLE = replace(
    load_device("a100-80g-sxm"), peak_flops={"fp32": 1e12, "bf16": 100e12}, matmul_efficiency=0.8, sustained=0.5,
    matmul_ramp=3e-6, core_count=10, matmul_tiles=((100, 100), (50, 50)), tile_loss=0.0, tile_overhead_k=0.0,
    kernel_overhead=2e-6, launch_overhead=8e-6, memory_bandwidth=4e12, stream_efficiency=0.5,
)  # fmt: skip
CORE = 100e12 * 0.8 * 0.5 / 10  # FLOP/s of one core
BIG = 2 * 100 * 100 * 1000 / CORE  # 5 us: a tile of 100 x 100 on it, with a contraction of 1000


@pytest.mark.parametrize("rows, waves", [
    # 10 tiles on 10 cores; 11 make a second wave, in which small tiles (of a quarter) do better: 44 / 10 -> 5 quarters
    (1000, 1.0), (1100, 5 / 4), (2000, 2.0),
    # a row too many is a row of tiles more: 11; of small ones 21 x 2 = 42 / 10 -> 5 quarters
    (1001, 5 / 4),
])
def test_tiles_and_waves(rows: int, waves: float) -> None:
    assert seconds(matmul(rows, 100, 1000), SIMPLE) == pytest.approx(waves * BIG + 5e-6, rel=1e-6)


def test_a_batch_fills_waves_together() -> None:
    assert seconds(matmul(100, 100, 1000, batch=20), SIMPLE) == pytest.approx(2 * BIG + 5e-6, rel=1e-6)


def test_a_long_contraction_is_cut_where_that_fills_the_device() -> None:
    """One tile of 100 x 100 would leave 9 cores idle; four small ones in two pieces each use 8, and the sums of both
    pieces are written and read in fp32."""
    summed = 8 * 2 * 100 * 100 / 2e12
    assert seconds(matmul(100, 100, 1e6), SIMPLE) == pytest.approx(1000 * BIG / 4 / 2 + summed + 5e-6, rel=1e-6)


def test_tiles_lose_to_their_operands_and_to_their_ends() -> None:
    """tile_loss 100: a tile of 50 x 50 takes (1 + 4) / (1 + 2) times as long an element as one of 100 x 100, at whose
    rate the level is stated; tile_overhead_k 1000 doubles a contraction of 1000."""
    device = replace(SIMPLE, tile_overhead_k=1000.0)
    assert seconds(matmul(1000, 100, 1000), device) == pytest.approx(2 * BIG + 5e-6, rel=1e-6)
    # 11 big tiles are 2 waves; 44 small ones are 5 waves of a quarter, each 5 / 3 as long; sums are slow to write here
    device = replace(SIMPLE, tile_loss=100.0, memory_bandwidth=0.8e12)
    assert seconds(matmul(1100, 100, 1000), device) == pytest.approx(2 * BIG + 5e-6, rel=1e-6)


def test_bytes_bound_and_the_launch_bounds() -> None:
    other = Work(0.0, 1e9, torch.bfloat16)
    assert seconds(other, SIMPLE) == pytest.approx(1e9 / 2e12 + 2e-6)
    # a short kernel waits for the host: 8 us, not 2 + 8
    assert seconds(Work(0.0, 1000.0, torch.bfloat16), SIMPLE) == pytest.approx(8e-6)
    assert seconds(Work(0.0, 1000.0, torch.bfloat16, kernels=3, times=2), SIMPLE) == pytest.approx(2 * 3 * 8e-6)
    # what is computed inside another kernel launches nothing, and a view takes no time
    assert seconds(Work(0.0, 1e6, torch.bfloat16, kernels=0), SIMPLE) == pytest.approx(0.5e-6)
    assert seconds(Work(0.0, 0.0, torch.bfloat16, kernels=0), SIMPLE) == 0.0
    assert stream_seconds(1e9, SIMPLE, kernels=2) == pytest.approx(1e9 / 2e12 + 4e-6)
    # without a kind FLOPs run at the level
    assert seconds(Work(40e12, 0.0, torch.bfloat16), SIMPLE) == pytest.approx(1.0, rel=1e-4)
    assert seconds(Work(0.4e12, 0.0, torch.int64), SIMPLE) == pytest.approx(1.0, rel=1e-4)  # fp32 stands in


def test_work_is_priced_together_as_one_by_one() -> None:
    device = load_device("h100-sxm")
    work = [matmul(4096, 4096, 4096), Work(0.0, 1e8, torch.float32), attention(4096, 128, True),
            matmul(64, 4096, 512, torch.float32, batch=3), Work(0.0, 0.0, torch.bool, kernels=0, times=4)]
    together = work_seconds(work, device)
    assert together.shape == (5,)
    assert list(together) == [seconds(w, device) for w in work]
    assert len(work_seconds([], device)) == 0


def test_float32_is_slower_than_bfloat16_by_the_ratio_of_the_peaks() -> None:
    device = load_device("h100-sxm")
    large = [seconds(matmul(16384, 16384, 16384, dtype), device) for dtype in (torch.float32, torch.bfloat16)]
    assert large[0] / large[1] == pytest.approx(989 / 67, rel=1e-3)


def attention(length: int, head_dim: int, causal: bool, backward: bool = False) -> Work:
    """Attention of FlashAttention's benchmarks: 16k tokens, hidden 2048, bf16; causal FLOPs counted as half."""
    heads = 16384 // length * (2048 // head_dim)
    flops = 4 * heads * length**2 * head_dim * (0.5 if causal else 1) * (2.5 if backward else 1)
    moved = 2 * heads * length * head_dim * (8 if backward else 4)
    return Work(flops, moved, torch.bfloat16, "attention", heads, length, length, head_dim, causal, backward)


@pytest.mark.parametrize("head_dim, causal, backward, lengths", [
    # FlashAttention-2's bars of figures 5 and 6 of arXiv:2407.08608, H100 SXM5, TFLOP/s
    (128, False, False, {512: 309, 1024: 350, 2048: 362, 4096: 368, 8192: 370, 16384: 370}),
    (128, True, False, {512: 191, 1024: 260, 2048: 298, 4096: 319, 8192: 333, 16384: 335}),
    (128, False, True, {512: 214, 1024: 260, 2048: 291, 4096: 310, 8192: 318, 16384: 322}),
    (64, False, False, {512: 282, 1024: 306, 2048: 318, 4096: 321, 8192: 322, 16384: 324}),
    (64, False, True, {512: 198, 1024: 238, 2048: 264, 4096: 279, 8192: 287, 16384: 291}),
    (256, True, False, {4096: 293, 8192: 297, 16384: 298}),  # at 512 we are a sixth below 208
])
def test_published_attention(head_dim: int, causal: bool, backward: bool, lengths: dict[int, float]) -> None:
    device = load_device("h100-sxm")
    for length, tflops in lengths.items():
        assert rate(attention(length, head_dim, causal, backward), device) == pytest.approx(tflops, rel=0.08), length


def test_attention_kernels_of_hopper() -> None:
    """The other kernels' bars at 16k, head dim 128: FlashAttention-3 648, causal 616, backward 561; cuDNN 595, 539,
    516."""
    for kernel, full, causal, backward in (("hopper_flash3", 648, 616, 561), ("hopper_cudnn", 595, 539, 516)):
        spec = {**preset_spec("h100-sxm"), "attention_kernel": kernel}
        device = device_from_spec(spec)
        assert rate(attention(16384, 128, False), device) == pytest.approx(full, rel=0.04)
        assert rate(attention(16384, 128, True), device) == pytest.approx(causal, rel=0.04)
        assert rate(attention(16384, 128, False, True), device) == pytest.approx(backward, rel=0.04)


def test_attention_of_an_a100() -> None:
    """FlashAttention-2 (arXiv:2307.08691): up to 230 TFLOP/s forward and 196 backward; Azure measured 179.5."""
    device = load_device("a100-80g-sxm")
    assert rate(attention(16384, 128, False), device) == pytest.approx(225, rel=0.03)
    assert rate(attention(16384, 128, False, True), device) == pytest.approx(194, rel=0.03)
    assert 160 < rate(attention(2048, 128, True), device) < 205


def test_head_dims_between_are_interpolated() -> None:
    kernel = load_device("h100-sxm").attention
    levels = [kernel.efficiency(d, 1e9, False, False) for d in (32, 64, 96, 128, 512)]
    assert levels[0] == levels[1] < levels[2] < levels[3]
    assert levels[2] == pytest.approx((levels[1] + levels[3]) / 2)
    assert levels[4] == pytest.approx(kernel.forward[-1])


def test_optimizer_is_bound_by_its_bytes() -> None:
    """AdamW on 1e9 bf16 parameters: fused 2 p + g + 2 (m + v) = 14e9 bytes; torch's passes 4 p + 2 g + 7 (m + v) =
    40e9."""
    device, (p, g, state) = replace(SIMPLE, launch_overhead=0.0), (2e9, 2e9, 4e9)
    assert optimizer_seconds("adamw", p, g, state, device, fused=True) == pytest.approx(14e9 / 2e12, rel=1e-3)
    assert optimizer_seconds("adamw", p, g, state, device) == pytest.approx(40e9 / 2e12, rel=1e-3)
    assert optimizer_seconds("sgd", p, g, 0.0, device) == pytest.approx(6e9 / 2e12, rel=1e-3)
    assert optimizer_seconds("none", p, 0.0, 0.0, device) == 0.0


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    """Bytes of state that a real optimizer keeps for its parameter after one step, without the scalar step."""
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = (value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, make", [
    ("adamw", lambda p: torch.optim.AdamW(p)), ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
    ("sgd_momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ("adafactor", lambda p: torch.optim.Adafactor(p)),
])
def test_optimizer_state_is_that_of_torch(name: str, make: Make, dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.ones(16, 16, dtype=dtype))
    found = state_bytes(256, dtype, name)
    assert found["optimizer"] == state_of(make([parameter]), parameter)
    assert found["parameters"] == found["gradients"] == 256 * dtype.itemsize


def test_state_of_an_eight_billion_parameter_model() -> None:
    # bf16 parameters, gradients and two moments: 8 bytes a parameter; fp32: 16
    assert sum(state_bytes(8_000_000_000, torch.bfloat16, "adamw").values()) == 64_000_000_000
    assert sum(state_bytes(8_000_000_000, torch.float32, "adamw").values()) == 128_000_000_000
    assert state_bytes(1000, torch.bfloat16, "none") == {"parameters": 2000, "gradients": 0, "optimizer": 0}


def test_memory_formulas_and_unknown_optimizer() -> None:
    elements, width = memory.SYMBOLS
    assert memory.state_formulas("adamw")["optimizer"] == 2 * elements * width
    with pytest.raises(WorkloadError, match="did you mean adamw"):
        state_bytes(1, torch.float32, "adam")
