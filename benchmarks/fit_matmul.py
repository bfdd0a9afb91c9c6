"""Fits the constants of matrix products in the presets to published throughput, and prints how well they predict it.

    python benchmarks/fit_matmul.py

``cost_model/compute.py`` says how long a product takes by its tiles and waves. Three kinds of constants are fitted to
``data/matmul.csv``: ``tile_loss`` and ``tile_overhead_k`` once for all devices; ``matmul_ramp_us`` and a level for each
device, the median of steady runs; and ``matmul_efficiency``, the level at which the best published shape (found in
short runs by trying thousands) comes out. ``sustained`` is the ratio of the two levels.

The errors are |log(predicted / published seconds)|. With one source left out, the level is that of the device's other
sources: what is left is what shapes and the sources' own differences make.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from autopar.cost_model.compute import Work
from autopar.cost_model.fit import at_level, product_errors
from autopar.cost_model.hardware import Device, load_device

TABLE = Path(__file__).parent / "data" / "matmul.csv"
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Chosen:
    """Rows of the table, by their ``gpu`` or ``hardware`` and their dtypes, and the preset of their device."""

    preset: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    dtype: torch.dtype


#: Devices with several published shapes. The A100s of EleutherAI's cookbook are not named further; the H800 is an H100
#: with slower links.
CHOSEN = {
    "A100 fp16": Chosen("a100-80g-sxm", ("A100-80GB-SXM", "A100-class (GPU not stated)"),
                        ("fp16", "bf16", "fp16->fp32"), torch.float16),
    "H100 fp8": Chosen("h100-sxm", ("H100-80GB-SXM",), ("fp8",), torch.float8_e4m3fn),
    "H200 fp8": Chosen("h200-sxm", ("H200-SXM",), ("fp8",), torch.float8_e4m3fn),
    "H800 fp8": Chosen("h100-sxm", ("H800-SXM",), ("fp8 (block scaled 1x128/128x128)",), torch.float8_e4m3fn),
}  # fmt: skip
#: Devices of which the best bf16 shape is published.
BEST = {
    "a100-80g-sxm": "A100-80GB-SXM", "h100-sxm": "H100-80GB-SXM", "b200-sxm": "B200-SXM", "gb200": "GB200",
    "mi300x": "MI300X", "mi325x": "MI325X", "mi355x": "MI355X",
}  # fmt: skip
LOSSES, OVERHEADS = (0, 16, 24, 32, 48, 64), (64, 128, 192, 256, 320, 384)
RAMPS = tuple(1e-6 * us for us in (1.0, 2.0, 3.0, 4.0, 5.0))


@dataclass(frozen=True)
class Row:
    """A published product and its FLOP/s."""

    work: Work
    rate: float
    source: str

    @property
    def seconds(self) -> float:
        """Published seconds."""
        return self.work.flops / self.rate


def rows(chosen: Chosen) -> list[Row]:
    """The chosen rows that give a shape."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        found = [r for r in csv.DictReader(file) if {r["gpu"], r["hardware"]} & set(chosen.names)]
    return [
        Row(product(r, chosen.dtype), float(r["tflops"]) * 1e12, r["source"].split(" ")[0])
        for r in found
        if r["dtype"] in chosen.dtypes and r["M"] and r["N"] and r["K"] and "grouped" not in r["kernel"]
    ]


def product(row: dict[str, str], dtype: torch.dtype) -> Work:
    """A row as work; results are written in 16 bits."""
    batch, m, n, k = (float(row[key] or 1) for key in ("batch_or_groups", "M", "N", "K"))
    moved = batch * (dtype.itemsize * (m * k + k * n) + 2 * m * n)
    return Work(2 * batch * m * n * k, moved, dtype, "matmul", batch, m, n, k)


def errors(found: Sequence[Row], device: Device) -> Floats:
    """log(predicted / published seconds)."""
    return product_errors([row.work for row in found], [row.seconds for row in found], device)


def level(found: Sequence[Row], device: Device) -> Device:
    """The device at the level of the rows."""
    return at_level([row.work for row in found], [row.seconds for row in found], device)


def fitted(found: Sequence[Row], device: Device) -> Device:
    """The device with the ramp and the level that fit best."""
    tried = [level(found, replace(device, matmul_ramp=ramp, sustained=1.0)) for ramp in RAMPS]
    return min(tried, key=lambda d: float(np.abs(errors(found, d)).sum()))


def best_level(name: str, gpu: str) -> float:
    """``matmul_efficiency`` at which the best published bf16 product of a device takes as long as predicted."""
    every = rows(Chosen(name, (gpu,), ("bf16",), torch.bfloat16))
    device = replace(load_device(name), sustained=1.0)
    return level([max(every, key=lambda row: row.rate)], device).matmul_efficiency


def shared(tables: dict[str, list[Row]]) -> tuple[int, int]:
    """The pair of ``tile_loss`` and ``tile_overhead_k`` that fits all devices best, each at its own level and ramp."""

    def total(pair: tuple[int, int]) -> float:
        devices = {name: replace(load_device(c.preset), tile_loss=pair[0], tile_overhead_k=pair[1])
                   for name, c in CHOSEN.items()}
        return sum(float(np.abs(errors(t, fitted(t, devices[name]))).sum()) for name, t in tables.items())

    return min(itertools.product(LOSSES, OVERHEADS), key=total)


def report(name: str, found: list[Row]) -> str:
    """One line: constants and errors of a device, all sources together and each left out in turn."""
    device = fitted(found, load_device(CHOSEN[name].preset))
    all_in = np.abs(errors(found, device))
    sources = sorted({row.source for row in found})
    out: list[float] = []
    for source in sources if len(sources) > 1 else []:
        kept = level([row for row in found if row.source != source], device)
        out += list(np.abs(errors([row for row in found if row.source == source], kept)))
    left = f"; a source left out: median {np.median(out):.3f}, p90 {np.quantile(out, 0.9):.3f}" if out else ""
    return (f"{name}: {len(found)} rows of {len(sources)} sources, level {device.matmul_efficiency:.3f}, ramp "
            f"{device.matmul_ramp * 1e6:.1f} us, error median {np.median(all_in):.3f}, "
            f"p90 {np.quantile(all_in, 0.9):.3f}{left}")


def main() -> None:
    """Print the constants and their errors."""
    tables = {name: rows(chosen) for name, chosen in CHOSEN.items()}
    loss, overhead = shared(tables)
    print(f"all devices: tile_loss {loss}, tile_overhead_k {overhead}")
    for name, found in tables.items():
        print(report(name, found))
    for name, gpu in BEST.items():
        print(f"{name}: matmul_efficiency {best_level(name, gpu):.3f}")
    for name in ("H100 fp8", "H200 fp8"):
        found = tables[name]
        steady = fitted(found, load_device(CHOSEN[name].preset))
        peak = level([max(found, key=lambda row: row.rate)], steady)
        print(f"{name}: steady over best {steady.matmul_efficiency / peak.matmul_efficiency:.3f}")


if __name__ == "__main__":
    main()
