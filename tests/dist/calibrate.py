"""Calibration in real processes: every rank gets the constants that rank 0 has measured, and they predict its times.

    torchrun --nproc-per-node 2 tests/dist/calibrate.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from training import say

from autopar import Cluster
from autopar.cost_model.calibrate import collective_samples
from autopar.cost_model.communication import collective_seconds
from autopar.runtime.process import ensure_process_group


def main() -> None:
    """Calibrate, compare with a second measurement, and save."""
    torch.set_num_threads(1)
    ensure_process_group()
    cluster = Cluster.calibrate(seconds=1.0)
    world = dist.get_world_size()
    given = [None] * world
    dist.all_gather_object(given, cluster.to_dict())
    assert all(table == given[0] for table in given), "ranks differ"
    link = cluster.device.links[cluster.device.scale_up.name]
    for kind, constants in link.items():
        assert constants.source.startswith("measured: 7 points"), (kind, constants)
    group = cluster.group(1, world)
    for sample in collective_samples(dist.group.WORLD, world, 1, "cpu"):
        told = collective_seconds(sample.kind, sample.nbytes, group, cluster.device)
        say(f"{sample.kind} {int(sample.nbytes)} {sample.seconds:.3g} {told:.3g}")
    if dist.get_rank() == 0:
        cluster.save(Path(sys.argv[1]) / "cluster.toml")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
