"""Trains a parallel module and the untouched eager model side by side, in every process, and compares them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from small_models import gradients, largest_error
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.ops import counter_draws

#: Of float32, and of float64 (inside `exact_float64`, since transformers casts to float32 in many places).
BOUND, EXACT_BOUND = 1e-5, 1e-10
#: An element whose gradient is under this share of the RMS takes an AdamW step that is mostly noise, DESIGN section 9.
FLOOR = 1e-3


def join() -> int:
    """Join the process group; returns this rank. Random states differ between ranks, as a user's may."""
    dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())
    return dist.get_rank()


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """DTensors gathered; every rank must call it."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters by name, whole."""
    return {name: p.clone() for name, p in whole({n: p.detach() for n, p in model.named_parameters()}).items()}


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor], what: str) -> None:
    """No tensor is off by more than the bound of their dtype."""
    error, name = largest_error(found, truth)
    exact = all(t.dtype == torch.float64 for t in (*found.values(), *truth.values()))
    assert error <= (EXACT_BOUND if exact else BOUND), f"{what}: {name} is off by {error:.3g}"


def check_is_split(model: Any, reference: nn.Module) -> None:
    """The parameters are DTensors on the whole mesh, under the model's own names and with its shapes."""
    mine, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(mine) == list(theirs)
    for name, p in mine.items():
        assert isinstance(p, nn.Parameter) and isinstance(p.data, DTensor), name
        assert p.device_mesh.size() == dist.get_world_size()
        assert p.device_mesh.mesh_dim_names == model.plan.mesh.names
        own = theirs[name]
        assert (p.shape, p.dtype, p.requires_grad) == (own.shape, own.dtype, own.requires_grad), name


class Pair:
    """A parallel module and the eager model it was made from, trained alike."""

    def __init__(self, reference: nn.Module, hints: autopar.Hints | None, batch: dict[str, Tensor]) -> None:
        self.reference = reference
        self.model: Any = autopar.parallelize(copy.deepcopy(self.reference), hints=hints, example_inputs=batch)
        check_is_split(self.model, self.reference)
        self.steady: dict[str, Tensor] = {}

    def step(self, batch: dict[str, Tensor], optimizers: Sequence[torch.optim.Optimizer], max_norm: float) -> None:
        """Forward, backward, clipping and update on both sides; losses, gradients and norms compared."""
        seed = self.model.seed.clone()
        loss = self.model(**batch)["loss"]
        loss.backward()
        draws = counter_draws(seed) if has_dropout(self.reference) else contextlib.nullcontext()
        with draws:
            truth = self.reference(**batch)["loss"]
        truth.backward()
        assert_close({"loss": loss.detach()}, {"loss": truth.detach()}, "loss")
        grads = gradients(self.reference)
        assert_close(whole(gradients(self.model)), grads, "gradients")
        rms = torch.cat([g.flatten() for g in grads.values()]).square().mean().sqrt()
        for name, g in grads.items():
            steady = g.abs() > FLOOR * rms
            self.steady[name] = self.steady[name] & steady if name in self.steady else steady
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), max_norm) for m in (self.model, self.reference)]
        norm = norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0]
        assert float(norms[1]) > max_norm, "clipping did nothing"
        assert_close({"norm": norm}, {"norm": norms[1]}, "clip_grad_norm_")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, make: Callable[[Any], torch.optim.Optimizer], batches: Sequence[dict[str, Tensor]], *,
              steady: bool = False, max_norm: float = 0.05) -> None:  # fmt: skip
        """One step a batch; then all parameters agree (with ``steady`` those elements whose gradients never were noise)
        and have moved."""
        before, self.steady = parameters(self.model), {}
        optimizers = [make(self.model.parameters()), make(self.reference.parameters())]
        for batch in batches:
            self.step(batch, optimizers, max_norm)
        after, truth = parameters(self.model), parameters(self.reference)
        if steady:
            after = {n: torch.where(self.steady[n], p, 0) for n, p in after.items()}
            truth = {n: torch.where(self.steady[n], p, 0) for n, p in truth.items()}
            assert sum(int(k.sum()) for k in self.steady.values()) > 0.5 * sum(p.numel() for p in truth.values())
        assert_close(after, truth, "parameters")
        moving = {name for name, steady in self.steady.items() if steady.any()}  # a key bias has no influence
        assert len(moving) > 0.8 * len(before)
        assert all(not torch.equal(before[n], p) for n, p in parameters(self.model).items() if n in moving)


def has_dropout(model: nn.Module) -> bool:
    """Whether the model's forward drops anything now."""
    return model.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())


def say(text: str) -> None:
    """A line that the test looks for, from this rank; written at once so that lines of ranks do not mix."""
    print(f"[rank {dist.get_rank()}] {text}\n", end="", flush=True)
