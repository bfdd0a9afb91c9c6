"""Gradients of micro-batches: added in place as soon as they are there, and no two of them, or anything else, one
tensor."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.small_models import gradients, largest_error
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import Hints
from autopar.errors import RuntimeFailure
from autopar.passes.collectives import ALL_REDUCE, WAIT
from autopar.passes.sums import keep_sums
from autopar.runtime import accumulate, release
from autopar.runtime.accumulate import Accumulator
from autopar.runtime.step import Sums
from autopar.sharding.buckets import is_overwritten

aten = torch.ops.aten
BOUND = 1e-5


def graph_of(write: Callable[[Any, fx.Node], list[fx.Node]]) -> fx.GraphModule:
    """A graph that reads ``x`` [4]."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(write(graph.call_function, x)))
    return fx.GraphModule(nn.Module(), graph)


def several(call: Any, x: fx.Node) -> list[fx.Node]:
    """Outputs of all sorts: computed; the same again; a view of it; repeated; a part; what is given; of two results."""
    doubled = call(aten.mul.Tensor, (x, 2))
    repeated = call(aten.expand.default, (call(aten.sum.dim_IntList, (x, [0], True)), [4]))
    part = call(aten.slice.Tensor, (call(aten.neg.default, (x,)), 0, 1, 3))
    view = call(aten.view.default, (doubled, [2, 2]))
    extremes = call(aten.topk.default, (x, 2))
    largest = call(operator.getitem, (extremes, 0))
    turned = call(aten.t.default, (call(aten.view.default, (call(aten.abs.default, (x,)), [2, 2])),))
    return [doubled, doubled, view, repeated, part, x, largest, turned]


def test_sums_are_those_of_the_outputs() -> None:
    """Over three runs, whichever outputs are summed up; the others come out as they are, and nothing that the graph is
    given changes."""
    module = graph_of(several)
    inputs = [torch.tensor([1.0, -2.0, 3.0, 0.5]) * k for k in (1, 2, 3)]
    kept = [x.clone() for x in inputs]
    truth = [module(x) for x in inputs]
    for summed in (range(8), [1, 2], [3, 4, 5, 6, 7]):
        first = keep_sums(module, summed, ())(inputs[0])
        sums = [first[i] for i in summed]
        places = [t.untyped_storage().data_ptr() for t in sums]
        assert len(set(places)) == len(sums)
        others = [i for i in range(8) if i not in summed]
        for k in (1, 2):
            found = keep_sums(module, (), summed)(inputs[k], *sums)
            assert all(torch.equal(t, truth[k][i]) for t, i in zip(found, others, strict=True))
        for i, total in zip(summed, sums, strict=True):
            assert torch.equal(total, truth[0][i] + truth[1][i] + truth[2][i]), i
        assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True))


def test_only_what_is_shared_is_copied() -> None:
    """The first tensor of a storage is its own sum, also seen as a matrix; a part would hold on to the whole."""
    copies = [n.args[0] for n in keep_sums(graph_of(several), range(8), ()).graph.find_nodes(
        op="call_function", target=aten.clone.default)]  # fmt: skip
    assert sorted(n.name for n in copies) == ["expand_default", "mul_tensor", "slice_tensor", "view_default", "x"]


def test_a_value_that_goes_elsewhere_too_is_copied() -> None:
    """What another stage is still being sent must not change under its hands."""
    module = graph_of(lambda call, x: [d := call(aten.mul.Tensor, (x, 2)), call(aten.view.default, (d, [2, 2]))])
    found = keep_sums(module, [1], ())(torch.ones(4))
    assert found[0].untyped_storage().data_ptr() != found[1].untyped_storage().data_ptr()


def test_adding_comes_as_soon_as_there_is_something() -> None:
    """Not behind all that the graph computes: right after the summand."""
    module = graph_of(lambda call, x: [a := call(aten.neg.default, (x,)), call(aten.abs.default, (a,))])
    adding = keep_sums(module, (), [0, 1]).graph
    targets = [n.target for n in adding.nodes if n.op == "call_function"]
    assert targets == [aten.neg.default, aten.add_.Tensor, aten.abs.default, aten.add_.Tensor]


class Twice(nn.Module):
    """Parameters whose gradients are one tensor, the loss' own, or one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.first, self.second = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.number, self.other, self.numbers = (nn.Parameter(torch.randn(s)) for s in ((), (), (6,)))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x [B, 8], y [B, 4]."""
        wrong = self.layer(x) + (self.first + self.second) - y
        return {"loss": wrong.square().mean() + self.number + self.other + self.numbers.sum()}


def parallel_pair(**arguments: Any) -> tuple[Any, nn.Module, dict[str, Tensor]]:
    """A parallel module on one rank, the model that it was made from, and a batch of eight samples."""
    model, batch = Twice(), {"x": torch.randn(8, 8), "y": torch.randn(8, 4)}
    parallel = autopar.parallelize(copy.deepcopy(model), cluster="cpu:1", example_inputs=batch, **arguments)
    return parallel, model, batch


def compare(parallel: nn.Module, model: nn.Module) -> None:
    """Gradients agree."""
    found: dict[str, Any] = {name: p.grad for name, p in parallel.named_parameters()}
    error, name = largest_error({name: g.to_local() for name, g in found.items()}, gradients(model))
    assert error <= BOUND, (error, name)


@pytest.mark.parametrize("size", [None, 2])
def test_no_two_gradients_are_one_tensor(size: int | None) -> None:
    """Clipping and adding write to gradients in place: each must have memory of its own. In the plain loop and in whole
    steps, against eager; twice, so that gradients are added to."""
    parallel, model, batch = parallel_pair(hints=Hints(micro_batch_size=size))
    plain = [lambda: parallel(**batch)["loss"].backward()] if size is None else []
    for step in (lambda: parallel.train_step(**batch), *plain):
        for m in (parallel, model):
            m.zero_grad()
        for _ in range(2):
            step()
            model(**batch)["loss"].backward()
        norms = parallel.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert float(norms[1]) > 0.1 and abs(float(norms[0] / norms[1]) - 1) < BOUND
        found = [p.grad.to_local() for p in parallel.parameters()]
        assert len({g.untyped_storage().data_ptr() for g in found}) == len(found) == 7
        compare(parallel, model)


def test_micro_batches_add_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four micro-batches the first leaves tensors, to which the other three add; then they are the gradients."""
    seen: list[dict[str, int]] = []
    add = Sums.run

    def run(self: Sums, *arguments: Any) -> dict[str, Any]:
        found = add(self, *arguments)
        seen.append({name: t.data_ptr() for name, t in self.items() if t.dim() > 0})
        return found

    monkeypatch.setattr(Sums, "run", run)
    parallel, model, batch = parallel_pair(hints=Hints(micro_batch_size=2))
    parallel.train_step(**batch)
    assert len(seen) == 4 and all(one == seen[0] for one in seen) and len(seen[0]) >= 3
    own = {p.grad.to_local().data_ptr() for p in parallel.layer.parameters()}
    assert len(own) == 2 and own <= set(seen[0].values())
    model(**batch)["loss"].backward()
    compare(parallel, model)


def test_held_gradients_add_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of backwards inside of `accumulate`."""
    seen: list[list[int]] = []
    hold = Accumulator._hold

    def held(self: Accumulator, program: Any, *arguments: Any) -> None:
        hold(self, program, *arguments)
        seen.append([t.data_ptr() for t in self._sums[program].values])

    monkeypatch.setattr(Accumulator, "_hold", held)
    parallel, model, batch = parallel_pair()
    for i in range(3):
        given = {name: t + i for name, t in batch.items()}
        with parallel.accumulate():
            parallel(**given)["loss"].backward()
        model(**given)["loss"].backward()
    assert all(p.grad is None for p in parallel.parameters())
    parallel(**batch)["loss"].backward()
    model(**batch)["loss"].backward()
    assert len(seen) == 4 and all(one == seen[0] for one in seen) and len(seen[0]) >= 3
    compare(parallel, model)


def test_a_backward_that_fails_halfway_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has added some of its gradients to what is held: nothing of that becomes a gradient until it is dropped."""
    parallel, model, batch = parallel_pair()

    def fails(module: Any, inputs: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    with parallel.accumulate():
        parallel(**batch)["loss"].backward()
        loss = parallel(**batch)["loss"]
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(accumulate, "run_and_release", fails)
            loss.backward()
    with pytest.raises(RuntimeFailure, match="not complete"):
        parallel(**batch)["loss"].backward()
    with pytest.raises(RuntimeFailure, match="not complete"), parallel.accumulate():
        pass
    parallel.zero_grad()
    parallel(**batch)["loss"].backward()
    model(**batch)["loss"].backward()
    compare(parallel, model)


def test_a_bucket_is_reduced_where_it_lies() -> None:
    """What was laid for one all-reduce alone is written over when the graph runs; all else is copied first, and what a
    graph is given stays as it is."""
    parallel_pair()  # joins a process group of one rank
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def write(call: Any, x: fx.Node) -> list[fx.Node]:
        found = []
        own, shared = (call(aten.cat.default, ([call(aten.neg.default, (x,)), x],)) for _ in range(2))
        for sent in (own, shared, x):
            found.append(call(WAIT, (call(ALL_REDUCE, (sent, "sum", group)),)))
        return [*found, shared]

    module, x = graph_of(write), torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = release.run_and_release(module, [x])
    both = torch.tensor([-1.0, -2.0, -3.0, -4.0, 1.0, 2.0, 3.0, 4.0])
    assert all(torch.equal(t, truth) for t, truth in zip(found, (both, both, x, both), strict=True))
    assert len({t.data_ptr() for t in found}) == 4 and found[2].data_ptr() != x.data_ptr()
    assert [is_overwritten(n) for n in module.graph.find_nodes(op="call_function", target=ALL_REDUCE)] == [
        True, False, False,
    ]  # fmt: skip
    with Calls() as calls:
        release.run_and_release(module, [x])
    assert calls.names.count("_c10d_functional::all_reduce_") == 1
    assert calls.names.count("_c10d_functional::all_reduce") == 2


class Calls(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))
