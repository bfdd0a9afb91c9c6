"""torchrun parity.py MODEL: every layout in which the test wants MODEL, three steps of SGD and three of AdamW each.

Llama and GPT-2 in float32, the others in float64 throughout.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import gpt2, llama, tokens
from torch import Tensor, nn
from training import Pair, join, say

from autopar import Hints
from autopar.runtime.reference import exact_float64

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plain_models
import zoo
from models import Case

Batches = list[dict[str, Tensor]]


def named(cases: tuple[Case, ...], name: str) -> Callable[[], tuple[nn.Module, Batches]]:
    """A case in float64 with its batch three times."""
    case = next(c for c in cases if c.name == name)

    def make() -> tuple[nn.Module, Batches]:
        model, batch = case.make(torch.float64)
        return model, [batch] * 3

    return make


MODELS: dict[str, Any] = {
    "llama": lambda: (llama(num_hidden_layers=2), [tokens(8, 8, seed=i) for i in range(3)]),
    "gpt2": lambda: (gpt2(0.1, layers=2), [tokens(8, 8, seed=i) for i in range(3)]),
    **{name: named(zoo.ARCHITECTURES, name) for name in ("bert", "t5", "vit", "gemma3")},
    "resnet": named(plain_models.CASES, "resnet"),
}


def layouts(world: int) -> dict[str, Hints | None]:
    """Free, both axes with ZeRO-3, and each axis forced to be all there is."""
    return {"free": None, "tp=2, zero=3": Hints(tp=2, zero=3), "dp forced": Hints(dp=world),
            "dp forced, zero=3": Hints(dp=world, zero=3)}  # fmt: skip


def main() -> None:
    """Run MODEL in all layouts."""
    join()
    with contextlib.nullcontext() if sys.argv[1] in ("llama", "gpt2") else exact_float64():
        run()
    dist.destroy_process_group()


def run() -> None:
    make = MODELS[sys.argv[1]]
    for name, hints in layouts(dist.get_world_size()).items():
        model, batches = make()
        pair = Pair(model, hints, batches[0])
        plan = pair.model.plan
        for axis in ("dp", "tp"):
            if hints is not None and getattr(hints, axis) is not None:
                assert plan.degrees[axis] == getattr(hints, axis)
        split = sum(p.to_local().numel() < p.numel() for p in pair.model.parameters())
        if hints is not None and hints.zero == 3:
            assert plan.zero == (3 if plan.degrees["dp"] > 1 else 0) and split > 0
        pair.train(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), batches)
        pair.train(lambda ps: torch.optim.AdamW(ps, lr=1e-3), batches, steady=True)
        say(f"ok {name}: {plan.degrees}, zero={plan.zero}, {split} parameters split")


if __name__ == "__main__":
    main()
