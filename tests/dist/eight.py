"""torchrun eight.py [NAME ...]: three steps of plans that use every axis at once in float64, on eight ranks."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pipeline import eager
from small_models import gpt2, llama, tokens
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from training import assert_close, join, say, whole

import autopar
from autopar import Hints
from autopar.runtime.reference import exact_float64

#: Plan -> model and hints. Llamas have tied embeddings, which in a pipeline two stages share; the GPT-2 has dropout.
PLANS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "dp2 tp2 pp2 zero1": (
        llama, {"dp": 2, "tp": 2, "pp": 2, "schedule": "1f1b", "zero": 1, "micro_batch_size": 1}
    ),
    "dp4 tp2 zero3": (lambda: gpt2(0.1, layers=3), {"dp": 4, "tp": 2, "zero": 3, "micro_batch_size": 1}),
    "dp2 pp4 zero3 full": (
        lambda: llama(num_hidden_layers=6),
        {"dp": 2, "pp": 4, "schedule": "interleaved-zb", "zero": 3, "micro_batch_size": 1, "recompute": "full"},
    ),
}  # fmt: skip


class Moved(TorchDispatchMode):
    """Counts what a rank sends: collectives by kind, and messages between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional"):
            self.count[name.strip("_").removesuffix("_")] += 1
        return func(*args, **(kwargs or {}))


def check_is_split(model: Any, reference: nn.Module, hints: dict[str, Any]) -> None:
    """With ZeRO parameters rest in pieces: all ranks together hold little more than one model, and no rank much more
    than its share."""
    assert model.plan.zero == hints["zero"] and model.plan.schedule == hints.get("schedule")
    assert all(model.plan.degrees[axis] == hints.get(axis, 1) for axis in ("dp", "tp", "pp"))
    own = sum(p.to_local().numel() for p in model.parameters())
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, own)
    total = sum(p.numel() for p in reference.parameters())
    # norms are not split by tp, and a tied embedding is held by the first stage and the last
    assert total <= sum(held) <= 1.3 * total and max(held) <= 2 * total / len(held), (held, total)


def check_moved(count: Counter[str], hints: dict[str, Any]) -> None:
    """Stages sent to one another, ZeRO gathered and scattered, and tp all-reduced."""
    assert (count["send"] + count["isend"] > 0) == ("pp" in hints), count
    assert count["all_gather_into_tensor"] > 0 and count["reduce_scatter_tensor"] > 0, count
    assert count["all_reduce"] > 0 or "tp" not in hints, count


def run(name: str) -> None:
    make, hints = PLANS[name]
    reference = make().double()
    batches = [tokens(8, 8, seed=i) for i in range(3)]
    batches[1]["labels"][2:4] = -100
    model: Any = autopar.parallelize(copy.deepcopy(reference), hints=Hints(**hints), example_inputs=batches[0])
    check_is_split(model, reference, hints)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for batch in batches:
        seed = model.seed.clone()
        with Moved() as moved:
            loss = model.train_step(**batch)
        check_moved(moved.count, hints)
        assert_close({"loss": loss}, {"loss": eager(reference, batch, seed)}, "loss")
        found, truth = ({n: p.grad for n, p in m.named_parameters()} for m in (model, reference))
        check(found, truth, "gradients")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, truth = ({n: p.detach() for n, p in m.named_parameters()} for m in (model, reference))
    check(found, truth, "parameters")


def check(found: dict[str, Any], truth: dict[str, Any], what: str) -> None:
    """What this rank's stage has, gathered, is what one process has."""
    assert found and all(isinstance(t, DTensor) for t in found.values())
    assert_close(whole(found), {name: truth[name] for name in found}, what)


def main() -> None:
    """Run the plans named on the command line, else all."""
    join()
    with exact_float64():
        for name in sys.argv[1:] or PLANS:
            run(name)
            say(f"ok {name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
