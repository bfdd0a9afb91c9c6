"""The layers that capture writes differently compute what torch's do, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.layers import SplittableLayers
from autopar.capture.normalization import normalization_table
from autopar.ops import counter_draws

aten, own = torch.ops.aten, torch.ops.autopar


def _results(module: nn.Module, *args: Any) -> list[Tensor]:
    """What a module returns, and the gradients of its parameters and inputs, by a loss that weighs all of it."""
    args = tuple(a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    out = torch.utils._pytree.tree_leaves(module(*args))
    loss = sum((t * torch.linspace(0.1, 1.0, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in out)
    wanted = [*module.parameters(), *(a for a in args if isinstance(a, Tensor) and a.requires_grad)]
    return [*out, *torch.autograd.grad(loss, wanted)]


def _agrees(module: nn.Module, *args: Any) -> None:
    module = module.double()
    expected = _results(module, *args)
    with SplittableLayers():
        found = _results(module, *args)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "bias", "both", "first"),
                         [*itertools.product((nn.LSTM, nn.GRU, nn.RNN), (True, False), (True, False), (True, False))])
def test_recurrences(kind: type[nn.RNNBase], bias: bool, both: bool, first: bool) -> None:
    torch.manual_seed(0)
    module = kind(3, 5, 2, bias=bias, bidirectional=both, batch_first=first)
    x, state = torch.randn(4, 6, 3).double(), torch.randn(4 if both else 2, 4 if first else 6, 5).double()
    _agrees(module, x)
    _agrees(module, x, (state, state.flip(0)) if kind is nn.LSTM else state)
    _agrees(module, x[0] if first else x[:, 0])


def test_rectified_recurrence_and_bilinear_layer() -> None:
    _agrees(nn.RNN(3, 5, nonlinearity="relu"), torch.randn(4, 6, 3).double())
    _agrees(nn.Bilinear(3, 4, 5), torch.randn(2, 6, 3).double(), torch.randn(2, 6, 4).double())


def test_projections_and_packed_sequences_stay_torchs() -> None:
    _agrees(nn.LSTM(3, 5, proj_size=2), torch.randn(4, 6, 3).double())
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 3).double(), torch.randn(2, 3).double()])
    module = nn.LSTM(3, 5).double()
    expected = module(packed)[0].data
    with SplittableLayers():
        assert torch.equal(module(packed)[0].data, expected)


def test_a_gru_needs_states_that_fit() -> None:
    gates, weight = torch.randn(3, 2, 12), torch.randn(12, 4)
    with pytest.raises(ValueError, match=r"a state \[2, 4\]"):
        own.gru(gates, torch.randn(1, 4), weight, torch.randn(12), False)
    with pytest.raises(ValueError, match=r"4 \* H"):
        own.lstm(gates, torch.randn(2, 4), torch.randn(2, 4), weight, False)


@pytest.mark.parametrize("op", ["lstm", "gru", "rnn"])
def test_operators_are_well_formed(op: str) -> None:
    def real(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    if op == "lstm":
        torch.library.opcheck(own.lstm.default, (real(3, 2, 8), real(2, 2), real(2, 2), real(8, 2), True))
    elif op == "rnn":
        torch.library.opcheck(own.rnn.default, (real(3, 2, 2), real(2, 2), real(2, 2), True, False))
    else:
        torch.library.opcheck(own.gru.default, (real(3, 2, 6), real(2, 2), real(6, 2), real(6), True))


@pytest.mark.parametrize(("mode", "padding", "ragged"),
                         [("sum", None, False), ("mean", None, False), ("mean", 2, False), ("sum", -1, True),
                          ("mean", 1, True), ("max", None, False)])
def test_embedding_bags(mode: str, padding: int | None, ragged: bool) -> None:
    torch.manual_seed(0)
    module = nn.EmbeddingBag(7, 4, mode=mode, padding_idx=padding)
    ids = torch.randint(0, 7, (4, 5))
    if not ragged:
        return _agrees(module, ids)
    _agrees(module, ids.flatten(), torch.tensor([0, 3, 3, 11]))
    module.include_last_offset = True
    _agrees(module, ids.flatten(), torch.tensor([0, 3, 3, 11, 20]))


def test_weighted_embedding_bags() -> None:
    weights = torch.randn(4, 5).double()
    _agrees(nn.EmbeddingBag(7, 4, mode="sum"), torch.randint(0, 7, (4, 5)), None, weights)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 2, 5)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(shape: tuple[int, ...], affine: bool, training: bool) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(shape).double() + 3.0, torch.randn(shape).double()
    weight, bias = (torch.randn(3).double(), torch.randn(3).double()) if affine else (None, None)
    mean, var = torch.randn(3).double(), torch.rand(3).double() + 0.5
    table = normalization_table()
    if training:
        target, args = aten._native_batch_norm_legit_functional.default, (x, weight, bias, mean, var, True, 0.1, 1e-5)
    else:
        target, args = aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, var, 0.1, 1e-5)
    found, expected = table[target](*args), target(*args)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    mask = [True, affine, affine]
    args = (grad, x, weight, mean, var, expected[1], expected[2], training, 1e-5, mask)
    target = aten.native_batch_norm_backward.default
    for a, b in zip(table[target](*args), target(*args), strict=True):
        assert (a is None) == (b is None or b.numel() == 0)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dims", [None, [1], [0, 2]])
@pytest.mark.parametrize("correction", [None, 0, 1, 5])
def test_variance(dims: list[int] | None, correction: float | None) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for target in (aten.var.correction, aten.std.correction, aten.var_mean.correction):
        for keepdim in (True, False):
            found = normalization_table()[target](x, dims, correction=correction, keepdim=keepdim)
            torch.testing.assert_close(found, target(x, dims, correction=correction, keepdim=keepdim))


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim: int) -> None:
    v = torch.randn(3, 4, 5, dtype=torch.float64)
    g = torch.randn([n if d == dim else 1 for d, n in enumerate(v.shape)], dtype=torch.float64)
    forward, backward = aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default
    table, (w, norms) = normalization_table(), forward(v, g, dim)
    torch.testing.assert_close(table[forward](v, g, dim), (w, norms))
    args = (torch.randn_like(v), v, g, norms, dim)
    torch.testing.assert_close(table[backward](*args), backward(*args))


class _Drops(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.weight = layer, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x * self.weight)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("layer", [
    nn.Dropout1d(0.3), nn.Dropout2d(0.3), nn.Dropout3d(0.3), nn.AlphaDropout(0.3), nn.LSTM(8, 8, 2, dropout=0.3),
    nn.GRU(8, 8, 3, dropout=0.5, bidirectional=True), nn.RNN(8, 8, 2, dropout=0.1)], ids=str)
def test_dropouts_draw_what_one_process_draws(layer: nn.Module) -> None:
    shapes = {nn.Dropout1d: (4, 8, 8), nn.Dropout2d: (4, 8, 8, 2), nn.Dropout3d: (4, 8, 2, 2, 2)}
    shape = shapes.get(type(layer), (4, 4, 8))
    report = autopar.verify(_Drops(layer).double(), "cpu:1x4", example_inputs=(torch.randn(shape).double(),))
    assert report.ok, report


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_dropout_of_channels(ndim: int) -> None:
    layer = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)[ndim - 1](0.5)
    with counter_draws(torch.tensor([3, 0])):
        out = layer(torch.ones(64, 64, *[3] * ndim)).flatten(2)
    assert bool(((out == 0) | (out == 2)).all()) and torch.equal(out.amax(2), out.amin(2))
    assert abs(float(out.mean()) - 1.0) < 0.1


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    with counter_draws(torch.tensor([3, 0])):
        out = nn.AlphaDropout(0.4)(torch.randn(200, 200, generator=torch.Generator().manual_seed(0)))
    assert abs(float(out.mean())) < 0.03 and abs(float(out.var()) - 1.0) < 0.05
