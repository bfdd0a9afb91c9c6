"""Random numbers that a forward draws: of the right distribution, and the same however the model is split."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Hints
from autopar.errors import CaptureError
from autopar.ops import counter_draws
from autopar.ops.uniform import uniform
from autopar.specialize import capture_batch

SEED = torch.tensor([1234, 7])
COUNT = 1 << 16


def drawn(function: Callable[[], Tensor], seed: Tensor = SEED) -> Tensor:
    with counter_draws(seed):
        return function()


def _normal(x: Tensor) -> Tensor:
    return 0.5 + 0.5 * torch.erf(x / math.sqrt(2))


#: What draws 2**16 numbers, and the probability of a smaller one than x.
CONTINUOUS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "rand": (lambda: torch.rand(COUNT), lambda x: x),
    "rand_like": (lambda: torch.rand_like(torch.ones(COUNT)), lambda x: x),
    "uniform_": (lambda: torch.empty(COUNT).uniform_(-1, 3), lambda x: (x + 1) / 4),
    "randn": (lambda: torch.randn(256, 256), _normal),
    "randn_like": (lambda: torch.randn_like(torch.ones(COUNT), dtype=torch.float64), _normal),
    "normal": (lambda: torch.normal(2.0, 3.0, (COUNT,)), lambda x: _normal((x - 2) / 3)),
    "normal of tensors": (lambda: torch.normal(torch.full([COUNT], 2.0), torch.tensor(3.0)),
                          lambda x: _normal((x - 2) / 3)),
    "normal_": (lambda: torch.empty(COUNT).normal_(-1, 0.5), lambda x: _normal((x + 1) / 0.5)),
    "Normal": (lambda: torch.distributions.Normal(torch.zeros(COUNT), torch.tensor(2.0)).rsample(),
               lambda x: _normal(x / 2)),
    "exponential_": (lambda: torch.empty(COUNT).exponential_(2.0), lambda x: 1 - torch.exp(-2 * x)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTINUOUS)
def test_distribution(name: str) -> None:
    """The largest distance between the empirical and the true distribution function is one that is exceeded in one of
    10,000 samples (Kolmogorov: 2.23 / sqrt(n)), and another step or seed draws others."""
    function, below = CONTINUOUS[name]
    x = drawn(function).flatten()
    assert len(x) == COUNT
    expected = below(x.double().sort().values)
    steps = torch.arange(COUNT + 1, dtype=torch.float64) / COUNT
    distance = torch.maximum((expected - steps[:-1]).abs(), (expected - steps[1:]).abs()).max()
    assert distance < 2.23 / math.sqrt(COUNT)
    for other in ([1234, 8], [1235, 7]):
        assert (x == drawn(function, torch.tensor(other)).flatten()).double().mean() < 0.01


@pytest.mark.parametrize("function", [
    lambda: torch.randint(7, (COUNT,)), lambda: torch.randint(2, 9, (COUNT,)),
    lambda: torch.randint(2, 9, size=[COUNT]), lambda: torch.randint(low=2, high=9, size=(COUNT,)),
    lambda: torch.randint(high=7, size=(COUNT,)),
    lambda: torch.randint_like(torch.ones(COUNT), 7), lambda: torch.randint_like(torch.ones(COUNT), 2, 9),
    lambda: torch.randint_like(torch.ones(COUNT), low=2, high=9)])  # fmt: skip
def test_integers(function: Callable[[], Tensor]) -> None:
    """As many of each of seven numbers as there should be: five standard deviations are 5 * sqrt(n * 1/7 * 6/7)."""
    x, theirs = drawn(function), function()
    assert x.dtype == theirs.dtype and x.shape == theirs.shape
    assert torch.equal(x.unique(), theirs.unique())
    counts = x.unique(return_counts=True)[1]
    assert len(counts) == 7 and (counts - COUNT / 7).abs().max() < 5 * math.sqrt(COUNT * 6 / 49)


@pytest.mark.parametrize("function", [
    lambda: torch.bernoulli(torch.full([COUNT], 0.3)), lambda: torch.empty(COUNT).bernoulli_(0.3),
    lambda: torch.empty(COUNT, dtype=torch.bool).bernoulli_(0.3), lambda: torch.ones(COUNT).bernoulli(0.3),
    lambda: torch.empty(COUNT).bernoulli_(torch.tensor(0.3))])  # fmt: skip
def test_bernoulli(function: Callable[[], Tensor]) -> None:
    x, theirs = drawn(function), function()
    assert x.dtype == theirs.dtype and torch.equal(x.unique(), theirs.unique())
    assert abs(x.double().mean().item() - 0.3) < 5 * math.sqrt(0.21 / COUNT)


@pytest.mark.parametrize("hard", [True, False])
def test_gumbel_softmax(hard: bool) -> None:
    """The hard sample is a one-hot vector, of every class as often as the softmax has it; soft ones sum to 1. Gradients
    are those of the soft sample."""
    logits = torch.tensor([0.0, 1.0, 2.0]).repeat(COUNT, 1).requires_grad_()
    x = drawn(lambda: F.gumbel_softmax(logits, tau=1.0, hard=hard))
    torch.testing.assert_close(x.sum(-1), torch.ones(COUNT))
    often = F.one_hot(x.argmax(-1), 3).double().mean(0)
    assert (often - logits[0].softmax(-1)).abs().max() < 5 * math.sqrt(0.25 / COUNT)
    soft = drawn(lambda: F.gumbel_softmax(logits, tau=1.0))
    weights = torch.tensor([1.0, -2.0, 3.0])
    ours, expected = (torch.autograd.grad((y * weights).sum(), logits)[0] for y in (x, soft))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """Never 1, in any dtype; as fine as float32 is, also in float64, whose numbers are the same."""
    x = drawn(lambda: torch.rand(COUNT, dtype=dtype))
    assert x.dtype == dtype and x.min() >= 0 and x.max() < 1
    coarse = 2.0 ** min(24, {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24))
    assert torch.equal(x, (drawn(lambda: torch.rand(COUNT)) * coarse).floor().to(dtype) / coarse)
    assert drawn(lambda: torch.randn(4, dtype=dtype)).dtype == dtype


def test_a_piece_is_part_of_the_whole() -> None:
    whole = uniform(torch.empty(6, 4), SEED, torch.tensor([0, 0]), 3, [6, 4])
    piece = uniform(torch.empty(2, 2), SEED, torch.tensor([2, 1]), 3, [6, 4])
    assert torch.equal(piece, whole[2:4, 1:3]) and whole.unique().numel() == 24
    with pytest.raises(ValueError, match=r"starts must be int64 \[2\]"):
        uniform(torch.empty(2, 2), SEED, torch.tensor([2]), 3, [6, 4])


def test_draws_from_a_generator_are_torchs() -> None:
    with counter_draws(SEED) as mode:
        x = torch.rand(8, generator=torch.Generator().manual_seed(3))
        assert mode.streams == 0
    assert torch.equal(x, torch.rand(8, generator=torch.Generator().manual_seed(3)))


class Noise(nn.Module):
    """Two linear maps with something random between them."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.noise = nn.Linear(8, 16), nn.Linear(16, 8), noise

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.down(self.noise(self.up(x).relu())).square().mean()}


#: Stochastic depth as transformers and torchvision write it, noise, noise that rows share, samples of a distribution, a
#: choice, random time steps.
NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "drop path": lambda h: h.div(0.8) * (0.8 + torch.rand((h.shape[0], 1, 1), dtype=h.dtype, device=h.device)).floor_(),
    "stochastic depth": lambda h: h * h.new_empty(h.shape[0], 1, 1).bernoulli_(0.7).div_(0.7),
    "gaussian": lambda h: h + 0.1 * torch.randn_like(h),
    "shared": lambda h: h + torch.empty(h.shape[1], 1, dtype=h.dtype).uniform_(-1, 1),
    "reparametrised": lambda h: torch.distributions.Normal(h, 0.1 * torch.ones_like(h)).rsample(),
    "gumbel": lambda h: F.gumbel_softmax(h, tau=0.5, hard=True) * h,
    "time": lambda h: h * torch.randint(1, 5, (h.shape[0], 1, 1)),
}
LAYOUTS = {
    "tp": Hints(pp=1, dp=1, tp=2, micro_batch_size=2),
    "dp": Hints(pp=1, dp=2, tp=1),
    "cp": Hints(pp=1, dp=1, tp=1, cp=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("noise", NOISES)
def test_split(noise: str, layout: str) -> None:
    """Two steps on two ranks, with the loss and the gradients of one process that draws the same numbers."""
    model, x = Noise(NOISES[noise]).double(), torch.randn(4, 6, 8, dtype=torch.float64)
    report = autopar.verify(model, "cpu:1x2", hints=LAYOUTS[layout], example_inputs={"x": x}, steps=2)
    assert report.ok and report.max_error < 1e-10 and report.flops_share == 0.5, report


def _draws(function: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    return lambda h: h * function()


@pytest.mark.parametrize(("noise", "found"), [
    (_draws(random.random), "the generator of random"),
    (_draws(np.random.rand), "the generator of numpy.random"),
    (lambda h: h[:, torch.randperm(h.shape[1])], "aten.randperm.default"),
], ids=["python", "numpy", "permutation"])  # fmt: skip
def test_refused(noise: Callable[[Tensor], Tensor], found: str) -> None:
    """What would be a constant of the graph, or differ between ranks."""
    with pytest.raises(CaptureError, match=f"draws random numbers[\\s\\S]*found: .*{found}"):
        capture_batch(Noise(noise), (torch.randn(4, 6, 8),), {})


def test_a_generator_is_refused() -> None:
    noise = Noise(lambda h: h * torch.rand(1, generator=torch.Generator()))
    with pytest.raises(CaptureError, match=r"hands aten\.rand\.generator what is no tensor[\s\S]*found: Generator"):
        capture_batch(noise, (torch.randn(4, 6, 8),), {})
