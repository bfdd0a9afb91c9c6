"""The model's own module tree with every parameter a `DTensor` in its storage layout on the whole mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.process import placements
from autopar.sharding.layout import Layout, Mesh


def is_meta(model: nn.Module) -> bool:
    """Whether a parameter of the model has no storage yet."""
    return any(p.is_meta for p in model.parameters())


def parameter_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of every parameter, by the first."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {found[0]: tuple(found) for found in names.values()}


def parameter_at(model: nn.Module, name: str) -> nn.Parameter:
    """``model.get_parameter(name)`` in a tenth of its time, for one that is there: every step asks for all of them."""
    *path, last = name.split(".")
    module: Any = model
    for part in path:
        module = module._modules[part]
    found: nn.Parameter = module._parameters[last]
    return found


@dataclass(frozen=True)
class Pieces:
    """What one rank holds of a model that is on the meta device: its pieces of parameters, and whole buffers, by name
    (of tied parameters the first)."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


#: Makes a rank's pieces of a meta model: ``fill(model, layouts, mesh, rank)``, of the parameters in ``layouts`` only.
Fill = Callable[[nn.Module, Mapping[str, Layout], Mesh, int], Pieces]


def distribute(whole: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh) -> DTensor:
    """This rank's piece of a tensor that every rank has whole, as a DTensor. The piece owns its memory."""
    piece = layout.local_slice(mesh, whole.detach(), dist.get_rank()).clone(memory_format=torch.contiguous_format)
    return as_dtensor(piece.to(device_mesh.device_type), layout, mesh, device_mesh, whole.shape)


def as_dtensor(piece: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """A rank's piece as the DTensor of global ``shape``."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(piece, device_mesh, placements(layout, mesh), run_check=False, shape=shape, stride=stride)


def layouts_of(model: nn.Module, storage: Mapping[str, Layout]) -> dict[str, Layout]:
    """The storage layout of every parameter of ``model``, by its first name; what ``storage`` lacks is replicated."""
    return {name: storage.get(name, Layout.replicated(p.dim())) for name, p in model.named_parameters()}


def parallel_tree(
    model: nn.Module,
    storage: Mapping[str, Layout],
    mesh: Mesh,
    device_mesh: DeviceMesh,
    pieces: Pieces | None = None,
    held: Collection[str] | None = None,
) -> nn.Module:
    """A copy of ``model`` whose parameters are DTensors and whose buffers are on the device; the model stays as it is.

    ``storage`` gives layouts by parameter name; tied parameters stay one. ``pieces`` are this rank's of a model on the
    meta device; without them every rank has the whole model. Parameters that are not ``held`` (None: all are) stay on
    the meta device.
    """
    memo: dict[int, object] = {}
    layouts, device = layouts_of(model, storage), device_mesh.device_type
    for name, p in model.named_parameters():
        tensor: Tensor
        if held is not None and name not in held:
            tensor = torch.empty_like(p, device="meta")
        elif pieces is None:
            tensor = distribute(p, layouts[name], mesh, device_mesh)
        else:
            tensor = as_dtensor(pieces.parameters[name].to(device), layouts[name], mesh, device_mesh, p.shape)
        memo[id(p)] = nn.Parameter(tensor, requires_grad=p.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = (buffer if pieces is None else pieces.buffers[name]).detach().to(device, copy=True)
    return copy.deepcopy(model, memo)


def own_pieces(
    state: Mapping[str, Any], module: nn.Module, storage: Mapping[str, Layout], mesh: Mesh, device_mesh: DeviceMesh
) -> dict[str, Any]:
    """A state dict with every whole tensor that stands for a parameter of ``module`` cut to this rank's piece; each
    rank must pass the same. ``storage`` gives layouts by the first name of a parameter. What has another shape, or is a
    DTensor already, stays as it is."""
    first = {id(p): name for name, p in module.named_parameters()}
    found = dict(state)
    for name, p in module.named_parameters(remove_duplicate=False):
        value = found.get(name)
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == p.shape:
            layout = storage.get(first[id(p)], Layout.replicated(p.dim()))
            found[name] = distribute(value, layout, mesh, device_mesh)
    return found
