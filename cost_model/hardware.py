"""What one device can do, read from the data files beside this module: peaks, memory, links, measured constants.

A preset is a TOML file in ``data/`` whose key names carry the units (``memory_gib``, ``network_gbs``) and which names
the source of every number. The constants of the links (how much of the nominal bandwidth a collective reaches, and
its latencies) are shared by devices with the same kind of link and lie in ``data/links.toml``, which
``benchmarks/fit_links.py`` writes; those of attention kernels lie in ``data/attention.toml``. Everything in a
``Device`` is in SI units: FLOP/s, bytes, bytes/s, seconds.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar.errors import ClusterError

DATA = Path(__file__).parent / "data"
_SHARED = ("links", "attention")  # files there that are no presets
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")

# The name under which a peak is listed. A matmul in torch.float32 runs at the fp32 peak, not at tf32: torch's default
# is torch.backends.cuda.matmul.allow_tf32 = False.
_DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

_NUMBER, _WHOLE, _TEXT = "a number", "a whole number", "text"
_FLAG, _TABLE, _LIST = "true or false", "a table", "a list"
_KEYS = {
    "name": _TEXT,
    "source": _TEXT,
    "notes": _TEXT,
    "sources": _TABLE,
    "cuda_names": _LIST,
    "peak_tflops": _TABLE,
    "memory_gib": _NUMBER,
    "context_gib": _NUMBER,
    "memory_bandwidth_gbs": _NUMBER,
    "stream_gbs": _NUMBER,
    "matmul_efficiency": _NUMBER,
    "sustained": _NUMBER,
    "matmul_ramp_us": _NUMBER,
    "core_count": _WHOLE,
    "matmul_tiles": _LIST,
    "tile_loss": _NUMBER,
    "tile_overhead_k": _NUMBER,
    "unaligned": _NUMBER,
    "kernel_overhead_us": _NUMBER,
    "launch_overhead_us": _NUMBER,
    "attention_kernel": _TEXT,
    "attention": _TABLE,
    "overlap_rate": _NUMBER,
    "scale_up_link": _TEXT,
    "scale_up_gbs": _NUMBER,
    "scale_up_devices": _WHOLE,
    "scale_up_spans_hosts": _FLAG,
    "scale_up_mesh": _FLAG,
    "network_link": _TEXT,
    "network_gbs": _NUMBER,
    "links": _TABLE,
}
#: `Device.overlap_rate` where a file does not give it: while collectives run, computation is slowed down by 18.9 %
#: on average over A100, H100, MI210 and MI250 (Lee et al., arXiv:2507.03114, 2025).
OVERLAP_RATE = 1 / 1.189
#: `Device.unaligned` where a file does not give it. Tensor cores are fed 16 bytes at a time, and most efficient with
#: rows that begin at multiples of them (NVIDIA, Matrix Multiplication Background User's Guide, section 2.2). What is
#: left without: on an A100 a step of GPT-2 with 50,257 words took 1.25 times as long as with 50,304 (Karpathy, nanoGPT,
#: 2023); the head's products, a third of the step's FLOPs and with 50,304 words about a fifth of its time, therefore
#: took 2.2 times as long.
UNALIGNED = 0.45
_OPTIONAL = {
    "notes", "sources", "cuda_names", "context_gib", "overlap_rate", "scale_up_spans_hosts", "scale_up_mesh", "links",
    "attention", "unaligned",
}
_LINK_KEYS = {"efficiency": _NUMBER, "base_us": _NUMBER, "step_us": _NUMBER, "fill_us": _NUMBER, "source": _TEXT}
_ATTENTION_KEYS = {"forward": _TABLE, "backward": _TABLE, "forward_half": _NUMBER, "backward_half": _NUMBER,
                   "causal": _NUMBER, "causal_half": _NUMBER, "source": _TEXT}
_MAY_BE_ZERO = {
    "matmul_ramp_us", "tile_loss", "tile_overhead_k", "kernel_overhead_us", "launch_overhead_us", "base_us", "step_us",
    "fill_us", "overlap_rate", "context_gib", "forward_half", "backward_half", "causal_half",
}


@dataclass(frozen=True)
class Link:
    """A kind of connection; ``bandwidth`` is nominal, in bytes/s per device and direction."""

    name: str
    bandwidth: float


@dataclass(frozen=True)
class LinkConstants:
    """What one collective reaches on one kind of link.

    ``efficiency`` is achieved over nominal bandwidth, ``base`` seconds a call and ``step`` seconds a step of the
    algorithm, ``fill`` seconds in which its pipeline fills. ``switch_efficiency`` is that of a reduction inside the
    switch, 0 where there is none.
    """

    efficiency: float
    base: float
    step: float
    fill: float
    source: str
    switch_efficiency: float


@dataclass(frozen=True)
class Attention:
    """The level of an attention kernel (``data/attention.toml``): fractions of the peak by head dim, ascending, and the
    keys at which half of them is reached."""

    head_dims: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    forward_half: float
    backward_half: float
    causal: float
    causal_half: float
    source: str

    def efficiency(self, head_dim: float, keys: float, causal: bool, backward: bool) -> float:
        """FLOP/s over peak, of the FLOPs that a causal mask leaves; between two head dims interpolated, beyond them as
        at the last."""
        level = float(np.interp(head_dim, self.head_dims, self.backward if backward else self.forward))
        half = self.backward_half if backward else self.forward_half
        if causal:
            level, half = level * self.causal, half + self.causal_half
        return level * keys / (keys + half)


@dataclass(frozen=True)
class Device:
    """One accelerator (or CPU process) with its links. ``spec`` is the table it was read from, with the constants of
    its links and its attention kernel filled in: a device is compared and saved by it, and does not depend on data
    files that may change.

    ``matmul_efficiency`` is achieved over peak FLOP/s of the largest of its ``matmul_tiles`` (rows, columns) on a long
    contraction, ``sustained`` what is left of it in a long run at the power limit, ``matmul_ramp`` seconds that a
    product takes to fill and drain the ``core_count`` cores; ``tile_loss`` and ``tile_overhead_k`` are the constants a
    and k of `autopar.cost_model.compute`, ``unaligned`` the fraction of its speed that a product keeps whose rows do
    not begin at multiples of 16 bytes. ``kernel_overhead`` are the device's seconds and ``launch_overhead`` the host's
    for every kernel. ``overlap_rate`` is the fraction of its speed (0 to 1) that compute keeps while a collective runs
    beside it. ``context_bytes`` are those of ``memory_bytes`` that tensors never have: the device's
    context, its libraries' workspaces and the buffers of collectives.
    """

    spec: Mapping[str, Any] = field(repr=False, hash=False)
    name: str
    peak_flops: Mapping[str, float] = field(compare=False)
    memory_bytes: int = field(compare=False)
    context_bytes: int = field(compare=False)
    memory_bandwidth: float = field(compare=False)
    stream_efficiency: float = field(compare=False)
    matmul_efficiency: float = field(compare=False)
    sustained: float = field(compare=False)
    matmul_ramp: float = field(compare=False)
    core_count: int = field(compare=False)
    matmul_tiles: tuple[tuple[int, int], ...] = field(compare=False)
    tile_loss: float = field(compare=False)
    tile_overhead_k: float = field(compare=False)
    unaligned: float = field(compare=False)
    kernel_overhead: float = field(compare=False)
    launch_overhead: float = field(compare=False)
    attention: Attention = field(compare=False, repr=False)
    overlap_rate: float = field(compare=False)
    scale_up: Link = field(compare=False)
    scale_up_devices: int = field(compare=False)
    scale_up_spans_hosts: bool = field(compare=False)
    scale_up_mesh: bool = field(compare=False)
    network: Link = field(compare=False)
    links: Mapping[str, Mapping[str, LinkConstants]] = field(compare=False, repr=False)
    cuda_names: tuple[str, ...] = field(compare=False)
    source: str = field(compare=False)

    def peak(self, dtype: torch.dtype) -> float:
        """Peak dense FLOP/s for ``dtype``; the fp32 peak for a dtype that the device does not list (a V100 runs bf16
        through fp32; integers do no FLOPs that are counted)."""
        return self.peak_flops.get(_DTYPE_NAMES.get(dtype, "fp32"), self.peak_flops["fp32"])

    def constants(self, link: Link, kind: str) -> LinkConstants:
        """Constants of the collective ``kind`` (one of ``COLLECTIVES``) on ``link``."""
        return self.links[link.name][kind]


def nearest(word: str, known: Iterable[str]) -> str:
    """What to change: the known names closest to ``word``, or all of them where none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"use one of: {', '.join(names)}"


def device_names() -> list[str]:
    """Names of the presets, sorted."""
    return sorted(path.stem for path in DATA.glob("*.toml") if path.stem not in _SHARED)


def preset_spec(name: str) -> dict[str, Any]:
    """The table of a preset as its data file has it; ClusterError if there is none of that name."""
    if name not in device_names():
        raise ClusterError(
            f"There is no device preset {name!r}.",
            expected="the name of a preset", found=name, change=nearest(name, device_names()),
        )
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


def load_device(name: str) -> Device:
    """The preset ``name``, for instance ``"h100-sxm"``; ClusterError if there is none."""
    return device_from_spec(preset_spec(name))


def device_from_spec(spec: Mapping[str, Any], where: str = "device") -> Device:
    """A ``Device`` from a table with the keys of a preset file (TOML or JSON types); ClusterError names what is
    unknown, missing or of the wrong type. ``where`` names the table in messages."""
    check_keys(spec, _KEYS, where)
    for key in _KEYS:
        if key not in spec and key not in _OPTIONAL:
            raise ClusterError(f"{where}: {key} is missing.", expected=_KEYS[key], found="nothing",
                               change=f"add {key}, or start from a preset: preset = \"h100-sxm\"")
    links, attention = _link_tables(spec, where), _attention_table(spec, where)
    peaks = _peaks(spec["peak_tflops"], where)
    bandwidth = spec["memory_bandwidth_gbs"] * 1e9
    return Device(
        spec={**spec, "links": links, "attention": attention}, name=spec["name"], peak_flops=peaks,
        memory_bytes=round(spec["memory_gib"] * 2**30),
        context_bytes=round(spec.get("context_gib", 0.0) * 2**30), memory_bandwidth=bandwidth,
        stream_efficiency=spec["stream_gbs"] * 1e9 / bandwidth,
        matmul_efficiency=spec["matmul_efficiency"], sustained=spec["sustained"],
        matmul_ramp=spec["matmul_ramp_us"] * 1e-6, core_count=spec["core_count"],
        matmul_tiles=_tiles(spec["matmul_tiles"], where), tile_loss=spec["tile_loss"],
        tile_overhead_k=spec["tile_overhead_k"], unaligned=spec.get("unaligned", UNALIGNED),
        kernel_overhead=spec["kernel_overhead_us"] * 1e-6,
        launch_overhead=spec["launch_overhead_us"] * 1e-6, attention=_attention(attention, where),
        overlap_rate=min(1.0, spec.get("overlap_rate", OVERLAP_RATE)),
        scale_up=Link(spec["scale_up_link"], spec["scale_up_gbs"] * 1e9),
        scale_up_devices=spec["scale_up_devices"],
        scale_up_spans_hosts=spec.get("scale_up_spans_hosts", False), scale_up_mesh=spec.get("scale_up_mesh", False),
        network=Link(spec["network_link"], spec["network_gbs"] * 1e9),
        links={link: _link_constants(table, f"{where}.links.{link}") for link, table in links.items()},
        cuda_names=tuple(spec.get("cuda_names", ())), source=spec["source"],
    )


def check_keys(table: Mapping[str, Any], known: Mapping[str, str], where: str) -> None:
    """ClusterError unless every key of ``table`` is one of ``known`` and has the type said there."""
    for key, value in table.items():
        if key not in known:
            raise ClusterError(f"{where}: there is no key {key!r}.", expected=f"keys {', '.join(known)}", found=key,
                               change=nearest(key, known))
        if not _has_type(value, known[key]):
            raise ClusterError(f"{where}: {key} has the wrong type.", expected=known[key], found=repr(value),
                               change=f"write {key} as {known[key]}")
        if known[key] in (_NUMBER, _WHOLE) and (value < 0 or (value == 0 and key not in _MAY_BE_ZERO)):
            raise ClusterError(f"{where}: {key} must be positive.", expected="a number above 0", found=repr(value),
                               change=f"correct {key}")


def _has_type(value: object, kind: str) -> bool:
    types: dict[str, tuple[type, ...]] = {_NUMBER: (int, float), _WHOLE: (int,), _TEXT: (str,), _FLAG: (bool,),
                                          _TABLE: (Mapping,), _LIST: (list,)}
    return isinstance(value, types[kind]) and (kind == _FLAG or not isinstance(value, bool))


def _peaks(table: Mapping[str, Any], where: str) -> dict[str, float]:
    known = dict.fromkeys(("bf16", "fp16", "fp8", "fp4", "tf32", "fp32", "fp64"), _NUMBER)
    check_keys(table, known, f"{where}.peak_tflops")
    if "fp32" not in table:
        raise ClusterError(f"{where}: peak_tflops.fp32 is missing.", expected=_NUMBER, found=", ".join(table),
                           change="add fp32; it also stands in for dtypes that are not listed")
    return {dtype: tflops * 1e12 for dtype, tflops in table.items()}


def _tiles(pairs: list[Any], where: str) -> tuple[tuple[int, int], ...]:
    able = bool(pairs) and all(
        isinstance(pair, list) and len(pair) == 2 and all(_has_type(n, _WHOLE) and n > 0 for n in pair)
        for pair in pairs
    )
    if not able:
        raise ClusterError(f"{where}: matmul_tiles are not pairs of sizes.", expected="a list of [rows, columns]",
                           found=repr(pairs), change="write for instance matmul_tiles = [[128, 256], [128, 128]]")
    return tuple((rows, columns) for rows, columns in pairs)


def _attention_table(spec: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table of the device's attention kernel: that of ``attention.toml``, with what its own ``attention``
    overrides."""
    name, own = spec["attention_kernel"], spec.get("attention", {})
    known = attention_tables()
    if name not in known and not own:
        raise ClusterError(f"{where}: attention_kernel is one that is not known.", expected="an attention kernel",
                           found=name, change=nearest(name, known))
    return {**known.get(name, {}), **own}


def _attention(table: Mapping[str, Any], where: str) -> Attention:
    where = f"{where}.attention"
    check_keys(table, _ATTENTION_KEYS, where)
    missing = [key for key in _ATTENTION_KEYS if key not in table]
    by_head_dim = [table.get(key, {}) for key in ("forward", "backward")]
    for levels in by_head_dim:
        check_keys(levels, {key: _NUMBER for key in levels if key.isdigit()}, where)
    if missing or not by_head_dim[0] or by_head_dim[0].keys() != by_head_dim[1].keys():
        raise ClusterError(f"{where} is incomplete.", expected=", ".join(_ATTENTION_KEYS) + ", both directions for the "
                           "same head dims", found=", ".join(table), change="complete the table, or leave it out")
    dims = sorted(by_head_dim[0], key=int)
    forward, backward = (tuple(levels[d] for d in dims) for levels in by_head_dim)
    numbers = {key: table[key] for key in ("forward_half", "backward_half", "causal", "causal_half", "source")}
    return Attention(tuple(map(float, dims)), forward, backward, **numbers)


def _link_tables(spec: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The tables of the two links the device uses: ``links.toml``, with what the device's own ``links`` override."""
    tables = dict(link_tables())
    for link, own in spec.get("links", {}).items():
        tables[link] = {**tables.get(link, {}), **own} if isinstance(own, Mapping) else {}
    for key in ("scale_up_link", "network_link"):
        if spec[key] not in tables:
            raise ClusterError(f"{where}: {key} is a kind of link that is not known.", expected="a kind of link",
                               found=spec[key], change=nearest(spec[key], tables))
    return {link: tables[link] for link in (spec["scale_up_link"], spec["network_link"])}


def _link_constants(table: Mapping[str, Any], where: str) -> dict[str, LinkConstants]:
    constants = {}
    for kind in COLLECTIVES:
        entry = table.get(kind)
        if not isinstance(entry, Mapping) or not entry.keys() >= set(_LINK_KEYS):
            raise ClusterError(f"{where}: {kind} is missing or incomplete.",
                               expected=", ".join(_LINK_KEYS), found=repr(entry),
                               change=f"add the table {kind}")
        check_keys(entry, _LINK_KEYS | {"switch_efficiency": _NUMBER}, f"{where}.{kind}")
        constants[kind] = LinkConstants(
            efficiency=entry["efficiency"], base=entry["base_us"] * 1e-6, step=entry["step_us"] * 1e-6,
            fill=entry["fill_us"] * 1e-6, source=entry["source"], switch_efficiency=entry.get("switch_efficiency", 0.0),
        )
    return constants


@functools.cache
def link_tables() -> dict[str, Any]:
    """``links.toml``: kind of link -> collective -> efficiency, base_us, step_us, fill_us, source."""
    return tomllib.loads((DATA / "links.toml").read_text(encoding="utf-8"))


@functools.cache
def attention_tables() -> dict[str, Any]:
    """``attention.toml``: attention kernel -> its table."""
    return tomllib.loads((DATA / "attention.toml").read_text(encoding="utf-8"))
