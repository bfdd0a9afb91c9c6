"""``autopar::lstm``, ``autopar::gru`` and ``autopar::rnn``: one layer of a recurrence in one direction, whole.

Only what depends on the step before is in here. What enters the gates from outside is an ordinary product over all
steps, and so is the gradient of the recurrent weight: both split like any other. The formulas are those of torch.nn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def _steps(count: int, reverse: bool) -> list[int]:
    return list(range(count))[::-1] if reverse else list(range(count))


def _wide(*tensors: Tensor) -> list[Tensor]:
    """For what is carried from step to step: 16-bit numbers would be rounded in every one."""
    return [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]


def _previous(states: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """[T, B, H]: the state that each step starts from."""
    parts = [states[1:], first[None]] if reverse else [first[None], states[:-1]]
    return torch.cat(parts)


def _check(name: str, gates: Tensor, state: Tensor, weight: Tensor, count: int) -> None:
    hidden = weight.shape[-1]
    if gates.dim() != 3 or tuple(weight.shape) != (count * hidden, hidden) or gates.shape[2] != count * hidden:
        raise ValueError(
            f"autopar::{name} expects gates [T, B, {count} * H] and weight [{count} * H, H], found "
            f"{list(gates.shape)} and {list(weight.shape)}"
        )
    if tuple(state.shape) != (gates.shape[1], hidden):
        raise ValueError(f"autopar::{name} expects a state [{gates.shape[1]}, {hidden}], found {list(state.shape)}")


@torch.library.custom_op("autopar::lstm", mutates_args=())
def lstm(gates: Tensor, h0: Tensor, c0: Tensor, weight: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A layer of an LSTM.

    Args:
        gates: [T, B, 4 * H], what input and biases contribute to the gates i, f, g, o.
        h0, c0: [B, H], the states before the first step.
        weight: [4 * H, H], recurrent.
        reverse: whether the steps run from the last to the first.

    Returns:
        Outputs and cells [T, B, H] by step, and the gates [T, B, 4 * H] after their functions, not differentiable.

    Raises:
        ValueError: shapes that do not fit together.
    """
    _check("lstm", gates, h0, weight, 4)
    out, cells = gates.new_empty((*gates.shape[:2], h0.shape[1])), gates.new_empty((*gates.shape[:2], h0.shape[1]))
    active = gates.new_empty(gates.shape)
    steps, h, c, weight = _wide(gates, h0, c0, weight)
    for t in _steps(gates.shape[0], reverse):
        i, f, g, o = torch.addmm(steps[t], h, weight.t()).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = o * c.tanh()
        active[t] = torch.cat([i, f, g, o], 1)
        out[t], cells[t] = h, c
    return out, cells, active


@lstm.register_fake
def _(gates: Tensor, h0: Tensor, c0: Tensor, weight: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    _check("lstm", gates, h0, weight, 4)
    shape = (*gates.shape[:2], h0.shape[1])
    return gates.new_empty(shape), gates.new_empty(shape), gates.new_empty(gates.shape)


@torch.library.custom_op("autopar::lstm_backward", mutates_args=())
def lstm_backward(
    grad_out: Tensor, grad_cells: Tensor, active: Tensor, cells: Tensor, c0: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``gates`` [T, B, 4 * H], h0 and c0 [B, H], by those of outputs and cells."""
    grad_gates = active.new_empty(active.shape)
    active, cells, c, weight = _wide(active, cells, c0, weight)
    before = _previous(cells, c, reverse)
    dh, dc = torch.zeros_like(c), torch.zeros_like(c)
    for t in _steps(active.shape[0], not reverse):
        i, f, g, o = active[t].chunk(4, 1)
        squashed = cells[t].tanh()
        dh = dh + grad_out[t]
        dc = dc + grad_cells[t] + dh * o * (1 - squashed * squashed)
        step = torch.cat(
            [dc * g * i * (1 - i), dc * before[t] * f * (1 - f), dc * i * (1 - g * g), dh * squashed * o * (1 - o)], 1
        )
        grad_gates[t], dh, dc = step, step @ weight, dc * f
    return grad_gates, dh.to(c0.dtype), dc.to(c0.dtype)


@lstm_backward.register_fake
def _(
    grad_out: Tensor, grad_cells: Tensor, active: Tensor, cells: Tensor, c0: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return active.new_empty(active.shape), c0.new_empty(c0.shape), c0.new_empty(c0.shape)


def _lstm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, h0, c0, weight, ctx.reverse = inputs
    out, cells, active = output
    ctx.mark_non_differentiable(active)
    ctx.save_for_backward(h0, c0, weight, out, cells, active)


def _lstm_gradients(ctx: Any, grad_out: Tensor, grad_cells: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    h0, c0, weight, out, cells, active = ctx.saved_tensors
    grad_gates, dh, dc = lstm_backward(grad_out, grad_cells, active, cells, c0, weight, ctx.reverse)
    previous = _previous(out, h0, ctx.reverse)
    return grad_gates, dh, dc, torch.einsum("tbg,tbh->gh", grad_gates, previous), None


lstm.register_autograd(_lstm_gradients, setup_context=_lstm_setup)


@torch.library.custom_op("autopar::gru", mutates_args=())
def gru(gates: Tensor, h0: Tensor, weight: Tensor, bias: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """A layer of a GRU.

    Args:
        gates: [T, B, 3 * H], what the input and its bias contribute to the gates r, z, n.
        h0: [B, H], the state before the first step.
        weight: [3 * H, H] and bias [3 * H], recurrent.
        reverse: whether the steps run from the last to the first.

    Returns:
        Outputs [T, B, H] by step, and [T, B, 4 * H], not differentiable: the gates r, z, n after their functions and
        what the state contributes to n.

    Raises:
        ValueError: shapes that do not fit together.
    """
    _check("gru", gates, h0, weight, 3)
    out, active = gates.new_empty((*gates.shape[:2], h0.shape[1])), gates.new_empty(_gru_active(gates, h0))
    steps, h, weight, bias = _wide(gates, h0, weight, bias)
    for t in _steps(gates.shape[0], reverse):
        (xr, xz, xn), (hr, hz, hn) = steps[t].chunk(3, 1), torch.addmm(bias, h, weight.t()).chunk(3, 1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * hn).tanh()
        h = n + z * (h - n)
        active[t] = torch.cat([r, z, n, hn], 1)
        out[t] = h
    return out, active


def _gru_active(gates: Tensor, h0: Tensor) -> tuple[int, ...]:
    return (*gates.shape[:2], 4 * h0.shape[1])


@gru.register_fake
def _(gates: Tensor, h0: Tensor, weight: Tensor, bias: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    _check("gru", gates, h0, weight, 3)
    return gates.new_empty((*gates.shape[:2], h0.shape[1])), gates.new_empty(_gru_active(gates, h0))


@torch.library.custom_op("autopar::gru_backward", mutates_args=())
def gru_backward(
    grad_out: Tensor, active: Tensor, out: Tensor, h0: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``gates`` [T, B, 3 * H], of what the states contribute to them [T, B, 3 * H], and of h0 [B, H]."""
    shape = (*out.shape[:2], 3 * out.shape[2])
    grad_gates, grad_hidden = out.new_empty(shape), out.new_empty(shape)
    active, out, h, weight = _wide(active, out, h0, weight)
    before = _previous(out, h, reverse)
    dh = torch.zeros_like(h)
    for t in _steps(out.shape[0], not reverse):
        r, z, n, hn = active[t].chunk(4, 1)
        dh = dh + grad_out[t]
        dn = dh * (1 - z) * (1 - n * n)
        dr, dz = dn * hn * r * (1 - r), dh * (before[t] - n) * z * (1 - z)
        hidden = torch.cat([dr, dz, dn * r], 1)
        grad_gates[t], grad_hidden[t] = torch.cat([dr, dz, dn], 1), hidden
        dh = dh * z + hidden @ weight
    return grad_gates, grad_hidden, dh.to(h0.dtype)


@gru_backward.register_fake
def _(
    grad_out: Tensor, active: Tensor, out: Tensor, h0: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*out.shape[:2], 3 * out.shape[2])
    return out.new_empty(shape), out.new_empty(shape), h0.new_empty(h0.shape)


def _gru_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, h0, weight, _, ctx.reverse = inputs
    out, active = output
    ctx.mark_non_differentiable(active)
    ctx.save_for_backward(h0, weight, out, active)


def _gru_gradients(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    h0, weight, out, active = ctx.saved_tensors
    grad_gates, grad_hidden, dh = gru_backward(grad_out, active, out, h0, weight, ctx.reverse)
    previous = _previous(out, h0, ctx.reverse)
    grad_weight = torch.einsum("tbg,tbh->gh", grad_hidden, previous)
    return grad_gates, dh, grad_weight, grad_hidden.sum((0, 1)), None


gru.register_autograd(_gru_gradients, setup_context=_gru_setup)


@torch.library.custom_op("autopar::rnn", mutates_args=())
def rnn(gates: Tensor, h0: Tensor, weight: Tensor, relu: bool, reverse: bool) -> Tensor:
    """A layer of a plain recurrence.

    Args:
        gates: [T, B, H], what input and biases contribute to each step.
        h0: [B, H], the state before the first step.
        weight: [H, H], recurrent.
        relu: whether relu in place of tanh. reverse: whether the steps run from the last to the first.

    Returns:
        Outputs [T, B, H] by step.

    Raises:
        ValueError: shapes that do not fit together.
    """
    _check("rnn", gates, h0, weight, 1)
    out = gates.new_empty(gates.shape)
    steps, h, weight = _wide(gates, h0, weight)
    for t in _steps(gates.shape[0], reverse):
        h = torch.addmm(steps[t], h, weight.t())
        h = h.relu() if relu else h.tanh()
        out[t] = h
    return out


@rnn.register_fake
def _(gates: Tensor, h0: Tensor, weight: Tensor, relu: bool, reverse: bool) -> Tensor:
    _check("rnn", gates, h0, weight, 1)
    return gates.new_empty(gates.shape)


@torch.library.custom_op("autopar::rnn_backward", mutates_args=())
def rnn_backward(grad_out: Tensor, out: Tensor, weight: Tensor, relu: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    """Gradients of ``gates`` [T, B, H] and h0 [B, H]."""
    grad_gates = out.new_empty(out.shape)
    out, weight = _wide(out, weight)
    dh = torch.zeros_like(out[0])
    for t in _steps(out.shape[0], not reverse):
        dh = dh + grad_out[t]
        step = torch.where(out[t] > 0, dh, 0.0) if relu else dh * (1 - out[t] * out[t])
        grad_gates[t], dh = step, step @ weight
    return grad_gates, dh.to(grad_gates.dtype)


@rnn_backward.register_fake
def _(grad_out: Tensor, out: Tensor, weight: Tensor, relu: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    return out.new_empty(out.shape), out.new_empty(out.shape[1:])


def _rnn_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, h0, weight, ctx.relu, ctx.reverse = inputs
    ctx.save_for_backward(h0, weight, output)


def _rnn_gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    h0, weight, out = ctx.saved_tensors
    grad_gates, dh = rnn_backward(grad_out, out, weight, ctx.relu, ctx.reverse)
    grad_weight = torch.einsum("tbg,tbh->gh", grad_gates, _previous(out, h0, ctx.reverse))
    return grad_gates, dh, grad_weight, None, None


rnn.register_autograd(_rnn_gradients, setup_context=_rnn_setup)


def _products(gates: Sequence[int], hidden: int) -> int:
    return 2 * gates[0] * gates[1] * gates[2] * hidden


@register_flop_formula(torch.ops.autopar.lstm)
def _lstm_flops(gates: Sequence[int], h0: Sequence[int], *_: Any, **__: Any) -> int:
    """The state times the recurrent weight, in every step."""
    return _products(gates, h0[1])


@register_flop_formula(torch.ops.autopar.lstm_backward)
def _lstm_backward_flops(
    _out: Sequence[int], _cells: Sequence[int], gates: Sequence[int], _: Any, c0: Sequence[int], *__: Any, **___: Any
) -> int:
    """The gates' gradients times the recurrent weight, in every step."""
    return _products(gates, c0[1])


@register_flop_formula(torch.ops.autopar.gru)
def _gru_flops(gates: Sequence[int], h0: Sequence[int], *_: Any, **__: Any) -> int:
    """As an LSTM's, with three gates."""
    return _products(gates, h0[1])


@register_flop_formula(torch.ops.autopar.gru_backward)
def _gru_backward_flops(_grad: Any, _active: Any, out: Sequence[int], h0: Sequence[int], *_: Any, **__: Any) -> int:
    """As an LSTM's, with three gates."""
    return _products((*out[:2], 3 * out[2]), h0[1])


@register_flop_formula(torch.ops.autopar.rnn)
def _rnn_flops(gates: Sequence[int], h0: Sequence[int], *_: Any, **__: Any) -> int:
    """As an LSTM's, with one gate."""
    return _products(gates, h0[1])


@register_flop_formula(torch.ops.autopar.rnn_backward)
def _rnn_backward_flops(_grad: Any, out: Sequence[int], *_: Any, **__: Any) -> int:
    """As an LSTM's, with one gate."""
    return _products(out, out[2])
