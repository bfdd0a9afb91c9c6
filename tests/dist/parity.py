"""torchrun parity.py MODEL: every layout in which the test wants MODEL, three steps of SGD and three of AdamW each."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from small_models import gpt2, llama, tokens
from training import Pair, join, say

from autopar import Hints

MODELS: dict[str, Any] = {
    "llama": lambda: llama(num_hidden_layers=2),
    "gpt2": lambda: gpt2(0.1, layers=2),
}


def layouts(world: int) -> dict[str, Hints | None]:
    """Free, both axes with ZeRO-3, and each axis forced to be all there is."""
    return {"free": None, "tp=2, zero=3": Hints(tp=2, zero=3), "dp forced": Hints(dp=world),
            "dp forced, zero=3": Hints(dp=world, zero=3)}  # fmt: skip


def main() -> None:
    """Run MODEL in the layouts that are named, or in all."""
    join()
    make = MODELS[sys.argv[1]]
    batches = [tokens(8, 8, seed=i) for i in range(3)]
    for name, hints in layouts(dist.get_world_size()).items():
        pair = Pair(make(), hints, batches[0])
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
