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
from autopar.cost_model.compute import operator_seconds
from autopar.cost_model.hardware import COLLECTIVES, Device, Link, LinkConstants, load_device
from autopar.cost_model.memory import parameter_state_bytes
from autopar.errors import WorkloadError

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


def test_large_squares_reach_the_published_efficiency() -> None:
    rows = Path(__file__).parents[1] / "benchmarks" / "data" / "matmul.csv"
    device, checked = load_device("a100-80g-sxm"), 0
    with rows.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["gpu"] == "A100-80GB-SXM" and "Azure" in row["source"] and row["M"] == row["N"] == row["K"] != "":
                n = int(row["M"])
                seconds = operator_seconds(2 * n**3, 6 * n**2, torch.float16, device)
                assert 2 * n**3 / seconds / 1e12 == pytest.approx(float(row["tflops"]), rel=0.25), row
                checked += 1
    assert checked == 5


def test_roofline() -> None:
    device = load_device("h100-sxm")
    launch = 3e-6
    # bytes bound: 1 GB read and written at the 2.97 TB/s that STREAM reaches
    assert operator_seconds(0, 1e9, torch.bfloat16, device) == pytest.approx(1e9 / 2.97e12 + launch)
    # compute bound: 1e15 FLOPs at 794.5 TFLOP/s, the best published matmul
    assert operator_seconds(1e15, 1e9, torch.bfloat16, device) == pytest.approx(1e15 / 794.5e12, rel=1e-3)
    assert operator_seconds(0, 0, torch.int64, device) == pytest.approx(launch)
    # half the efficiency where the FLOPs take as long as the ramp of 3.6 us
    half = 3.6e-6 * 989e12 * 0.8033
    assert operator_seconds(half, 0, torch.bfloat16, device) - launch == pytest.approx(2 * 3.6e-6)


def test_roofline_of_arrays() -> None:
    device = load_device("a100-80g-sxm")
    flops, moved = np.array([0.0, 1e12, 1e15]), np.array([[1e6], [1e12]])
    seconds = operator_seconds(flops, moved, torch.bfloat16, device)
    assert isinstance(seconds, np.ndarray) and seconds.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            assert seconds[i, j] == operator_seconds(float(flops[j]), float(moved[i, 0]), torch.bfloat16, device)


def test_float32_is_slower_than_bfloat16_by_the_ratio_of_the_peaks() -> None:
    device = load_device("h100-sxm")
    ratio = operator_seconds(1e16, 0, torch.float32, device) / operator_seconds(1e16, 0, torch.bfloat16, device)
    assert ratio == pytest.approx(989 / 67, rel=1e-3)


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
    found = parameter_state_bytes(256, dtype, name)
    assert found["optimizer"] == state_of(make([parameter]), parameter)
    assert found["parameters"] == found["gradients"] == 256 * dtype.itemsize


def test_state_of_an_eight_billion_parameter_model() -> None:
    # bf16 parameters, gradients and two moments: 8 bytes a parameter; fp32: 16
    assert sum(parameter_state_bytes(8_000_000_000, torch.bfloat16, "adamw").values()) == 64_000_000_000
    assert sum(parameter_state_bytes(8_000_000_000, torch.float32, "adamw").values()) == 128_000_000_000
    assert parameter_state_bytes(1000, torch.bfloat16, "none") == {"parameters": 2000, "gradients": 0, "optimizer": 0}


def test_memory_formulas_and_unknown_optimizer() -> None:
    elements, width = memory.SYMBOLS
    assert memory.state_formulas("adamw")["optimizer"] == 2 * elements * width
    with pytest.raises(WorkloadError, match="did you mean adamw"):
        parameter_state_bytes(1, torch.float32, "adam")
