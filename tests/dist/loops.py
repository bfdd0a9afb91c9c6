"""torchrun loops.py [NAME ...]: the ends of real loops, each against the same loop in one process."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from small_models import bert, gpt2, gradients, llama, tokens
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training import assert_close, join, parameters, say, whole

import autopar
from autopar import Hints, Workload
from autopar.errors import AutoparError
from autopar.ops import counter_draws
from autopar.runtime import cache


def forced() -> Hints:
    """dp=2 and the rest on tp, ZeRO-3: something to get wrong on every axis."""
    return Hints(dp=2, tp=dist.get_world_size() // 2, zero=3)


def pair(**arguments: Any) -> tuple[Any, nn.Module]:
    """A parallel Llama of one layer, and the eager one that it was made from."""
    reference = llama(num_hidden_layers=1)
    given = {"hints": forced(), "example_inputs": tokens(4, 8), **arguments}
    model = autopar.parallelize(copy.deepcopy(reference), **given)
    return model, reference


def compare(model: nn.Module, reference: nn.Module, losses: tuple[Tensor, Tensor]) -> None:
    """Losses and gradients agree."""
    assert_close({"loss": losses[0].detach()}, {"loss": losses[1].detach()}, "loss")
    assert_close(whole(gradients(model)), gradients(reference), "gradients")


def step_of(model: nn.Module, reference: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Forward and backward of one batch on both; their losses."""
    losses = model(**batch).loss, reference(**batch).loss
    for loss in losses:
        loss.backward()
    return losses


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """The texts of autopar's warnings in the block, when it is done."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if w.category is UserWarning and "multiple" in str(w.message)]


def refused(text: str, act: Callable[[], object]) -> None:
    """``act`` raises an error of autopar, or of `torch.nn`, that says ``text``."""
    try:
        act()
    except (AutoparError, RuntimeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"expected {text}")


def whole_step(model: Any, reference: nn.Module, batch: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """`train_step` of what a rank passes, against forward and backward of the whole batch."""
    seed = model.seed.clone()
    loss = model.train_step(**own)
    assert loss.shape == () and not loss.requires_grad
    with counter_draws(seed):
        truth = reference(**batch).loss
    truth.backward()
    compare(model, reference, (loss, truth))


def stepped() -> None:
    """train_step in micro-batches of one sample a rank, with dropout: steps of SGD, gradients that add up over
    two calls, a smaller batch, and the plain loop beside it, on the same model."""
    reference = gpt2(0.1, layers=1)
    model: Any = autopar.parallelize(
        copy.deepcopy(reference), hints=replace(forced(), micro_batch_size=1), example_inputs=tokens(8, 8)
    )
    assert model.plan.num_micro_batches == 4
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for seed, size in enumerate([8, 8, 6]):
        batch = tokens(size, 8, seed=seed)
        whole_step(model, reference, batch, batch)
        if seed != 1:  # the second step's gradients stay for the third
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_close(parameters(model), parameters(reference), "parameters")
    batch, draw = tokens(8, 8, seed=3), model.seed.clone()
    loss = model(**batch).loss
    with counter_draws(draw):
        truth = reference(**batch).loss
    loss.backward(), truth.backward()
    compare(model, reference, (loss, truth))


def stepped_locally() -> None:
    """train_step of each rank's own samples, and where it cannot be: inside accumulate, and without a loss."""
    reference = llama(num_hidden_layers=1)
    model: Any = autopar.parallelize(
        copy.deepcopy(reference),
        hints=replace(forced(), micro_batch_size=2),
        example_inputs=tokens(8, 8),
        inputs="local",
    )
    batch = tokens(8, 8)
    rows = slice(model.data_rank * 4, model.data_rank * 4 + 4)
    whole_step(model, reference, batch, {name: t[rows] for name, t in batch.items()})
    with model.accumulate():
        refused("train_step inside of accumulate()", lambda: model.train_step(**batch))
    refused("train_step needs a model that returns its loss", lambda: model.train_step(input_ids=batch["input_ids"]))


def ragged() -> None:
    """Whole batches, a last one of 3 and of 1, other lengths: all exact; one warning, on rank 0, for the batch dim."""
    model, reference = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    with noted() as texts:
        for size, length in [(4, 8), (3, 8), (4, 8), (1, 8), (4, 6), (3, 7)]:
            compare(model, reference, step_of(model, reference, tokens(size, length)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    batch_dim = [t for t in texts if t.startswith("dim 0 of input_ids (3), labels (3) is not a multiple of 2")]
    assert len(batch_dim) == (dist.get_rank() == 0), texts
    assert all("drop_last=True" in t and "100% of the FLOPs run replicated over dp" in t for t in batch_dim)
    assert len(texts) <= 2 * (dist.get_rank() == 0), texts


def kept() -> None:
    """The cache says what it keeps and how often it was used, is bounded, and makes an evicted program again."""
    model, reference = pair()
    before, cache.CACHE_SIZE = cache.CACHE_SIZE, 2
    try:
        for length in (8, 6, 8, 4, 6):
            compare(model, reference, step_of(model, reference, tokens(4, length)))
        entries = model.specializations
        assert [(e.shapes[0], e.training, e.uses) for e in entries] == [((4, 4), True, 1), ((4, 6), True, 1)]
        assert "2 of at most" in repr(model)
    finally:
        cache.CACHE_SIZE = before


def decayed(m: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups as every recipe makes them: no weight decay on norms and biases."""
    named = list(m.named_parameters())
    matrices = [p for name, p in named if not name.endswith("bias") and "norm" not in name]
    others = [p for name, p in named if name.endswith("bias") or "norm" in name]
    assert matrices and others
    return [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]


def recipe() -> None:
    """Groups by name, a warm-up schedule, clipping by value and by norm, an exponential moving average, and the first
    layer frozen half way: parameters and averages agree after 6 steps. eps is large so that noise is not divided by
    itself."""
    model, reference = pair()
    both = (model, reference)
    optimizers = [torch.optim.AdamW(decayed(m), lr=1e-2, eps=1e-3) for m in both]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8) for o in optimizers]
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in both]
    for step in range(6):
        for m, optimizer, schedule, average in zip(both, optimizers, schedules, averages, strict=True):
            m.get_submodule("model.layers.0.mlp").requires_grad_(step < 3)
            m(**tokens(4, 8, seed=step)).loss.backward()
            torch.nn.utils.clip_grad_value_(m.parameters(), 0.01)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.update_parameters(m)
    assert_close(parameters(model), parameters(reference), "parameters")
    assert_close(parameters(averages[0].module), parameters(averages[1].module), "averages")
    losses = [average(**tokens(4, 8)).loss.detach() for average in averages]
    assert_close({"loss": losses[0]}, {"loss": losses[1]}, "loss of the averages")
    vectors = [torch.nn.utils.parameters_to_vector(m.parameters()).detach() for m in both]
    assert_close(whole({"all": vectors[0]}), {"all": vectors[1]}, "parameters_to_vector")


def state() -> None:
    """Its own state dict and a whole one of the original model can be loaded, into the parameters that the optimizer
    has; others are refused by what is wrong with them."""
    model, reference = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(2.0)
    truth = parameters(reference)
    held = [id(p) for p in model.parameters()]
    model.load_state_dict(reference.state_dict())
    assert held == [id(p) for p in model.parameters()] and model.lm_head.weight is model.model.embed_tokens.weight
    assert_close(parameters(model), truth, "from the original model")
    compare(model, reference, step_of(model, reference, tokens(4, 8)))
    optimizer.step()
    assert any(not torch.equal(p, truth[name]) for name, p in parameters(model).items())
    model.load_state_dict(own)
    assert all(torch.equal(p, truth[name] / 2) for name, p in parameters(model).items())
    refused("Missing key", lambda: model.load_state_dict({}))
    refused("size mismatch", lambda: model.load_state_dict({**own, "model.norm.weight": torch.ones(7)}))
    refused("cannot take over", lambda: model.load_state_dict(own, assign=True))


def accumulated() -> None:
    """Four micro-batches of three shapes a step, three of them held back: p.grad stays empty until the fourth, which
    reduces once; gradients and two steps of AdamW equal those of one process that accumulates the same."""
    model, reference = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, reference)]
    for step in range(2):
        shapes = [(4, 8), (4, 8), (3, 8), (4, 6)]
        for i, (size, length) in enumerate(shapes):
            last = i == len(shapes) - 1
            with contextlib.nullcontext() if last else model.accumulate():
                losses = step_of(model, reference, tokens(size, length, seed=10 * step + i))
            assert_close({"loss": losses[0].detach()}, {"loss": losses[1].detach()}, "loss")
            assert all((p.grad is None) != last for p in model.parameters())
        compare(model, reference, losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(parameters(model), parameters(reference), "parameters")


def copies() -> None:
    """A deep copy, made while gradients are held and programs kept, is a module of its own: it trains apart, runs the
    programs that there are, and has none of what is held, and no gradients, as the copy of any model."""
    model, reference = pair()
    batch = tokens(4, 8)
    step_of(model, reference, batch)
    for m in (model, reference):
        assert all(p.grad is not None for p in m.parameters())
        assert all(p.grad is None for p in copy.deepcopy(m).parameters())
        m.zero_grad()
    assert model(**batch).logits.shape == (4, 8, 64)  # asked for, so that the next program keeps it
    with model.accumulate():
        step_of(model, reference, batch)
    twins = copy.deepcopy(model), copy.deepcopy(reference)
    assert twins[0].specializations == model.specializations
    for twin in twins:
        twin.zero_grad()
    compare(*twins, step_of(*twins, batch))
    for twin in twins:
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_close(parameters(twins[0]), parameters(twins[1]), "parameters of the copy")
    assert_close(parameters(model), parameters(reference), "parameters")
    compare(model, reference, step_of(model, reference, batch))


def held_too_long() -> None:
    """Gradients that are held back are never lost in silence: not by a step, not by other parameters, not by freezing;
    zero_grad of the module drops them."""
    model, reference = pair()
    batch = tokens(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hold() -> None:
        with model.accumulate():
            model(**batch).loss.backward()

    def change() -> None:
        with torch.no_grad():
            model.lm_head.weight.mul_(1.0)
        hold()

    def freeze() -> None:
        model.model.norm.requires_grad_(False)
        model(**batch).loss.backward()

    wrong = {"SGD.step() while gradients are held": optimizer.step, "parameters have changed": change,
             "the gradient of model.norm.weight is held back": freeze}  # fmt: skip
    for text, act in wrong.items():
        hold()
        refused(text, act)
        model.zero_grad()
    model.model.norm.requires_grad_(True)
    optimizer.step()
    compare(model, reference, step_of(model, reference, batch))


def local() -> None:
    """Every rank passes what its sampler gives it, with labels that count unevenly; the eager model gets them in one
    batch. Then, a last batch that is shorter on some ranks, which all ranks refuse; and the loop goes on."""
    model, reference = pair(inputs="local")
    data = tokens(12, 8)
    samples = TensorDataset(*data.values())

    def batches(rank: int) -> list[dict[str, Tensor]]:
        sampler = DistributedSampler(samples, model.data_world_size, rank, shuffle=True, seed=3)
        return [dict(zip(data, rows, strict=True)) for rows in DataLoader(samples, batch_size=2, sampler=sampler)]

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    everyone = zip(*(batches(rank) for rank in range(model.data_world_size)), strict=True)
    for own, parts in zip(batches(model.data_rank), everyone, strict=True):
        losses = model(**own).loss, reference(**{n: torch.cat([part[n] for part in parts]) for n in data}).loss
        for loss in losses:
            loss.backward()
        compare(model, reference, losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    half = dist.get_world_size() // 2  # dp is outermost: the upper half of the ranks has data_rank 1
    others = list(range(half, 2 * half))
    refused(f"ranks {others} passed another batch", lambda: model(**tokens(2 + model.data_rank, 8)))
    refused("a local batch whose tensors have different numbers",
            lambda: model(input_ids=data["input_ids"], labels=data["labels"][:1]))  # fmt: skip
    assert torch.isfinite(model(**batches(model.data_rank)[0]).loss)


def differing() -> None:
    """Ranks whose batches, or modes, differ are told so, each time and on every rank; then the loop goes on. (After
    steps of one batch that no rank compares any more they end: ``failures.py``.)"""
    model, reference = pair()
    last = dist.get_world_size() - 1
    mine = dist.get_rank() == last
    compare(model, reference, step_of(model, reference, tokens(4, 8)))
    for _ in range(2):
        refused(f"ranks [{last}] passed another batch than rank 0", lambda: model(**tokens(2 if mine else 4, 8)))
        model.train(not mine)
        refused("training=False", lambda: model(**tokens(4, 8)))
        model.train()
    compare(model, reference, step_of(model, reference, tokens(4, 8)))


def bucketed() -> None:
    """Padded batches in a causal model and in one that sees both sides."""
    for make in (lambda: llama(num_hidden_layers=1), bert):
        reference = make()
        workload = Workload(global_batch=4, pad_to=[6, 8])
        padded_as_it_is(autopar.parallelize(copy.deepcopy(reference), hints=forced(), workload=workload), reference)


def padded_as_it_is(model: Any, reference: nn.Module) -> None:
    """Lengths padded to 6 and 8: loss, gradients, logits and a loss outside equal those of the batch as it is; two
    programs in all. One rank with too long a batch stops all."""
    for length in (5, 8, 7, 6):
        batch = tokens(4, length)
        for m in (model, reference):
            m.zero_grad()
        compare(model, reference, step_of(model, reference, batch))
        logits = [m(**batch).logits.detach() for m in (model, reference)]
        assert_close({"logits": logits[0].clone()}, {"logits": logits[1]}, "logits")
    assert [e.shapes[0] for e in model.specializations] == [(4, 8), (4, 6)]
    for m in (model, reference):
        m.zero_grad()
        m(input_ids=tokens(4, 7)["input_ids"]).logits.pow(2).mean().backward()
    assert_close(whole(gradients(model)), gradients(reference), "gradients of a loss outside")
    refused("a sequence of 9 tokens is longer than the largest bucket", lambda: model(**tokens(4, 9)))
    last = dist.get_world_size() - 1
    refused(f"ranks [{last}] passed another batch", lambda: model(**tokens(4, 9 if dist.get_rank() == last else 8)))


LOOPS = (ragged, kept, recipe, state, accumulated, copies, held_too_long, local, differing, bucketed, stepped,
         stepped_locally)  # fmt: skip


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
