"""Fits the constants of the links to published curves and prints ``cost_model/data/links.toml``.

    python benchmarks/fit_links.py > cost_model/data/links.toml       # errors of every curve go to stderr

Input: ``data/nccl_curves.csv`` (published nccl-tests and similar sweeps, one source a row). For each kind of link and
collective the constants of ``cost_model/communication.py``'s formulas are chosen to minimise the mean squared
**logarithm** of predicted over published time, so that 1 KiB and 16 GiB weigh the same. Where the table has no rows
the entry says ``assumed`` and from what. Two curves are left out of every fit; their errors are printed as checks.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.cost_model.fit import Constants, Sample, fit, log_errors, loss, minimise
from autopar.cost_model.hardware import COLLECTIVES

TABLE = Path(__file__).parent / "data" / "nccl_curves.csv"


def fit_network(samples: Sequence[Sample], intra: Constants, bandwidth: float) -> Constants:
    """Step and fill of the network, given its bandwidth and the constants within the hosts, where the base is
    counted. The search starts from a fill that is too long: a short one hides behind the hosts, and the loss would
    not see it."""
    best = minimise(lambda p: loss(samples, intra, Constants(bandwidth, 0.0, p[0], p[1])), (1e-5, 1e-3))
    return Constants(bandwidth, 0.0, float(best[0]), float(best[1]))


def read_samples(gpu: str, source: str, kind: str = "all_reduce", size: int | None = None,
                 algorithm: str = "") -> list[Sample]:
    """Rows of the table with that device and collective whose ``source`` and ``library_algo`` contain the given text,
    time from the bus bandwidth where the row has none (nccl-tests PERFORMANCE.md: all_reduce 2(n-1)/n size/busbw, the
    others (n-1)/n). What NVLink joins counts as one host, also in a GB200 rack of 18 hosts."""
    samples = []
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            wanted = row["gpu"] == gpu and source in row["source"] and row["collective"] == kind
            wanted = wanted and algorithm in row["library_algo"] and bool(row["size_bytes"] and row["n_gpus"])
            if not wanted or (size is not None and row["n_gpus"] != str(size)):
                continue
            n, nbytes = int(row["n_gpus"]), float(row["size_bytes"])
            volume = (2 if kind == "all_reduce" else 1) * (n - 1) / n * nbytes
            seconds = float(row["time_us"]) * 1e-6 if row["time_us"] else volume / (float(row["busbw_gbs"]) * 1e9)
            # The profiler's all-to-all size is what one rank holds (its notes); X is the sum over the ranks.
            whole = nbytes * n if kind == "all_to_all" else nbytes
            domain = 72 if gpu == "GB200" else int(row["gpus_per_node"])
            samples.append(Sample(kind, whole, n, max(1, n // domain), seconds, row["source"]))
    return samples


@dataclass(frozen=True)
class Entry:
    """One table of links.toml: constants relative to the nominal bandwidth, and where they come from."""

    efficiency: float
    base: float
    step: float
    fill: float
    source: str
    switch_efficiency: float = 0.0


NOMINAL = {"nvlink3": 300e9, "nvlink4": 450e9, "nvlink5": 900e9, "nvl72": 900e9, "xgmi": 448e9, "rdma": 50e9}
"""Nominal bytes/s a direction and device for which the table has rows: hardware.csv, 400 Gb/s for the network."""

GALVATRON = "Hetu-Galvatron galvatron/profile_hardware"
STAS = "stas00/ml-engineering network/README.md"


def _report(what: str, samples: Sequence[Sample], intra: Constants, inter: Constants | None = None) -> str:
    errors = log_errors(samples, intra, inter)
    large = errors[[s.nbytes >= 2**28 for s in samples]]
    print(f"{what:42} {len(samples):3} rows, mean |log error| {abs(errors).mean():.2f}, from 256 MiB up "
          f"{large.mean():+.2f}", file=sys.stderr)
    return f"{len(samples)} rows, mean |log error| {abs(errors).mean():.2f}"


def _nvlink3() -> tuple[Constants, dict[str, Entry]]:
    """A100: rings over NVSwitch; groups of 2, 4 and 8, of which the source does not name the device (A100 by its
    speed). Fitted with a step the step comes out as 0: latency does not grow with the group."""
    nominal = NOMINAL["nvlink3"]
    reduce = [*read_samples("A100-80GB-SXM", "Azure"), *read_samples("A100-80GB-SXM", STAS),
              *read_samples("", GALVATRON)]
    exchange = read_samples("", GALVATRON, "all_to_all")

    def make(bandwidth: float, base: float, fill: float) -> Constants:
        return Constants(bandwidth, base, 0.0, fill)

    ring, swap = fit(reduce, make, 1e-5, 1e-6), fit(exchange, make, 1e-5, 1e-6)
    reduced, swapped = _report("nvlink3 all_reduce", reduce, ring), _report("nvlink3 all_to_all", exchange, swap)

    def entry(bandwidth: float, source: str) -> Entry:
        return Entry(bandwidth / nominal, ring.base, 0.0, ring.fill, source)

    return ring, {
        **dict.fromkeys(("all_gather", "reduce_scatter"), entry(ring.bandwidth, "assumed: as all_reduce, also a ring")),
        "all_reduce": entry(ring.bandwidth, f"fitted: Azure, stas00/ml-engineering, Hetu-Galvatron, {reduced}"),
        "all_to_all": Entry(swap.bandwidth / nominal, swap.base, 0.0, swap.fill,
                            f"fitted: Hetu-Galvatron sp_time, {swapped}"),
        "p2p": entry(171e9, "points: Hetu-Galvatron 162.1 and 163.7 GB/s, unnamed A100 document 188.6 (geometric mean "
                            "171); latency and fill assumed as all_reduce"),
    }


def _switched(name: str, curves: Sequence[Sample], ring: float, text: str, others: dict[str, tuple[float, str]],
              latency: Constants | None = None) -> tuple[Constants, dict[str, Entry]]:
    """A link whose switch reduces: the ring's bandwidth from points; the switch's, the base and the fill from the
    curves, unless these have no short messages and ``latency`` gives base and fill. No step, as on nvlink3."""
    if latency is None:
        fitted = fit(curves, lambda switch, base, fill: Constants(ring, base, 0.0, fill, switch), 1e-5, 1e-6)
    else:
        fitted = fit(curves, lambda switch: Constants(ring, latency.base, 0.0, latency.fill, switch))
    source = f"fitted: {text}, " + _report(f"{name} all_reduce", curves, fitted)
    entries = {kind: Entry(efficiency, fitted.base, 0.0, fitted.fill, f"{why}; latency and fill assumed as all_reduce")
               for kind, (efficiency, why) in others.items()}
    nominal = NOMINAL[name]
    entries["all_reduce"] = Entry(ring / nominal, fitted.base, 0.0, fitted.fill, source, fitted.switch / nominal)
    return fitted, entries


def _nvlink4(swap: float) -> tuple[Constants, dict[str, Entry]]:
    curves = [*read_samples("H100-80GB-SXM", "aws-batch"), *read_samples("H100-80GB-SXM", "dgxc"),
              *read_samples("H100-80GB-SXM", "Azure"), *read_samples("H200-SXM", "Azure"),
              *read_samples("H200-SXM", "all_reduce_bench.py", size=8),
              *read_samples("H200-SXM", STAS, algorithm="NVLS")]
    text = "AWS, NVIDIA dgxc, Azure (H100), Azure, stas00/ml-engineering (H200); ring 365.6 GB/s of the last"
    return _switched("nvlink4", curves, 365.6e9, text, {
        "all_gather": (355.7 / 450, "points: stas00 H200 361.4 GB/s, NVIDIA/nccl issue 1281 H100 350"),
        "reduce_scatter": (361.5 / 450, "points: stas00 H200 362.9 GB/s, NVIDIA/nccl issue 1281 H100 360"),
        "all_to_all": (swap, "assumed: efficiency of nvlink3 all_to_all"),
        "p2p": (396.4 / 450, "point: stas00 H200 pairwise copy 396.4 GB/s"),
    })


def _nvlink5(name: str, swap: float, latency: Constants | None = None) -> tuple[Constants, dict[str, Entry]]:
    ring = (682.2e9 / 900e9, "assumed: as the all_reduce ring, stas00 B200 682.2 GB/s")
    others = {"all_gather": ring, "reduce_scatter": ring,
              "all_to_all": (swap, "assumed: efficiency of nvlink3 all_to_all"),
              "p2p": (396.4 / 450, "assumed: efficiency of nvlink4 p2p")}
    if latency is None:
        return _switched(name, read_samples("B200-SXM", "all_reduce_bench.py", size=8), 682.2e9,
                         "stas00/ml-engineering all_reduce_bench.py B200; ring 682.2 GB/s of the same", others)
    return _switched(name, read_samples("GB200", "coreweave", size=72), 682.2e9,
                     "coreweave GB200-NVL72 72 devices from 512 MiB up; ring, base and fill as B200", others, latency)


def _rdma(intra: Constants) -> dict[str, Entry]:
    """The network of H100 hosts with 400 Gb/s a device, within which ``intra`` holds. Two hosts with that much are
    bound by NVLink as much as by the network, so its bandwidth comes from three published points that the network
    bounds: bus bandwidth over the 2 (n-1)/n / (2 (H-1)/H / 8 NICs) that the formula allows. (Runs with SHARP send
    less: not used.)"""
    efficiency = (338.82 / 375 * 369.86 / 423.3 * 340 / 411.3) ** (1 / 3)
    rows = [*read_samples("H100-80GB-SXM", "micro-benchmarks/nccl-tests/README.md"),
            *read_samples("H100-80GB-SXM", "coreweave/nccl-tests PR")]
    fitted = fit_network(rows, intra, efficiency * NOMINAL["rdma"])
    text = _report("rdma all_reduce", rows, intra, fitted)
    other = Entry(efficiency, 0.0, fitted.step, fitted.fill, "assumed: as rdma all_reduce")
    swap = Entry(efficiency, 0.0, fitted.step, 0.0,
                 "assumed: as rdma all_reduce, but messages to all are on their way at once")
    hop = Entry(efficiency, 0.0, fitted.step, fitted.step, "assumed: as rdma all_reduce, but one hop fills in one step")
    checks = (("2 hosts, 8 x 200 Gb/s TCPXO", read_samples("H100-80GB-SXM", "ztan"), 0.5),
              ("4 hosts B200, 8 x 400 Gb/s EFA", read_samples("B200-SXM", "all_reduce_bench.py", size=32), 1.0))
    for what, samples, share in checks:
        network = Constants(fitted.bandwidth * share, 0.0, fitted.step, fitted.fill)
        _report(f"check, not fitted: {what}", samples, intra, network)
    source = ("bandwidth: points GCP A3 Mega 338.8 GB/s (of 375), AWS p5en 369.9 (423), NVIDIA/nccl issue 1218 "
              f"340 (411); step and fill fitted: AWS p5 EFA and coreweave InfiniBand, 2 hosts, {text}")
    reduce = Entry(efficiency, 0.0, fitted.step, fitted.fill, source)
    return {"all_gather": other, "reduce_scatter": other, "all_reduce": reduce, "all_to_all": swap, "p2p": hop}


def _all(efficiency: float, latency: Constants, source: str) -> dict[str, Entry]:
    return dict.fromkeys(COLLECTIVES, Entry(efficiency, latency.base, 0.0, latency.fill, source))


def fit_all() -> dict[str, dict[str, Entry]]:
    """Every kind of link -> collective -> constants."""
    ring, nvlink3 = _nvlink3()
    swap = nvlink3["all_to_all"].efficiency
    fourth, nvlink4 = _nvlink4(swap)
    fifth, nvlink5 = _nvlink5("nvlink5", swap)
    mesh = math.sqrt(312.912 / 448 * 47.671 / 64)
    mesh_text = ("points: stas00 MI300X all_reduce of 8 312.9 GB/s (of 448) and of 2 47.7 (of 64), geometric mean; "
                 "other collectives as all_reduce, latency and fill as nvlink3: assumed")
    return {
        "nvlink2": _all(nvlink3["all_reduce"].efficiency, ring, "assumed: as nvlink3 all_reduce"),
        "nvlink3": nvlink3, "nvlink4": nvlink4, "nvlink5": nvlink5,
        "nvl72": _nvlink5("nvl72", swap, fifth)[1],
        "xgmi": _all(mesh, ring, mesh_text),
        "pcie": _all(0.7, ring, "assumed: 0.7 of the slot, the lower end of the measured links; latency as nvlink3"),
        "rdma": _rdma(fourth),
        "ethernet": _all(0.8, Constants(0.0, 1e-4, 0.0, 0.0), "assumed: 0.8 of the wire and 100 us a call (Gloo, TCP)"),
    }


def main() -> None:
    """Print links.toml."""
    print("# Written by benchmarks/fit_links.py from benchmarks/data/nccl_curves.csv: change that, not this.")
    print("# efficiency: achieved over nominal bandwidth; base_us a call; step_us a step; fill_us a pipeline's fill.")
    for link, kinds in fit_all().items():
        for kind in COLLECTIVES:
            entry = kinds[kind]
            switch = [f"switch_efficiency = {entry.switch_efficiency:.4f}"] if entry.switch_efficiency else []
            print("\n".join(["", f"[{link}.{kind}]", f"efficiency = {entry.efficiency:.4f}", *switch,
                             f"base_us = {entry.base * 1e6:.2f}", f"step_us = {entry.step * 1e6:.2f}",
                             f"fill_us = {entry.fill * 1e6:.2f}", f'source = "{entry.source}"']))


if __name__ == "__main__":
    main()
