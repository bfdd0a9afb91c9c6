"""Replicated blocks: the graph with copies is the graph of a whole trace, and doubtful models are traced whole."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dist import small_models as models
from test_capture import assert_same
from torch import Tensor, fx, nn

from autopar._compat import pytree
from autopar.capture import Captured, capture
from autopar.capture.repeats import Repeat
from autopar.capture.replicate import put_copies

capture_module = sys.modules[capture.__module__]

PRIME = 11
Batch = dict[str, Any]


class Residual(nn.Module):
    """A block: x + f(x), with dropout, and with what a test varies."""

    def __init__(self, number: int, slope: float = 0.1, drop: float = 0.2) -> None:
        super().__init__()
        self.number, self.slope = number, slope
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, 16] -> the same."""
        return x + self.drop(self.down(F.leaky_relu(self.up(self.norm(x)), self.slope)))


class Scaled(Residual):
    """Calculates with the number of its block."""

    def forward(self, x: Tensor) -> Tensor:
        """As `Residual`, smaller in deeper blocks."""
        return super().forward(x) / (1 + self.number)


class Chosen(Residual):
    """Branches on the number of its block."""

    def forward(self, x: Tensor) -> Tensor:
        """As `Residual`; block 5 is another function."""
        return torch.tanh(super().forward(x)) if self.number == 5 else super().forward(x)


class Stack(nn.Module):
    """Blocks one after the other, and a scalar loss; ``between`` may do something after a block."""

    def __init__(
        self, blocks: list[nn.Module], between: Callable[[int, Tensor, Tensor], Tensor] = lambda i, x, first: x
    ) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList(blocks), between

    def forward(self, x: Tensor) -> dict[str, Any]:
        """[batch, sequence, 16] -> loss and all states."""
        first = x
        states = []
        for i, block in enumerate(self.blocks):
            x = self.between(i, block(x), first)
            states.append(x)
        return {"loss": x.square().mean(), "states": tuple(states)}


def _sample() -> Tensor:
    return torch.randn(4, PRIME, 16, generator=torch.Generator().manual_seed(1))


def _stack(*blocks: nn.Module) -> nn.Module:
    return Stack(list(blocks))


def _frozen_below() -> nn.Module:
    model = _stack(*(Residual(i) for i in range(14)))
    for block in list(model.blocks)[:7]:  # type: ignore[arg-type]
        block.requires_grad_(False)
    return model


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    parts = {"embed": nn.Linear(16, 16), "encoder": nn.TransformerEncoder(layer, 6)}
    return nn.Sequential(OrderedDict(parts))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    return BertForMaskedLM(BertConfig(num_hidden_layers=6, max_position_embeddings=32, **sizes))


def _gemma() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    kinds = ["sliding_attention", "full_attention"] * 5
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            num_hidden_layers=10, num_key_value_heads=2, head_dim=8, sliding_window=4, layer_types=kinds, **sizes
        )
    )


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 48}
    config = OPTConfig(num_hidden_layers=7, max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, **sizes)
    return OPTForCausalLM(config)


X = {"x": _sample()}
TOKENS = models.tokens(seq_len=PRIME)
#: Models, batches, and the container, period, first marker and number of markers of what is copied.
COPIED: dict[str, tuple[Callable[[], nn.Module], Batch, tuple[str, int, int, int]]] = {
    "stack": (lambda: _stack(*(Residual(i) for i in range(6))), X, ("blocks", 1, 3, 2)),
    "period": (lambda: _stack(*(Residual(i, (0.1, 0.3, 0.2)[i % 3]) for i in range(13))), X, ("blocks", 3, 7, 3)),
    "other ends": (lambda: _stack(*(Residual(i, 0.1 + (i in (0, 8))) for i in range(9))), X, ("blocks", 1, 4, 3)),
    "frozen below": (_frozen_below, X, ("blocks", 1, 3, 3)),
    "encoder": (_encoder, {"input": _sample()}, ("encoder.layers", 1, 3, 2)),
    "llama": (lambda: models.llama(num_hidden_layers=8), TOKENS, ("model.layers", 1, 3, 4)),
    "gpt2": (lambda: models.gpt2(0.2, layers=6), TOKENS, ("transformer.h", 1, 3, 2)),
    "bert": (_bert, TOKENS, ("bert.encoder.layer", 1, 3, 2)),
    "gemma": (_gemma, TOKENS, ("model.layers", 2, 5, 4)),
    "opt": (_opt, TOKENS, ("model.decoder.layers", 1, 3, 3)),  # its blocks end in a view
}


class Shared(nn.Module):
    """A tensor that every block reads, with a gradient; and what the blocks leave behind."""

    def __init__(self, collect: bool) -> None:
        super().__init__()
        self.bias, self.collect = nn.Parameter(torch.randn(16)), collect
        self.blocks = nn.ModuleList(Biased(i) for i in range(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """[batch, sequence, 16] -> loss."""
        bias = None if self.collect else torch.tanh(self.bias)
        for block in self.blocks:
            x = block(x, bias)
        left = sum(block.left for block in self.blocks) if self.collect else 0.0
        return {"loss": x.square().mean() + left}


class Biased(Residual):
    """Adds a tensor that it is given; keeps a penalty to be collected."""

    left: Tensor | float = 0.0

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[batch, sequence, 16], [16] -> the same as the first."""
        x = super().forward(x if bias is None else x + bias)
        self.left = x.abs().mean()
        return x


class Decayed(Stack):
    """Adds a penalty on every weight to its loss."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        """As `Stack`."""
        out = super().forward(x)
        return {"loss": out["loss"] + sum(p.square().sum() for p in self.parameters())}


def _skipping(i: int, x: Tensor, first: Tensor) -> Tensor:
    return x + first if i == 5 else x


def _doubled_in_place(i: int, x: Tensor, first: Tensor) -> Tensor:
    return x.mul_(2.0) if i == 4 else x


class _Jumping(Stack):
    """Calls every block with what the block before the last returned."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        """As `Stack`."""
        states = [x, x]
        for block in self.blocks:
            states.append(block(states[-2]))
        return {"loss": (states[-1] + states[-2]).square().mean()}


class _Again(Stack):
    """Goes through its blocks twice."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        """As `Stack`."""
        return super().forward(super().forward(x)["states"][-1])


class InPlace(Residual):
    """Adds to the tensor that it is called with."""

    def forward(self, x: Tensor) -> Tensor:
        """As `Residual`."""
        return x.mul_(0.5).add_(self.down(self.norm(self.up.weight.sum(0) + x)[..., :1].expand(-1, -1, 32)))


class Viewed(Residual):
    """Ends in a view that its neighbour undoes: normal form sees both as one."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> the same."""
        return super().forward(x.view(4, PRIME, 16)).view(-1, 16)


def _tied() -> nn.Module:
    blocks = [Residual(i) for i in range(8)]
    for block in blocks[1:]:
        block.up.weight = blocks[0].up.weight
    return _stack(*blocks)


#: Models whose blocks only look alike, with the layers of a whole trace as the only right answer.
DOUBTFUL: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "calculates with its number": (lambda: _stack(*(Scaled(i) for i in range(8))), X),
    "branches on its number": (lambda: _stack(*(Chosen(i) for i in range(8))), X),
    "something between blocks": (lambda: Stack([Residual(i) for i in range(8)], _skipping), X),
    "changed between blocks": (lambda: Stack([Residual(i) for i in range(8)], _doubled_in_place), X),
    "another order": (lambda: _Jumping([Residual(i) for i in range(8)]), X),
    "twice": (lambda: _Again([Residual(i) for i in range(8)]), X),
    "changes its input": (lambda: _stack(nn.Linear(16, 16), *(InPlace(i) for i in range(8))), X),
    "views between blocks": (lambda: _stack(*(Viewed(i) for i in range(8))), {"x": _sample().view(-1, 16)}),
    "shared weights": (_tied, X),
    "one block many times": (lambda: _stack(*[Residual(0)] * 8), X),
    "gradients of a shared value": (lambda: Shared(collect=False), X),
    "collected from blocks": (lambda: Shared(collect=True), X),
    "weights read outside": (lambda: Decayed([Residual(i) for i in range(8)]), X),
    "views at the border": (lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))), {"input": _sample()}),
}


def _captured(model: nn.Module, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> tuple[Captured, tuple[Repeat, ...]]:
    """The model captured, and the repeats of the graph that was taken in the end."""
    taken: list[tuple[Repeat, ...]] = []

    def spy(graph: fx.Graph, repeats: Any, *rest: Any) -> Any:
        found = put_copies(graph, repeats, *rest)
        taken.append(tuple(repeats))
        return found

    monkeypatch.setattr(capture_module, "put_copies", spy)
    return capture(model, (), batch), taken[-1]


def _form(node: fx.Node) -> list[Any]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [(tuple(v.shape), v.dtype, v.stride()) if isinstance(v, Tensor) else v for v in leaves]


def _arguments(node: fx.Node, position: dict[fx.Node, int]) -> Any:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return spec, [("node", position[v]) if isinstance(v, fx.Node) else (type(v), v) for v in leaves]


def assert_equal(found: Captured, whole: Captured) -> None:
    """Node for node, in the same order: operator, arguments, specs, labels; parameters, outputs and block classes."""
    here, there = ({n: i for i, n in enumerate(c.graph.nodes)} for c in (found, whole))
    assert len(here) == len(there)
    for x, y in zip(here, there, strict=True):
        assert x.op == y.op and (x.op != "call_function" or x.target is y.target)
        assert _arguments(x, here) == _arguments(y, there)
        if x.op != "output":
            assert _form(x) == _form(y)
            assert all(x.meta.get(k) == y.meta.get(k) for k in ("module", "block", "backward")), (x, y)
    for p, q in zip(found.parameters, whole.parameters, strict=True):
        assert (p.name, p.aliases, p.spec, here[p.placeholder]) == (q.name, q.aliases, q.spec, there[q.placeholder])
        assert (p.gradient and here[p.gradient]) == (q.gradient and there[q.gradient])
    assert [here[o.node] for o in found.outputs] == [there[o.node] for o in whole.outputs]
    for c, d in zip(found.blocks, whole.blocks, strict=True):
        assert (c.name, c.paths) == (d.name, d.paths)
        assert [[here[n] for n in nodes] for nodes in c.nodes] == [[there[n] for n in nodes] for nodes in d.nodes]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("gemma", "bert"))) for n in COPIED]
)
def test_copies_are_what_a_whole_trace_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph with copies equals the whole trace node for node, and eager on real numbers."""
    make, batch, expected = COPIED[name]
    torch.manual_seed(0)
    model = make().train()
    found, (repeat,) = _captured(model, batch, monkeypatch)
    assert (repeat.path, repeat.period, repeat.first, repeat.count) == expected
    assert_equal(found, capture(model, (), batch, whole=True))
    assert_same(model, found, (), batch)


@pytest.mark.parametrize("name", DOUBTFUL)
def test_doubtful_blocks_are_traced_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that only look alike are not copied, and the graph is right."""
    make, batch = DOUBTFUL[name]
    torch.manual_seed(0)
    model = make().train()
    found, repeats = _captured(model, batch, monkeypatch)
    assert repeats == ()
    assert_same(model, found, (), batch)


def test_without_gradients_and_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluation the copies are those of a trace in evaluation."""
    model = models.gpt2(0.2, layers=6).eval()
    found, repeats = _captured(model, TOKENS, monkeypatch)
    assert len(repeats) == 1
    assert_equal(found, capture(model, (), TOKENS, whole=True))


class _Normed(nn.Module):
    """A block with buffers that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x))) + x


def test_buffers_that_blocks_change() -> None:
    """No block loses the new values of its running statistics: such blocks are traced whole."""
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(*(_Normed() for _ in range(9))), head=nn.Linear(8, 8)))
    changed = {output.buffer for output in capture(model, (torch.randn(8, 8),)).outputs} - {None}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert changed == {f"layers.{i}.norm.{name}" for i in range(9) for name in statistics}
