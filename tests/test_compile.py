"""Emitted graphs compiled by Inductor: the same numbers, one compilation for all blocks of a class."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from dist.small_models import gpt2, gradients, largest_error, llama, tokens
from torch import fx

import autopar
from autopar import Hints
from autopar.errors import CompilerError
from autopar.passes.collectives import KINDS
from autopar.passes.phases import Phases
from autopar.passes.segments import segmented
from autopar.passes.sums import keep_sums
from autopar.runtime import compiled, reference
from autopar.runtime.parameters import parameter_at
from autopar.runtime.simulate import run_ranks
from autopar.specialize import specialize, specialize_step

BOUND = 1e-5


def cut(graph: fx.Graph) -> tuple[fx.Graph, list[fx.GraphModule]]:
    """The outer graph of ``graph``, and its segments, which run as they are."""
    segments: list[fx.GraphModule] = []

    def make(module: fx.GraphModule) -> Any:
        segments.append(module)

        def run(*inputs: Any) -> Any:
            return module(*inputs)

        return run

    return segmented(graph, make), segments


@pytest.mark.parametrize("hints", [Hints(dp=2, tp=2, zero=3), Hints(tp=4, recompute="full")], ids=str)
def test_segments_compute_the_same(hints: Hints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank simulated: forward and backward cut in segments give the same tensors to the last bit, the collectives
    stand in the same order, and the blocks share their segments."""
    model, batch = llama(), tokens(8, 8)
    plan = autopar.plan(model, "cpu:4", hints=hints, example_inputs=batch)
    special = specialize(model, plan, (), batch)
    seen = []

    def check(module: fx.GraphModule, inputs: Any, mesh: Any, traffic: Any = None) -> list[list[torch.Tensor]]:
        truth = run_ranks(module, inputs, mesh, traffic)
        outer, segments = cut(module.graph)
        found = run_ranks(fx.GraphModule(torch.nn.Module(), outer), inputs, mesh)
        assert all(torch.equal(a, b) for x, y in zip(found, truth, strict=True) for a, b in zip(x, y, strict=True))
        assert [n.target for n in outer.nodes if n.target in KINDS] == [
            n.target for n in module.graph.nodes if n.target in KINDS
        ]
        kinds = Counter(segment.code for segment in segments)
        inside = sum(n.op == "call_function" for segment in segments for n in segment.graph.nodes)
        seen.append((max(kinds.values()), inside / sum(n.op == "call_function" for n in module.graph.nodes)))
        return truth

    monkeypatch.setattr(reference, "run_ranks", check)
    reference.run_sharded(model, special, reference.Batch((), batch, 1, "sgd"))
    assert len(seen) == 2
    for shared, inside in seen:
        assert shared >= 2  # at least the blocks that are neither first nor last
        assert inside > 0.4


def test_kernels_make_elementwise_values_again() -> None:
    """What a compiled backward makes on the way is not kept: of a block the gate's activation and both normalised
    inputs before their weights; what products read is, and so is what cannot be made of what is kept. The numbers are
    those of the program that keeps all, to the last bit, on every rank."""
    model, batch = llama(num_hidden_layers=1), tokens(4, 8)
    plan = autopar.plan(model, "cpu:2", hints=Hints(dp=2), example_inputs=batch)
    runs, kept = [], []
    for compiles in (False, True):
        special = specialize(model, plan, (), batch, compiles=compiles)
        kept.append(special.program.saved)
        runs.append(reference.run_sharded(model, special, reference.Batch((), batch, 1, "sgd"))[0])
    assert set(kept[1]) < set(kept[0])
    lost = Counter(name.split("_")[0] for name in kept[0] if name not in kept[1])
    assert lost == {"silu": 1, "mul": 3}  # the last norm's too
    plain, made_again = runs
    assert plain.gradients[0].keys() == made_again.gradients[0].keys()
    assert all(torch.equal(g, made_again.gradients[0][name]) for name, g in plain.gradients[0].items())


def test_the_same_call_stands_once() -> None:
    """In a segment two copies of one value that products read are one; what is read outside is its own tensor."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    copies = [graph.call_function(torch.ops.aten.clone.default, (x,)) for _ in range(3)]
    total = graph.call_function(torch.ops.aten.mm.default, (copies[0], copies[1]))
    graph.output((total, copies[2]))
    _, segments = cut(graph)
    targets = [n.target for n in segments[0].graph.nodes if n.op == "call_function"]
    assert targets == [torch.ops.aten.clone.default, torch.ops.aten.clone.default, torch.ops.aten.mm.default]
    x = torch.randn(3, 3)
    copy, product = segments[0](x)
    assert torch.equal(product, x @ x) and torch.equal(copy, x)


@pytest.mark.slow
def test_two_inputs_may_be_one_tensor() -> None:
    """When a segment is compiled they are, and another time they are two."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    wave = graph.call_function(torch.ops.aten.exp.default, (x,))
    graph.output((graph.call_function(torch.ops.aten.sub.Tensor, (wave, y)),))
    segment = compiled.Segment(fx.GraphModule(torch.nn.Module(), graph))
    first, second = torch.linspace(0, 1, 8), torch.linspace(1, 2, 8)
    for pair in ((first, first), (first, second)):
        torch.testing.assert_close(segment(*pair)[0], pair[0].exp() - pair[1])


def test_parameters_are_those_that_modules_hold_now() -> None:
    """By their names, also where a module or a parameter has been replaced."""
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))})
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    model["a"][1] = torch.nn.Linear(2, 3)  # type: ignore[index]
    model["a"][0].bias = torch.nn.Parameter(torch.ones(2))  # type: ignore[index]
    assert all(parameter_at(model, name) is p for name, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda n: llama(num_hidden_layers=n), lambda n: gpt2(0.0, layers=n)],
                         ids=["llama", "gpt2"])  # fmt: skip
def test_equal_to_eager_and_compiled_once(make: Any) -> None:
    """On one rank: loss and gradients of a plain loop and of train_step within the bound of float32; and a model of
    five blocks needs no more compilations than one of four."""
    batch, counts = tokens(8, 8), []
    for layers in (4, 5):
        reference_model = make(layers)
        before = compiled.compilations()
        model = autopar.parallelize(
            copy.deepcopy(reference_model), cluster="cpu:1", example_inputs=batch, compile=True,
            hints=Hints(recompute="full"),
        )  # fmt: skip
        model(**batch).loss.backward()
        counts.append(compiled.compilations() - before)
        reference_model(**batch).loss.backward()
        for _ in range(2):
            found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            error, name = largest_error(found, gradients(reference_model))
            assert error <= BOUND, (error, name)
            model.zero_grad()
            model.train_step(**batch)
    assert counts[0] > 0 and counts[1] == 0


def kinds(layers: int, hints: Hints) -> list[set[str]]:
    """The texts of all segments that each stage of a step compiles, of its first micro-batch and of further ones."""
    model, batch = llama(num_hidden_layers=layers), tokens(8, 8)
    plan = autopar.plan(model, f"cpu:{(hints.pp or 1) * (hints.dp or 1)}", hints=hints, example_inputs=batch)
    program = specialize_step(model, plan, (), batch)
    found = []
    for part in program.stages or [program.phases]:
        phases = part.all() if isinstance(part, Phases) else part.phases
        assert part.backward is not None
        summed = [i for i, name in enumerate(part.backward.outputs) if name in part.left]
        modules = [*(phase.module for phase in phases), keep_sums(part.backward.module, (), summed)]
        found.append({segment.code for module in modules for segment in cut(module.graph)[1]})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("hints", [
    Hints(pp=2, schedule="1f1b", micro_batch_size=2),
    Hints(dp=2, zero=2, micro_batch_size=2),
    Hints(pp=2, dp=2, zero=3, schedule="1f1b", micro_batch_size=2),
], ids=["1f1b", "zero 2", "1f1b, zero 3"])  # fmt: skip
def test_a_deeper_model_has_no_other_segments(hints: Hints) -> None:
    """Nothing that is compiled has as many operators as the model has blocks, such as what gradients end with."""
    few, many = kinds(6, hints), kinds(8, hints)
    assert few == many and all(few)


def test_no_compiler_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One error at parallelize, with what is missing, not at the first step."""

    def fails(module: Any, inputs: Any, name: str) -> Any:
        raise RuntimeError("g++: command not found\nmore")

    compiled.check_compiler.cache_clear()
    monkeypatch.setattr(compiled, "compile_graph", fails)
    with pytest.raises(CompilerError, match=r"nothing can be compiled here[\s\S]*C\+\+ compiler[\s\S]*not found") as e:
        autopar.parallelize(llama(num_hidden_layers=1), cluster="cpu:1", example_inputs=tokens(), compile=True)
    assert "more" not in str(e.value)
    compiled.check_compiler.cache_clear()
