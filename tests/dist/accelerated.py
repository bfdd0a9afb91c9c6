"""torchrun accelerated.py FOLDER: a loop of accelerate on parallel modules, against a plain loop in every process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import llama, tokens
from torch import Tensor
from torch.utils.data import DataLoader
from trainer import BATCH, LENGTH, refused, samples
from training import assert_close, join, parameters, say
from transformers import LlamaForCausalLM

import autopar
from autopar import Hints
from autopar.errors import InputError
from autopar.integrations.accelerate import AutoparAccelerator

EVERY, NORM = 2, 0.5


def loader() -> DataLoader[Any]:
    """Batches in order, of which the last is short."""
    rows = [{name: sample[name] for name in ("input_ids", "labels")} for sample in samples()]
    return DataLoader(rows, batch_size=BATCH)


def tools(model: Any) -> tuple[Any, Any]:
    """An optimizer and its schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def one_process() -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and weights of a plain loop that accumulates and clips."""
    model, losses = llama(num_hidden_layers=1), []
    optimizer, schedule = tools(model)
    batches = list(loader())
    for i, batch in enumerate(batches):
        loss = model(**batch).loss
        (loss / EVERY).backward()
        losses.append(loss.detach())
        if (i + 1) % EVERY == 0 or i + 1 == len(batches):
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses, parameters(model)


def prepared(hints: Hints) -> tuple[Any, ...]:
    """An accelerator, and what it has prepared."""
    accelerator = AutoparAccelerator(gradient_accumulation_steps=EVERY, cpu=True)
    model = autopar.parallelize(llama(num_hidden_layers=1), hints=hints, example_inputs=tokens(BATCH, LENGTH))
    return accelerator, *accelerator.prepare(model, *tools(model), loader())


def loop(accelerator: Any, model: Any, optimizer: Any, schedule: Any, batches: Any) -> Iterator[Tensor]:
    """The loop of accelerate's documentation."""
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        yield loss.detach()


def named(losses: list[Tensor]) -> dict[str, Tensor]:
    return {f"loss {i}": loss for i, loss in enumerate(losses)}


def trained(folder: Path, truth: list[Tensor], weights: dict[str, Tensor]) -> None:
    """As in one process; what is saved comes back as transformers reads it."""
    accelerator, model, *rest = prepared(Hints(dp=2, zero=3))
    assert len(rest[-1]) == len(truth) and model.plan.degrees["dp"] == 2
    assert_close(named(list(loop(accelerator, model, *rest))), named(truth), "losses")
    assert_close(parameters(model), weights, "weights")
    accelerator.save_model(model, folder / "model")
    found = parameters(model)
    loaded = dict(LlamaForCausalLM.from_pretrained(folder / "model").named_parameters())
    assert all(torch.equal(p, found[name]) for name, p in loaded.items())
    state = accelerator.get_state_dict(model)
    assert all(torch.equal(state[name], p) for name, p in found.items())


def resumed(folder: Path, truth: list[Tensor], weights: dict[str, Tensor]) -> None:
    """A run that is cut after two steps goes on under another plan."""
    accelerator, model, *rest = prepared(Hints(dp=2))
    steps = loop(accelerator, model, *rest)
    for _ in range(2 * EVERY):
        next(steps)
    accelerator.save_state(str(folder / "state"))
    accelerator, model, *rest = prepared(Hints(tp=2))
    accelerator.load_state(str(folder / "state"))
    batches = accelerator.skip_first_batches(rest.pop(), 2 * EVERY)
    assert_close(named(list(loop(accelerator, model, *rest, batches))), named(truth[2 * EVERY :]), "losses")
    assert_close(parameters(model), weights, "weights")


def refusals() -> None:
    """What would do again what a plan does."""
    refused(InputError, 'param_dtype="bfloat16"', lambda: AutoparAccelerator(mixed_precision="bf16", cpu=True))
    accelerator = AutoparAccelerator(cpu=True)
    refused(InputError, "before the optimizer is made", lambda: accelerator.prepare(llama(num_hidden_layers=1)))
    local = autopar.parallelize(llama(num_hidden_layers=1), hints=Hints(dp=2), example_inputs=tokens(BATCH, LENGTH),
                                inputs="local")  # fmt: skip
    refused(InputError, 'inputs="local"', lambda: accelerator.prepare(local))
    model = accelerator.prepare(autopar.parallelize(llama(num_hidden_layers=1), hints=Hints(dp=2),
                                                    example_inputs=tokens(BATCH, LENGTH)))  # fmt: skip
    refused(InputError, "whole module", lambda: accelerator.clip_grad_norm_(list(model.parameters())[:2], NORM))
    refused(InputError, "what save_state returned", accelerator.load_state)


def main() -> None:
    """All of it; the first that fails ends it."""
    folder = Path(sys.argv[1])
    join()
    losses, weights = one_process()
    trained(folder, losses, weights)
    say("ok trained")
    resumed(folder, losses, weights)
    say("ok resumed")
    refusals()
    say("ok refusals")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
