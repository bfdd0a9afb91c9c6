"""Clusters: what can be written, what is refused and with which words, and the groups that a mesh forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cluster import Cluster
from autopar.cost_model.hardware import device_names, load_device
from autopar.errors import ClusterError

PRESETS = [
    "a100-40g-sxm", "a100-80g-sxm", "h100-sxm", "h100-pcie", "h200-sxm", "b200-sxm", "gb200", "gb300", "mi300x",
    "mi325x", "mi355x", "l40s", "rtx4090", "v100-32g-sxm", "cpu",
]


def test_presets_are_those_of_the_contract() -> None:
    assert set(device_names()) == set(PRESETS)


@pytest.mark.parametrize("text, hosts, per_host", [("h100-sxm:16x8", 16, 8), ("h100-sxm:8", 1, 8), ("cpu:4", 1, 4)])
def test_parse(text: str, hosts: int, per_host: int) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.hosts, cluster.devices_per_host, cluster.size) == (hosts, per_host, hosts * per_host)
    assert str(cluster) == f"{text.split(':')[0]}:{hosts}x{per_host}"
    assert Cluster.parse(str(cluster)) == cluster


@pytest.mark.parametrize("text, words", [
    ("h100-smx:8", ["'h100-smx'", "did you mean", "h100-sxm"]),
    ("h100-sxm:0x8", ["0 hosts", "from 1"]),
    ("h100-sxm:2x0", ["0 devices_per_host"]),
    ("h100-sxm", ["PRESET:HOSTSxDEVICES", "h100-sxm:16x8"]),
    ("h100-sxm:8*2", ["PRESET:HOSTSxDEVICES"]),
    ("h100-sxm:-1x8", ["PRESET:HOSTSxDEVICES"]),
    ("", ["PRESET:HOSTSxDEVICES"]),
])
def test_parse_refuses(text: str, words: list[str]) -> None:
    with pytest.raises(ClusterError) as error:
        Cluster.parse(text)
    assert error.value.expected and error.value.found and error.value.change
    for word in words:
        assert word in str(error.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_load_preset_with_overrides(tmp_path: Path) -> None:
    cluster = Cluster.load(write(tmp_path, """
        preset = "h100-sxm"
        hosts = 4
        devices_per_host = 8
        [device]
        memory_gib = 70
        network_gbs = 25.0
        peak_tflops.bf16 = 900
    """))
    assert str(cluster) == "h100-sxm:4x8"
    assert cluster.device.memory_bytes == 70 * 2**30
    assert cluster.device.network.bandwidth == 25e9
    assert cluster.device.peak(torch.bfloat16) == 900e12
    assert cluster.device.peak(torch.float32) == 67e12  # not overridden: hardware.csv
    assert cluster != Cluster.parse("h100-sxm:4x8")


BASE = 'preset = "h100-sxm"\nhosts = 1\ndevices_per_host = 8\n'


@pytest.mark.parametrize("text, words", [
    ('preset = "h100-sxm"\nhots = 4\ndevices_per_host = 8', ["'hots'", "did you mean hosts"]),
    ('preset = "h100-sxm"\nhosts = 4', ["devices_per_host is missing"]),
    ('preset = "h100-sxm"\nhosts = "4"\ndevices_per_host = 8', ["hosts", "a whole number", "'4'"]),
    ('preset = "h100-sxm"\nhosts = true\ndevices_per_host = 8', ["hosts", "a whole number", "True"]),
    ('preset = "h100"\nhosts = 4\ndevices_per_host = 8', ["'h100'", "h100-sxm"]),
    ("hosts = 4\ndevices_per_host = 8", ["neither preset nor device"]),
    ("hosts = ", ["not valid TOML", "Invalid value"]),
    (BASE + "[device]\nmemory_gb = 70", ["'memory_gb'", "did you mean memory_gib"]),
    (BASE + '[device]\nmemory_gib = "70"', ["memory_gib", "a number", "'70'"]),
    (BASE + "[device]\nnetwork_gbs = -1", ["network_gbs", "positive"]),
    (BASE + "[device.peak_tflops]\nbf61 = 1", ["'bf61'", "bf16"]),
    (BASE + '[device]\nscale_up_link = "nvlink44"', ["nvlink44", "nvlink4"]),
    (BASE + '[device]\nlinks.nvlink4.p2p = 3\n', ["p2p", "missing or incomplete"]),
    (BASE + '[device]\nattention_kernel = "hopper_flash"', ["attention_kernel", "did you mean", "hopper_flash2"]),
    (BASE + "[device]\nattention = { forward = { 64 = 0.3 } }", ["attention is incomplete", "same head dims"]),
    (BASE + "[device]\nattention = { forward = { small = 0.3 } }", ["'small'"]),
    (BASE + "[device]\nattention = { causl = 0.9 }", ["'causl'", "did you mean causal"]),
    (BASE + "[device]\nmatmul_tiles = [[128, 0]]", ["matmul_tiles", "[rows, columns]", "[[128, 0]]"]),
    (BASE + "[device]\nmatmul_tiles = []", ["matmul_tiles", "[rows, columns]"]),
    (BASE + "[device]\ncore_count = 1.5", ["core_count", "a whole number", "1.5"]),
    ('hosts = 1\ndevices_per_host = 1\n[device]\nname = "mine"\nsource = "me"', ["peak_tflops is missing"]),
])
def test_load_refuses(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ClusterError) as error:
        Cluster.load(write(tmp_path, text))
    assert error.value.expected and error.value.found and error.value.change
    for word in words:
        assert word in str(error.value)


def test_load_without_file(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="No such file"):
        Cluster.load(tmp_path / "absent.toml")


@pytest.mark.parametrize("preset", PRESETS)
def test_saved_cluster_does_not_need_its_preset(tmp_path: Path, preset: str) -> None:
    cluster = Cluster.parse(f"{preset}:2x4")
    cluster.save(tmp_path / "c.toml")
    assert "preset" not in (tmp_path / "c.toml").read_text(encoding="utf-8")
    loaded = Cluster.load(tmp_path / "c.toml")
    assert loaded == cluster
    assert loaded.device.peak_flops == cluster.device.peak_flops and loaded.device.links == cluster.device.links
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    return monkeypatch


def test_detect_alone(no_cuda: pytest.MonkeyPatch) -> None:
    assert str(Cluster.detect()) == "cpu:1x1"


def test_detect_under_torchrun_shares_the_memory_of_the_host(no_cuda: pytest.MonkeyPatch) -> None:
    whole = Cluster.detect().device.memory_bytes
    no_cuda.setenv("WORLD_SIZE", "8")
    no_cuda.setenv("LOCAL_WORLD_SIZE", "4")
    cluster = Cluster.detect()
    assert str(cluster) == "cpu:2x4"
    assert cluster.device.memory_bytes == pytest.approx(whole / 4, abs=1)


@pytest.mark.parametrize("world, local", [("8", "3"), ("8", None), ("eight", "8"), ("8", "0")])
def test_detect_refuses(no_cuda: pytest.MonkeyPatch, world: str, local: str | None) -> None:
    no_cuda.setenv("WORLD_SIZE", world)
    if local is not None:
        no_cuda.setenv("LOCAL_WORLD_SIZE", local)
    with pytest.raises(ClusterError, match=f"LOCAL_WORLD_SIZE={local or 'unset'}"):
        Cluster.detect()


@pytest.mark.parametrize("name, preset", [
    ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA A100-SXM4-40GB", "a100-40g-sxm"),
    ("NVIDIA A100-SXM4-80GB", "a100-80g-sxm"), ("NVIDIA H200", "h200-sxm"), ("NVIDIA B200", "b200-sxm"),
    ("NVIDIA GB200", "gb200"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("AMD Instinct MI300X", "mi300x"),
    ("Tesla V100-SXM2-32GB", "v100-32g-sxm"), ("NVIDIA L40S", "l40s"),
])
def test_detect_names_the_device(no_cuda: pytest.MonkeyPatch, name: str, preset: str) -> None:
    no_cuda.setattr(torch.cuda, "is_available", lambda: True)
    no_cuda.setattr(torch.cuda, "get_device_name", lambda *_: name)
    assert str(Cluster.detect()) == f"{preset}:1x1"


def test_detect_unknown_device(no_cuda: pytest.MonkeyPatch) -> None:
    no_cuda.setattr(torch.cuda, "is_available", lambda: True)
    no_cuda.setattr(torch.cuda, "get_device_name", lambda *_: "Quadro K620")
    with pytest.raises(ClusterError, match="Quadro K620"):
        Cluster.detect()


@pytest.mark.parametrize("text, stride, size, hosts, per_host", [
    ("h100-sxm:16x8", 1, 8, 1, 8),  # tp over a host
    ("h100-sxm:16x8", 2, 4, 1, 4),  # an axis outside tp=2
    ("h100-sxm:16x8", 8, 16, 16, 1),  # dp over the hosts, one device of each
    ("h100-sxm:16x8", 2, 64, 16, 4),
    ("h100-sxm:16x8", 1, 128, 16, 8),
    ("h100-sxm:16x8", 1, 1, 1, 1),
    ("a100-80g-sxm:2x6", 1, 4, 2, 2),  # ranks 4..7 lie over the edge of the first host
    ("a100-80g-sxm:4x6", 2, 4, 2, 3),  # ranks 0 2 4 | 6
    ("gb200:36x4", 1, 72, 1, 72),  # NVLink spans the rack of 18 hosts
    ("gb200:36x4", 72, 2, 2, 1),
    ("gb200:36x4", 1, 144, 2, 72),
])
def test_group(text: str, stride: int, size: int, hosts: int, per_host: int) -> None:
    cluster = Cluster.parse(text)
    group = cluster.group(stride, size)
    assert (group.size, group.hosts, group.per_host) == (size, hosts, per_host)
    assert group.intra == cluster.device.scale_up
    assert group.inter == (cluster.device.network if hosts > 1 else None)


@pytest.mark.parametrize("stride, size", [(1, 3), (8, 32), (0, 2), (2, 0), (-1, 2)])
def test_group_must_tile_the_cluster(stride: int, size: int) -> None:
    with pytest.raises(ClusterError, match="do not tile h100-sxm:16x8"):
        Cluster.parse("h100-sxm:16x8").group(stride, size)


def test_mesh_gives_a_pair_one_of_its_seven_links() -> None:
    cluster = Cluster.parse("mi300x:8")
    assert cluster.group(1, 2).intra.bandwidth == pytest.approx(64e9)  # hardware.csv: peer to peer only 64 GB/s
    assert cluster.group(1, 8).intra.bandwidth == pytest.approx(448e9)


@pytest.mark.parametrize("name, key, value", [
    # published figures, in the units of the property
    ("h100-sxm", "memory_bandwidth", 3350e9), ("h200-sxm", "memory_bandwidth", 4800e9),
    ("a100-80g-sxm", "memory_bandwidth", 2039e9), ("mi300x", "memory_bandwidth", 5300e9),
    ("h100-sxm", "memory_bytes", round(79.1 * 2**30)), ("a100-40g-sxm", "memory_bytes", round(39.4 * 2**30)),
])
def test_published_numbers(name: str, key: str, value: float) -> None:
    assert getattr(load_device(name), key) == value


@pytest.mark.parametrize("name, dtype, tflops", [
    ("h100-sxm", torch.bfloat16, 989), ("a100-80g-sxm", torch.float16, 312), ("b200-sxm", torch.float8_e4m3fn, 4500),
    ("h100-sxm", torch.float32, 67), ("v100-32g-sxm", torch.float16, 125),
    ("v100-32g-sxm", torch.bfloat16, 15.7),  # no bf16 in hardware
    ("h100-sxm", torch.int64, 67),
])
def test_peaks(name: str, dtype: torch.dtype, tflops: float) -> None:
    assert load_device(name).peak(dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_of_a_preset_has_a_source_and_makes_sense(name: str) -> None:
    device = load_device(name)
    assert device.name == name and device.source
    sources: dict[str, Any] = device.spec["sources"]
    assert set(sources) <= set(device.spec), "a source for a key that does not exist"
    if name != "cpu":  # whose `source` says that all else was measured
        assert {
            "peak_tflops", "memory_gib", "stream_gbs", "matmul_efficiency", "sustained", "matmul_ramp_us", "core_count",
            "matmul_tiles", "tile_loss", "tile_overhead_k", "kernel_overhead_us", "launch_overhead_us",
            "attention_kernel",
        } <= set(sources)  # fmt: skip
    assert 0.5 < device.stream_efficiency <= 1 and 0.3 < device.matmul_efficiency <= 1 and 0.8 < device.sustained <= 1
    kernel = device.attention
    assert kernel.source and max(kernel.backward) <= max(kernel.forward) < 1 and 0.5 < kernel.causal <= 1
    assert list(kernel.head_dims) == sorted(kernel.head_dims)
    assert device.network.bandwidth < device.scale_up.bandwidth < device.memory_bandwidth * 1.001
    for link in (device.scale_up, device.network):
        for constants in device.links[link.name].values():
            assert constants.source and 0 < constants.efficiency <= 1 and constants.base + constants.step > 0
