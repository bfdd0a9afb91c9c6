"""The commands about machines: ``clusters`` and ``calibrate``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer

from autopar.cli.output import Json, note, reporting, show
from autopar.cluster import Cluster
from autopar.cost_model.hardware import Device, LinkConstants, device_names, load_device, preset_spec
from autopar.errors import ClusterError
from autopar.report.tables import rendered, table
from autopar.report.units import bytes_text, seconds_text
from autopar.runtime.process import ensure_process_group


@reporting
def clusters(as_json: Json = False) -> None:
    """The devices that --cluster knows, with the sources of their numbers; with --json all of the numbers.

    \b
    autopar clusters
    """
    devices = {name: load_device(name) for name in device_names()}
    header = ("preset", "memory", "GB/s", "16 bit", "float32", "link", "devices", "GB/s", "network GB/s")
    numbers = table([_numbers(name, d) for name, d in devices.items()], header, right=(1, 2, 3, 4, 6, 7, 8))
    sources = table([(name, device.source) for name, device in devices.items()])
    about = "16 hosts of 8 devices are --cluster h100-sxm:16x8, other hardware is a cluster.toml."
    text = rendered([("Presets: dense TFLOP/s, links in each direction", numbers), ("Sources", sources), ("", about)])
    show(as_json, text, {name: preset_spec(name) for name in devices})


def _numbers(name: str, device: Device) -> tuple[str, ...]:
    """The row of a preset."""
    half = max(device.peak_flops.get(dtype, 0.0) for dtype in ("bf16", "fp16"))
    return (
        name,
        bytes_text(device.memory_bytes),
        f"{device.memory_bandwidth / 1e9:.0f}",
        f"{half / 1e12:.4g}",
        f"{device.peak_flops['fp32'] / 1e12:.3g}",
        device.scale_up.name,
        str(device.scale_up_devices),
        f"{device.scale_up.bandwidth / 1e9:.3g}",
        f"{device.network.bandwidth / 1e9:.3g}",
    )


@reporting
def calibrate(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a cluster.toml.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long to measure.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Measure this machine, matrix products, memory, attention and overheads, for a cluster.toml.

    Under torchrun every collective between its processes is measured too, and
    rank 0 writes.

    \b
    autopar calibrate -o here.toml
    torchrun --nproc-per-node 8 --no-python autopar calibrate -o here.toml
    """
    if "RANK" in os.environ:
        ensure_process_group()
    try:
        found = Cluster.calibrate(seconds=seconds)
        if not dist.is_initialized() or dist.get_rank() == 0:
            _write(found, output)
            show(as_json, _measured(found), found.to_dict())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _measured(cluster: Cluster) -> str:
    """What calibration measures of a device, for people."""
    device = cluster.device
    attention = (f"{level:.0%} at {dim:.0f}" for dim, level in zip(*_forward(device), strict=True))
    links = device.links[device.scale_up.name] if dist.is_initialized() else {}
    rows = [
        ("cluster", f"{cluster}, {bytes_text(device.memory_bytes)} a device"),
        ("matrix products", ", ".join(f"{t} {flops / 1e12:.3g} TFLOP/s" for t, flops in device.peak_flops.items())),
        ("memory", f"{device.memory_bandwidth / 1e9:.3g} GB/s"),
        ("a kernel", f"{seconds_text(device.kernel_overhead)} besides its work"),
        ("attention", f"of the peak, by head dim: {', '.join(attention)}"),
        *((name, _reached(constants)) for name, constants in links.items()),
        *([] if links else [("collectives", "not measured: there is one process")]),
    ]
    return rendered([(device.source, table(rows))])


def _forward(device: Device) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Head dims and the fraction of the peak that the forward of attention reaches at them."""
    return device.attention.head_dims, device.attention.forward


def _reached(constants: LinkConstants) -> str:
    """What a collective reaches within a host, and where that is from."""
    seconds = seconds_text(constants.base + constants.step)
    return f"{constants.efficiency:.0%} of the link, {seconds} a call of two ranks ({constants.source})"


def _write(cluster: Cluster, output: Path | None) -> None:
    """Save a cluster; ClusterError if that is not possible."""
    if output is None:
        return
    try:
        cluster.save(output)
    except OSError as error:
        raise ClusterError(
            f"Cannot write the cluster to {output}.",
            expected="a path in a folder that can be written",
            found=str(error),
            change="create the folder, or give another path",
        ) from error
    note(f"this machine is in {output}: --cluster {output}")
