"""What a forward returns: the model's own structure, with tensors that know they are split."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.runtime.outputs import Deferred, OutputTensor
from autopar.runtime.process import placements
from autopar.runtime.program import Specialization


def rebuild(
    special: Specialization,
    results: dict[int, Tensor],
    late: Callable[[int], Tensor],
    device_mesh: DeviceMesh,
    length: int | None,
) -> Any:
    """What the model would have returned of ``results``, this rank's pieces by place: its structure, with an
    `OutputTensor` for all but scalars, and for what is not among them a `Deferred` that ``late`` computes when it is
    used; cut to ``length`` tokens where the batch was padded."""
    captured = special.captured

    def whole(place: int, result: Tensor) -> Tensor:
        return _output(special, place, result, device_mesh, length)

    found: list[Tensor | Deferred] = []
    for place, output in enumerate(captured.outputs):
        if place in results:
            found.append(whole(place, results[place]))
        elif output.buffer is None:
            val = output.node.meta["val"]
            make = functools.partial(lambda p: whole(p, late(p)), place)
            found.append(Deferred(_shorter(special, place, length), val.dtype, make))
    tensors, constants = iter(found), dict(captured.output_constants)
    count = captured.output_spec.num_leaves
    leaves = [constants[i] if i in constants else next(tensors) for i in range(count)]
    return pytree.tree_unflatten(leaves, captured.output_spec)


def _output(
    special: Specialization, place: int, result: Tensor, device_mesh: DeviceMesh, length: int | None
) -> Tensor:
    """One result as the user gets it."""
    if result.dim() == 0:
        return result
    val = special.captured.outputs[place].node.meta["val"]
    layout, mesh = special.assignment.sinks[place], special.assignment.mesh
    where = placements(layout, mesh)
    tensor: Any = DTensor.from_local(
        result, device_mesh, where, run_check=False, shape=val.shape, stride=val.stride()
    )
    for dim, size in enumerate(_shorter(special, place, length)):
        if size < tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, size)
    return OutputTensor.of(tensor)


def _shorter(special: Specialization, place: int, length: int | None) -> torch.Size:
    """The shape of an output whose sequence is cut to ``length``; None leaves it."""
    shape = special.captured.outputs[place].node.meta["val"].shape
    if length is None:
        return torch.Size(shape)
    return torch.Size(length if d in special.length_dims[place] else size for d, size in enumerate(shape))
