"""torchrun failures.py WHAT: something goes wrong; every rank says what it saw, and the run ends with exit code 3."""

from __future__ import annotations

import sys

import torch.distributed as dist
from small_models import llama, tokens
from training import join, say

import autopar
from autopar import Hints
from autopar.errors import AutoparError


def world_size() -> None:
    """A plan for twice as many ranks."""
    model, batch = llama(num_hidden_layers=1), tokens(8, 8)
    plan = autopar.plan(model, f"cpu:{2 * dist.get_world_size()}", example_inputs=batch)
    autopar.parallelize(model, plan=plan)


def batch_shapes() -> None:
    """Rank 1 has another batch in the first step."""
    model = autopar.parallelize(llama(num_hidden_layers=1), hints=Hints(tp=2), example_inputs=tokens(8, 8))
    model(**tokens(8 if dist.get_rank() != 1 else 4, 8))


def later_batch_shapes() -> None:
    """Rank 1 has another batch in the second step, when the other ranks have their program already."""
    model = autopar.parallelize(llama(num_hidden_layers=1), hints=Hints(tp=2), example_inputs=tokens(8, 8))
    model(**tokens(8, 8)).loss.backward()
    model(**tokens(8 if dist.get_rank() != 1 else 4, 8))


def planning() -> None:
    """Only rank 0 plans; its error is everybody's."""
    autopar.parallelize(llama(num_hidden_layers=1), hints=Hints(memory_limit=1000), example_inputs=tokens(8, 8))


def main() -> None:
    """Run WHAT, wait for all ranks, end."""
    join()
    try:
        {f.__name__: f for f in (world_size, batch_shapes, later_batch_shapes, planning)}[sys.argv[1]]()
    except AutoparError as error:
        say(f"{type(error).__name__}: {error.what}")
    else:
        say("nothing was raised")
    dist.barrier()  # or torchrun would end the others before they speak
    sys.exit(3)


if __name__ == "__main__":
    main()
