"""The norm of all gradients of a parallel module, each element counted once however it is split, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import InputError, RuntimeFailure


def _is_counted(gradient: DTensor) -> bool:
    """Whether this rank's piece counts: of replicas only that on the ranks whose coordinates there are 0."""
    where = gradient.device_mesh.get_coordinate()
    assert where is not None
    return all(c == 0 for c, p in zip(where, gradient.placements, strict=True) if isinstance(p, Replicate))


def global_norm(gradients: Iterable[DTensor], norm_type: float, device: torch.device) -> Tensor:
    """The ``norm_type`` norm (a number from 0 excluded to infinity) of all ``gradients`` of all ranks together, in
    float64, the same on every rank. Ranks may have different gradients, as stages of a pipeline do, and none."""
    pieces = [g.to_local() for g in gradients if _is_counted(g)]
    norms = torch.zeros(1, dtype=torch.float64, device=device)
    if pieces:
        norms = torch.stack([n.double() for n in torch._foreach_norm(pieces, norm_type)])
    if norm_type == math.inf:
        largest = norms.max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest
    total = norms.pow(norm_type).sum()
    dist.all_reduce(total)
    return total.pow(1.0 / norm_type)


@torch.no_grad()
def clip(
    gradients: Sequence[DTensor],
    counted: Sequence[DTensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    device: torch.device,
) -> Tensor:
    """Scale ``gradients`` in place so that the norm of those ``counted``, of all ranks, is at most ``max_norm``; gives
    the norm before, as ``torch.nn.utils.clip_grad_norm_`` does. InputError for a norm that is none, RuntimeFailure with
    ``error_if_nonfinite`` if the norm is NaN or infinite: both on every rank."""
    if not norm_type > 0:
        raise InputError(
            f"clip_grad_norm_ with norm_type={norm_type!r}",
            expected="a number above 0, or infinity",
            found=repr(norm_type),
            change="leave norm_type out for the Euclidean norm",
        )
    norm = global_norm(counted, float(norm_type), device)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeFailure(
            f"the norm of the gradients is {float(norm)}",
            expected="finite gradients",
            found=f"a norm of order {norm_type} that is not",
            change="lower the learning rate, skip the step, or leave error_if_nonfinite out",
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    pieces = [g.to_local() for g in gradients]
    if pieces:
        torch._foreach_mul_(pieces, scale.to(pieces[0].dtype))
    return norm.float() if all(g.dtype != torch.float64 for g in gradients) else norm
