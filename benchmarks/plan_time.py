"""Seconds and peak memory of planning, phase by phase: Llama-3-8B-shaped models on meta, bf16, 16 x 2048 tokens.

    python benchmarks/plan_time.py                 # the table
    python benchmarks/plan_time.py --json out.json

Every configuration runs in a process of its own, so that peak memory is its own too. ``all`` lets both axes split every
factor, where plans let ``dp`` split the batch only. Phases are in seconds of the processor, which other work on the
machine changes little (planning runs in one thread); "clock" is what passed on the wall. Planning pauses the cyclic
garbage collector; "garbage" is what one collection takes when it is over.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

BATCH, SEQUENCE = 16, 2048
PHASES = ("capture", "strategies", "pricing", "solve", "rewrite")
GARBAGE = "garbage"
#: What a peer needs for the same, layers and mesh -> (seconds, GiB): AutoParallel, on two cores of such a machine.
#: Quoted from our notes of 2026; it has not been run again here.
PEER: dict[tuple[int, tuple[int, ...]], tuple[float, float | None]] = {
    (4, (4, 8)): (431.0, 3.4),
    (32, (4, 8)): (473.0, 6.6),
    (32, (8,)): (72.0, None),
}
SERIES = (2, 4, 8, 16, 32, 64, 80, 126)


@dataclass(frozen=True)
class Configuration:
    """Layers of the model, degrees of the mesh, and whether every axis may split everything."""

    layers: int
    mesh: tuple[int, ...]
    every_factor: bool = False

    @property
    def text(self) -> str:
        """In a word, as the command line takes it."""
        return f"{self.layers}:{'x'.join(map(str, self.mesh))}{':all' if self.every_factor else ''}"

    @staticmethod
    def parse(text: str) -> Configuration:
        """The inverse of `text`."""
        layers, mesh, *rest = text.split(":")
        return Configuration(int(layers), tuple(int(n) for n in mesh.split("x")), bool(rest))


@dataclass(frozen=True)
class Measured:
    """Seconds by phase and by the clock, the step time of the plan in seconds, and the peak resident memory of the
    process in GiB, of which ``imported`` were there before planning began."""

    layers: int
    mesh: tuple[int, ...]
    every_factor: bool
    step_time: float
    imported: float
    peak: float
    clock: float
    seconds: dict[str, float] = field(default_factory=dict)


CONFIGURATIONS = (
    *(Configuration(n, (8,)) for n in (4, 32, 80)),
    *(Configuration(n, (4, 8), every) for every in (False, True) for n in (4, 32, 80)),
)


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _model(layers: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def measure(configuration: Configuration) -> Measured:
    """Plan one configuration in this process."""
    import torch

    from autopar.cluster import Cluster
    from autopar.garbage import collecting_later
    from autopar.runtime.program import emit
    from autopar.sharding.layout import Mesh
    from autopar.solver.costs import Prices, price
    from autopar.solver.pins import Pins
    from autopar.solver.program import solve
    from autopar.solver.space import build_space
    from autopar.solver.spmd import read
    from autopar.specialize import capture_batch

    dp, tp = configuration.mesh if len(configuration.mesh) == 2 else (1, configuration.mesh[0])
    mesh, cluster = Mesh((("dp", dp), ("tp", tp))), Cluster.parse(f"h100-sxm:{dp}x{tp}")
    model = _model(configuration.layers)
    batch = {name: torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    seconds: dict[str, float] = dict.fromkeys((*PHASES, GARBAGE), 0.0)

    def timed(phase: str, work: Callable[[], T]) -> T:
        before = time.process_time()
        result = work()
        seconds[phase] += time.process_time() - before
        return result

    imported, started = _peak_gib(), time.perf_counter()
    prices, every = Prices(cluster, mesh), configuration.every_factor
    with collecting_later():  # as `search` and `specialize` do
        captured = timed("capture", lambda: capture_batch(model, (), batch))
        operators = timed("strategies", lambda: read(captured))
        space = timed("strategies", lambda: build_space(captured, operators, mesh, Pins(), axes_split_all=every))
        program = timed("pricing", lambda: price(space, captured, operators, prices, "adamw", float("inf")))
        solution = timed("solve", lambda: solve(program))
        assert solution is not None
        emitted = timed("rewrite", lambda: emit(captured, operators, space.assignment(solution.options)))
    timed(GARBAGE, gc.collect)
    del emitted
    clock = time.perf_counter() - started
    return Measured(
        **asdict(configuration),
        step_time=solution.value,
        imported=imported,
        peak=_peak_gib(),
        clock=clock,
        seconds=seconds,
    )


def in_fresh_process(script: str, text: str) -> dict[str, Any]:
    """What ``script --one text`` prints last, as JSON."""
    command = [sys.executable, "-W", "ignore", script, "--one", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{text} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _peer(row: dict[str, Any]) -> str:
    seconds, gib = PEER.get((row["layers"], tuple(row["mesh"])), (None, None))
    return "" if seconds is None else f"{seconds:.0f} s" + (f", {gib} GiB" if gib else "")


def _line(row: dict[str, Any]) -> str:
    seconds = row["seconds"]
    mesh = "(" + ", ".join(map(str, row["mesh"])) + ")" + (" all" if row["every_factor"] else "")
    phases = [seconds[phase] for phase in PHASES]
    figures = [*phases, sum(phases), seconds[GARBAGE], row["clock"]]
    parts = [f"{figure:.2f}" for figure in figures]
    return "| " + " | ".join([str(row["layers"]), mesh, *parts, f"{row['peak']:.2f}", _peer(row)]) + " |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help="one configuration, in this process: layers:mesh, as in 4:4x8 or 4:4x8:all")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.one:
        print(json.dumps(asdict(measure(Configuration.parse(arguments.one)))))
        return
    print("| layers | mesh | " + " | ".join(PHASES) + " | all | garbage | clock | peak GiB | peer |")
    print("| --- " * (len(PHASES) + 7) + "|")
    wanted = dict.fromkeys((*CONFIGURATIONS, *(Configuration(n, (4, 8)) for n in SERIES)))
    rows = []
    for configuration in wanted:
        rows.append(in_fresh_process(__file__, configuration.text))
        print(_line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
