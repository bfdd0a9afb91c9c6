"""Calibration: what is measured here, alone and in two processes, and the file it is kept in."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_distributed import SCRIPTS, said, torchrun

from autopar import Cluster
from autopar.cost_model.compute import Work, work_seconds
from autopar.cost_model.fit import Constants, Sample, at_level, fit, product_errors
from autopar.cost_model.hardware import COLLECTIVES, load_device
from autopar.errors import ClusterError


def product(n: int) -> Work:
    return Work(2.0 * n**3, 3 * 4 * n**2, torch.float32, "matmul", 1, n, n, n)


@pytest.mark.slow
def test_calibrated_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group compute and memory are measured and links stay those of the preset; the file is the
    cluster."""
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    before = Cluster.detect()
    cluster = Cluster.calibrate(seconds=0.5)
    device = cluster.device
    assert str(cluster) == "cpu:1x1" and "Cluster.calibrate" in device.source
    assert device.links == before.device.links
    for key in ("peak_tflops", "stream_gbs", "matmul_efficiency", "kernel_overhead_us", "attention"):
        assert device.spec["sources"][key] == "measured: Cluster.calibrate"
        assert device.spec[key] != before.device.spec[key]
    # between a slow core that is shared with others and a fast one
    assert 1e9 < device.peak(torch.float32) < 1e12 and 0.5e9 < device.memory_bandwidth < 1e12
    assert device.peak(torch.float64) < 1.2 * device.peak(torch.float32)
    assert 0.1e-6 < device.kernel_overhead < 1e-3
    # what it predicts is what this process takes, as far as a shared machine repeats itself
    x = torch.randn(512, 512)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - start)
    assert min(times) / 10 < work_seconds([product(512)], device)[0] < 10 * max(times)
    cluster.save(tmp_path / "here.toml")
    assert Cluster.load(tmp_path / "here.toml") == cluster


@pytest.mark.parametrize("scale", [0.25, 1.0, 3.0])
def test_a_level_is_found_again(scale: float) -> None:
    """Products timed on a device of another level give that level, though the short ones are bound by their ramp."""
    device = load_device("h100-sxm")
    work = [product(n) for n in (64, 1024, 2048, 4096, 8192)]
    truth = [float(t) for t in work_seconds(work, device)]
    found = at_level(work, [t / scale for t in truth], device)
    assert np.median(product_errors(work, [t / scale for t in truth], found)) == pytest.approx(0, abs=1e-6)
    if scale < 1:
        assert found.matmul_efficiency == pytest.approx(scale * device.matmul_efficiency, rel=0.05)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_alpha_and_beta_are_found_again(kind: str) -> None:
    """Times made of 2 GB/s, 30 us a call and 20 us a step on 4 ranks, written out here."""
    steps, share = {"all_gather": (3, 3 / 4), "reduce_scatter": (3, 3 / 4), "all_reduce": (6, 3 / 2),
                    "all_to_all": (3, 3 / 16), "p2p": (1, 1.0)}[kind]  # fmt: skip
    samples = [Sample(kind, n, 4, 1, 30e-6 + steps * 20e-6 + share * n / 2e9, "") for n in (4**k for k in range(6, 13))]
    found = fit(samples, lambda bandwidth, base, step: Constants(bandwidth, base, step, 0.0), 1e-5, 1e-6)
    assert found.bandwidth == pytest.approx(2e9, rel=0.02)
    assert found.base + steps * found.step == pytest.approx(30e-6 + steps * 20e-6, rel=0.05)


def test_ranks_must_be_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    with pytest.raises(ClusterError, match="has 8 ranks and torchrun's environment says 4"):
        Cluster.calibrate()


@pytest.mark.slow
@pytest.mark.dist
def test_calibrated_in_two_processes(tmp_path: Path) -> None:
    """Both ranks take the same constants, every collective's among them, and a second measurement agrees: half of its
    points within a factor of 2 of what the first predicts (this machine is shared), none by 30."""
    result = torchrun(2, SCRIPTS / "calibrate.py", str(tmp_path))
    assert result.returncode == 0, result.stdout[-3000:]
    lines = [line.split() for line in said(result)[0]]
    assert len(lines) == 7 * len(COLLECTIVES)
    errors = [abs(math.log(float(told) / float(taken))) for _, _, taken, told in lines]
    assert np.median(errors) < math.log(2) and max(errors) < math.log(30), lines
    loaded = Cluster.load(tmp_path / "cluster.toml")
    assert str(loaded) == "cpu:1x2"
    constants = loaded.device.links["gloo"]
    assert all(constants[kind].source.startswith("measured: 7 points") for kind in COLLECTIVES)
    assert constants != load_device("cpu").links["gloo"]
