"""Seconds of a whole search, capture included: against layers, against devices, and of four cases that people have.

    python benchmarks/search_time.py                      # the tables
    python benchmarks/search_time.py --series cases       # one of: cases, layers, devices
    python benchmarks/search_time.py --json times.json    # and every figure
    python benchmarks/search_time.py --plot times.png     # and the two curves (needs matplotlib)

Llamas on the meta device, fp32 masters used in bf16, sequences of 8192 tokens, on hosts of 8 H100s, compiled. Layers
are those of a Llama-3-8B, 8 to 126 of them on 64 devices; devices are 8 to 131,072 for the 8B, with a sequence a device
and at least 128. Every search runs in a process of its own, which has imported autopar when the clock starts.
"processor" are seconds of all processes of a search, of which there are as many as cores, "clock" what passed on the
wall, which other work on the machine makes longer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plan_time import in_fresh_process

SEQUENCE, PER_HOST = 8192, 8
#: What a search of the four cases may take, in seconds on two cores.
TARGET = 45.0
#: hidden, ffn, layers and heads of Llama 3 (arXiv:2407.21783, table 3).
SHAPES = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64), "405B": (16384, 53248, 126, 128)}


@dataclass(frozen=True)
class Case:
    """A Llama of one of `SHAPES` with so many ``layers``, ``batch`` sequences a step, on so many ``devices``."""

    shape: str
    layers: int
    devices: int
    batch: int

    @property
    def text(self) -> str:
        """In a word, as the command line takes it."""
        return f"{self.shape}:{self.layers}:{self.devices}:{self.batch}"

    @staticmethod
    def parse(text: str) -> Case:
        """The inverse of `text`."""
        shape, *numbers = text.split(":")
        return Case(shape, *map(int, numbers))


@dataclass(frozen=True)
class Measured:
    """Seconds that a search took, and peak resident memory in GiB; of the plan its degrees, what it is besides, the
    seconds of its step and its gap (a fraction)."""

    shape: str
    layers: int
    devices: int
    batch: int
    processor: float
    clock: float
    peak: float
    degrees: dict[str, int]
    zero: int
    micro_batches: int
    schedule: str | None
    recompute: str
    step_time: float
    gap: float


SERIES: dict[str, tuple[Case, ...]] = {
    "cases": (Case("8B", 32, 64, 1024), Case("8B", 32, 512, 512), Case("70B", 80, 512, 1024),
              Case("405B", 126, 16384, 2048)),
    "layers": tuple(Case("8B", n, 64, 512) for n in (8, 16, 32, 64, 96, 126)),
    "devices": tuple(Case("8B", 32, n, max(n, 128)) for n in (8, 32, 128, 512, 2048, 8192, 32768, 131072)),
}  # fmt: skip


def _model(case: Case) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, ffn, _, heads = SHAPES[case.shape]
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _processor() -> float:
    """Seconds of the processor that this process and those that it waited for have taken."""
    return sum(os.times()[:4])


def measure(case: Case) -> Measured:
    """Search for one plan in this process."""
    from autopar import Cluster, Workload, plan

    model, cluster = _model(case), Cluster.parse(f"h100-sxm:{case.devices // PER_HOST}x{PER_HOST}")
    workload = Workload(global_batch=case.batch, seq_len=SEQUENCE, param_dtype="bfloat16")
    clock, processor = time.perf_counter(), _processor()
    found = plan(model, cluster, workload=workload, compile=True)
    clock, processor = time.perf_counter() - clock, _processor() - processor
    return Measured(
        **asdict(case),
        processor=processor,
        clock=clock,
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        degrees=found.degrees,
        zero=found.zero,
        micro_batches=found.num_micro_batches,
        schedule=found.schedule,
        recompute=found.recompute,
        step_time=found.step_time,
        gap=found.gap,
    )


def _line(row: dict[str, Any]) -> str:
    degrees = " ".join(f"{axis} {n}" for axis, n in row["degrees"].items() if n > 1)
    pipeline = f", {row['schedule']}" if row["schedule"] else ""
    plan = f"{degrees}, ZeRO {row['zero']}, {row['micro_batches']} micro-batches{pipeline}, {row['recompute']}"
    figures = [f"{row['processor']:.1f}", f"{row['clock']:.1f}", f"{row['peak']:.2f}", plan, f"{row['step_time']:.3g}"]
    sizes = [row["shape"], row["layers"], f"{row['devices']:,}", f"{row['batch']:,}"]
    return "| " + " | ".join([*map(str, sizes), *figures, f"{row['gap']:.1%}"]) + " |"


COLUMNS = ("shape", "layers", "devices", "batch", "processor s", "clock s", "peak GiB", "plan", "step s", "gap")


def run(name: str) -> list[dict[str, Any]]:
    """Measure one of `SERIES` and print its table row by row."""
    print(f"\n{name}\n\n| " + " | ".join(COLUMNS) + " |\n" + "| --- " * len(COLUMNS) + "|")
    rows = []
    for case in SERIES[name]:
        rows.append(in_fresh_process(__file__, case.text))
        print(_line(rows[-1]), flush=True)
    if name == "cases":
        within = sum(row["processor"] <= TARGET for row in rows)
        print(f"\n{within} of {len(rows)} within {TARGET:.0f} s of the processor")
    return rows


def plot(series: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw seconds of the processor against layers and against devices, those that were measured."""
    import matplotlib  # here, because only this needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [name for name in ("layers", "devices") if name in series]
    figure, every = pyplot.subplots(1, len(shown), sharey=True, squeeze=False, figsize=(5 * len(shown), 4))
    for name, axes in zip(shown, every[0], strict=True):
        rows = series[name]
        axes.plot([row[name] for row in rows], [row["processor"] for row in rows], marker="o", label="processor")
        axes.plot([row[name] for row in rows], [row["clock"] for row in rows], linestyle=":", label="clock")
        axes.set_xlabel(name)
    if "devices" in shown:
        every[0][-1].set_xscale("log", base=2)
    every[0][0].set_ylim(bottom=0)  # of both, which share it
    every[0][0].set_ylabel("seconds of a search")
    every[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", choices=tuple(SERIES), action="append", help="only this table; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves there")
    parser.add_argument("--one", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.one:
        print(json.dumps(asdict(measure(Case.parse(options.one)))))
        return
    wanted = options.series or tuple(SERIES)
    if options.plot and not {"layers", "devices"} & set(wanted):
        parser.error("--plot draws the series layers and devices; --series leaves both out")
    if options.plot and importlib.util.find_spec("matplotlib") is None:  # before minutes of searching, not after
        parser.error("--plot needs matplotlib")
    series = {name: run(name) for name in wanted}
    if options.json:
        options.json.write_text(json.dumps(series, indent=1) + "\n")
    if options.plot:
        plot(series, options.plot)


if __name__ == "__main__":
    main()
