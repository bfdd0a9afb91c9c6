"""Measures the device and the links of this run, and writes what it finds into the table of a device.

Compute: matrix products of several shapes, a copy larger than the caches, short kernels, attention. Links: every
collective of `COLLECTIVES` on 4 KiB to 16 MiB (CPUs) or 256 MiB (GPUs), among the processes of a host and between
hosts, as far as there is a process group; plain alpha-beta, without a pipeline's fill. Every rank measures at the same
time, as it will when it trains, and takes what rank 0 has found.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.cost_model.compute import Work, work_seconds
from autopar.cost_model.fit import Constants, Sample, at_level, fit, log_errors, loss, minimise
from autopar.cost_model.hardware import COLLECTIVES, Device, device_from_spec

SIZES = {"cpu": [4096 * 4**k for k in range(7)], "cuda": [4096 * 4**k for k in range(9)]}
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
_SQUARES = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
#: Rectangles (m, n, k) that a transformer has: few tokens, wide and narrow layers.
_OBLONG = {"cpu": ((128, 1024, 256), (1024, 256, 1024)), "cuda": ((4096, 14336, 4096), (4096, 4096, 14336))}
_ROUNDS = 5
#: Bytes up to which a collective is repeated within a round, so that the skew of the barrier spreads over the calls.
_SHORT = 2**18


def calibrated(spec: Mapping[str, Any], hosts: int, per_host: int, seconds: float) -> dict[str, Any]:
    """The table ``spec`` of a device with what this process measures in about ``seconds`` seconds of compute, and with
    the links that the process group spans, if there is one. All of its ranks call it and get the same."""
    found = measured_compute(spec, seconds)
    if dist.is_initialized() and dist.get_world_size() > 1:
        found["links"] = {**found["links"], **measured_links(found, hosts, per_host)}
        shared = [found]
        dist.broadcast_object_list(shared, src=0)
        found = shared[0]
    return found


def device_kind() -> str:
    """Where this process computes: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_seconds(call: Callable[[], object], budget: float = 0.5, least: int = 3) -> float:
    """Median seconds of ``call`` over at least ``least`` runs and about ``budget`` seconds, after one to warm up."""
    call()
    times: list[float] = []
    while len(times) < least or (sum(times) < budget and len(times) < 200):
        _finish()
        start = time.perf_counter()
        call()
        _finish()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# -- compute ----------------------------------------------------------------------------------------------------------


def measured_compute(spec: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """``spec`` with peaks (of a CPU, which has no nominal ones), levels, ramps, overheads and stream bandwidth."""
    kind, budget = device_kind(), seconds / 20
    products = {name: _products(kind, dtype, budget) for name, dtype in _DTYPES.items() if name in spec["peak_tflops"]}
    main = "bf16" if kind == "cuda" else "fp32"
    stream, overhead = stream_bandwidth(kind, budget), call_overhead(kind, budget)
    found = {**spec, "source": _machine(), "sustained": 1.0, "stream_gbs": stream / 1e9, "matmul_efficiency": 1.0}
    if kind == "cpu":
        peaks = {name: max(w.flops / t for w, t in rows) / 1e12 for name, rows in products.items()}
        found |= {"peak_tflops": peaks, "memory_bandwidth_gbs": stream / 1e9, "kernel_overhead_us": overhead * 1e6}
    else:
        found |= {"launch_overhead_us": overhead * 1e6}
    found["matmul_ramp_us"] = _ramp(device_from_spec(found), _DTYPES[main], budget) * 1e6
    work, times = [w for w, _ in products[main]], [t for _, t in products[main]]
    found["matmul_efficiency"] = at_level(work, times, device_from_spec(found)).matmul_efficiency
    found["attention"] = _attention_table(found, _DTYPES[main], budget)
    measured = [key for key in found if key not in ("source", "sources", "sustained") and found[key] != spec[key]]
    found["sources"] = {**spec.get("sources", {}), **dict.fromkeys(measured, "measured: Cluster.calibrate"),
                        "sustained": "measured rates are those of steady runs"}
    return found


def _product(m: int, n: int, k: int, dtype: torch.dtype, kind: str, budget: float) -> tuple[Work, float]:
    x, y = (torch.randn(shape, device=kind).to(dtype) for shape in ((m, k), (k, n)))
    moved = dtype.itemsize * (m * k + k * n + m * n)
    return Work(2.0 * m * n * k, moved, dtype, "matmul", 1, m, n, k), median_seconds(lambda: x @ y, budget)


def _products(kind: str, dtype: torch.dtype, budget: float) -> list[tuple[Work, float]]:
    """Products and their seconds; squares grow as long as they fit the budget."""
    found: list[tuple[Work, float]] = []
    for n in _SQUARES[kind]:
        found.append(_product(n, n, n, dtype, kind, budget))
        if 8 * found[-1][1] > budget:
            break
    if dtype in (torch.bfloat16, torch.float32):
        found += [_product(m, n, k, dtype, kind, budget) for m, n, k in _OBLONG[kind]]
    return found


def stream_bandwidth(kind: str, budget: float) -> float:
    """Bytes/s (read plus written) of copying 128 MiB, more than caches hold."""
    source = torch.ones(2**25, device=kind)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), budget)


def call_overhead(kind: str, budget: float) -> float:
    """Seconds of an operator on one element, of many in a row."""
    x, out = torch.zeros(1, device=kind), torch.empty(1, device=kind)
    return median_seconds(lambda: [torch.add(x, 1.0, out=out) for _ in range(500)], budget) / 500


def _ramp(device: Device, dtype: torch.dtype, budget: float) -> float:
    """Seconds that a product of 64 x 64 takes beyond its FLOPs and the overhead of a call."""
    kind = device_kind()
    x = torch.randn(64, 64, device=kind).to(dtype)
    taken = median_seconds(lambda: [x @ x for _ in range(200)], budget) / 200
    return max(0.0, taken - 2 * 64**3 / device.peak(dtype) - max(device.kernel_overhead, device.launch_overhead))


def _attention_table(spec: Mapping[str, Any], dtype: torch.dtype, budget: float) -> dict[str, Any]:
    """The table of the attention kernel with its two levels as measured at one shape; the rest keeps its form."""
    kind, table, device = device_kind(), dict(spec["attention"]), device_from_spec(spec)
    batch, heads, length, dim = (1, 4, 512, 64) if kind == "cpu" else (4, 32, 4096, 128)
    q, k, v = (torch.randn(batch, heads, length, dim, device=kind).to(dtype).requires_grad_() for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    out = forward()
    once = median_seconds(forward, budget)
    back = median_seconds(lambda: torch.autograd.grad(out, (q, k, v), out.detach(), retain_graph=True), budget)
    flops = 4.0 * batch * heads * length**2 * dim
    for name, times, seconds in (("forward", 1.0, once), ("backward", 2.5, back)):
        work = Work(times * flops, 0.0, dtype, "attention", batch * heads, length, length, dim, False, times > 1)
        scale = float(work_seconds([work], device)[0]) / seconds
        table[name] = {head_dim: level * scale for head_dim, level in table[name].items()}
    return {**table, "source": "measured: Cluster.calibrate"}


def _machine() -> str:
    if torch.cuda.is_available():
        return f"measured by Cluster.calibrate on {torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return (f"measured by Cluster.calibrate on {processor()}, {os.cpu_count()} cores, torch {torch.__version__}, "
            f"{threads} thread{'s' * (threads > 1)} a process")


def processor() -> str:
    """The name of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# -- links ------------------------------------------------------------------------------------------------------------


def measured_links(spec: Mapping[str, Any], hosts: int, per_host: int) -> dict[str, Any]:
    """Constants of the links between the ranks of the process group: kind of link -> collective -> table."""
    kind = device_kind()
    links: dict[str, Any] = {}
    within: dict[str, Constants] = dict.fromkeys(COLLECTIVES, Constants(1e12, 0.0, 0.0, 0.0))
    if per_host > 1:
        group = dist.new_subgroups(group_size=per_host)[0] if hosts > 1 else dist.group.WORLD
        samples = collective_samples(group, per_host, 1, kind)
        within = {name: fit_plain(samples, name) for name in COLLECTIVES}
        links[spec["scale_up_link"]] = link_table(samples, within, spec["scale_up_gbs"] * 1e9)
    if hosts > 1:
        rows = [[host * per_host + local for host in range(hosts)] for local in range(per_host)]
        group = dist.new_subgroups_by_enumeration(rows)[0]
        samples = collective_samples(group, hosts, hosts, kind)
        across = {name: _fit_across(samples, name, within[name]) for name in COLLECTIVES}
        links[spec["network_link"]] = link_table(samples, across, spec["network_gbs"] * 1e9, within)
    return links


def collective_samples(group: Any, size: int, hosts: int, kind: str) -> list[Sample]:
    """Seconds of every collective and size in a process group, as this rank sees them."""
    found = []
    with warnings.catch_warnings():
        # torch 2.13 renamed the tensor collectives; the old names are those that every version we support has
        warnings.simplefilter("ignore", FutureWarning)
        for name in COLLECTIVES:
            for nbytes in SIZES[kind]:
                seconds = _rounds(_collective(name, nbytes, group, size, kind), nbytes, group)
                found.append(Sample(name, nbytes, size, hosts, seconds / (2 if name == "p2p" else 1), "measured"))
    return found


def _rounds(call: Callable[[], object], nbytes: int, group: Any) -> float:
    repeats, times = 20 if nbytes <= _SHORT else 3, []
    for _ in range(_ROUNDS):
        dist.barrier(group)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        _finish()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)


def _collective(name: str, nbytes: int, group: Any, size: int, kind: str) -> Callable[[], object]:
    """One call on a whole tensor of ``nbytes``. Two ranks send one there and back."""
    whole, part = (torch.ones(max(1, n // 4), device=kind) for n in (nbytes - nbytes % (4 * size), nbytes // size))
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if name == "all_to_all":
        even = part[: part.numel() - part.numel() % size].clone()
        out = torch.empty_like(even)
        return lambda: dist.all_to_all_single(out, even, group=group)
    if dist.get_rank(group) == 0:
        return lambda: (dist.send(whole, group=group, group_dst=1), dist.recv(whole, group=group, group_src=1))
    if dist.get_rank(group) == 1:
        return lambda: (dist.recv(whole, group=group, group_src=0), dist.send(whole, group=group, group_dst=0))
    return lambda: None


def fit_plain(samples: list[Sample], name: str) -> Constants:
    """Plain alpha-beta of one collective. A p2p has one step, which cannot be told from the base."""
    chosen = [s for s in samples if s.kind == name]
    if name == "p2p":
        return fit(chosen, lambda bandwidth, base: Constants(bandwidth, base, 0.0, 0.0), 1e-5)
    return fit(chosen, lambda bandwidth, base, step: Constants(bandwidth, base, step, 0.0), 1e-5, 1e-6)


def _fit_across(samples: list[Sample], name: str, within: Constants) -> Constants:
    """Bandwidth and step of the network; the base of a call is counted within the host."""
    chosen = [s for s in samples if s.kind == name]
    best = minimise(lambda p: loss(chosen, within, Constants(p[0], 0.0, p[1], 0.0)), (1e12, 1e-5))
    return Constants(float(best[0]), 0.0, float(best[1]), 0.0)


def link_table(
    samples: list[Sample],
    fitted: Mapping[str, Constants],
    nominal: float,
    within: Mapping[str, Constants] | None = None,
) -> dict[str, Any]:
    """The table of a link: constants relative to ``nominal`` bytes/s. Of the network those ``within`` a host beside
    it say how well they fit."""
    table = {}
    for name, constants in fitted.items():
        chosen = [s for s in samples if s.kind == name]
        pair = (constants, None) if within is None else (within[name], constants)
        error = float(abs(log_errors(chosen, *pair)).mean())
        table[name] = {
            "efficiency": constants.bandwidth / nominal, "base_us": constants.base * 1e6,
            "step_us": constants.step * 1e6, "fill_us": 0.0,
            "source": f"measured: {len(chosen)} points, mean |log error| {error:.2f}",
        }  # fmt: skip
    return table
