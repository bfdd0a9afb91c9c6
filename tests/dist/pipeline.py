"""torchrun pipeline.py SCHEDULE...: three steps with each schedule in float64, on four ranks as in `LAYOUTS`, or on two
ranks that are two stages."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from small_models import gpt2, llama, tokens
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training import assert_close, has_dropout, join, say, whole

import autopar
from autopar import Hints
from autopar.errors import RuntimeFailure
from autopar.ops import counter_draws
from autopar.runtime import pipeline
from autopar.runtime.reference import exact_float64
from autopar.schedule import SPLIT_BACKWARD

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

#: Schedule -> how the four ranks are laid out. GPT-2 has dropout, the Llama tied embeddings on both stages.
LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpipe": (gpt2, {"pp": 4, "micro_batch_size": 2}),
    "1f1b": (llama, {"pp": 2, "dp": 2, "zero": 3, "micro_batch_size": 1}),
    "interleaved": (llama, {"pp": 2, "tp": 2, "micro_batch_size": 4}),
    "interleaved-zb": (llama, {"pp": 2, "dp": 2, "zero": 1, "micro_batch_size": 1}),
    "zbv": (llama, {"pp": 2, "tp": 2, "micro_batch_size": 2}),
    "dualpipev": (gpt2, {"pp": 2, "dp": 2, "micro_batch_size": 1}),
}


class Counted:
    """Counts the graphs that run, by name."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self._run = pipeline.run_and_release

    def __call__(self, module: Any, inputs: list[Any]) -> Any:
        self.ran[type(module).__name__] += 1
        return self._run(module, inputs)


def eager(reference: nn.Module, batch: dict[str, Tensor], seed: Tensor) -> Tensor:
    """Loss of the untouched model, with gradients."""
    if not has_dropout(reference):
        loss: Tensor = reference(**batch)["loss"]
    else:
        with counter_draws(seed):
            loss = reference(**batch)["loss"]
    loss.backward()
    return loss.detach()


def check_held(model: Any, reference: nn.Module) -> None:
    """A rank holds parameters of its own stages only, as DTensors on the stage's mesh; all are somewhere."""
    own = dict(model.named_parameters())
    theirs = dict(reference.named_parameters())
    assert 0 < len(own) < len(theirs)
    for name, p in own.items():
        assert isinstance(p.data, DTensor) and p.shape == theirs[name].shape
        assert p.device_mesh.mesh_dim_names == ("dp", "tp")
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(own))
    assert {name for names in every for name in names} == set(theirs)


def check_graphs(ran: Counter[str], model: Any, schedule: str) -> None:
    """Every graph of this rank's stages ran once a micro-batch: the backward whole, or in its two parts."""
    plan = model.plan
    expected = plan.num_micro_batches * len(plan.stages) // plan.degrees["pp"]
    assert ran["Forward"] == expected, ran
    assert ran["BackwardInput"] == ran["BackwardWeight"] and ran["Backward"] + ran["BackwardInput"] == expected, ran
    assert (ran["BackwardInput"] > 0) == (schedule in SPLIT_BACKWARD), ran


def check_equal(loss: Tensor) -> None:
    """Every rank has the same loss, to the last bit."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, loss.item().hex())
    assert len(set(every)) == 1, every


def run(schedule: str) -> None:
    make, hints = LAYOUTS[schedule]
    if dist.get_world_size() == 2:
        hints = {"pp": 2, "micro_batch_size": 2}
    reference = (make(0.1, layers=2) if make is gpt2 else make(num_hidden_layers=2)).double()
    batches = [tokens(8, 8, seed=i) for i in range(3)]
    batches[1]["labels"][2:4] = -100  # a micro-batch of which no label counts
    model: Any = autopar.parallelize(
        copy.deepcopy(reference), hints=Hints(schedule=schedule, **hints), example_inputs=batches[0]
    )
    check_held(model, reference)
    assert model.plan.schedule == schedule and model.plan.degrees["pp"] == hints["pp"]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for batch in batches:
        seed, pipeline.run_and_release = model.seed.clone(), Counted()
        with patch.object(dist, "broadcast", side_effect=AssertionError("the loss travels with gradients")):
            loss = model.train_step(**batch)
        check_equal(loss)
        check_graphs(pipeline.run_and_release.ran, model, schedule)
        pipeline.run_and_release = pipeline.run_and_release._run
        assert_close({"loss": loss}, {"loss": eager(reference, batch, seed)}, "loss")
        truth = {n: p.grad for n, p in reference.named_parameters()}
        found = {n: p.grad for n, p in model.named_parameters()}
        assert_close(whole(found), {n: truth[n] for n in found}, "gradients")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    truth = dict(reference.named_parameters())
    found = {n: p.detach() for n, p in model.named_parameters()}
    assert_close(whole(found), {n: truth[n].detach() for n in found}, "parameters")
    if schedule in ("interleaved", "dualpipev"):
        check_use(model, reference, batches[0])
    check_evaluation(model, reference, batches[0])


def check_use(model: Any, reference: nn.Module, batch: dict[str, Tensor]) -> None:
    """A whole state dict is loaded; a last batch of one sample, which the schedule cannot run, runs all the same, twice
    into the same gradients, and clips by one norm of all stages."""
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(1.1)
    model.load_state_dict(reference.state_dict())
    rest = {name: t[:1] for name, t in batch.items()}
    for _ in range(2):
        seed = model.seed.clone()
        assert_close({"loss": model.train_step(**rest)}, {"loss": eager(reference, rest, seed)}, "loss of the rest")
    norms = [model.clip_grad_norm_(0.05), nn.utils.clip_grad_norm_(reference.parameters(), 0.05)]
    assert_close(whole({"norm": norms[0]}), {"norm": norms[1]}, "norm")
    truth = {n: p.grad for n, p in reference.named_parameters()}
    found = {n: p.grad for n, p in model.named_parameters()}
    assert_close(whole(found), {n: truth[n] for n in found}, "clipped gradients")


def check_evaluation(model: Any, reference: nn.Module, batch: dict[str, Tensor]) -> None:
    """Evaluation gives every rank loss and logits; a forward in training says to use train_step."""
    try:
        model(**batch)
    except RuntimeFailure as error:
        assert "train_step" in str(error)
    else:
        raise AssertionError("a forward in training did not fail")
    for m in (model, reference):
        m.eval()
    with torch.no_grad():
        found, truth = model(**batch), reference(**batch)
    names = ("loss", "logits")
    assert_close({n: found[n].clone() for n in names}, {n: truth[n] for n in names}, "evaluation")


def main() -> None:
    """Run the schedules named on the command line."""
    join()
    with exact_float64():
        for schedule in sys.argv[1:]:
            run(schedule)
            say(f"ok {schedule}: {LAYOUTS[schedule][1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
