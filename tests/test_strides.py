"""Operators that read memory: what they read does not depend on how a plan lets pieces lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Hints, Workload
from autopar.errors import CaptureError, MicroBatchError

SAMPLES, LENGTH, WIDTH = 8, 12, 16


class Reading(nn.Module):
    """Two layers, and a function of what comes of them, [samples, length, width]."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(F.gelu(self.second(F.gelu(self.first(x))))).square().mean()


def windows(x: Tensor) -> Tensor:
    """Softmax over windows of four, of which normal form takes the copy out that lays them side by side."""
    x = x.transpose(1, 2).contiguous()
    w = x.as_strided((len(x), WIDTH, LENGTH - 3, 4), (WIDTH * LENGTH, LENGTH, 1, 1))
    return w.softmax(-1) * torch.arange(4)


def columns(x: Tensor) -> Tensor:
    """As `windows`, of what lies transposed."""
    x = x.transpose(1, 2)
    return torch.as_strided(x, (len(x), LENGTH - 1, 2 * WIDTH), (WIDTH * LENGTH, WIDTH, 1)).softmax(-1)


def scattered(x: Tensor) -> Tensor:
    x = x.transpose(1, 2).contiguous()
    return torch.as_strided_scatter(x, x[:, 0].cos(), (len(x), LENGTH), (WIDTH * LENGTH, 1), 1)


def rotated(x: Tensor) -> Tensor:
    """Pairs as complex numbers, of a copy that normal form takes out."""
    angles = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2).float()).to(torch.complex128)
    pairs = x.transpose(1, 2).contiguous().unflatten(1, (-1, 2)).transpose(2, 3).contiguous()
    return torch.view_as_real(torch.view_as_complex(pairs) * angles[:, None])


def bits(x: Tensor) -> Tensor:
    """With the signs and exponents of what lies transposed."""
    high = x.detach().transpose(1, 2).contiguous().view(torch.int32)[..., 1::2] >> 20
    return x + high.transpose(1, 2)


def verified(read: Callable[[Tensor], Tensor], hints: Hints) -> autopar.VerifyReport:
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)
    workload = Workload(optimizer="sgd")
    return autopar.verify(Reading(read).double(), "cpu:1x4", hints=hints, example_inputs=batch, workload=workload)


@pytest.mark.parametrize("hints", [Hints(tp=4), Hints(dp=2, tp=2, zero=3)], ids=["tp", "dp and tp"])
@pytest.mark.parametrize("read", [windows, columns, scattered, rotated, bits])
def test_memory_is_read_as_it_lay(read: Callable[[Tensor], Tensor], hints: Hints) -> None:
    report = verified(read, hints)
    assert report.ok, report


def test_memory_beside_a_tensor_is_refused() -> None:
    with pytest.raises(CaptureError, match="reads memory beside a tensor"):
        verified(lambda x: x[:, 1:].as_strided((SAMPLES, WIDTH), (LENGTH * WIDTH, 1), 0), Hints(dp=4))


def test_sums_over_micro_batches_that_each_of_them_would_need() -> None:
    """The gradient of windows is a sum at places of the whole batch."""
    assert verified(windows, Hints(dp=4)).ok  # plans with more micro-batches are looked at, and not taken
    with pytest.raises(MicroBatchError, match="mixes its samples"):
        verified(windows, Hints(dp=2, tp=2, micro_batch_size=2))
