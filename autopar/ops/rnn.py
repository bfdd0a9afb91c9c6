"""``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu`` (hence ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``) by the
operators of `autopar.ops.recurrent`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops import recurrent

Drop = Callable[[Tensor, float], Tensor]
Layer = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], bool], tuple[Tensor, tuple[Tensor, ...]]]


def _recurrence(
    layer: Layer,
    drop: Drop,
    x: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The layers of an RNN over ``x`` [T, B, I] (batch_first: [B, T, I]) from ``states``, each [layers x directions, B,
    H]: outputs and the last states. ``layer(x, states, parameters, reverse)`` runs one in one direction, ``drop(x, p)``
    stands between layers."""
    x = x.transpose(0, 1) if batch_first else x
    directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
    last: list[tuple[Tensor, ...]] = []
    for number in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = len(last)
            own = parameters[each * index : each * (index + 1)]
            out, final = layer(x, [s[index] for s in states], own, direction == 1)
            outputs.append(out)
            last.append(final)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and number < num_layers - 1:
            x = drop(x, dropout)
    stacked = (torch.stack(each_state) for each_state in zip(*last, strict=True))
    return (x.transpose(0, 1) if batch_first else x), *stacked


def _end(states: Tensor, reverse: bool) -> Tensor:
    return states[0 if reverse else -1]


def _lstm_layer(
    x: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    gates = F.linear(x, parameters[0])
    for bias in parameters[2:]:
        gates = gates + bias
    out, cells, _ = recurrent.lstm(gates, *states, parameters[1], reverse)
    return out, (_end(out, reverse), _end(cells, reverse))


def _gru_layer(
    x: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    weight, inner, *biases = parameters
    bias = biases[1] if biases else inner.new_zeros(inner.shape[0])
    out, _ = recurrent.gru(F.linear(x, weight, biases[0] if biases else None), states[0], inner, bias, reverse)
    return out, (_end(out, reverse),)


def _rnn_layer(relu: bool) -> Layer:
    def layer(
        x: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor], reverse: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        gates = F.linear(x, parameters[0])
        for bias in parameters[2:]:
            gates = gates + bias
        out = recurrent.rnn(gates, states[0], parameters[1], relu, reverse)
        return out, (_end(out, reverse),)

    return layer


def lstm(*args: Any, drop: Drop = F.dropout) -> tuple[Tensor, ...]:
    """``torch.lstm``; packed sequences (a tensor of batch sizes comes second) and projections are left to torch.
    ``drop(x, p)`` is the dropout between layers."""
    if isinstance(args[1], Tensor) or args[1][0].shape[-1] != args[1][1].shape[-1]:
        return torch.lstm(*args)
    return _recurrence(_lstm_layer, drop, *args)


def _of_one_state(whole: Callable[..., Any], layer: Layer, args: tuple[Any, ...], drop: Drop) -> tuple[Tensor, ...]:
    """Packed sequences (a tensor of batch sizes comes second) are left to torch's ``whole``."""
    x, state, *rest = args
    return whole(*args) if state.dtype == torch.int64 else _recurrence(layer, drop, x, [state], *rest)


def gru(*args: Any, drop: Drop = F.dropout) -> tuple[Tensor, ...]:
    """``torch.gru``, as `lstm`."""
    return _of_one_state(torch.gru, _gru_layer, args, drop)


def rnn_tanh(*args: Any, drop: Drop = F.dropout) -> tuple[Tensor, ...]:
    """``torch.rnn_tanh``, as `lstm`."""
    return _of_one_state(torch.rnn_tanh, _rnn_layer(relu=False), args, drop)


def rnn_relu(*args: Any, drop: Drop = F.dropout) -> tuple[Tensor, ...]:
    """``torch.rnn_relu``, as `lstm`."""
    return _of_one_state(torch.rnn_relu, _rnn_layer(relu=True), args, drop)
