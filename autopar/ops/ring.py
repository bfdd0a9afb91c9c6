"""``autopar::ring_step`` and its backward: attention of a rank's queries to the keys that it has at hand.

In a ring of n ranks the sequence is split: every rank has a piece of the queries and the keys and values of the same
places. These go round, from each rank to the next, and in n steps every query has met every key. A step computes
attention to the keys at hand and merges it with that of the steps before, by the logarithms of the two sums (``lse``);
the backward uses the merged ones in every step, as FlashAttention's does for its tiles. Between the steps lie the
collectives, in the graph: nothing here communicates.

**Contiguous** pieces follow one another. Where attention is causal that is a waste: of half of the steps all keys lie
ahead of the queries, and who has the last queries works in every one. So pieces are **balanced** where causality is all
there is: of 2n chunks each rank has an early one and a late one, as far from the beginning as the other from the end
(Brandon et al., "Striped attention", arXiv:2311.09431, and the zig-zag order that followed it). Then each step is the
same work everywhere, without a mask: late queries see all early keys, and besides either the early queries see the
early keys, or the late queries see the late ones, whichever of the two ranks is nearer to the beginning. Only the step
with a rank's own keys has chunks that meet themselves.

A rank gives its mirror image, rank n-1-r, the second half of what it has, chunk 2r + 1 of 2n, and keeps the first,
chunk 2r: it then has chunks 2r and 2n-1-2r. A balanced tensor is [2, ...], the early chunk and the late one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar.ops.attention import SCALARS, products
from autopar.ops.attention_kernels import BACKWARD, FORWARD, Call, accumulate_dtype, backend

_RING = f"{SCALARS}, SymInt ring, SymInt step, bool balanced"
_GIVEN = "Tensor? key_mask, Tensor? bias, Tensor? seed, Tensor? starts"


@dataclass(frozen=True)
class _Place:
    """Where the keys at hand come from, for a rank whose piece of [B, Hq, S, T] begins at ``starts``: after ``step``
    steps from the rank that is so many places back in a ring of ``ring``."""

    starts: Tensor
    ring: int
    step: int
    extent: Sequence[int]

    @cached_property
    def own(self) -> Tensor:
        """This rank's place in the ring."""
        return self.starts[2] // (self.extent[2] // self.ring)

    @cached_property
    def source(self) -> Tensor:
        """The place of the rank whose keys are at hand."""
        return (self.own - self.step) % self.ring

    @property
    def begin(self) -> Tensor:
        """Index of the first of contiguous keys at hand."""
        return self.source * (self.extent[3] // self.ring)

    def early(self, place: Tensor) -> Tensor:
        """Which of 2n chunks is the early one of a rank."""
        return torch.where(2 * place < self.ring, 2 * place, 2 * self.ring - 1 - 2 * place)

    @cached_property
    def behind(self) -> Tensor:
        """Whether the early chunk at hand comes before this rank's own."""
        return self.early(self.source) < self.early(self.own)

    def chunks(self) -> tuple[Tensor, Tensor]:
        """Index of the first key of each of the two chunks at hand."""
        early = self.early(self.source)
        size = self.extent[3] // (2 * self.ring)
        return early * size, (2 * self.ring - 1 - early) * size


def _columns(x: Tensor | None, begin: Tensor, count: int) -> Tensor | None:
    """``count`` columns of ``x``, whose last dim goes over all keys, from ``begin`` on."""
    if x is None:
        return None
    return x.index_select(x.dim() - 1, begin.to(x.device) + torch.arange(count, device=x.device))


@dataclass(frozen=True)
class _Pair:
    """Queries that meet keys; ``causal`` where they are the same chunk, ``masks`` the key_mask and bias of these keys,
    ``starts`` what the operator takes."""

    q: Tensor
    kv: Tensor
    causal: bool
    masks: tuple[Tensor | None, Tensor | None]
    starts: Tensor | None = None


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys as attention to both. A row that has met no key has an lse of -inf."""
    total = torch.logaddexp(lse, more_lse)
    weight = torch.where(more_lse == -torch.inf, 0.0, torch.exp(more_lse - total))
    return torch.lerp(out, more.to(out.dtype), weight[..., None]), total


class _Step:
    """One step of a ring: the arguments of the operators from ``q`` on, and the calls of attention that it consists
    of."""

    def __init__(self, q: Tensor, kv: Tensor, *rest: Any) -> None:
        self.q, self.kv = q, kv
        (self.key_mask, self.bias, self.seed, self.starts, self.scale, self.causal, self.window, _spread, self.softcap,
         self.dropout, self.stream, self.extent, ring, step, self.balanced) = rest  # fmt: skip
        if self.starts is not None:
            self.place = _Place(self.starts, ring, step, self.extent)

    def call(self, pair: _Pair) -> Call:
        """The call of attention that a pair stands for. Rows without any key are merged, so they get 0 here."""
        head_dim = pair.q.shape[-1]
        k, v = pair.kv[..., :head_dim], pair.kv[..., head_dim:]
        extent = self.extent if pair.starts is not None else ()
        window = 0 if self.balanced else self.window
        return Call(pair.q, k, v, *pair.masks, self.seed, pair.starts, self.scale, pair.causal, window, False,
                    self.softcap, self.dropout, self.stream, extent)  # fmt: skip

    def contiguous(self) -> _Pair:
        """All queries with all keys at hand."""
        if self.starts is None:
            return _Pair(self.q, self.kv, False, (None, None))
        begin, keys = self.place.begin, self.kv.shape[-2]
        masks = _columns(self.key_mask, begin, keys), _columns(self.bias, begin, keys)
        placed = self.causal or self.window or self.dropout
        starts = torch.cat([self.starts[:3], begin[None]]) if placed else None
        return _Pair(self.q, self.kv, bool(self.causal), masks, starts)

    def own_chunks(self) -> _Pair:
        """Of the first step: both chunks, each with itself, as if they were samples of their own."""
        mask = None
        if self.key_mask is not None:
            mask = torch.cat(self._masks())
        return _Pair(self.q.flatten(0, 1), self.kv.flatten(0, 1), True, (mask, None))

    def late_with_early(self) -> _Pair:
        """The late queries with the early keys at hand."""
        return _Pair(self.q[1], self.kv[0], False, (self._mask(0), None))

    def chosen(self) -> _Pair:
        """Of later steps: the chunks of that rank which is nearer to the beginning of the two, late or early ones."""
        mask = None
        if self.key_mask is not None:
            mask = self.choose(torch.stack(self._masks()))
        return _Pair(self.choose(self.q), self.choose(self.kv), False, (mask, None))

    def choose(self, x: Tensor) -> Tensor:
        """The chunk of a balanced tensor that `chosen` takes."""
        return torch.where(self.place.behind, x[0], x[1])

    def _mask(self, which: int) -> Tensor | None:
        return _columns(self.key_mask, self.place.chunks()[which], self.kv.shape[-2])

    def _masks(self) -> list[Tensor]:
        """The masks of both chunks at hand, where there are any."""
        return [mask for mask in (self._mask(0), self._mask(1)) if mask is not None]


def _run(step: _Step, pair: _Pair) -> tuple[Tensor, Tensor]:
    call = step.call(pair)
    return FORWARD[backend(call)](call)


@torch.library.custom_op(
    "autopar::ring_step", mutates_args=(),
    schema=f"(Tensor? out, Tensor? lse, Tensor q, Tensor kv, {_GIVEN}, {_RING}) -> (Tensor out, Tensor lse)",
)  # fmt: skip
def ring_step(
    out: Tensor | None,
    lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """Attention after one more ``step`` of a ring of so many ranks.

    Args:
        out: [B, Hq, S/n, Dv] and lse [B, Hq, S/n], what the steps before have found, both float32 (float64 for
            float64); None in step 0.
        q: [B, Hq, S/n, D]. kv: [B, Hkv, T/n, D + Dv], keys and values of the rank ``step`` places back. Of these and
            the results, ``balanced`` ones are [2, B, heads, S/2n, ...] as the module has it.
        key_mask: bool [B, T], of all keys. bias: [B or 1, Hq or 1, S/n or 1, T], of all keys.
        starts: int64 [4], where this rank's contiguous piece of [B, Hq, S, T] = ``extent`` begins. None where nothing
            depends on places: no masks, causality, window, dropout.
        others: as ``autopar::attention``. ``spread`` is for callers to respect: nothing is spread here.

    Returns:
        out and lse, of the keys met so far.
    """
    now = _Step(q, kv, *rest)
    if not now.balanced:
        found, found_lse = _run(now, now.contiguous())
        if out is None or lse is None:
            return found.to(accumulate_dtype(q.dtype)).contiguous(), found_lse.contiguous()
        out, lse = _merged(out, lse, found, found_lse)
        return out.contiguous(), lse.contiguous()
    if out is None or lse is None:
        found, found_lse = _run(now, now.own_chunks())
        out = found.to(accumulate_dtype(q.dtype)).view(*q.shape[:-1], found.shape[-1])
        early, late = (out[0], found_lse.view(q.shape[:-1])[0]), (out[1], found_lse.view(q.shape[:-1])[1])
    else:
        found, found_lse = _run(now, now.chosen())
        nothing = torch.full_like(found_lse, -torch.inf)
        early = _merged(out[0], lse[0], found, torch.where(now.place.behind, found_lse, nothing))
        late = _merged(out[1], lse[1], found, torch.where(now.place.behind, nothing, found_lse))
    late = _merged(*late, *_run(now, now.late_with_early()))
    return torch.stack([early[0], late[0]]).contiguous(), torch.stack([early[1], late[1]]).contiguous()


@ring_step.register_fake
def _(out: Tensor | None, lse: Tensor | None, q: Tensor, kv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(q.dtype)
    value_dim = kv.shape[-1] - q.shape[-1]
    return q.new_empty((*q.shape[:-1], value_dim), dtype=dtype), q.new_empty(q.shape[:-1], dtype=dtype)


@torch.library.custom_op(
    "autopar::ring_step_backward", mutates_args=(),
    schema=f"(Tensor? dq, Tensor grad_out, Tensor q, Tensor kv, Tensor out, Tensor lse, {_GIVEN}, {_RING}) -> "
    "(Tensor dq, Tensor dkv)",
)  # fmt: skip
def ring_step_backward(
    dq: Tensor | None,
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """The gradients of one ``step`` of a ring: ``dq`` of the steps before with that of this one added, and what this
    rank's queries add to the gradients of the keys and values at hand. ``out`` (in q's dtype) and ``lse`` are those of
    all steps together. Both results are float32 (float64 for float64), in the shapes of q and kv.
    """
    now = _Step(q, kv, *rest)
    given = (grad_out, out, lse)
    if not now.balanced:
        more, dkv = _run_backward(now, now.contiguous(), given)
        return more if dq is None else dq + more, dkv
    late = _run_backward(now, now.late_with_early(), [x[1] for x in given])
    if dq is None:
        own = _run_backward(now, now.own_chunks(), [x.flatten(0, 1) for x in given])
        dq, dkv = own[0].view(q.shape), own[1].view(kv.shape)
        return torch.stack([dq[0], dq[1] + late[0]]), torch.stack([dkv[0] + late[1], dkv[1]])
    more, others = _run_backward(now, now.chosen(), [now.choose(x) for x in given])
    behind = now.place.behind
    early_q, late_q = torch.where(behind, more, 0.0), torch.where(behind, 0.0, more)
    early_kv, late_kv = torch.where(behind, others, 0.0), torch.where(behind, 0.0, others)
    dq = torch.stack([dq[0] + early_q, dq[1] + late_q + late[0]])
    return dq, torch.stack([early_kv + late[1], late_kv])


def _run_backward(step: _Step, pair: _Pair, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradients of a pair, as they are added up."""
    call, (grad_out, out, lse) = step.call(pair), given
    dq, dk, dv = BACKWARD[backend(call)](call, grad_out, out, lse)
    dtype = accumulate_dtype(dq.dtype)
    return dq.to(dtype).contiguous(), torch.cat([dk, dv], dim=-1).to(dtype)


@ring_step_backward.register_fake
def _(dq: Tensor | None, grad_out: Tensor, q: Tensor, kv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(q.dtype)
    return q.new_empty(q.shape, dtype=dtype), kv.new_empty(kv.shape, dtype=dtype)


@torch.library.custom_op(
    "autopar::ring_balance", mutates_args=(), schema="(Tensor kept, Tensor received, Tensor starts, SymInt extent) "
    "-> Tensor",
)  # fmt: skip
def ring_balance(kept: Tensor, received: Tensor, starts: Tensor, extent: int) -> Tensor:
    """The two chunks of a rank in their order: that which it has ``kept`` of its piece, which begins at ``starts[2]``
    of ``extent`` queries, and that which it has ``received`` of its mirror image, as [2, ...]."""
    return torch.stack([kept, received]).index_select(0, _order(starts, extent, kept.device))


@ring_balance.register_fake
def _(kept: Tensor, received: Tensor, starts: Tensor, extent: int) -> Tensor:
    return kept.new_empty((2, *kept.shape))


@torch.library.custom_op(
    "autopar::ring_unbalance", mutates_args=(), schema="(Tensor x, Tensor starts, SymInt extent) -> "
    "(Tensor kept, Tensor received)",
)  # fmt: skip
def ring_unbalance(x: Tensor, starts: Tensor, extent: int) -> tuple[Tensor, Tensor]:
    """Inverse of `ring_balance`."""
    order = _order(starts, extent, x.device)
    return x.index_select(0, order[:1])[0], x.index_select(0, order[1:])[0]


@ring_unbalance.register_fake
def _(x: Tensor, starts: Tensor, extent: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1:]), x.new_empty(x.shape[1:])


def _order(starts: Tensor, extent: int, device: torch.device) -> Tensor:
    """[0, 1] where the first half of a rank's piece is the early chunk, [1, 0] where it is the late one."""
    late = (2 * starts[2] >= extent).to(device=device, dtype=torch.int64)
    return (torch.arange(2, device=device) + late) % 2


def _pairs(q: Sequence[int], kv: Sequence[int], with_q: int, with_v: int, step: int, balanced: bool) -> int:
    """FLOPs of one step: two products of chunks, in the first step three, of which `autopar::attention`'s half that is
    counted all the same is in two."""
    value_dim = kv[-1] - q[-1]
    if not balanced:
        return products(q, kv, with_q, with_v, value_dim)
    return (3 if step == 0 else 2) * products(q[1:], kv[1:], with_q, with_v, value_dim)


@register_flop_formula(torch.ops.autopar.ring_step)
def _ring_flops(_out: Any, _lse: Any, q: Sequence[int], kv: Sequence[int], *rest: Any, **__: Any) -> int:
    """q k^T and weights v."""
    return _pairs(q, kv, 1, 1, *rest[-2:])


@register_flop_formula(torch.ops.autopar.ring_step_backward)
def _ring_backward_flops(
    _dq: Any, _grad: Any, q: Sequence[int], kv: Sequence[int], *rest: Any, **__: Any
) -> int:
    """2.5 times the forward, as of `autopar::attention`."""
    return _pairs(q, kv, 3, 2, *rest[-2:])
