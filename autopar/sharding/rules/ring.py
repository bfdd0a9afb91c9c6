"""Attention as a ring: how a rank computes it on its piece of the queries and of the keys (`autopar.ops.ring`).

Keys and values go from each rank to the next while the rank computes with them, in the backward together with their
gradients, one step behind: a rank adds its own to what arrives and passes the sum on, and the last one sends it home.
`passing` has the same messages in numbers.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import autopar.ops.ring  # noqa: F401  defines the operators
from autopar.ops.attention_kernels import accumulate_dtype
from autopar.sharding.axes import group_of
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.rule import Arg, Hop, Local, OpCall, Passing

aten = torch.ops.aten
ops = torch.ops.autopar
_wait = torch.ops._c10d_functional.wait_tensor.default

#: Arguments of attention that are no tensors, in their order.
SCALARS = ("scale", "causal", "window", "spread", "softcap", "dropout", "stream", "extent")
#: Kernels of a step forward and backward, as `autopar.ops.ring` starts them on a GPU: of contiguous pieces those of one
#: attention (backward two) and of merging it or adding it up; of balanced ones two of each, and what chooses chunks.
_KERNELS = {False: (8, 6), True: (42, 34)}
_MASKS = ("key_mask", "bias", "seed", "starts")


@dataclass(frozen=True)
class Ring:
    """One call of attention on a ring of ``n`` ranks, arguments by name; ``extent`` is [B, Hq, S, T]. Only ``steps`` of
    them have keys that any query sees."""

    given: dict[str, Any]
    extent: tuple[int, int, int, int]
    n: int

    @property
    def balanced(self) -> bool:
        """Whether pieces are balanced: where nothing but causality depends on places, and the chunks are equal."""
        _, _, queries, keys = self.extent
        given = self.given
        plain = not self.windowed and not given["dropout"] and given["bias"] is None
        return bool(given["causal"]) and plain and queries == keys and queries % (2 * self.n) == 0

    @property
    def windowed(self) -> bool:
        """Whether the window hides anything."""
        return 0 < int(self.given["window"]) < self.extent[2]

    @property
    def steps(self) -> int:
        """How many of the pieces of keys the queries of a rank see, at most."""
        _, _, queries, keys = self.extent
        if not (self.windowed and self.given["causal"] and queries == keys):
            return self.n
        return min(self.n, 1 + math.ceil((self.given["window"] - 1) / (queries // self.n)))

    @property
    def placed(self) -> bool:
        """Whether anything depends on places."""
        given = self.given
        return bool(given["causal"] or given["window"] or given["dropout"]) or any(
            given[name] is not None for name in ("key_mask", "bias")
        )

    @property
    def share(self) -> float:
        """Of all pairs of a query and a key of two pieces, those that are computed: with balanced ones half, and of
        others those of the steps that there are."""
        return 0.5 if self.balanced else self.steps / self.n


def is_possible(call: OpCall, given: dict[str, Any]) -> bool:
    """Whether attention can go round: not where queries without any key are to attend all of them equally, as no rank
    knows of its own that there are none."""
    bias, (queries, keys) = given["bias"], (call.operands[given[name].index].shape[2] for name in ("q", "k"))
    hides = isinstance(bias, Arg) and call.operands[bias.index].dtype == torch.bool
    beyond = given["window"] and keys < queries
    return not (given["spread"] and (given["key_mask"] is not None or beyond or hides))


class _Writer:
    """Writes the steps of one rank."""

    def __init__(self, local: Local, ring: Ring, axis: str) -> None:
        self.local, self.ring, self.axis, self.n = local, ring, axis, ring.n
        operands = {name: local.substitute(value) for name, value in ring.given.items()}
        self.operands, self.emit = operands, local.emit
        self.layouts = {
            name: local.operand_layouts[value.index] for name, value in ring.given.items() if isinstance(value, Arg)
        }
        self.starts = None
        if ring.placed:
            rows = self.layouts["q"].dims[:3]
            self.starts = local.starts(Layout((*rows, ())), list(ring.extent))

    def shape(self, name: str) -> list[int]:
        """Local shape of an operand."""
        return local_shape(self.local.call, self.local.mesh, self.ring.given[name], self.layouts[name])

    def scalars(self, step: int) -> list[Any]:
        """The arguments of a step behind its tensors."""
        given = {**self.operands, "extent": list(self.ring.extent), "starts": self.starts}
        return [*(given[name] for name in (*_MASKS, *SCALARS)), self.n, step, self.ring.balanced]

    def pair(self, target: Any, *args: Any) -> tuple[Any, Any]:
        """The two results of an operator."""
        both = self.emit(target, *args)
        return self.emit(operator.getitem, both, 0), self.emit(operator.getitem, both, 1)

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, x: Any, rows: int, to: Sequence[int]) -> Any:
        """Start sending ``x``, whose dim 0 has ``rows``."""
        return self.emit(ops.permute.default, x, rows, list(to), group_of(self.axis))

    def arrived(self, x: Any) -> Any:
        """What is on its way, once it is there."""
        return self.emit(_wait, x)

    def onward(self, steps: int = 1) -> list[int]:
        """To the rank so many places further."""
        return [(r + steps) % self.n for r in range(self.n)]

    def mirror(self) -> list[int]:
        """To the mirror image."""
        return [self.n - 1 - r for r in range(self.n)]

    def rows(self) -> int:
        """Size of dim 0 of what goes round."""
        return 2 if self.ring.balanced else self.shape("k")[0]

    # -- balance ------------------------------------------------------------------------------------------------------

    def balance(self, *names: str) -> Any:
        """Operands side by side along their last dim, of a rank's piece [B, H, S/n, ...] the early and the late chunk.
        """
        rows, _, length, *_ = self.shape(names[0])
        halves = [(0, length // 2), (length // 2, length)]
        kept, given = (self.beside([self._cut(self.operands[name], 2, half) for name in names]) for half in halves)
        sent = self.send(self.emit(aten.contiguous.default, given), rows, self.mirror())
        return self.emit(ops.ring_balance.default, kept, self.arrived(sent), self.starts, self.ring.extent[2])

    def unbalance(self, x: Any, rows: int) -> Any:
        """Inverse of `balance`, in memory token by token; ``rows`` are those of the piece."""
        kept, given = self.pair(ops.ring_unbalance.default, x, self.starts, self.ring.extent[2])
        both = [kept, self.arrived(self.send(given, rows, self.mirror()))]
        return self._turned(self.emit(aten.cat.default, [self._turned(half) for half in both], 1))

    def _turned(self, x: Any) -> Any:
        """``x`` with heads and sequence in each other's place."""
        return self.emit(aten.transpose.int, x, 1, 2)

    def together(self, *names: str) -> Any:
        """Operands side by side along their last dim; balanced if the ring is."""
        return self.balance(*names) if self.ring.balanced else self.beside([self.operands[name] for name in names])

    def beside(self, parts: Sequence[Any]) -> Any:
        """Tensors [B, H, S, ...] side by side along their last dim."""
        return parts[0] if len(parts) == 1 else self.emit(aten.cat.default, list(parts), 3)

    def _cut(self, x: Any, dim: int, ends: tuple[int, int]) -> Any:
        return self.emit(aten.slice.Tensor, x, dim, *ends)

    def home(self, x: Any, name: str) -> Any:
        """A result in its dtype and where it belongs."""
        dtype = self.local.call.operands[self.ring.given[name].index].dtype
        if accumulate_dtype(dtype) != dtype:
            x = self.emit(aten._to_copy.default, x, dtype=dtype)
        return self.unbalance(x, self.shape(name)[0]) if self.ring.balanced else x

    def result(self, x: Any, name: str) -> Any:
        """`home`, in memory token by token."""
        return self.home(x, name) if self.ring.balanced else self.by_tokens(self.home(x, name))

    def by_tokens(self, x: Any) -> Any:
        """``x`` in memory as `autopar.ops.attention.by_tokens` has it."""
        return self._turned(self.emit(aten.contiguous.default, self._turned(x)))

    # -- steps --------------------------------------------------------------------------------------------------------

    def forward(self) -> list[Any]:
        """[out, lse]."""
        q = self.operands["q"]
        if self.ring.balanced:
            q = self.balance("q")
        kv = self.together("k", "v")
        out, lse = None, None
        for step in range(self.ring.steps):
            sent = self.send(kv, self.rows(), self.onward()) if step < self.ring.steps - 1 else None
            out, lse = self.pair(ops.ring_step.default, out, lse, q, kv, *self.scalars(step))
            kv = self.arrived(sent) if sent is not None else None
        if self.ring.balanced:
            lse = self.emit(aten.contiguous.default, self.unbalance(lse, self.shape("q")[0]))
        return [self.result(out, "q"), lse]

    def backward(self) -> list[Any]:
        """[dq, dk, dv]."""
        q, grad_out, out, lse = (self.operands[name] for name in ("q", "grad_out", "out", "lse"))
        if self.ring.balanced:
            q, grad_out, out = self._apart(self.balance("q", "grad_out", "out"), 4, "q", "grad_out", "out")
            lse = self.balance("lse")
        kv = self.together("k", "v")
        dq, passed, steps = None, None, self.ring.steps
        for step in range(steps):
            sent = self.send(kv, self.rows(), self.onward()) if step < steps - 1 else None
            dq, dkv = self.pair(
                ops.ring_step_backward.default, dq, grad_out, q, kv, out, lse, *self.scalars(step)
            )
            if passed is not None:
                dkv = self.emit(aten.add.Tensor, dkv, self.arrived(passed))
            if steps > 1:  # after the last step they go home
                dkv = self.send(dkv, self.rows(), self.onward(1 if step < steps - 1 else 1 - steps))
            passed = dkv
            kv = self.arrived(sent) if sent is not None else None
        dkv = self.home(self.arrived(passed) if steps > 1 else passed, "k")
        return [self.result(dq, "q"), *(self.by_tokens(x) for x in self._apart(dkv, 3, "k", "v"))]

    def _apart(self, x: Any, dim: int, *names: str) -> list[Any]:
        """The parts of what was put ``together``."""
        ends = [0]
        for name in names:
            ends.append(ends[-1] + self.shape(name)[-1])
        return [self._cut(x, dim, pair) for pair in itertools.pairwise(ends)]


def local_shape(call: OpCall, mesh: Mesh, arg: Arg, layout: Layout) -> list[int]:
    """Shape of a rank's piece of an operand."""
    return list(layout.local_shape(mesh, call.operands[arg.index].shape))


def write(local: Local, ring: Ring, axis: str) -> list[Any]:
    """One rank's part of a call of attention, forward or backward, on the ring of ``axis``."""
    writer = _Writer(local, ring, axis)
    return writer.backward() if "grad_out" in ring.given else writer.forward()


def passing(call: OpCall, ring: Ring, axis: str, mesh: Mesh, operands: Sequence[Layout]) -> Passing:
    """What `write` sends, in its order; ``operands`` are their layouts."""
    own: dict[str, int] = {}
    for name, arg in ring.given.items():
        if isinstance(arg, Arg):
            spec = call.operands[arg.index]
            own[name] = operands[arg.index].local_numel(mesh, spec.shape) * spec.dtype.itemsize
    keys = call.operands[ring.given["k"].index].dtype
    kv = own["k"] + own["v"]
    sums = kv * accumulate_dtype(keys).itemsize // keys.itemsize
    backward, last = "grad_out" in ring.given, ring.steps - 1
    moved: list[tuple[int, int | None, int | None]] = []
    if ring.balanced:
        before = (own["q"] + own["grad_out"] + own["out"], own["lse"], kv) if backward else (own["q"], kv)
        moved += [(nbytes // 2, None, None) for nbytes in before]
    for step in range(ring.steps):
        moved += [(kv, step, None)] * (step < last) + [(sums, step, None)] * (backward and step > 0)
    moved += [(sums, None, None)] * (backward and last > 0)
    if ring.balanced:
        results = (own["q"], kv) if backward else _out_bytes(call, mesh, operands[ring.given["q"].index])
        moved += [(nbytes // 2, None, None if backward else i) for i, nbytes in enumerate(results)]
    _, _, queries, keys = ring.extent
    own_keys = keys // ring.n // (2 if ring.balanced else 1)
    hops = tuple(Hop(axis, *hop) for hop in moved)
    return Passing(ring.steps, hops, ring.share, _KERNELS[ring.balanced][backward], queries // ring.n, own_keys)


def _out_bytes(call: OpCall, mesh: Mesh, rows: Layout) -> tuple[int, int]:
    """Bytes of a rank's piece of out and lse, both in the layout ``rows`` of q."""
    out, lse = (rows.local_numel(mesh, spec.shape) * spec.dtype.itemsize for spec in call.results)
    return out, lse
