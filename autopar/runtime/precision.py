"""Mixed precision where programs are run: what goes in and comes out in another dtype, and the same by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from autopar._compat import pytree
from autopar.capture import batch_tensors
from autopar.capture.graph import Captured


def inputs_as_used(captured: Captured, tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of a batch in the dtypes in which the graph takes them."""
    return [t.to(node.meta["val"].dtype) for node, t in zip(captured.inputs, tensors, strict=True)]


@torch.no_grad()
def agree_on_overflow(gradients: Iterable[DTensor], device: torch.device) -> None:
    """Let every rank see that a gradient of any rank is not finite, by making one of its own so.

    A ``torch.amp.GradScaler`` looks at the gradients of its own process; DTensor takes those of its mesh together, but
    the stages of a pipeline have meshes of their own, and all must skip a step if one does.
    """
    pieces = [piece for g in gradients if (piece := g.to_local()).numel() > 0]
    overflow = torch.zeros((), device=device)
    if pieces:
        largest = torch.stack([n.float() for n in torch._foreach_norm(pieces, math.inf)])
        overflow = (~largest.isfinite()).any().float()
    dist.all_reduce(overflow, dist.ReduceOp.MAX)
    if pieces:
        first = pieces[0].view(-1)[:1]
        first.copy_(torch.where(overflow > 0, torch.full_like(first, math.inf), first))


def mixed_call(model: nn.Module, captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``model(*args, **kwargs)`` as one process computes it by hand: parameters that have masters, and inputs, cast to
    the dtypes in which they are used. Gradients come back in the masters' dtype."""
    used = iter(inputs_as_used(captured, batch_tensors(args, kwargs)))
    args, given = pytree.tree_map_only(Tensor, lambda _: next(used), (args, dict(kwargs)))
    cast = {p.name: model.get_parameter(p.name).to(p.spec.dtype) for p in captured.parameters if p.master is not None}
    return functional_call(model, cast, args, given) if cast else model(*args, **given)
