"""Row -> cluster: a preset or a file of ``data/clusters``, with the row's hosts and network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster
from published.rows import Row

FILES = Path(__file__).parent.parent / "data" / "clusters"

#: `hardware` of a row -> preset; other hardware may have a file in ``data/clusters``.
PRESETS = {
    "A100-40GB-SXM": "a100-40g-sxm",
    "A100-80GB-SXM": "a100-80g-sxm",
    "H100-80GB-SXM": "h100-sxm",
    "H100-PCIe": "h100-pcie",
    "H200-SXM": "h200-sxm",
    "B200-SXM": "b200-sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
    "L40S": "l40s",
    "RTX4090": "rtx4090",
    "V100-32GB-SXM": "v100-32g-sxm",
}

#: How sources print the network of a host or of a device, and the numbers of them that multiply to Gb/s.
_PER_HOST = (
    r"(?P<count>\d+)x(?P<gbps>\d+) ?Gb/s(?: RDMA)? per node",
    r"(?P<gbps>\d+) ?Gb/s x(?P<count>\d+) per node",
    r"(?P<gbps>\d+) ?Gb/s per node",
)
_PER_DEVICE = (r"(?P<gbps>\d+) ?Gb/s per GPU", r"\d+x(?P<bytes>\d+) GB/s")


def network_gbs(text: str | None, devices_per_host: int) -> float | None:
    """GB/s a device and direction that a source's words on its network say; None if they do not."""
    for patterns, devices in ((_PER_HOST, devices_per_host), (_PER_DEVICE, 1)):
        for pattern in patterns:
            if found := re.search(pattern, text or ""):
                numbers = found.groupdict()
                gbps = 8 * int(numbers["bytes"]) if "bytes" in numbers else int(numbers["gbps"])
                return gbps * int(numbers.get("count") or 1) / devices / 8
    return None


def cluster_of(row: Row, **device: Any) -> Cluster | None:
    """The row's cluster; None for hardware that there is no description of. ``device`` overrides keys of its device."""
    path = FILES / f"{row.hardware}.toml"
    if row.hardware not in PRESETS and not path.exists():
        return None
    base = Cluster.load(path) if path.exists() else Cluster.parse(f"{PRESETS[row.hardware]}:1")
    network = network_gbs(row.interconnect_inter, row.gpus_per_node)
    per_host = min(row.n_gpus, row.gpus_per_node)
    table = base.to_dict() | {"hosts": max(1, row.n_gpus // per_host), "devices_per_host": per_host}
    changes = device | ({"network_gbs": network} if network else {})
    return Cluster.from_dict({**table, "device": {**table["device"], **changes}}, where=row.hardware)
