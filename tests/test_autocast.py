"""``torch.autocast`` around a parallel module does what it does around the model."""

from __future__ import annotations

import copy

import torch
from models import LLAMA
from torch import Tensor, nn

import autopar
from autopar.runtime.verify import tensor_errors


def step(model: nn.Module, batch: dict[str, Tensor], narrow: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a forward under autocast to bf16, or without."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for n, p in model.named_parameters()}


def test_every_program_is_that_of_its_autocast() -> None:
    """Under autocast, without, and under it again, on one rank: the model's losses, which differ between the two, and
    gradients no further from those in float32 than 1.5 times the model's own; two programs are made."""
    model, batch = LLAMA.make()
    parallel = autopar.parallelize(copy.deepcopy(model), cluster="cpu:1x1", example_inputs=batch)
    _, exact = step(model, batch, False)
    losses = []
    for narrow in (True, False, True):
        truth, found = step(model, batch, narrow), step(parallel, batch, narrow)
        losses.append(float(found[0]))
        torch.testing.assert_close(found[0], truth[0], rtol=1e-6, atol=0)
        allowed = 1.5 * max(tensor_errors(truth[1], exact).values()) if narrow else 1e-5
        assert max(tensor_errors(found[1], exact).values()) <= allowed
    assert losses[0] == losses[2] and abs(losses[0] - losses[1]) > 1e-5 * losses[1]
    assert len(parallel.specializations) == 2
