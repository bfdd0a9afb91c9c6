"""Emitted graphs as they run without a compiler: fused kernels, one copy for all readers, results over operands."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from dist.small_models import bert, gpt2, llama, mlp, tokens
from liveness import life
from torch import Tensor, fx, nn
from zoo import MIXTURES

import autopar
from autopar import Hints
from autopar.passes.collectives import ALL_REDUCE, KINDS, WAIT
from autopar.passes.lower import lower
from autopar.passes.sums import keep_sums
from autopar.runtime import reference
from autopar.runtime.simulate import run_ranks
from autopar.sharding.operators import ROUTED
from autopar.specialize import specialize

aten = torch.ops.aten


def lowered(module: fx.GraphModule, *inputs: Any) -> fx.GraphModule:
    """``module`` rewritten for inputs like these."""
    graph = copy.deepcopy(module.graph)
    lower(graph, inputs)
    return fx.GraphModule(nn.Module(), graph)


def targets(module: fx.GraphModule) -> Counter[Any]:
    """How often every operator is called."""
    return Counter(node.target for node in module.graph.nodes if node.op == "call_function")


def graph_of(write: Callable[..., Any], inputs: int = 1) -> fx.GraphModule:
    """A graph that returns what ``write`` writes of its inputs."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") for i in range(inputs)]
    graph.output(tuple(write(graph.call_function, *given)))
    return fx.GraphModule(nn.Module(), graph)


def check(module: fx.GraphModule, *inputs: Tensor) -> Counter[Any]:
    """The lowered graph returns the same, twice, and writes to none of its inputs; its operators."""
    before, truth = [x.clone() for x in inputs], module(*inputs)
    found = lowered(module, *inputs)
    for _ in range(2):
        for mine, theirs in zip(found(*inputs), truth, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    return targets(found)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def peak(module: fx.GraphModule, inputs: Sequence[Tensor]) -> int:
    """Bytes that are alive at most while a graph runs, with what it is given."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    given = {n: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
             for n, x in zip(names, inputs, strict=True)}  # fmt: skip
    return sum(life(module.graph, given, dict.fromkeys(names, "given"), {}).peak.values())


PLANS = {
    "one rank": Hints(),
    "dp2, tp2, zero 3": Hints(dp=2, tp=2, zero=3),
    "dp2, zero 1": Hints(dp=2, zero=1),
    "tp4, full": Hints(tp=4, recompute="full"),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "llama": (llama, tokens(8, 8)),
    "gpt2, dropout": (lambda: gpt2(dropout=0.2), tokens(8, 8)),
    "bert": (bert, tokens(8, 8)),
    "mlp": (mlp, {"input": torch.linspace(-1, 1, 256).view(16, 16)}),
    # rows of experts are others in every step: what has to do with them stays, all else is lowered
    "mixtral": (lambda: MIXTURES[0].make()[0], MIXTURES[0].make()[1]),
}


DEFAULT = ("llama", "dp2, tp2, zero 3")
REST = [pytest.param(m, p, marks=pytest.mark.slow) for m in MODELS for p in PLANS if (m, p) != DEFAULT]


@pytest.mark.parametrize("name, plan", [DEFAULT, *REST])
def test_whole_graphs_return_the_same(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank simulated in float64, forward and backward: the same tensors, with the collectives in their order,
    fewer operators, no more bytes alive at a time, and nothing written that the graph is given."""
    make, batch = MODELS[name]
    hints, seen = PLANS[plan], []
    ranks = (hints.dp or 1) * (hints.tp or 1)

    def compare(module: fx.GraphModule, inputs: Any, mesh: Any, traffic: Any = None) -> list[list[Tensor]]:
        before = [[x.clone() for x in own] for own in inputs]
        truth = run_ranks(module, inputs, mesh, traffic)
        other = lowered(module, *inputs[0])
        for mine, theirs in zip(run_ranks(other, inputs, mesh), truth, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
        assert all(torch.equal(x, y) for a, b in zip(inputs, before, strict=True) for x, y in zip(a, b, strict=True))
        if not any(node.meta.get(ROUTED) for node in module.graph.nodes):  # how many rows there are no shape says
            assert peak(other, inputs[0]) <= peak(module, inputs[0]) + 1024  # single numbers may live longer
        assert [n.target for n in other.graph.nodes if n.target in KINDS or n.target is WAIT] == [
            n.target for n in module.graph.nodes if n.target in KINDS or n.target is WAIT
        ]
        seen.append((targets(module).total(), targets(other).total()))
        return truth

    with reference.exact_float64():
        model = make().double()
        batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
        plan_made = autopar.plan(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
        special = specialize(model, plan_made, (), batch)
        monkeypatch.setattr(reference, "run_ranks", compare)
        reference.run_sharded(model, special, reference.Batch((), batch, 1, "sgd"))
    assert len(seen) >= 2
    assert all(after < before for before, after in seen), seen


def test_a_llama_runs_fewer_kernels_than_eager() -> None:
    """What one would write by hand is there: the kernel of log-softmax, a concatenation for the
    gradient of rotated halves, one copy for both products of a gradient, products added as products."""
    model, batch = llama(), tokens(8, 8)
    special = specialize(model, autopar.plan(model, "cpu:1", example_inputs=batch), (), batch)
    values: dict[str, Any] = {}
    for node in special.sharded.module.graph.find_nodes(op="placeholder"):
        values[node.name] = torch.zeros(1, dtype=torch.int64)
    for p in special.captured.parameters:
        values[special.input_name(p.placeholder)] = torch.zeros(p.spec.shape)
    for node in (*special.captured.inputs, *(b.placeholder for b in special.captured.buffers)):
        val = node.meta["val"]
        values[special.input_name(node)] = torch.zeros(val.shape, dtype=val.dtype)
    tangent = special.captured.outputs[0].tangent
    assert tangent is not None
    values[special.input_name(tangent)] = torch.ones(())
    program = special.loss_only()
    assert program.backward is not None
    made = program.forward(*(values[name] for name in program.forward_inputs))
    values.update(zip(program.saved, made[program.num_results :], strict=True))
    inputs = [values[name] for name in program.backward_inputs]
    forward = targets(lowered(program.forward, *(values[name] for name in program.forward_inputs)))
    backward = targets(lowered(program.backward, *inputs))
    layers: int = model.config.num_hidden_layers
    assert forward[aten._log_softmax.default] == 1
    assert backward[aten.exp.default] == 1 and backward[aten.sub_.Tensor] == 1  # no other buffer of logits is made
    cats = lowered(program.backward, *inputs).graph.find_nodes(op="call_function", target=aten.cat.default)
    halves = [node for node in cats if node.args[1] == 3]
    assert backward[aten.slice_backward.default] == 0 and len(halves) == 2 * layers
    # q, k and v, and gate and up: all but the first product of each are added to it
    assert backward[aten.addmm_.default] == 3 * layers and backward[aten.addmm.default] == 0
    assert backward[aten.mm.default] + backward[aten.addmm_.default] == 2 * (7 * layers + 1)
    assert backward[aten.add.Tensor] <= 1  # all other sums are over an operand
    assert lowered(program.backward, *inputs).code == lowered(program.backward, *inputs).code


def test_only_what_nobody_needs_is_written_over() -> None:
    """Not what is given, read again, returned, a part, seen by a later reader in another shape, or broader."""

    powers = itertools.count(2)

    def fresh(call: Any, x: fx.Node) -> fx.Node:
        return call(aten.pow.Tensor_Scalar, (x, next(powers)))

    def write(call: Any, x: fx.Node, row: fx.Node) -> list[fx.Node]:
        given = call(aten.neg.default, (x,))
        again = fresh(call, x)
        first, second = call(aten.exp.default, (again,)), call(aten.mul.Scalar, (again, 3.0))
        returned = fresh(call, x)
        seen = fresh(call, x)
        turned = call(aten.reshape.default, (call(aten.t.default, (seen,)), [4, 4]))
        changed = call(aten.exp.default, (turned,))
        part = call(aten.neg.default, (call(aten.slice.Tensor, (fresh(call, x), 0, 1, 3)),))
        broad = call(aten.add.Tensor, (fresh(call, row), x))
        return [given, first, second, returned, call(aten.exp.default, (returned,)), changed, seen, part, broad]

    found = check(graph_of(write, 2), numbers(4, 4), numbers(4))
    assert found[aten.mul_.Scalar] == 1  # over ``again``, which has been read by then
    assert found[aten.exp_.default] == found[aten.neg_.default] == found[aten.add_.Tensor] == 0


def test_the_dying_operand_is_written_over() -> None:
    """Either of a sum or a product, the first of a difference; also through views; and on and on."""

    def write(call: Any, x: fx.Node) -> list[fx.Node]:
        made = [call(aten.pow.Tensor_Scalar, (x, i)) for i in (2, 3, 4, 5)]
        total = call(aten.add.Tensor, (x, made[0]))
        times = call(aten.mul.Tensor, (x, call(aten.reshape.default, (total, [4, 4]))))
        over = call(aten.exp.default, (call(aten.sub.Tensor, (times, x)),))
        kept = call(aten.sub.Tensor, (x, made[1]))
        twice = call(aten.add.Tensor, (made[2], call(aten.t.default, (made[2],))))
        both = call(aten.mul.Tensor, (made[3], call(aten.t.default, (made[3],))))
        return [over, kept, twice, both]

    found = check(graph_of(write), numbers(4, 4))
    over = (aten.add_.Tensor, aten.mul_.Tensor, aten.sub_.Tensor, aten.exp_.default)
    assert [found[target] for target in over] == [1, 1, 1, 1]
    # x is given; the others look at an operand twice, and in another order that would be wrong
    assert [found[target] for target in (aten.sub.Tensor, aten.add.Tensor, aten.mul.Tensor)] == [1, 1, 1]


def test_what_a_collective_reads_is_left_alone() -> None:
    """It may still be on its way when the graph goes on."""

    def write(call: Any, x: fx.Node) -> list[fx.Node]:
        sent = call(aten.sin.default, (x,))
        reduced = call(ALL_REDUCE, (sent, "sum", "axis:dp"))
        meanwhile = call(aten.exp.default, (sent,))
        arrived = call(WAIT, (reduced,))
        return [meanwhile, call(aten.exp.default, (arrived,))]

    found = targets(lowered(graph_of(write), numbers(4)))
    assert found[aten.exp.default] == 1 and found[aten.exp_.default] == 1  # over what has arrived


def test_calls_on_the_same_values_are_one() -> None:
    """Where nothing more is alive for that: the copy that two products read, but not a value that is cheap to make and
    would be held while the others need the space."""

    def write(call: Any, x: fx.Node, w: fx.Node) -> list[fx.Node]:
        grad = call(aten.sin.default, (x,))
        copies = [call(aten.reshape.default, (call(aten.permute.default, (grad, [1, 0, 2])), [64, 64])) for _ in "ab"]
        products = [call(aten.mm.default, (c, w)) for c in copies]
        early = call(aten.cos.default, (x,))
        first = call(aten.mm.default, (call(aten.reshape.default, (early, [64, 64])), w))
        late = call(aten.cos.default, (x,))
        return [*products, first, call(aten.mm.default, (call(aten.reshape.default, (late, [64, 64])), first))]

    found = check(graph_of(write, 2), numbers(8, 8, 64), numbers(64, 64, seed=1))
    assert found[aten.permute.default] == 1 and found[aten.cos.default] == 2
    assert found[aten.mm.default] == 4  # the first two are equal as well, and results of their own


def test_results_are_tensors_of_their_own() -> None:
    """Equal ones, one that changes nothing, and one that repeats its elements: all may be written to afterwards."""

    def write(call: Any, x: fx.Node) -> list[fx.Node]:
        few = call(aten.sum.dim_IntList, (x, [1], True))
        equal = [call(aten.exp.default, (x,)) for _ in range(2)]
        copies = [call(aten.clone.default, (equal[0],)) for _ in range(2)]
        repeated = call(aten.mul.Scalar, (call(aten.expand.default, (few, [4, 4])), 3.0))
        return [*equal, *copies, call(aten.mul.Scalar, (x, 1)), repeated]

    module, x = graph_of(write), numbers(4, 4)
    check(module, x)
    found = lowered(module, x)(x)
    assert len({t.untyped_storage().data_ptr() for t in (*found, x)}) == len(found) + 1
    assert all(t.is_contiguous() for t in found)


def test_a_log_softmax_over_a_split_dim_stays_in_parts() -> None:
    """With a reduction between ranks inside there is no kernel for it; and what only looks like one is none."""

    def split(call: Any, x: fx.Node) -> list[fx.Node]:
        most = call(WAIT, (call(ALL_REDUCE, (call(aten.amax.default, (x, [1], True)), "max", "axis:tp")),))
        shifted = call(aten.sub.Tensor, (x, most))
        total = call(aten.sum.dim_IntList, (call(aten.exp.default, (shifted,)), [1], True))
        return [call(aten.sub.Tensor, (shifted, call(aten.log.default, (total,))))]

    def other_dims(call: Any, x: fx.Node) -> list[fx.Node]:
        shifted = call(aten.sub.Tensor, (x, call(aten.amax.default, (x, [0], True))))
        total = call(aten.sum.dim_IntList, (call(aten.exp.default, (shifted,)), [1], True))
        return [call(aten.sub.Tensor, (shifted, call(aten.log.default, (total,))))]

    assert targets(lowered(graph_of(split), numbers(4, 4)))[aten._log_softmax.default] == 0
    assert check(graph_of(other_dims), numbers(4, 4))[aten._log_softmax.default] == 0


@pytest.mark.parametrize("cut, fused", [((0, 2, 2, 9), 1), ((0, 2, 1, 9), 0), ((0, 1, 2, 4), 0), ((1, 2, 2, 4), 0)])
def test_only_halves_are_put_together(cut: tuple[int, int, int, int], fused: int) -> None:
    """Parts that overlap, or leave a gap, are laid into zeros and added up."""
    begin, end, other, last = cut

    def write(call: Any, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        parts = [call(aten.slice_backward.default, (g, [3, 4], 1, a, b, 1)) for g, a, b in
                 ((y, other, last), (x, begin, end))]  # fmt: skip
        return [call(aten.add.Tensor, tuple(parts))]

    found = check(graph_of(write, 2), numbers(3, end - begin), numbers(3, min(last, 4) - other, seed=1))
    assert found[aten.cat.default] == fused and found[aten.slice_backward.default] == 2 * (1 - fused)


def test_gradients_of_weights_are_added_by_their_products() -> None:
    """From the second micro-batch on: no gradient of a weight is there besides its sum."""
    x, w = numbers(4, 8), numbers(4, 16, seed=1)

    def write(call: Any, x: fx.Node, w: fx.Node) -> list[fx.Node]:
        product = call(aten.mm.default, (call(aten.t.default, (x,)), w))
        return [call(aten.reshape.default, (product, [2, 4, 16])), call(aten.sum.dim_IntList, (x, [0]))]

    module = keep_sums(graph_of(write, 2), (), (0, 1))
    sums = [numbers(2, 4, 16, seed=2), numbers(8, seed=3)]
    truth = [sums[0] + (x.t() @ w).view(2, 4, 16), sums[1] + x.sum(0)]
    found = lowered(module, x, w, *sums)
    assert targets(found)[aten.addmm_.default] == 1 and targets(found)[aten.mm.default] == 0
    found(x, w, *sums)
    torch.testing.assert_close(sums, truth, rtol=1e-12, atol=1e-12)
