"""failures.py WHAT: something goes wrong; every rank says what it saw. Under torchrun the run ends with exit code 3.

Those in `ALONE` are started without torchrun, which would end all ranks as soon as one has failed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from small_models import llama, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from training import join, say

import autopar
from autopar import Hints
from autopar.errors import AutoparError
from autopar.runtime import failure
from autopar.runtime.batches import CONTENTS_FIRST

aten = torch.ops.aten
PIPELINE = Hints(pp=2, schedule="1f1b", micro_batch_size=2)


def parallel(hints: Hints | None = None, **arguments: Any) -> Any:
    """A small parallel Llama."""
    hints = hints or Hints(tp=2)
    return autopar.parallelize(llama(num_hidden_layers=1), hints=hints, example_inputs=tokens(8, 8), **arguments)


def world_size() -> None:
    """A plan for twice as many ranks."""
    model, batch = llama(num_hidden_layers=1), tokens(8, 8)
    plan = autopar.plan(model, f"cpu:{2 * dist.get_world_size()}", example_inputs=batch)
    autopar.parallelize(model, plan=plan)


def batch_shapes() -> None:
    """Rank 1 has another batch in the first step."""
    parallel()(**tokens(8 if dist.get_rank() != 1 else 4, 8))


def later_batch_shapes() -> None:
    """Rank 1 has another batch in the second step, when the other ranks have their program already."""
    model = parallel()
    model(**tokens(8, 8)).loss.backward()
    model(**tokens(8 if dist.get_rank() != 1 else 4, 8))


class Comparisons(TorchDispatchMode):
    """Counts how often ranks compare what they are given. What programs reduce goes through functional collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.c10d.allreduce_.default
        return func(*args, **(kwargs or {}))


def much_later_batch_shapes() -> None:
    """Rank 1 has another batch in a step in which ranks do not compare batches any more; it asks, rank 0 computes."""
    failure.GRACE = 2.0
    model = parallel()
    for call in range(CONTENTS_FIRST + 2):
        with Comparisons() as comparisons:
            model(**tokens(8, 8)).loss.backward()
        assert comparisons.count == int(call < CONTENTS_FIRST), (call, comparisons.count)
    model(**tokens(8 if dist.get_rank() != 1 else 4, 8))


def planning() -> None:
    """Only rank 0 plans; its error is everybody's."""
    autopar.parallelize(llama(num_hidden_layers=1), hints=Hints(memory_limit=1000), example_inputs=tokens(8, 8))


# ---- ranks that differ where shapes do not tell ----


def batch_contents() -> None:
    """Rank 1 shuffles by itself."""
    parallel()(**tokens(8, 8, seed=dist.get_rank()))


def local_contents() -> None:
    """Ranks that work on the same samples are given different ones."""
    parallel(inputs="local")(**tokens(8, 8, seed=dist.get_rank()))


def plans() -> None:
    """Every rank loads its own plan."""
    model, batch = llama(num_hidden_layers=1), tokens(8, 8)
    hints = Hints(tp=2) if dist.get_rank() == 0 else Hints(dp=2)
    autopar.parallelize(model, plan=autopar.plan(model, "cpu:2", hints=hints, example_inputs=batch))


def weights() -> None:
    """Every rank draws its own weights."""
    model = llama(num_hidden_layers=1)
    torch.manual_seed(dist.get_rank())
    model.init_weights()
    torch.nn.init.normal_(model.lm_head.weight)
    autopar.parallelize(model, hints=Hints(tp=2), example_inputs=tokens(8, 8))


def code() -> None:
    """Rank 1 runs another version of the model's code: the same parameters, other activations."""
    model = llama(num_hidden_layers=1, hidden_act="silu" if dist.get_rank() == 0 else "gelu")
    autopar.parallelize(model, hints=Hints(tp=2), example_inputs=tokens(8, 8))(**tokens(8, 8))


def not_a_number() -> None:
    """A loss of nan is a number like others, with one warning on every rank, in the plain loop and in a whole step."""
    model = parallel()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model(**tokens(8, 8)).loss.isnan()
        assert model.train_step(**tokens(8, 8)).isnan()
    for warning in caught:
        if "nan" in str(warning.message):
            say(f"warned: {warning.message}")


def differing() -> None:
    """All of the above, one after the other."""
    for what in (batch_contents, local_contents, plans, weights, code, not_a_number):
        try:
            what()
        except AutoparError as error:
            say(f"{what.__name__}: {error.what}")


# ---- a rank that fails while others wait for it ----


class At(TorchDispatchMode):
    """Does something at the first matrix product inside, on rank 1."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.mm.default and dist.get_rank() == 1:
            self.act()
        return func(*args, **(kwargs or {}))


def kill() -> None:
    """As the kernel does when the host runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def no_memory() -> None:
    """As an allocator."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def killed_in_forward() -> None:
    model = parallel()
    model(**tokens(8, 8)).loss.backward()
    with At(kill):
        model(**tokens(8, 8))


def killed_in_backward() -> None:
    loss = parallel()(**tokens(8, 8)).loss
    with At(kill):
        loss.backward()


def killed_in_train_step() -> None:
    model = parallel(Hints(dp=2, micro_batch_size=2))
    with At(kill):
        model.train_step(**tokens(8, 8))


def killed_in_pipeline() -> None:
    """While the first stage waits for a gradient of the last one."""
    model = parallel(PIPELINE)
    model.train_step(**tokens(8, 8))
    with At(kill):
        model.train_step(**tokens(8, 8))


def killed_before_clipping() -> None:
    """Between two calls; the other is in a collective of its own by then."""
    model = parallel()
    model(**tokens(8, 8)).loss.backward()
    if dist.get_rank() == 1:
        kill()
    model.clip_grad_norm_(1.0)


def out_of_memory() -> None:
    """Rank 1 raises, lives on and never comes back, and rank 0 waits for it in a collective."""
    model = parallel()
    model(**tokens(8, 8)).loss.backward()
    _without_memory(lambda: model(**tokens(8, 8)))


def out_of_memory_in_pipeline() -> None:
    """The same, and rank 0 waits for a message."""
    model = parallel(PIPELINE)
    model.train_step(**tokens(8, 8))
    _without_memory(lambda: model.train_step(**tokens(8, 8)))


def _without_memory(step: Callable[[], object]) -> None:
    failure.GRACE = 2.0
    try:
        with At(no_memory):
            step()
    except torch.OutOfMemoryError as error:
        say(f"{type(error).__name__}: {error}")
        time.sleep(60)


def data_loader() -> None:
    """Rank 1 ends with an error of its own code, outside of autopar."""
    model = parallel()
    model(**tokens(8, 8)).loss.backward()
    if dist.get_rank() == 1:
        raise ValueError("the file is cut short")
    model(**tokens(8, 8))


ALONE = (killed_in_forward, killed_in_backward, killed_in_train_step, killed_in_pipeline, killed_before_clipping,
         out_of_memory, out_of_memory_in_pipeline, data_loader, much_later_batch_shapes)  # fmt: skip
TOGETHER = (world_size, batch_shapes, later_batch_shapes, planning, differing)


def main() -> None:
    """Run WHAT, wait for all ranks, end."""
    join()
    what = {f.__name__: f for f in (*ALONE, *TOGETHER)}[sys.argv[1]]
    try:
        what()
    except AutoparError as error:
        say(f"{type(error).__name__}: {error.what}")
    else:
        say("nothing was raised")
    if what in TOGETHER:
        dist.barrier()  # or torchrun would end the others before they speak
    sys.exit(3)


if __name__ == "__main__":
    main()
