"""The mode that puts autopar's random operators in the place of PyTorch's own: dropout of every kind, and the random
numbers that a forward draws."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.ops.distributions import replacements
from autopar.ops.dropout import dropout
from autopar.ops.sdpa import scaled_dot_product_attention
from autopar.ops.uniform import uniform

_ALPHA = -1.7580993408473766  # what SELU tends to on the left, to which alpha dropout drops: -scale * alpha of F.selu
#: Arguments with which a draw stays PyTorch's: numbers of a generator, and tensors that are no part of a graph yet.
_TORCHS = ("generator", "out", "names", "pin_memory", "requires_grad")
_RECURRENCES = ("gru", "lstm", "rnn_relu", "rnn_tanh")  # functions of torch and of autopar.ops.rnn

_entered: list[CounterDraws] = []


def active_draws() -> CounterDraws | None:
    """The innermost ``counter_draws`` that is entered, for operators that draw their own mask; None outside."""
    return _entered[-1] if _entered else None


class CounterDraws(TorchFunctionMode):
    """See ``counter_draws``. ``streams`` counts the random operators replaced since the context was entered."""

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
            **replacements(self._uniform),
        }

    def __enter__(self) -> CounterDraws:
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
        kwargs = kwargs or {}
        own = any(kwargs.get(name) for name in _TORCHS)
        return (func if own else self._replacements.get(func, func))(*args, **kwargs)

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

    def _uniform(self, like: Tensor) -> Tensor:
        """Random numbers in [0, 1) of the shape and dtype of ``like``."""
        starts = torch.zeros(like.dim(), dtype=torch.int64, device=like.device)
        return uniform(like, self.seed, starts, self.next_stream(), like.shape)

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


def counter_draws(seed: Tensor) -> CounterDraws:
    """Context in which random numbers are autopar's, numbered in call order: one forward of the model per entry.

    ``F.dropout``, ``torch.dropout``, their in-place forms (hence ``nn.Dropout``) become ``autopar::dropout`` when
    training with p > 0, and ``F.scaled_dot_product_attention`` becomes ``autopar::attention`` always. So do the dropout
    of channels, ``F.alpha_dropout`` and the dropout between layers of RNNs, and what `autopar.ops.distributions` has:
    uniform, normal, exponential, Bernoulli, integers, ``F.gumbel_softmax``. Other random operators (permutations, draws
    from a generator of the model's own) are left alone. Used while capturing, and around the untouched eager model,
    which then draws exactly what a sharded one draws. Not for models that recompute with ``torch.utils.checkpoint``:
    the recomputation would take new stream numbers.

    Args:
        seed: int64 [2], the seed and the step, on the model's device; may be a fake tensor.
    """
    return CounterDraws(seed)
