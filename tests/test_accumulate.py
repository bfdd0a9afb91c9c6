"""The reductions of gradients cut off a backward graph: fewer collectives in it, the same gradients in the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist.small_models import bert, largest_error, llama, mlp, tokens
from torch import fx

import autopar
from autopar import Hints
from autopar.passes.accumulate import accumulation
from autopar.runtime import reference
from autopar.runtime.simulate import Traffic, run_ranks
from autopar.specialize import specialize

REDUCTIONS = ("all_reduce", "reduce_scatter")

MODELS = {
    "llama": (lambda: llama(num_hidden_layers=1), tokens(4, 8)),
    "llama, bf16": (lambda: llama(num_hidden_layers=1).bfloat16(), tokens(4, 8)),
    "bert": (bert, tokens(4, 8)),
    "mlp": (mlp, {"input": torch.linspace(-1, 1, 128).view(8, 16)}),
}

#: BERT's position embeddings are the same for every sample: their gradient is reduced before it is put into the table,
#: which is smaller, and then no longer the last thing that happens to it.
REDUCED_EARLIER = {"bert": "bert.embeddings.position_embeddings.weight"}


def reduced(traffic: Traffic) -> int:
    """Bytes that were reduced over dp."""
    return sum(traffic.bytes[kind, "dp"] for kind in REDUCTIONS)


@pytest.mark.parametrize("hints", [Hints(dp=2, tp=2, zero=0), Hints(dp=2, tp=2, zero=3), Hints(dp=4, zero=3)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_two_backwards_share_their_reductions(name: str, hints: Hints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank simulated: the backward that accumulates reduces no gradient over dp, and what finishes two of them
    gives twice the gradients with the reductions of one. In bf16 sums are rounded later than gradients would be."""
    make, batch = MODELS[name]
    model = make()
    plan = autopar.plan(model, "cpu:4", hints=hints, example_inputs=batch)
    special = specialize(model, plan, (), batch)
    backward = special.program.backward
    assert backward is not None
    cut = accumulation(backward, ["axis:dp"])
    trained = [p for p in special.captured.parameters if p.gradient is not None]

    def check(module: fx.GraphModule, inputs: Any, mesh: Any, traffic: Any = None) -> list[list[torch.Tensor]]:
        if module is not backward:
            return run_ranks(module, inputs, mesh, traffic)
        counts = [Traffic(), Traffic(), Traffic()]
        truth = run_ranks(backward, inputs, mesh, counts[0])
        held = run_ranks(cut.backward, inputs, mesh, counts[1])
        sums = [[torch.tensor(mesh.coordinates(r)), *(2 * h for h in held[r])] for r in range(mesh.size)]
        found = run_ranks(cut.finish, sums, mesh, counts[2])
        for mine, theirs in zip(found, truth, strict=True):
            names = [p.name for p in trained]
            twice = {n: 2 * g for n, g in zip(names, theirs, strict=True)}
            error = largest_error(dict(zip(names, mine, strict=True)), twice)
            assert error[0] <= (1e-2 if "bf16" in name else 1e-6), error
        assert reduced(counts[1]) + reduced(counts[2]) == reduced(counts[0])
        pieces = [special.assignment.sources[p.placeholder] for p in trained]
        apart = [layout.local_bytes(mesh, p.spec) for layout, p in zip(pieces, trained, strict=True)]
        over_dp = [n * mesh.degree("dp") ** ("dp" in x.split_axes) for n, x in zip(apart, pieces, strict=True)]
        late = [n for n, p in zip(over_dp, trained, strict=True) if p.name != REDUCED_EARLIER.get(name)]
        assert len(late) >= len(trained) - 1 and reduced(counts[2]) >= sum(late)
        return truth

    monkeypatch.setattr(reference, "run_ranks", check)
    reference.run_sharded(model, special, reference.Batch((), batch, 1, "sgd"))
