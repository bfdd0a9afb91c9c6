"""Measures this machine as the ``cpu`` device and prints its TOML entry (``cost_model/data/cpu.toml``).

    OMP_NUM_THREADS=1 python benchmarks/measure_cpu.py > cost_model/data/cpu.toml       # about two minutes

One device is one process with one thread, as the tests run it. Measured: matmul in fp32, fp64 and bf16 (best of
several square sizes), a stream copy larger than the caches, the cost of a call (a one-element add), the time a small
matmul takes beyond these, and Gloo's all_gather, reduce_scatter, all_reduce, all_to_all and send/recv between 2 and
between 4 processes on 4 KiB to 16 MiB. The latter are fitted with the formulas of ``cost_model/communication.py``
(see fit_links.py): processes share the cores and the memory, so 4 are slower than the formula's bandwidth term says
and the constants are a compromise.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from fit_links import Constants, Sample, fit, log_errors
from torch.multiprocessing.spawn import spawn

SIZES = [4096 * 4**k for k in range(7)]
WORLDS = (2, 4)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")
DEFAULT_MEMORY_GIB = 4.0


def median_seconds(call: Callable[[], object], budget: float = 0.5, least: int = 5) -> float:
    """Median seconds of ``call`` over at least ``least`` runs and about ``budget`` seconds, after one to warm up."""
    call()
    times: list[float] = []
    while len(times) < least or (sum(times) < budget and len(times) < 200):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matmul_flops(dtype: torch.dtype) -> float:
    """Best FLOP/s of one thread over square matmuls of 512, 1024 and 2048."""
    rates = []
    for n in (512, 1024, 2048):
        x, y = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
        rates.append(2 * n**3 / median_seconds(lambda x=x, y=y: x @ y, least=3))  # type: ignore[misc]
    return max(rates)


def stream_bandwidth() -> float:
    """Bytes/s (read plus written) of copying 256 MiB with one thread."""
    source = torch.ones(2**26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source))


def call_overhead() -> float:
    """Seconds of an operator on one element."""
    x = torch.zeros(1)
    out = torch.empty(1)
    return median_seconds(lambda: [torch.add(x, 1.0, out=out) for _ in range(1000)]) / 1000


def matmul_ramp(peak: float, overhead: float) -> float:
    """Seconds that a 64 x 64 matmul takes beyond its FLOPs at ``peak`` and the overhead of a call."""
    x = torch.randn(64, 64)
    seconds = median_seconds(lambda: [x @ x for _ in range(1000)]) / 1000
    return max(0.0, seconds - 2 * 64**3 / peak - overhead)


def _collective(kind: str, nbytes: int, rank: int, world: int) -> Callable[[], object]:
    whole, part = torch.ones(nbytes // 4), torch.ones(nbytes // 4 // world)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all_to_all":
        out = torch.empty_like(part)
        return lambda: dist.all_to_all_single(out, part)
    if rank == 0:
        return lambda: (dist.send(whole, 1), dist.recv(whole, 1))
    return lambda: (dist.recv(whole, 0), dist.send(whole, 0)) if rank == 1 else None


def _worker(rank: int, world: int, port: int, path: str) -> None:
    torch.set_num_threads(1)
    # torch 2.13 renamed the tensor collectives; the old names are those that every version we support has.
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    rows = []
    for kind in KINDS:
        for nbytes in SIZES:
            call = _collective(kind, nbytes, rank, world)
            repeats = 20 if nbytes <= 2**18 else 3
            times = []
            for _ in range(8):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(repeats):  # the skew of the barrier spreads over them
                    call()
                times.append((time.perf_counter() - start) / repeats)
            seconds = min(times) / (2 if kind == "p2p" else 1)  # p2p goes there and back
            rows.append((kind, nbytes, world, seconds))
    if rank == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    dist.destroy_process_group()


def gloo_samples(folder: str) -> list[Sample]:
    """Times of every collective, size and number of processes, as rank 0 saw them."""
    samples = []
    for world in WORLDS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        path = os.path.join(folder, f"{world}.json")
        spawn(_worker, args=(world, port, path), nprocs=world)
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)
        # Only 2 of the 4 processes take part in a p2p, so its second run would count twice.
        samples += [Sample(kind, nbytes, n, 1, seconds, "gloo") for kind, nbytes, n, seconds in rows
                    if kind != "p2p" or n == 2]
    return samples


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _fit(kind: str, samples: list[Sample]) -> Constants:
    """Plain alpha-beta: Gloo's curves do not call for a fill. A p2p has one step, which cannot be told from the
    base."""
    if kind == "p2p":
        return fit(samples, lambda bandwidth, base: Constants(bandwidth, base, 0.0, 0.0), 1e-5)
    return fit(samples, lambda bandwidth, base, step: Constants(bandwidth, base, step, 0.0), 1e-5, 1e-6)


def link_lines(samples: list[Sample], nominal: float) -> list[str]:
    """TOML tables ``[links.gloo.*]`` with efficiencies relative to ``nominal`` bytes/s."""
    lines = []
    for kind in KINDS:
        chosen = [s for s in samples if s.kind == kind]
        fitted = _fit(kind, chosen)
        error = float(abs(log_errors(chosen, fitted)).mean())
        lines += [f"[links.gloo.{kind}]", f"efficiency = {fitted.bandwidth / nominal:.4f}",
                  f"base_us = {fitted.base * 1e6:.2f}", f"step_us = {fitted.step * 1e6:.2f}", "fill_us = 0.0",
                  f'source = "measured: {len(chosen)} points, mean |log error| {error:.2f}"', ""]
    return lines


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    peaks = {name: matmul_flops(dtype) for name, dtype in
             (("fp32", torch.float32), ("fp64", torch.float64), ("bf16", torch.bfloat16))}
    stream, overhead = stream_bandwidth(), call_overhead()
    ramp = matmul_ramp(peaks["fp32"], overhead)
    with tempfile.TemporaryDirectory() as folder:
        samples = gloo_samples(folder)
    machine = f"{_processor()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a process"
    print("\n".join([
        'name = "cpu"', f'source = "measured by benchmarks/measure_cpu.py on {machine}"',
        'notes = "One device is one process with one thread. Peaks are achieved rates. memory_gib is a default: '
        'Cluster.detect() divides the RAM of the host by its processes."', "",
        f"memory_gib = {DEFAULT_MEMORY_GIB}", f"memory_bandwidth_gbs = {stream / 1e9:.2f}",
        f"stream_gbs = {stream / 1e9:.2f}", "matmul_efficiency = 1.0", f"matmul_ramp_us = {ramp * 1e6:.2f}",
        f"launch_overhead_us = {overhead * 1e6:.2f}", 'scale_up_link = "gloo"', f"scale_up_gbs = {stream / 1e9:.2f}",
        "scale_up_devices = 8", 'network_link = "ethernet"', "network_gbs = 1.25", "",
        "[peak_tflops]", *(f"{name} = {peak / 1e12:.5f}" for name, peak in peaks.items()), "",
        "[sources]", 'memory_gib = "assumed: small enough for several processes on a laptop"',
        'scale_up_gbs = "the stream bandwidth; efficiencies of links.gloo are relative to it"',
        'scale_up_devices = "assumed: any number of processes shares the memory of the host"',
        'network_gbs = "assumed: 10 Gb/s Ethernet"', "", *link_lines(samples, stream),
    ]).rstrip())


if __name__ == "__main__":
    main()
