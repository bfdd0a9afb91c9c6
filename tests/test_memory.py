"""The bytes that a plan predicts, against what the emitted program really keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import CASES, Case, captured_case, plan_captured

import autopar
from autopar import Workload
from autopar.capture import batch_tensors
from autopar.runtime.program import Specialization
from autopar.runtime.simulate import run_ranks
from autopar.specialize import specialize

HINTS = {
    "free": autopar.Hints(pp=1),
    "tp4": autopar.Hints(tp=4),
    "dp4-zero3": autopar.Hints(dp=4, zero=3),
    "dp2-tp2-zero3": autopar.Hints(dp=2, tp=2, zero=3),
}
#: Every way to recompute, each on another mesh.
RECOMPUTE = {
    "dp2-tp2-zero3-full": autopar.Hints(dp=2, tp=2, zero=3, recompute="full"),
    "dp2-tp2-selective": autopar.Hints(dp=2, tp=2, recompute="selective"),
    "tp4-full": autopar.Hints(tp=4, recompute="full"),
    "dp4-zero3-selective": autopar.Hints(dp=4, zero=3, recompute="selective"),
    "dp4-first": autopar.Hints(dp=4, recompute="full:1"),
}


def _forward_values(
    model: torch.nn.Module, special: Specialization, batch: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """What rank 0's forward program hands to its backward."""
    mesh, captured = special.assignment.mesh, special.captured
    named = dict(model.named_parameters(remove_duplicate=False))
    inputs = []
    for rank in range(mesh.size):
        values = {special.sharded.coordinates.name: torch.tensor(mesh.coordinates(rank))}
        for p in captured.parameters:
            layout = special.assignment.sources[p.placeholder]
            values[special.input_name(p.placeholder)] = layout.local_slice(mesh, named[p.name].detach(), rank).clone()
        values.update({special.input_name(b.placeholder): b.tensor(model) for b in captured.buffers})
        given = batch_tensors((), batch)
        values.update({special.input_name(n): t for n, t in zip(captured.inputs, given, strict=True)})
        if captured.seed is not None:
            values[special.input_name(captured.seed)] = torch.tensor([1, 0])
        inputs.append([values[name] for name in special.program.forward_inputs])
    return run_ranks(special.program.forward, inputs, mesh)[0][special.program.num_results :]


def _cases() -> list[Any]:
    free = ("llama", "mlp")  # others are searched for as long and have nothing else to show
    found = [
        pytest.param(case, hints, id=f"{case.name}-{name}",
                     marks=[pytest.mark.slow] * (name == "free" and case.name not in free))
        for case in CASES for name, hints in HINTS.items()
    ]  # fmt: skip
    for case in CASES:
        for i, (name, hints) in enumerate(RECOMPUTE.items()):
            if case.name != "mlp" or hints.recompute == "selective":  # which has no blocks
                marks = [] if case.name == "llama" and i < 3 else [pytest.mark.slow]
                found.append(pytest.param(case, hints, id=f"{case.name}-{name}", marks=marks))
    return found


@pytest.mark.parametrize(("case", "hints"), _cases())
def test_saved_activations_and_parameters_take_the_bytes_that_the_plan_says(case: Case, hints: autopar.Hints) -> None:
    """Exactly, for activations saved for the backward (each storage once) and for parameters at rest."""
    model, batch = case.make()
    plan = plan_captured(model, batch, captured_case(case), "cpu:4", hints, Workload())
    special = specialize(model, plan, (), batch, captured=captured_case(case))
    kept = {  # a number may lie beside others that came with it in one collective
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() if t.ndim else t.nbytes
        for t in _forward_values(model, special, batch)
    }
    assert sum(kept.values()) == plan.memory["activations"]
    mesh = plan.mesh
    at_rest = sum(
        p.storage.local_slice(mesh, torch.empty(p.shape, dtype=next(model.parameters()).dtype), 0).nbytes
        for p in plan.parameters.values()
    )
    assert at_rest == plan.memory["parameters"]
