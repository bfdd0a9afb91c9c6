"""torchrun ends.py: what real loops do with a model's results, on two or four ranks, against the same in one process.

Labels of -100 are spread unevenly over the batch, so that a mean of the ranks' means would show.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_models import gradients, llama, tokens
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training import assert_close, join, parameters, say, whole

import autopar
from autopar import Hints
from autopar.errors import InputError, RuntimeFailure
from autopar.runtime.outputs import Deferred

RANKS = int(os.environ["WORLD_SIZE"])
LAYOUTS = (
    Hints(dp=RANKS),
    Hints(tp=RANKS),
    Hints(dp=2, tp=2, zero=3) if RANKS == 4 else Hints(dp=2, zero=3),
)


class Heads(nn.Module):
    """Two results from one trunk, a batch norm, and a counter among the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm = nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32)  # it would undo a bias
        self.first, self.second = nn.Linear(32, 8), nn.Linear(32, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.steps.add_(1)
        y = torch.tanh(self.norm(self.trunk(x)))
        return {"first": self.first(y), "second": self.second(y)}


def heads() -> Heads:
    torch.manual_seed(1)
    return Heads()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Features [8, 16] and labels [8] of which five do not count, unevenly."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (8,), generator=generator)
    labels[[0, 1, 2, 3, 6]] = -100
    return 3 * torch.randn(8, 16, generator=generator), labels


def pairs(reference: nn.Module, example: Any) -> Any:
    """A parallel module for each layout, and the eager model."""
    for hints in LAYOUTS:
        model = autopar.parallelize(copy.deepcopy(reference), hints=hints, example_inputs=example)
        yield model, copy.deepcopy(reference)


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    found = gradients(model)
    assert set(found) == set(gradients(reference))
    assert_close(whole(found), gradients(reference), "gradients")


def criterion() -> None:
    """``criterion(model(x).logits, y)``, as one writes it for one process, with shifted labels and ``ignore_index``."""
    inputs, labels = {"input_ids": tokens(8, 8)["input_ids"]}, tokens(8, 8)["labels"]
    for model, reference in pairs(llama(num_hidden_layers=1), inputs):
        losses = []
        for m in (model, reference):
            logits = m(**inputs).logits[:, :-1]
            losses.append(nn.CrossEntropyLoss()(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)))
            losses[-1].backward()
        assert_close({"loss": losses[0].detach()}, {"loss": losses[1].detach()}, "loss")
        assert_same_gradients(model, reference)


def several_results() -> None:
    """Both results used, either of them, and none."""
    losses = {
        "both": lambda out, y: F.cross_entropy(out["second"], y) + out["first"].square().mean(),
        "first": lambda out, y: out["first"].abs().sum(),
        "second": lambda out, y: F.cross_entropy(out["second"], y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
        "twice": lambda out, y: (out["first"][:, :4] * out["second"]).mean() + out["first"][y != -100].mean(),
    }
    x, y = batch(0)
    for model, reference in pairs(heads(), {"x": x}):
        for name, loss_of in losses.items():
            truth, loss = loss_of(reference(x), y), loss_of(model(x), y)
            truth.backward(), loss.backward()
            assert_close({name: loss.detach()}, {name: truth.detach()}, "loss")
            assert_same_gradients(model, reference)
            model.zero_grad(), reference.zero_grad()
        out = model(x)  # nobody asks
        assert isinstance(out["first"], DTensor) and out["first"].shape == (8, 8)
        assert out["first"].to_local().numel() < 64 or model.plan.degrees["dp"] == 1
        reference(x)


def buffers() -> None:
    """Batch norm over the global batch, its running statistics, and a counter, over steps of training and evaluation;
    they are in ``state_dict``."""
    for model, reference in pairs(heads(), {"x": batch(0)[0]}):
        for m in (model, reference):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            for step in range(3):
                x, y = batch(step)
                out = m(x)
                (F.cross_entropy(out["second"], y) + out["first"].mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_close(parameters(model), parameters(reference), "parameters")
        mine, theirs = dict(model.named_buffers()), dict(reference.named_buffers())
        assert set(mine) == set(theirs) and int(mine["steps"]) == 3 == int(mine["norm.num_batches_tracked"])
        assert_close({n: t.float() for n, t in mine.items()}, {n: t.float() for n, t in theirs.items()}, "buffers")
        assert_close(whole(model.state_dict()), reference.state_dict(), "state_dict")
        model.eval(), reference.eval()
        with torch.no_grad():
            found, truth = model(batch(9)[0])["first"], reference(batch(9)[0])["first"]
        assert_close({"eval": found.full_tensor()}, {"eval": truth}, "evaluation")
        assert_close({"mean": model.norm.running_mean}, {"mean": reference.norm.running_mean}, "unchanged")


class Annealed(nn.Module):
    """A trunk that may be frozen in evaluation mode, and numbers that a loop changes as it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.0))
        self.head, self.temperature, self.weights = nn.Linear(16, 4), 1.0, [1.0, 0.5]
        self.register_buffer("scale", torch.ones(4))

    def anneal(self, temperature: float) -> None:
        self.temperature = temperature

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.head(self.trunk(x)) * self.scale / self.temperature
        return {"loss": self.weights[0] * y.logsumexp(-1).mean() + self.weights[1] * y.square().mean()}


def _keep_trunk(m: nn.Module) -> None:
    m.trunk.eval()


def _assign(m: nn.Module) -> None:
    m.temperature, m.scale = 2.0, torch.arange(1.0, 5.0)


def _drop(m: nn.Module) -> None:
    m.trunk[3].p = 1.0


def attributes() -> None:
    """What a loop changes between steps counts from the next one on: modes of submodules, numbers, lists, rates and
    buffers of the model, by assignment or by a method."""
    changes = (
        _keep_trunk, nn.Module.train, _assign, lambda m: m.anneal(0.5), lambda m: m.weights.__setitem__(1, 0.1), _drop
    )
    torch.manual_seed(1)
    start = Annealed()
    start.trunk.eval()
    x = batch(0)[0]
    for model, reference in pairs(start, {"x": x}):
        for change in (lambda m: None, *changes):
            for m in (model, reference):
                change(m)
                m.zero_grad()
            losses = [m(x)["loss"] for m in (model, reference)]
            for loss in losses:
                loss.backward()
            assert_close({"loss": losses[0].detach()}, {"loss": losses[1].detach()}, "loss")
            assert_same_gradients(model, reference)
            mean = {"mean": reference.trunk[1].running_mean}
            assert_close({"mean": model.trunk[1].running_mean}, mean, "running mean")
        try:
            model.head = nn.Linear(16, 4)
        except InputError as error:
            assert "head of a parallel module cannot be replaced" in str(error)
        else:
            raise AssertionError("a module was replaced in silence")


def evaluation() -> None:
    """``model.eval()`` under ``no_grad``: loss, accuracy and numpy as usual; nothing is kept for a backward. Evaluation
    with gradients works too."""
    inputs = tokens(8, 8)
    for model, reference in pairs(llama(num_hidden_layers=1), inputs):
        model.eval(), reference.eval()
        with torch.no_grad():
            out, truth = model(**inputs), reference(**inputs)
        assert_close({"loss": out.loss}, {"loss": truth.loss}, "loss")
        predicted, counts = out.logits[:, :-1].argmax(-1), inputs["labels"][:, 1:] != -100
        right = (predicted == inputs["labels"][:, 1:])[counts].sum().item()
        assert right == (truth.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:])[counts].sum().item()
        assert out.logits.float().numpy(force=True).shape == tuple(truth.logits.shape)
        assert not out.loss.requires_grad and out.loss.grad_fn is None
        for m in (model, reference):
            m(**inputs).loss.backward()
        assert_same_gradients(model, reference)


def all_frozen() -> None:
    """A model without a trainable parameter, for inference; and one that is frozen and unfrozen later."""
    inputs, reference = tokens(8, 8), llama(num_hidden_layers=1).requires_grad_(False)
    for model, eager in pairs(reference, inputs):
        out, truth = model(**inputs), eager(**inputs)
        found = {"loss": out.loss, "logits": out.logits.full_tensor()}
        assert_close(found, {"loss": truth.loss, "logits": truth.logits}, "all")
        assert not out.loss.requires_grad
        for m in (model, eager):
            m.requires_grad_(True)
            m(**inputs).loss.backward()
        assert_same_gradients(model, eager)


def deferred() -> None:
    """With labels, logits are no part of a training step until somebody uses them, in any way; they are those of that
    step, dropout included; too late is an error; from then on they are kept."""
    inputs = tokens(8, 8)
    for model, reference in pairs(llama(num_hidden_layers=1, attention_dropout=0.0), inputs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            truth = reference(**inputs).logits
        out = model(**inputs)
        assert isinstance(out.logits, Deferred) and tuple(out.logits.shape) == tuple(truth.shape)
        out.loss.backward()
        assert_close({"logits": out.logits.full_tensor()}, {"logits": truth}, "deferred logits")
        assert_close({"sum": torch.sum(out["logits"][0] * 2)}, {"sum": (truth[0] * 2).sum()}, "an operator")
        assert isinstance(model(**inputs).logits, DTensor), "asked for once, kept from then on"
        model.__dict__["_keeps_all"] = False
        late = model(**inputs)
        late.loss.backward()
        optimizer.step()
        try:
            late.logits.sum()
        except RuntimeFailure as error:
            assert "before optimizer.step()" in str(error)
        else:
            raise AssertionError("logits of parameters that are gone")


ENDS = (criterion, several_results, buffers, attributes, evaluation, all_frozen, deferred)


def main() -> None:
    """All of them; the first that fails ends the run."""
    join()
    for end in ENDS:
        end()
        say(f"ok {end.__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
