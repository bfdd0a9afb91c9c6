"""Measures this machine as the ``cpu`` device and prints its TOML entry (``cost_model/data/cpu.toml``).

    OMP_NUM_THREADS=1 python benchmarks/measure_cpu.py > cost_model/data/cpu.toml       # about two minutes

One device is one process with one thread, as the tests run it. The device is measured as `Cluster.calibrate` does it,
and Gloo's collectives between 2 and between 4 processes together: processes share the cores and the memory, so 4 are
slower than the formula's bandwidth term says and the constants are a compromise. What is printed is the preset as it
is, with what was measured in the place of its numbers.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from autopar.cluster import toml_lines
from autopar.cost_model.calibrate import collective_samples, fit_plain, link_table, measured_compute
from autopar.cost_model.fit import Sample
from autopar.cost_model.hardware import COLLECTIVES, attention_tables, load_device, preset_spec

WORLDS = (2, 4)
SECONDS = 60.0


def _worker(rank: int, world: int, port: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    samples = collective_samples(dist.group.WORLD, world, 1, "cpu")
    if rank == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump([asdict(sample) for sample in samples], file)
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
            rows = [Sample(**row) for row in json.load(file)]
        # Only 2 of the 4 processes take part in a p2p, so its second run would count twice.
        samples += [s for s in rows if s.kind != "p2p" or s.size == 2]
    return samples


def rounded(value: Any) -> Any:
    """Nested tables with their numbers to five decimals."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    preset, device = preset_spec("cpu"), load_device("cpu")
    found = measured_compute(device.spec, SECONDS)
    nominal = found["scale_up_gbs"] = found["stream_gbs"]
    with tempfile.TemporaryDirectory() as folder:
        samples = gloo_samples(folder)
    fitted = {name: fit_plain(samples, name) for name in COLLECTIVES}
    links = {preset["scale_up_link"]: link_table(samples, fitted, nominal * 1e9)}
    kernel = attention_tables()[preset["attention_kernel"]]
    own = {key: value for key, value in found["attention"].items() if value != kernel[key]}
    table = {**{key: found[key] for key in preset if key in found}, "attention": own, "links": links}
    print("\n".join(toml_lines(rounded(table))).lstrip())


if __name__ == "__main__":
    main()
