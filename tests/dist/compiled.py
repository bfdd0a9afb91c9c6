"""torchrun compiled.py [NAME ...]: graphs compiled by Inductor on two ranks, against eager PyTorch in one process.

Every plan runs a model of four blocks a stage and then a deeper one: what has been compiled for the first must do for
the second. (Fewer blocks are not enough: Inductor chooses strides, and those of the first block reach the second.)
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from small_models import gradients, llama, tokens
from training import assert_close, join, say, whole

import autopar
from autopar import Hints
from autopar.runtime import compiled

#: Plan -> hints, the numbers of blocks, and how many compilations a rank may need at most: of the blocks of a class,
#: the first, the last and the others, each forward and backward, in as many pieces as collectives cut them into.
PLANS: dict[str, tuple[Hints, tuple[int, int], int]] = {
    "dp": (Hints(dp=2), (4, 6), 19),
    "zero 3": (Hints(dp=2, zero=3), (4, 6), 21),
    "tp": (Hints(tp=2), (4, 6), 15),
    "1f1b": (Hints(pp=2, schedule="1f1b", micro_batch_size=2), (8, 12), 8),
    # two stages on each rank, and a backward in two parts
    "zbv": (Hints(pp=2, schedule="zbv", micro_batch_size=2), (16, 20), 15),
}


def run(name: str) -> tuple[int, int]:
    """Two steps of both models, the plain loop as well where there is one; the numbers of compilations of each."""
    hints, sizes, _ = PLANS[name]
    counts = []
    for layers in sizes:
        before, ran = compiled.compilations(), Counted.calls
        reference = llama(num_hidden_layers=layers)
        model: Any = autopar.parallelize(
            copy.deepcopy(reference), hints=hints, example_inputs=tokens(8, 8), compile=True
        )
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
        for seed in range(2):
            batch = tokens(8, 8, seed=seed)
            truth = reference(**batch).loss
            truth.backward()
            for step in (whole_step,) if hints.pp else (whole_step, plain):
                model.zero_grad()
                assert_close({"loss": step(model, batch)}, {"loss": truth.detach()}, "loss")
                expected, found = gradients(reference), gradients(model)
                assert_close(whole(found), {n: expected[n] for n in found}, "gradients")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        counts.append(compiled.compilations() - before)
        assert Counted.calls - ran > 2 * layers  # segments ran, and more than one a block
    return counts[0], counts[1]


class Counted(compiled.Segment):
    """Counts how often compiled segments run."""

    calls = 0

    def __call__(self, *inputs: Any) -> Any:
        Counted.calls += 1
        return super().__call__(*inputs)


def whole_step(model: Any, batch: Any) -> Any:
    return model.train_step(**batch)


def plain(model: Any, batch: Any) -> Any:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def main() -> None:
    """Run the plans named on the command line, else all."""
    from autopar.runtime import release

    release.Segment = Counted  # type: ignore[misc]
    join()
    for name in sys.argv[1:] or PLANS:
        first, second = run(name)
        assert 0 < first <= PLANS[name][2] and second == 0, (name, first, second)
        say(f"ok {name}: {first} compilations")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
