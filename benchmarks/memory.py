"""Peak memory of a training step: what plans predict, what PyTorch tracks, and what processes take.

    python benchmarks/memory.py [--json FILE] [--plans NAME ...]

Ten plans of one small Llama train on four Gloo processes, each plan in a fresh run. `predicted` is `Plan.peak_memory`;
`tracked` the peak that torch.distributed._tools.mem_tracker.MemTracker sees in a whole step, forward, backward and
AdamW, on the rank that has most; `ratio` is predicted / tracked. `resident` is by how much a process had grown at most
since before the model was made (VmHWM - VmRSS): the allocator, Gloo's buffers and code that is loaded late come on top.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RANKS, BATCH, SEQUENCE = 4, 16, 128
MODEL = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": SEQUENCE, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "dp4": {"dp": 4},
    "dp4, zero 3": {"dp": 4, "zero": 3},
    "dp4, zero 3, full": {"dp": 4, "zero": 3, "recompute": "full"},
    "dp4, zero 3, 4 micro-batches": {"dp": 4, "zero": 3, "micro_batch_size": 1},
    "tp4": {"tp": 4},
    "tp4, full": {"tp": 4, "recompute": "full"},
    "dp2, tp2, selective": {"dp": 2, "tp": 2, "recompute": "selective"},
    "dp2, tp2, zero 3, first 3 blocks": {"dp": 2, "tp": 2, "zero": 3, "recompute": "full:3"},
    "dp2, tp2, 4 micro-batches": {"dp": 2, "tp": 2, "micro_batch_size": 2},
    "pp2, dp2, 4 micro-batches": {"pp": 2, "dp": 2, "schedule": "1f1b", "micro_batch_size": 2},
}


@dataclass(frozen=True)
class Row:
    """One plan; bytes of the rank that has most."""

    name: str
    predicted: int
    tracked: int
    ratio: float
    resident: int


def _status(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def worker(name: str) -> None:
    """One rank of one plan; rank 0 prints its row."""
    import torch
    import torch.distributed as dist
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar
    from autopar.runtime.process import ensure_process_group

    ensure_process_group()
    dist.barrier()
    before = _status("VmRSS")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**MODEL))
    ids = torch.randint(0, 512, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    hints = autopar.Hints(**PLANS[name])
    parallel = autopar.parallelize(model, cluster=f"cpu:{RANKS}", hints=hints, example_inputs=batch)
    optimizer = torch.optim.AdamW(parallel.parameters())

    def step() -> None:
        if parallel.plan.num_micro_batches > 1:
            parallel.train_step(**batch)
        else:
            parallel(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the program and the optimizer's state
    step()
    resident = _status("VmHWM") - before
    tracker = MemTracker()
    tracker.track_external(parallel, optimizer)
    with tracker:
        step()
    most = torch.tensor([tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], resident])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    tracked, resident = most.tolist()
    predicted = parallel.plan.peak_memory
    if dist.get_rank() == 0:
        print("ROW " + json.dumps(asdict(Row(name, predicted, tracked, predicted / tracked, resident))), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str) -> Row:
    """Run one plan on its processes."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(RANKS), __file__, "--worker", name]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = re.search(r"^ROW (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    return Row(**json.loads(found[1]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS), metavar="NAME", help="some of them")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    print("| plan | predicted MiB | tracked MiB | ratio | resident MiB |\n| --- | --- | --- | --- | --- |")
    rows = []
    for name in arguments.plans:
        row = measure(name)
        rows.append(row)
        sizes = [f"{n / 2**20:.1f}" for n in (row.predicted, row.tracked, row.resident)]
        print(f"| {name} | {sizes[0]} | {sizes[1]} | {row.ratio:.3f} | {sizes[2]} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
