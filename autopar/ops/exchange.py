"""What surrounds the all-to-all by which ranks exchange routed rows (`autopar.ops.experts`).

Ranks on an axis that splits the tokens have the rows of their own tokens, for all ``experts`` of the range that they
share; on an axis that splits the experts, those of all tokens of the group for their part of the range. Between the two
goes an all-to-all whose pieces are as large as the router makes them. Every rank knows the sizes, since it has the
``index`` [n * T, K] of all tokens of the group (counted from the first expert of the range): no collective is needed to
learn them. ``to_experts`` says which way it goes. What is sent is sorted by receiver, and what arrives comes by sender,
in both cases by expert within: the permutations around it are local.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar._compat import FakeTensor

_CALL = "Tensor index, Tensor coordinate, SymInt experts, SymInt n, bool to_experts"


def _counts(index: Tensor, experts: int, n: int) -> Tensor:
    """[n, experts]: how many rows of each expert the tokens of each rank have."""
    flat = index.reshape(n, -1)
    keys = torch.where((flat >= 0) & (flat < experts), flat, experts)
    keys = keys + torch.arange(n, device=index.device)[:, None] * (experts + 1)
    return torch.bincount(keys.reshape(-1), minlength=n * (experts + 1)).view(n, experts + 1)[:, :experts]


def _own(index: Tensor, coordinate: Tensor, experts: int, n: int) -> tuple[Tensor, Tensor]:
    """The rows of this rank's tokens [n, experts / n] by the rank that has the experts, and those of this rank's
    experts [n, experts / n] by the rank that has the tokens."""
    if experts % n or index.shape[0] % n or coordinate.shape != (1,):
        raise ValueError(
            f"{n} ranks exchange rows of {experts} experts and {index.shape[0]} tokens, with a coordinate of shape "
            f"{list(coordinate.shape)}: all of the ranks must have as many, and the coordinate is [1]"
        )
    counts, me = _counts(index, experts, n), int(coordinate)
    part = experts // n
    return counts[me].view(n, part), counts[:, me * part : (me + 1) * part]


def _transposed(sizes: Tensor) -> Tensor:
    """Pieces of ``sizes`` [a, b] lie one after the other, b innermost: the order that puts a innermost."""
    a, b = sizes.shape
    label = torch.repeat_interleave(torch.arange(a * b, device=sizes.device), sizes.reshape(-1))
    return torch.argsort(label % b * a + label // b, stable=True)


@torch.library.custom_op("autopar::exchange_sizes", mutates_args=(), schema=f"({_CALL}) -> Tensor")
def exchange_sizes(index: Tensor, coordinate: Tensor, experts: int, n: int, to_experts: bool) -> Tensor:
    """How many rows this rank sends to and receives from each of the ``n``: int64 [2, n], on the CPU.

    Raises:
        ValueError: experts or tokens that ``n`` does not divide, or a coordinate that is not [1].
    """
    of_tokens, of_experts = _own(index, coordinate, experts, n)
    sizes = [of_tokens.sum(1), of_experts.sum(1)]
    return torch.stack(sizes if to_experts else sizes[::-1]).cpu()


@exchange_sizes.register_fake
def _(index: Tensor, coordinate: Tensor, experts: int, n: int, to_experts: bool) -> Tensor:
    # of meta tensors no numbers are known either: uninitialised memory would look as if they were
    return torch.empty(2, n, dtype=torch.int64, device="meta" if index.is_meta else "cpu")


@torch.library.custom_op("autopar::exchange_pack", mutates_args=(), schema=f"(Tensor rows, {_CALL}) -> Tensor")
def exchange_pack(rows: Tensor, index: Tensor, coordinate: Tensor, experts: int, n: int, to_experts: bool) -> Tensor:
    """Rows [1, P, H] as they are sent, [P, H]: by receiver, then by expert."""
    if to_experts:  # the receivers' experts follow one another
        return rows[0].clone()
    _, of_experts = _own(index, coordinate, experts, n)
    return rows[0][_transposed(of_experts.t())]


@exchange_pack.register_fake
def _(rows: Tensor, index: Tensor, coordinate: Tensor, experts: int, n: int, to_experts: bool) -> Tensor:
    return rows.new_empty(rows.shape[0] * rows.shape[1], rows.shape[2])


@torch.library.custom_op("autopar::exchange_unpack", mutates_args=(), schema=f"(Tensor received, {_CALL}) -> Tensor")
def exchange_unpack(
    received: Tensor, index: Tensor, coordinate: Tensor, experts: int, n: int, to_experts: bool
) -> Tensor:
    """What arrived [P, H], by sender and then by expert, as rows [1, P, H]."""
    if not to_experts:  # the senders' experts follow one another
        return received.unsqueeze(0).clone()
    _, of_experts = _own(index, coordinate, experts, n)
    return received[_transposed(of_experts)].unsqueeze(0)


@exchange_unpack.register_fake
def _(received: Tensor, index: Tensor, coordinate: Tensor, experts: int, n: int, to_experts: bool) -> Tensor:
    own = experts // n if to_experts else experts
    return received.new_empty(own, received.shape[0] // own, received.shape[1])


def piece_sizes(sizes: Tensor, which: int, mean: int) -> list[int]:
    """What is sent (``which`` 0) or received (1) of `exchange_sizes` as numbers; ``mean`` each where there are no
    values yet, that is while planning."""
    if isinstance(sizes, FakeTensor) or sizes.is_meta:
        return [mean] * int(sizes.shape[1])
    return [int(size) for size in sizes[which].tolist()]
