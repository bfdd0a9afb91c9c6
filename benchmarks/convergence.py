"""Loss curves of a small Llama on real text: one process, several plans, and a run that changes its plan half-way.

    python benchmarks/convergence.py                      # 200 steps; table on the terminal
    python benchmarks/convergence.py --plot curves.png    # and the curves (needs matplotlib)
    python benchmarks/convergence.py --json curves.json   # and every loss

The text is the Python standard library's own sources, byte by byte. Every plan runs on four Gloo processes with the
same AdamW as the one process, whose curve is that of eager PyTorch on the untouched model. ``A then B`` trains half of
the steps under plan A, saves with `torch.distributed.checkpoint`, and goes on from what other processes load under B.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Hints

PROCESSES, SAMPLES, LENGTH, STEPS = 4, 16, 64, 200
LEARNING_RATE = 1e-3
REFERENCE = "one process"

PLANS = {
    "dp4 zero3": Hints(dp=4, zero=3),
    "tp2 pp2 1f1b": Hints(tp=2, pp=2, schedule="1f1b", micro_batch_size=4),
    "pp4 interleaved": Hints(pp=4, schedule="interleaved", micro_batch_size=2),
}


@dataclass(frozen=True)
class Curve:
    """A run: under ``plans`` one after the other, each for an equal share of the steps."""

    name: str
    plans: tuple[str, ...]


CURVES = (
    *(Curve(name, (name,)) for name in PLANS),
    *(Curve(f"{a} then {b}", (a, b)) for a, b in (("dp4 zero3", "tp2 pp2 1f1b"), ("pp4 interleaved", "dp4 zero3"))),
)


def model() -> LlamaForCausalLM:
    """Eight layers, so that four ranks have two stages each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def text() -> Tensor:
    """Bytes of some sources of the standard library, int64."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [folder / name for name in ("argparse.py", "ast.py", "calendar.py", "inspect.py", "statistics.py")]
    return torch.tensor(list(b"".join(path.read_bytes() for path in sources)))


def batch(data: Tensor, step: int) -> dict[str, Tensor]:
    """The global batch of a step: ``SAMPLES`` pieces from places that the step's number draws."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(data) - LENGTH, (SAMPLES,), generator=generator)
    ids = torch.stack([data[s : s + LENGTH] for s in starts.tolist()])
    return {"input_ids": ids, "labels": ids}


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of all runs."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def reference(steps: int) -> list[float]:
    """The losses of one process in eager mode."""
    own, data = model(), text()
    optimizer, losses = adamw(own.parameters()), []
    for step in range(steps):
        loss = own(**batch(data, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def worker(plan: str, begin: int, end: int, folder: Path) -> None:
    """One process of a run from step ``begin`` to ``end``; ``folder`` holds checkpoints."""
    dist.init_process_group("gloo")
    data = text()
    own: Any = autopar.parallelize(model(), hints=PLANS[plan], example_inputs=batch(data, 0))
    optimizer = adamw(own.parameters())
    state = {"training": autopar.TrainingState(own, optimizer)}
    if begin:
        dcp.load(state, checkpoint_id=autopar.latest_checkpoint(folder))
    losses = []
    for step in range(begin, end):
        losses.append(float(own.train_step(**batch(data, step))))
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(state, checkpoint_id=folder / f"step-{end}")
    if dist.get_rank() == 0:
        (folder / f"losses-{begin}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def train(curve: Curve, steps: int) -> list[float]:
    """The losses of a run on ``PROCESSES`` processes, new ones for every plan."""
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, plan in enumerate(curve.plans):
            begin, end = (steps * k // len(curve.plans) for k in (i, i + 1))
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
            command = [*launch, __file__, "--worker", plan, str(begin), str(end), folder]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            losses += json.loads((Path(folder) / f"losses-{begin}.json").read_text())
    return losses


def show(curves: dict[str, list[float]]) -> None:
    """First and last losses, and how far each curve is from that of one process."""
    table = Table("run", "first loss", "last loss", "largest difference", "at the end")
    truth = curves[REFERENCE]
    for name, losses in curves.items():
        off = [abs(a - b) / abs(b) for a, b in zip(losses, truth, strict=True)]
        table.add_row(name, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{max(off):.1e}", f"{off[-1]:.1e}")
    Console().print(table)


def plot(curves: dict[str, list[float]], path: str) -> None:
    """Draw all curves, and below them their differences from one process."""
    import matplotlib  # here, because only this needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7))
    for i, (name, losses) in enumerate(curves.items()):
        above.plot(losses, color=f"C{i}", label=name, linewidth=1)
        if name != REFERENCE:
            off = [abs(a - b) / abs(b) for a, b in zip(losses, curves[REFERENCE], strict=True)]
            below.semilogy([max(x, 1e-9) for x in off], color=f"C{i}", linewidth=1)
    above.set_ylabel("loss")
    below.set_ylabel("relative difference from one process")
    below.set_xlabel("step")
    above.legend(fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--plot", metavar="FILE", help="draw the curves there")
    parser.add_argument("--json", metavar="FILE", help="write the losses there")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        plan, begin, end, folder = options.worker
        worker(plan, int(begin), int(end), Path(folder))
        return
    curves = {REFERENCE: reference(options.steps), **{c.name: train(c, options.steps) for c in CURVES}}
    show(curves)
    if options.json:
        Path(options.json).write_text(json.dumps(curves, indent=1) + "\n")
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
