"""Fits the ramp of the matmul efficiency (``matmul_ramp_us`` of the presets) to published matmuls and prints it.

    python benchmarks/fit_matmul.py

``cost_model/compute.py`` takes a matmul's efficiency as ceiling x F / (F + F_half): a constant time more, the ramp,
in which the first wave fills and the last drains. The ceiling is the best published matmul of the device
(hardware.csv), the ramp minimises the mean squared logarithm of predicted over published time on the rows of
``data/matmul.csv`` chosen below, beside the launch overhead that the presets assume. Shapes that divide into tiles
badly stay slower than that: quantisation is not modelled here.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

TABLE = Path(__file__).parent / "data" / "matmul.csv"

LAUNCH_OVERHEAD = 3e-6  # seconds, as launch_overhead_us in the presets

# device -> (dtypes, peak FLOP/s, ceiling as a fraction of it, stream bytes/s, bytes an element of the inputs)
CHOSEN = {
    "A100-80GB-SXM": (("fp16", "bf16", "fp16->fp32"), 312e12, 271.2 / 312, 1.70e12, 2),
    "H100-80GB-SXM": (("fp8",), 1979e12, 1402.6 / 1979, 2.97e12, 1),
    "H200-SXM": (("fp8",), 1979e12, 1453.4 / 1979, 4.15e12, 1),
}


def errors(gpu: str, ramp: float) -> list[float]:
    """log(predicted / published time) of the rows of ``gpu``, with ``ramp`` seconds."""
    dtypes, peak, ceiling, bandwidth, size = CHOSEN[gpu]
    found = []
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["gpu"] != gpu or row["dtype"] not in dtypes or not (row["M"] and row["N"] and row["K"]):
                continue
            m, n, k, batch = (float(row[key]) for key in ("M", "N", "K", "batch_or_groups"))
            flops, moved = 2 * batch * m * n * k, batch * (size * (m * k + k * n) + 2 * m * n)
            predicted = max(flops / (peak * ceiling) + ramp, moved / bandwidth) + LAUNCH_OVERHEAD
            found.append(math.log(predicted / (flops / (float(row["tflops"]) * 1e12))))
    return found


def main() -> None:
    """Print the ramp and its errors for every chosen device."""
    for gpu in CHOSEN:
        ramp = min((us * 0.1e-6 for us in range(400)), key=lambda r: sum(e * e for e in errors(gpu, r)))
        found = errors(gpu, ramp)
        mean = sum(abs(e) for e in found) / len(found)
        print(f"{gpu}: ramp {ramp * 1e6:.1f} us, {len(found)} rows, mean |log error| {mean:.2f}, "
              f"mean log error {sum(found) / len(found):+.2f}")


if __name__ == "__main__":
    main()
