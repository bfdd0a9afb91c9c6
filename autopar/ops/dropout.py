"""``autopar::dropout``, whose mask does not depend on how tensors are split (`mask`), and the mode that puts it in the
place of PyTorch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.ops.mask import check, keep_mask
from autopar.ops.sdpa import scaled_dot_product_attention

_SCHEMA = "(Tensor x, Tensor seed, Tensor starts, float p, int stream, SymInt[] extent) -> Tensor"
_ALPHA = -1.7580993408473766  # what SELU tends to on the left, to which alpha dropout drops: -scale * alpha of F.selu


@torch.library.custom_op("autopar::dropout", mutates_args=(), schema=_SCHEMA)
def dropout(x: Tensor, seed: Tensor, starts: Tensor, p: float, stream: int, extent: Sequence[int]) -> Tensor:
    """``x / (1 - p)`` where ``keep_mask`` is True, else 0; a shard draws its part of the whole tensor's mask.

    Args:
        x: floating point, any shape [ndim dims]; the shard.
        seed: int64 [2], the seed and the step. starts: int64 [ndim], global index of the shard's first element.
        p: probability of dropping an element. 0 gives a copy, 1 gives zeros.
        stream: number of the operator in the model.
        extent: shape of the whole tensor, ndim entries.

    Returns:
        Like ``x`` in shape, dtype and memory format. The gradient is the same operator applied to the gradient.

    Raises:
        ValueError: as ``keep_mask``.
    """
    keep = keep_mask(seed, starts, p, stream, x.shape, extent, x.device)
    out = torch.empty_like(x)
    torch.div(x, 1.0 - p if p < 1.0 else 1.0, out=out)
    return out.masked_fill_(keep.logical_not_(), 0.0)


@dropout.register_fake
def _(x: Tensor, seed: Tensor, starts: Tensor, p: float, stream: int, extent: Sequence[int]) -> Tensor:
    check(seed, starts, p, x.shape, extent)
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, starts, ctx.p, ctx.stream, ctx.extent = inputs
    ctx.save_for_backward(seed, starts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    seed, starts = ctx.saved_tensors
    return dropout(grad, seed, starts, ctx.p, ctx.stream, ctx.extent), None, None, None, None, None


dropout.register_autograd(_backward, setup_context=_setup_context)


_RECURRENCES = ("gru", "lstm", "rnn_relu", "rnn_tanh")  # functions of torch and of autopar.ops.rnn

_entered: list[CounterDropout] = []


def active_dropout() -> CounterDropout | None:
    """The innermost ``counter_dropout`` that is entered, for operators that draw their own mask; None outside."""
    return _entered[-1] if _entered else None


class CounterDropout(TorchFunctionMode):
    """See ``counter_dropout``. ``streams`` counts the random operators replaced since the context was entered."""

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.seed = seed
        self.streams = 0
        self._replacements: dict[Any, Callable[..., Tensor]] = {
            F.dropout: self._dropout,
            torch.dropout: self._torch_dropout,
            torch.dropout_: self._torch_dropout_,
            F.alpha_dropout: self._alpha_dropout,
            F.dropout1d: functools.partial(self._feature_dropout, 1),
            F.dropout2d: functools.partial(self._feature_dropout, 2),
            F.dropout3d: functools.partial(self._feature_dropout, 3),
            **{getattr(torch, n): functools.partial(self._recurrence, n) for n in _RECURRENCES},
            F.scaled_dot_product_attention: self._attention,
            F.multi_head_attention_forward: self._multi_head_attention,
        }

    def __enter__(self) -> CounterDropout:
        self.streams = 0
        _entered.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _entered.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The mode is off in here, so that F.dropout's own call of torch.dropout is not replaced a second time.
        return self._replacements.get(func, func)(*args, **(kwargs or {}))

    def next_stream(self) -> int:
        """The number of the next random operator of this forward."""
        self.streams += 1
        return self.streams - 1

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0.0 < p <= 1.0:  # outside the range, torch's own error
            return F.dropout(input, p, training, inplace)
        starts = torch.zeros(input.dim(), dtype=torch.int64, device=input.device)
        out = dropout(input, self.seed, starts, p, self.next_stream(), input.shape)
        return input.copy_(out) if inplace else out

    def _torch_dropout(self, input: Tensor, p: float, train: bool) -> Tensor:
        return self._dropout(input, p, train)

    def _torch_dropout_(self, input: Tensor, p: float, train: bool) -> Tensor:
        return self._dropout(input, p, train, inplace=True)

    def _feature_dropout(
        self, ndim: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Drops whole channels of [N, C, ...]; F.dropout1d and F.dropout3d take [C, ...] too, F.dropout2d does not."""
        if not training or not 0.0 < p <= 1.0:
            return (F.dropout1d, F.dropout2d, F.dropout3d)[ndim - 1](input, p, training, inplace)
        outer = 1 if input.dim() == ndim + 1 and ndim != 2 else 2
        ones = input.new_ones([n if d < outer else 1 for d, n in enumerate(input.shape)])
        out = input * self._dropout(ones, p)
        return input.copy_(out) if inplace else out

    def _alpha_dropout(self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        if not training or not 0.0 < p < 1.0:
            return F.alpha_dropout(input, p, training, inplace)
        scale = ((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p)) ** -0.5
        kept = self._dropout(torch.ones_like(input), p) * (1.0 - p)
        out = input * (kept * scale) + ((kept - 1.0) * (_ALPHA * scale) + _ALPHA * scale * p)
        return input.copy_(out) if inplace else out

    def _recurrence(self, name: str, *args: Any) -> Any:
        from autopar.ops import rnn  # which needs this module

        dropout, train = args[5], args[6]
        if not dropout or not train:
            return getattr(torch, name)(*args)
        return getattr(rnn, name)(*args, drop=self._dropout)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        seed, stream = (self.seed, self.next_stream()) if dropout_p > 0.0 else (None, 0)
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, seed=seed, stream=stream
        )

    def _multi_head_attention(self, *args: Any, **kwargs: Any) -> Any:
        # This one is Python that dispatches as a whole, once, and then runs with the mode off: what it calls has to be
        # replaced by name.
        saved = F.dropout, F.scaled_dot_product_attention
        F.dropout, F.scaled_dot_product_attention = self._dropout, self._attention
        try:
            return F.multi_head_attention_forward(*args, **kwargs)
        finally:
            F.dropout, F.scaled_dot_product_attention = saved


def counter_dropout(seed: Tensor) -> CounterDropout:
    """Context in which dropout is autopar's, numbered in call order: one forward of the model per entry.

    ``F.dropout``, ``torch.dropout``, their in-place forms (hence ``nn.Dropout``) become ``autopar::dropout`` when
    training with p > 0, and ``F.scaled_dot_product_attention`` becomes ``autopar::attention`` always. So do the dropout
    of channels, ``F.alpha_dropout`` and the dropout between layers of RNNs. Other random operators (``rand``,
    ``F.gumbel_softmax``) are left alone. Used while capturing, and
    around the untouched eager model, which then draws exactly what a sharded one draws. Not for models that recompute
    with ``torch.utils.checkpoint``: the recomputation would take new stream numbers.

    Args:
        seed: int64 [2], the seed and the step, on the model's device; may be a fake tensor.
    """
    return CounterDropout(seed)
