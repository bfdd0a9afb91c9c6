"""The machines a plan is made for: hosts of equal devices, and the communication groups that a mesh forms on them.

Ranks are numbered as torchrun does: hosts outermost, the devices of a host contiguous. Nothing here needs a GPU or a
process group, except that ``Cluster.detect`` reads torchrun's environment and asks CUDA for the name of the device.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from autopar.cost_model.hardware import (
    Device,
    Link,
    check_keys,
    device_from_spec,
    device_names,
    load_device,
    preset_spec,
)
from autopar.errors import ClusterError

_FORMAT = re.compile(r"(?P<preset>[^:]+):(?:(?P<hosts>\d+)x)?(?P<devices>\d+)")
_FILE_KEYS = {"preset": "text", "hosts": "a whole number", "devices_per_host": "a whole number", "device": "a table"}


@dataclass(frozen=True)
class Group:
    """A communication group of ``size`` ranks, as the slowest of the groups of its axis sees it.

    ``hosts`` counts what the scale-up link does not cross: hosts, or whole racks where NVLink spans a rack (NVL72).
    At most ``per_host`` ranks lie in one of them, joined by ``intra``. ``inter`` is one device's share of the network,
    None within one host.
    """

    size: int
    hosts: int
    per_host: int
    intra: Link
    inter: Link | None


@dataclass(frozen=True)
class Cluster:
    """``hosts`` machines with ``devices_per_host`` equal devices each. Memory and bandwidths are in ``device``."""

    device: Device
    hosts: int
    devices_per_host: int

    def __post_init__(self) -> None:
        for what, count in (("hosts", self.hosts), ("devices_per_host", self.devices_per_host)):
            if count < 1:
                raise ClusterError(
                    f"A cluster cannot have {count} {what}.",
                    expected="a whole number from 1",
                    found=str(count),
                    change=f"give at least one as {what}",
                )

    @property
    def size(self) -> int:
        """Number of devices, which is the number of ranks."""
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        return f"{self.device.name}:{self.hosts}x{self.devices_per_host}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """``"h100-sxm:16x8"``: 16 hosts of 8 devices; ``"h100-sxm:8"``: one host of 8. ClusterError if malformed or
        if there is no such preset."""
        match = _FORMAT.fullmatch(text.strip())
        if match is None:
            raise ClusterError(
                f"Cannot read {text!r} as a cluster.",
                expected="PRESET:HOSTSxDEVICES or PRESET:DEVICES",
                found=repr(text),
                change='write for instance "h100-sxm:16x8" (16 hosts of 8 devices); Cluster.load reads a file',
            )
        return cls(load_device(match["preset"]), int(match["hosts"] or 1), int(match["devices"]))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a TOML file: ``hosts``, ``devices_per_host`` and either ``preset`` with a table ``device`` that
        overrides keys of it, or a whole ``device`` (the keys of ``cost_model/data/*.toml``).

        ClusterError names a key that is unknown (with the nearest), missing or of the wrong type.
        """
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(
                f"Cannot read the cluster file {path}.",
                expected="a TOML file",
                found=str(error),
                change="check the path",
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ClusterError(
                f"{path} is not valid TOML.",
                expected="a TOML file",
                found=str(error),
                change="correct the line named above",
            ) from error
        return cls.from_dict(table, where=str(path))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "cluster") -> Self:
        """A cluster from the table that ``to_dict`` gives or ``load`` reads; ``where`` names it in errors."""
        check_keys(table, _FILE_KEYS, where)
        for key in ("hosts", "devices_per_host"):
            if key not in table:
                raise ClusterError(
                    f"{where}: {key} is missing.",
                    expected=_FILE_KEYS[key],
                    found=", ".join(table) or "an empty table",
                    change=f"add for instance {key} = 8",
                )
        if "preset" not in table and "device" not in table:
            raise ClusterError(
                f"{where}: neither preset nor device is given.",
                expected="one of them or both",
                found=", ".join(table),
                change='add for instance preset = "h100-sxm"',
            )
        base = preset_spec(table["preset"]) if "preset" in table else {}
        spec = _merged(base, table.get("device", {}))
        return cls(device_from_spec(spec, f"{where}: device"), table["hosts"], table["devices_per_host"])

    @classmethod
    def detect(cls) -> Self:
        """The cluster that this process runs in: its size from torchrun's WORLD_SIZE and LOCAL_WORLD_SIZE, one device
        without them; its device from CUDA's name for it, ``cpu`` without CUDA (memory: the RAM of the host divided by
        its processes). ClusterError if the environment contradicts itself or the GPU has no preset."""
        hosts, per_host = _detect_shape()
        if torch.cuda.is_available():
            return cls(load_device(_preset_of(torch.cuda.get_device_name())), hosts, per_host)
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        spec = preset_spec("cpu") | {"memory_gib": ram / per_host / 2**30}
        return cls(device_from_spec(spec), hosts, per_host)

    @classmethod
    def calibrate(cls, *, seconds: float = 10.0) -> Self:
        """The cluster that this process runs in, as `detect` finds it, with constants measured here: matrix products,
        memory bandwidth, attention and overheads in about so many ``seconds``, and within a process group every
        collective between its ranks (all of them call this; it takes some seconds more). ``save`` keeps it.
        ClusterError if the ranks are not those of torchrun's environment, and what `detect` raises."""
        from autopar.cost_model.calibrate import calibrated  # which needs the groups of this module

        found = cls.detect()
        ranks = dist.get_world_size() if dist.is_initialized() else found.size
        if ranks != found.size:
            raise ClusterError(
                f"The process group has {ranks} ranks and torchrun's environment says {found.size}.",
                expected="a process group of all ranks",
                found=f"{ranks} ranks",
                change="start with torchrun, or calibrate before the process group is made",
            )
        spec = calibrated(found.device.spec, found.hosts, found.devices_per_host, seconds)
        return cls(device_from_spec(spec), found.hosts, found.devices_per_host)

    def to_dict(self) -> dict[str, Any]:
        """A table of plain values that ``from_dict`` turns into an equal cluster, whatever becomes of the preset."""
        return {"hosts": self.hosts, "devices_per_host": self.devices_per_host, "device": dict(self.device.spec)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a TOML file that ``load`` reads back to an equal cluster."""
        Path(path).write_text("\n".join(toml_lines(self.to_dict())) + "\n", encoding="utf-8")

    def group(self, stride: int, size: int) -> Group:
        """The group formed by ``size`` ranks ``stride`` apart, of an axis of a mesh whose inner axes hold ``stride``
        ranks. Of all such groups the one over most hosts, if they differ. ClusterError unless ``stride * size`` divides
        the cluster."""
        if stride < 1 or size < 1 or self.size % (stride * size):
            raise ClusterError(
                f"Groups of {size} ranks {stride} apart do not tile {self}.",
                expected=f"stride x size that divides {self.size}",
                found=f"{stride} x {size}",
                change="choose degrees whose product is the number of devices",
            )
        domain = self._domain()
        # The ranks of a group ascend along dim 1, so those of one domain are a run.
        domains = np.arange(self.size).reshape(-1, size, stride) // domain
        spans = (np.diff(domains, axis=1) > 0).sum(axis=1) + 1
        block, _, offset = np.unravel_index(spans.argmax(), (len(domains), 1, stride))
        hosts = int(spans.max())
        per_host = int(np.unique(domains[block, :, offset], return_counts=True)[1].max())
        return Group(size, hosts, per_host, self._intra(per_host), self.device.network if hosts > 1 else None)

    def _domain(self) -> int:
        """Ranks joined by the scale-up link: a host, or as many whole hosts as the link spans."""
        reach = self.device.scale_up_devices if self.device.scale_up_spans_hosts else 0
        return max(1, reach // self.devices_per_host) * self.devices_per_host

    def _intra(self, members: int) -> Link:
        """The scale-up link as a group of ``members`` uses it. In a full mesh (MI300X: 7 links of 64 GB/s) a device
        uses only its links to the members; a switch gives all its bandwidth to any group."""
        link, others = self.device.scale_up, self.device.scale_up_devices - 1
        if not self.device.scale_up_mesh or members > others:
            return link
        return replace(link, bandwidth=link.bandwidth * max(1, members - 1) / others)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``, table by table."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merged(base[key], value) if both else value
    return merged


def _detect_shape() -> tuple[int, int]:
    """(hosts, devices per host) from torchrun's environment; (1, 1) outside it."""
    if "WORLD_SIZE" not in os.environ:
        return 1, 1
    found = {key: os.environ.get(key, "unset") for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    numbers = [int(value) if value.isdigit() else 0 for value in found.values()]
    world, local = numbers
    if not world or not local or world % local:
        raise ClusterError(
            "WORLD_SIZE and LOCAL_WORLD_SIZE do not describe equal hosts.",
            expected="whole numbers, LOCAL_WORLD_SIZE dividing WORLD_SIZE",
            found=", ".join(f"{key}={value}" for key, value in found.items()),
            change="start with torchrun and the same --nproc-per-node on every host, or pass cluster=",
        )
    return world // local, local


def _preset_of(cuda_name: str) -> str:
    """The preset whose ``cuda_names`` occur in CUDA's name of the device; the longest match wins."""
    matches = [
        (len(name), preset)
        for preset in device_names()
        for name in load_device(preset).cuda_names
        if name.lower() in cuda_name.lower()
    ]
    if not matches:
        raise ClusterError(
            f"There is no preset for the device {cuda_name!r}.",
            expected="a device with a preset",
            found=cuda_name,
            change="pass cluster=Cluster.load(file) with a file that describes it, or "
            f"a preset: {', '.join(device_names())}",
        )
    return max(matches)[1]


def toml_lines(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """TOML text of nested tables of numbers, text, booleans and lists: JSON's notation for these is TOML's too."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            path = f"{prefix}{json.dumps(key)}"
            lines += ["", f"[{path}]", *toml_lines(value, f"{path}.")]
    return lines
