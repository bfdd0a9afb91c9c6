"""Capture: the joint graph computes what the untouched model computes, and is in the form that the rules expect."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dist import small_models as models
from dist.small_models import largest_error
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import autopar
from autopar import Hints, ops
from autopar.capture import Captured, batch_tensors, capture
from autopar.errors import CaptureError

BOUND = 1e-5  # float32, DESIGN section 9
SEED = torch.tensor([1234, 7])
PRIME = 11  # a sequence length that divides no other size, so that S x S values can be told by their number of elements
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """A model with a batch, and the paths of its repeated blocks."""

    make: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    blocks: str | None = None


def sample(*shape: int) -> Tensor:
    """Fixed random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


CASES = {
    "llama": Case(models.llama, (), models.tokens(seq_len=PRIME), "model.layers"),
    "gpt2": Case(models.gpt2, (), models.tokens(seq_len=PRIME), "transformer.h"),
    "gpt2 dropout": Case(lambda: models.gpt2(0.2), (), models.tokens(seq_len=PRIME), "transformer.h"),
    "bert": Case(models.bert, (), models.tokens(seq_len=PRIME), "bert.encoder.layer"),
    "mlp": Case(models.mlp, (sample(4, PRIME, 16),), {}),
    "transformer": Case(models.transformer, (), models.tokens(seq_len=PRIME, names=("ids", "labels")), "blocks"),
    "encoder": Case(models.encoder, (sample(4, PRIME, models.HIDDEN),), {}),
    "encoder dropout": Case(lambda: models.encoder(0.2), (sample(4, PRIME, models.HIDDEN),), {}),
    "encoded": Case(models.encoded, (sample(4, PRIME, 16),), {}, "encoder.layers"),
}
ATTENDING = [name for name in CASES if name != "mlp"]


class Logical(fx.Interpreter):
    """Runs a graph in normal form, where copies are gone and a view is therefore of shapes, not of strides."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The node's operator, a view as the reshape that it means."""
        return super().call_function(aten.reshape.default if target is aten.view.default else target, args, kwargs)


def run(
    model: nn.Module, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The captured graph on the model's own numbers: results, and gradients by parameter name. What flows back into a
    result is 1 for a loss and `tangent` for anything else."""
    values: dict[fx.Node, Tensor] = dict(zip(captured.inputs, batch_tensors(args, kwargs), strict=True))
    values |= {p.placeholder: model.get_parameter(p.name).detach() for p in captured.parameters}
    for buffer in captured.buffers:
        path, _, name = buffer.name.rpartition(".")
        values[buffer.placeholder] = getattr(model.get_submodule(path), name)
    if captured.seed is not None:
        values[captured.seed] = SEED
    for output in captured.outputs:
        if output.tangent is not None:
            values[output.tangent] = tangent(tuple(output.node.meta["val"].shape))
    given = [values[node] if node.users else None for node in captured.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        found = iter(Logical(captured.module).run(*given, enable_io_processing=False))
    results = [next(found) for _ in captured.outputs]
    return results, {p.name: next(found) for p in captured.parameters if p.gradient is not None}


def tangent(shape: tuple[int, ...]) -> Tensor:
    """What flows back into a result of ``shape``."""
    return torch.ones(()) if not shape else torch.randn(shape, generator=torch.Generator().manual_seed(2))


def eager(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The untouched model: all tensors that it returns, and gradients by name; of the loss where there is one."""
    own = copy.deepcopy(model)
    with ops.counter_draws(SEED) if draws(model) else torch.enable_grad():
        out = own(*args, **kwargs)
    results = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    loss = out.get("loss") if isinstance(out, dict) else None
    back = results if loss is None else [loss]
    torch.autograd.backward(back, [tangent(tuple(r.shape)) for r in back])
    return [r.detach() for r in results], models.gradients(own)


def draws(model: nn.Module) -> bool:
    """Whether the model's forward drops anything."""
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    return model.training and any(rates)


def assert_same(model: nn.Module, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The graph gives the model's results and gradients."""
    results, grads = run(model, captured, args, kwargs)
    true_results, true_grads = eager(model, args, kwargs)
    for found, truth in zip(results, true_results, strict=True):
        assert largest_error({"result": found}, {"result": truth})[0] < BOUND
    error, name = largest_error(grads, true_grads)
    assert error < BOUND, name


def calls(captured: Captured) -> list[fx.Node]:
    """The nodes that compute."""
    return [n for n in captured.graph.nodes if n.op == "call_function"]


def attention_nodes(captured: Captured) -> tuple[list[fx.Node], list[fx.Node]]:
    """The attention operators, forward and backward."""
    ours = torch.ops.autopar
    return ([n for n in captured.graph.nodes if n.target is ours.attention.default],
            [n for n in captured.graph.nodes if n.target is ours.attention_backward.default])  # fmt: skip


def square_values(captured: Captured, seq_len: int) -> list[fx.Node]:
    """Nodes with a value of some multiple of S x S elements."""
    return [node for node in captured.graph.nodes for t in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(t, Tensor) and t.numel() and t.numel() % seq_len**2 == 0]  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, Case, nn.Module, Captured]:
    """Every case, captured once."""
    found = CASES[request.param]
    model = found.make()
    return request.param, found, model, capture(model, found.args, found.kwargs)


def test_graph_equals_eager(case: tuple[str, Case, nn.Module, Captured]) -> None:
    """The joint graph on real numbers gives the loss, all other results and all gradients of the untouched model, with
    the labels of -100 unevenly spread, and with dropout."""
    _, given, model, captured = case
    assert_same(model, captured, given.args, given.kwargs)


def test_attention_is_one_node(case: tuple[str, Case, nn.Module, Captured]) -> None:
    """One attention node a layer and direction, and nothing in the graph is S x S."""
    name, _, _, captured = case
    forward, backward = attention_nodes(captured)
    layers = models.LAYERS if name in ATTENDING else 0
    assert (len(forward), len(backward)) == (layers, layers)
    assert square_values(captured, PRIME) == []


def test_products_are_einsums(case: tuple[str, Case, nn.Module, Captured]) -> None:
    """No matrix product merges batch and sequence: none of torch's product operators is left, and every linear layer's
    einsum names batch and sequence as factors of their own."""
    _, given, model, captured = case
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default,
                aten.matmul.default}  # fmt: skip
    assert [n for n in calls(captured) if n.target in products] == []
    batch = batch_tensors(given.args, given.kwargs)[0].shape[0]
    einsums = [n for n in calls(captured) if n.target is aten.einsum.default]
    for node in einsums:
        shapes = [tuple(operand.meta["val"].shape) for operand in node.args[1]]
        assert not any(batch * PRIME in shape for shape in shapes), (node, shapes)
        assert any(batch in shape and PRIME in shape for shape in shapes), (node, shapes)
    linears = sum(isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D" for m in model.modules())
    linears += sum(isinstance(m, nn.MultiheadAttention) for m in model.modules())  # q, k and v in one
    # Forward, weight gradient, input gradient; the batch itself, where it is not ids, needs no gradient.
    assert len(einsums) == 3 * linears - bool(given.args)


def test_nodes_know_their_place(case: tuple[str, Case, nn.Module, Captured]) -> None:
    """Every call node has its module, block and direction; modules exist in the model; what the tracer marked as
    backward depends on the result, and nothing of the forward reads it."""
    _, _, model, captured = case
    paths = dict(model.named_modules())
    for node in calls(captured):
        assert {"module", "block", "backward", "val"} <= node.meta.keys(), node
        assert node.meta["module"] in paths
        block = node.meta["block"]
        assert block is None or node.meta["module"] == block or node.meta["module"].startswith(f"{block}.")
        if not node.meta["backward"]:
            assert not any(arg.meta["backward"] for arg in node.all_input_nodes)
    directions = Counter(n.meta["backward"] for n in calls(captured))
    assert directions[True] > directions[False] > 0


def test_blocks(case: tuple[str, Case, nn.Module, Captured]) -> None:
    """All layers of a uniform model are one class: the same operators, in the same order, in every one of them."""
    _, given, _, captured = case
    if given.blocks is None:
        return
    expected = tuple(f"{given.blocks}.{i}" for i in range(models.LAYERS))
    assert [set(b.paths) for b in captured.blocks] == [set(expected)]
    (block,) = captured.blocks
    for nodes in zip(*block.nodes, strict=True):
        assert len({str(n.target) for n in nodes}) == 1
        assert len({n.meta["module"].removeprefix(p) for n, p in zip(nodes, block.paths, strict=True)}) == 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_padding(name: str, side: str) -> None:
    """Padding on either side, of another length in every row: results and gradients of eager, and the mask stays the
    2-D one that the user gave."""
    model = CASES[name].make()
    batch = models.tokens(seq_len=PRIME)
    mask = torch.ones_like(batch["input_ids"])
    for row in range(1, mask.shape[0]):
        mask[row, slice(0, row) if side == "left" else slice(PRIME - row, PRIME)] = 0
    batch["labels"] = torch.where(mask.bool(), batch["labels"], -100)
    batch["attention_mask"] = mask
    captured = capture(model, (), batch)
    # A row of queries without a key to attend has no defined result; eager's depends on the kernel. Only the logits of
    # padded places are affected, which no label counts.
    results, grads = run(model, captured, (), batch)
    true_results, true_grads = eager(model, (), batch)
    keep = mask.bool()
    assert largest_error({"loss": results[0]}, {"loss": true_results[0]})[0] < BOUND
    assert largest_error({"logits": results[1][keep]}, {"logits": true_results[1][keep]})[0] < BOUND
    error, worst = largest_error(grads, true_grads)
    assert error < BOUND, worst
    assert [len(nodes) for nodes in attention_nodes(captured)] == [models.LAYERS, models.LAYERS]
    assert square_values(captured, PRIME) == []
    assert all(n.args[3] is not None for n in attention_nodes(captured)[0])


def test_packed_sequences() -> None:
    """Position ids that restart pack several sequences in a row: they must not see one another, so the real S x S mask
    is there, and the numbers are those of eager (sdpa, which packs). With ``use_cache`` transformers does not look for
    packed sequences, and neither do we: again eager's numbers, which are others."""
    model = models.llama()
    model.config.use_cache = False  # with a cache transformers does not look for packed sequences
    batch = models.tokens(batch=2, seq_len=PRIME, ignored=False)
    batch["position_ids"] = torch.tensor([[*range(4), *range(7)], [*range(8), *range(3)]])
    captured = capture(model, (), batch)
    assert model.config._attn_implementation == "sdpa"
    assert_same(model, captured, (), batch)
    assert square_values(captured, PRIME) != []
    assert all(n.args[4] is not None for n in attention_nodes(captured)[0])
    packed = run(model, captured, (), batch)[0][0]
    model.config.use_cache = True
    captured = capture(model, (), batch)
    assert_same(model, captured, (), batch)
    assert square_values(captured, PRIME) == []
    assert abs(float(run(model, captured, (), batch)[0][0] - packed)) > 1e-4


def test_position_ids_that_do_not_restart() -> None:
    """Plain position ids given by the user cost a mask (capture cannot see values) and change no number."""
    model = models.llama()
    model.config.use_cache = False
    batch = models.tokens(batch=2, seq_len=PRIME) | {"position_ids": torch.arange(PRIME).expand(2, -1)}
    assert_same(model, capture(model, (), batch), (), batch)


def test_tied_weights_are_one_parameter() -> None:
    """A tied embedding has one placeholder, all its names, and the sum of both gradients; untied it is two."""
    batch = models.tokens()
    tied = capture(models.llama(), (), batch)
    (embedding,) = [p for p in tied.parameters if "embed" in p.name or "lm_head" in p.name]
    assert (embedding.name, embedding.aliases) == ("model.embed_tokens.weight", ("lm_head.weight",))
    assert tied.parameter("lm_head.weight") is embedding
    untied = capture(models.llama(tie_word_embeddings=False), (), batch)
    assert len(untied.parameters) == len(tied.parameters) + 1
    model = models.llama()
    apart = models.llama(tie_word_embeddings=False)
    apart.load_state_dict(model.state_dict(), strict=False)
    apart.lm_head.weight.data.copy_(model.lm_head.weight.data)
    parts = run(apart, capture(apart, (), batch), (), batch)[1]
    whole = run(model, tied, (), batch)[1]["model.embed_tokens.weight"]
    total = parts["model.embed_tokens.weight"] + parts["lm_head.weight"]
    assert largest_error({"": whole}, {"": total})[0] < BOUND


def test_frozen_and_unused_parameters() -> None:
    """A frozen parameter and one that the forward never reads get no gradient and raise nothing; the others get
    eager's."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x)).tanh()

    torch.manual_seed(0)
    model, x = Partly(), sample(4, 8)
    captured = capture(model, (x,))
    with_gradient = {p.name for p in captured.parameters if p.gradient is not None}
    assert with_gradient == {"used.weight", "used.bias"}
    assert captured.parameter("frozen.weight").gradient is None
    assert_same(model, captured, (x,), {})


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "encoder"])
def test_the_model_is_untouched(name: str) -> None:
    """Capture leaves everything as it was: parameter objects and values, training flag, attention implementation,
    use_cache, forwards, environment, and what the model computes."""
    given = CASES[name]
    model = given.make()
    model.eval()
    before = dict(model.named_parameters())
    values = copy.deepcopy(model.state_dict())
    config = copy.deepcopy(model.config.to_dict()) if hasattr(model, "config") else None
    attributes = {path: set(vars(m)) for path, m in model.named_modules()}
    result = model(*given.args, **given.kwargs)
    capture(model, given.args, given.kwargs)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[n] is after[n] for n in before)
    assert all(p.grad is None for p in after.values())
    assert all(torch.equal(values[n], t) for n, t in model.state_dict().items())
    assert not any(m.training for m in model.modules())
    assert {path: set(vars(m)) for path, m in model.named_modules()} == attributes
    if config is not None:
        assert model.config.to_dict() == config
        assert model.config._attn_implementation == "sdpa"
    again = model(*given.args, **given.kwargs)
    for a, b in zip(pytree.tree_leaves(dict(result) if config else result),
                    pytree.tree_leaves(dict(again) if config else again), strict=True):  # fmt: skip
        assert not isinstance(a, Tensor) or torch.equal(a, b)
    assert not torch.compiler.is_compiling()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mlp", "transformer", "encoder"])
def test_meta_model(name: str) -> None:
    """A model without weights and a batch without numbers give the same graph as with them."""
    given = CASES[name]
    real = capture(given.make(), given.args, given.kwargs)
    with torch.device("meta"):
        model = given.make()
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (given.args, given.kwargs))
    captured = capture(model, args, kwargs)
    assert captured.module.code == real.module.code
    assert [p.name for p in captured.parameters] == [p.name for p in real.parameters]
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2 dropout", "encoder dropout"])
def test_dropout_is_ours_and_numbered(name: str) -> None:
    """All random draws are autopar's operators, each with a number of its own in the forward, used again by its
    backward; in eval mode there are none, and no seed."""
    given = CASES[name]
    captured = capture(given.make(), given.args, given.kwargs)
    ours = torch.ops.autopar
    foreign = ("bernoulli", "native_dropout", "aten.dropout", "rand")
    assert [n for n in calls(captured) if any(word in str(n.target) for word in foreign)] == []
    numbers: dict[bool, list[int]] = {False: [], True: []}
    where = {ours.dropout.default: 4, ours.attention.default: 13, ours.attention_backward.default: 16}
    for node in calls(captured):
        if node.target in where:
            numbers[node.meta["backward"]].append(node.args[where[node.target]])
    # One inside attention a layer; GPT-2 has two more a layer and one after the embedding, the encoder three a layer.
    expected = 3 * models.LAYERS + 1 if name.startswith("gpt2") else 4 * models.LAYERS
    assert sorted(numbers[False]) == list(range(expected)) == sorted(numbers[True])
    assert captured.seed is not None
    quiet = capture(given.make(), given.args, given.kwargs, training=False)
    assert quiet.seed is None
    assert [n for n in calls(quiet) if n.target is ours.dropout.default] == []


def test_dropout_draws_by_step() -> None:
    """Another step draws another mask: the masks come from the seed's value, not from the trace."""
    given = CASES["gpt2 dropout"]
    model = given.make()
    captured = capture(model, given.args, given.kwargs)
    first = run(model, captured, given.args, given.kwargs)[0][0]
    again = run(model, captured, given.args, given.kwargs)[0][0]
    assert torch.equal(first, again)
    SEED[1] += 1
    try:
        assert not torch.equal(first, run(model, captured, given.args, given.kwargs)[0][0])
    finally:
        SEED[1] -= 1


def test_only_the_loss_has_a_gradient_path() -> None:
    """With a loss among the results no gradient flows into the logits; without labels it does."""
    batch = models.tokens()
    with_loss = capture(models.llama(), (), batch)
    assert [o.tangent is not None for o in with_loss.outputs] == [True, False]
    model = models.llama()
    without = {"input_ids": batch["input_ids"]}
    captured = capture(model, (), without)
    assert [o.tangent is not None for o in captured.outputs] == [True]
    assert_same(model, captured, (), without)


def test_data_dependent_branch() -> None:
    """A branch on a tensor's value is refused with the source line and the operator, and leaves the model usable."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if self.linear(x).sum() > 0:  # the line that the error must name
                return x
            return self.linear(x)

    model = Branching()
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+") as caught:
        capture(model, (sample(4, 8),))
    assert "self.linear(x).sum() > 0" in str(caught.value)
    model(sample(4, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bias_gradients_are_summed_in_float32(dtype: torch.dtype) -> None:
    """A 16-bit gradient that is a sum is rounded after the sum, which may run across ranks,
    and bit for bit what eager gives."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).to(dtype)
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    captured = capture(model, (x,))
    sums = captured.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert len(sums) == 2
    assert {n.meta["val"].dtype for n in sums} == {torch.float32}
    assert {p.gradient.meta["val"].dtype for p in captured.parameters if p.gradient} == {dtype}
    casts = captured.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    assert len(casts) == (0 if dtype == torch.float32 else 2)


class _Unordered(nn.Module):
    """Two linear layers, each with a scale of its own that is made in an order which differs between processes, as in
    ``for kind in set(kinds)``."""

    def __init__(self, order: tuple[int, int]) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("angles", torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        scales = {kind: (self.angles[kind] * x.shape[0]).cos() for kind in self.order}
        for kind, layer in enumerate(self.layers):
            x = layer(x) * scales[kind]
        return x


def test_order_of_what_no_parameter_enters() -> None:
    """Ranks that make positions and masks in another order have the same graph."""
    graphs = [list(capture(_Unordered(order), (torch.randn(2, 4),)).graph.nodes) for order in ((0, 1), (1, 0))]
    numbers = [{node: i for i, node in enumerate(nodes)} for nodes in graphs]
    texts = [
        [(n.target, fx.node.map_arg(n.args, lambda arg, i=i: f"%{numbers[i][arg]}")) for n in nodes if n.op != "output"]
        for i, nodes in enumerate(graphs)
    ]
    assert texts[0] == texts[1]


class _OneHot(nn.Module):
    """``F.one_hot`` checks that every class is in range; what it looks at is used again behind a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 5, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        classes = x.to(torch.int64)
        return {"loss": (F.linear(F.one_hot(classes, 5).to(self.weight.dtype), self.weight) * classes[..., None]).sum()}


def test_checks_of_values_are_left_out() -> None:
    model, batch = _OneHot(), {"x": torch.tensor([[0, 4, 2], [1, 1, 3]], dtype=torch.int32)}
    captured = capture(model, (), batch)
    assert not [n for n in captured.graph.nodes if "assert" in str(n.target)]
    report = autopar.verify(model, "cpu:1x2", hints=Hints(pp=1, dp=1, tp=2), example_inputs=batch)
    assert report.ok and report.flops_share == 0.5, report


class _Warmup(nn.Module):
    """Counts its calls, in an attribute or in a buffer, and computes with the count."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        if buffer:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        else:
            self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"loss": (self.inner(x) * self.calls).square().mean()}


def test_attributes_that_a_forward_changes_are_told() -> None:
    """A graph has the value of the trace for good; a buffer it changes as the model does."""
    batch = {"x": torch.randn(4, 4)}
    with pytest.warns(UserWarning, match=r"the forward changes calls of the model: .* in a buffer"):
        capture(_Warmup(False), (), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        capture(_Warmup(True), (), batch)
    model = _Warmup(True).double()
    report = autopar.verify(model, "cpu:1x2", example_inputs={"x": batch["x"].double()}, steps=3)
    assert report.ok, report
