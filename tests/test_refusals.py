"""Models that something else has changed already are refused, each by one error that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import autopar
from autopar.errors import AutoparError, CaptureError, PlanError


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled_inside() -> nn.Module:
    found = model()
    found[1][0].compile()  # type: ignore[index]
    return found


def fully_sharded() -> nn.Module:
    found = model()
    fully_shard(found, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    return found


def packed() -> nn.Module:
    found = model()
    found[0].weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    return found


class Int4(torch.Tensor):
    """A tensor that is stored in another way."""


def of_a_subclass() -> nn.Module:
    found = model()
    found[0].weight = nn.Parameter(torch.zeros(8, 8).as_subclass(Int4), requires_grad=False)
    return found


def hooked() -> nn.Module:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    found = model()
    add_hook_to_module(found[0], AlignDevicesHook())
    return found


@pytest.mark.parametrize(("make", "kind", "says"), [
    (lambda: torch.compile(model()), CaptureError, "OptimizedModule is compiled already: it is what"),
    (compiled_inside, CaptureError, r"compiled already: its module 1\.0 is what"),
    (lambda: nn.parallel.DistributedDataParallel(model()), CaptureError, "it is a DistributedDataParallel"),
    (lambda: nn.DataParallel(model()), CaptureError, "it is a DataParallel"),
    (lambda: FullyShardedDataParallel(model(), device_id=torch.device("cpu")), CaptureError,
     "it is a FullyShardedDataParallel"),
    (fully_sharded, PlanError, "parallel already"),
    (packed, CaptureError, r"is quantized: 0\.weight is packed"),
    (of_a_subclass, CaptureError, r"is quantized: 0\.weight is packed"),
    (lambda: nn.Sequential(nn.LazyLinear(4)), CaptureError, r"0\.weight of Sequential has no shape yet"),
    (hooked, CaptureError, r"its module 0 has hooks of accelerate"),
], ids=["compiled", "compiled inside", "DDP", "DP", "FSDP", "FSDP2", "int8", "subclass", "lazy",
        "accelerate"])  # fmt: skip
def test_what_is_changed_already(group: None, make: Callable[[], Any], kind: type[AutoparError], says: str) -> None:
    found = make()
    for act in (lambda: autopar.plan(found, "cpu:1x2", example_inputs=torch.zeros(4, 8)),
                lambda: autopar.verify(found, "cpu:1x2", example_inputs=torch.zeros(4, 8)),
                lambda: autopar.parallelize(found, example_inputs=torch.zeros(4, 8))):  # fmt: skip
        with pytest.raises(kind, match=says) as error:
            act()
        assert error.value.expected and error.value.found and error.value.change


def test_what_a_plan_made_is_not_split_again(group: None) -> None:
    found = autopar.parallelize(model(), cluster="cpu:1x1", example_inputs=torch.zeros(4, 8))
    with pytest.raises(PlanError, match="parallel already"):
        autopar.parallelize(found, cluster="cpu:1x1", example_inputs=torch.zeros(4, 8))
