"""torchrun loops.py [NAME ...]: the ends of real loops, each against the same loop in one process."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from small_models import gradients, llama, tokens
from torch import Tensor, nn
from training import assert_close, join, say, whole

import autopar
from autopar import Hints
from autopar.runtime import cache


def forced() -> Hints:
    """dp=2 and the rest on tp, ZeRO-3: something to get wrong on every axis."""
    return Hints(dp=2, tp=dist.get_world_size() // 2, zero=3)


def pair(hints: Hints | None = None) -> tuple[autopar.ParallelModule, nn.Module]:
    """A parallel Llama of one layer, and the eager one that it was made from."""
    reference = llama(num_hidden_layers=1)
    model = autopar.parallelize(copy.deepcopy(reference), hints=hints or forced(), example_inputs=tokens(4, 8))
    return model, reference


def compare(model: nn.Module, reference: nn.Module, losses: tuple[Tensor, Tensor]) -> None:
    """Losses and gradients agree."""
    assert_close({"loss": losses[0].detach()}, {"loss": losses[1].detach()}, "loss")
    assert_close(whole(gradients(model)), gradients(reference), "gradients")


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """The texts of autopar's warnings in the block, when it is done."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if w.category is UserWarning and "divide" in str(w.message)]


def ragged() -> None:
    """Whole batches, a last one of 3 and of 1, other lengths: all exact; one warning, on rank 0, for the batch dim."""
    model, reference = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    with noted() as texts:
        for size, length in [(4, 8), (3, 8), (4, 8), (1, 8), (4, 6), (2, 5), (3, 7)]:
            losses = [m(**tokens(size, length)).loss for m in (model, reference)]
            for loss in losses:
                loss.backward()
            compare(model, reference, (losses[0], losses[1]))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    batch_dim = [t for t in texts if t.startswith("dim 0 of input_ids (3), labels (3) does not divide over dp=2")]
    assert len(batch_dim) == (dist.get_rank() == 0), texts
    assert all("drop_last=True" in t and "100% of the FLOPs run replicated over dp" in t for t in batch_dim)
    assert len(texts) <= 2 * (dist.get_rank() == 0), texts


def kept() -> None:
    """The cache says what it keeps and how often it was used, is bounded, and makes an evicted program again."""
    model, reference = pair()
    before, cache.CACHE_SIZE = cache.CACHE_SIZE, 2
    try:
        for length in (8, 6, 8, 4, 6):
            losses = [m(**tokens(4, length)).loss for m in (model, reference)]
            for m, loss in zip((model, reference), losses, strict=True):
                m.zero_grad()
                loss.backward()
            compare(model, reference, (losses[0], losses[1]))
        entries = model.specializations
        assert [(e.shapes[0], e.training, e.uses) for e in entries] == [((4, 4), True, 1), ((4, 6), True, 1)]
        assert "2 of at most" in repr(model)
    finally:
        cache.CACHE_SIZE = before


LOOPS = (ragged, kept)


def main() -> None:
    """Those that are named, else all; the first that fails ends the run."""
    join()
    for loop in LOOPS:
        if len(sys.argv) == 1 or loop.__name__ in sys.argv[1:]:
            loop()
            say(f"ok {loop.__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
