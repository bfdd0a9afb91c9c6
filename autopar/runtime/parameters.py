"""The model's own module tree with every parameter a `DTensor` in its storage layout on the whole mesh."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.capture.hf import is_transformers_model
from autopar.errors import CaptureError
from autopar.runtime.process import agree, placements
from autopar.sharding.layout import Layout, Mesh


def is_meta(model: nn.Module) -> bool:
    """Whether a parameter of the model has no storage yet."""
    return any(p.is_meta for p in model.parameters())


def materialize(model: nn.Module) -> nn.Module:
    """A copy of a meta model with weights, initialised as the model initialises itself, equal on every rank.

    transformers models run their own ``init_weights``, other modules ``reset_parameters``. CaptureError if a module
    with parameters or buffers of its own has neither.
    """
    seed = agree(torch.initial_seed())
    whole: Any = copy.deepcopy(model).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if is_transformers_model(whole):
            for module in whole.modules():
                module._is_hf_initialized = False
            whole.init_weights()
            whole.tie_weights()
            return whole
        for name, module in whole.named_modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif hasattr(module, "_reset_parameters"):
                module._reset_parameters()
            elif own:
                raise CaptureError(
                    f"module {name or '(root)'} is on the meta device and cannot initialise itself",
                    expected="a reset_parameters method on every module that owns tensors",
                    found=f"{type(module).__name__} without one",
                    change="add reset_parameters, or build the model with real weights",
                )
    return whole


def distribute(whole: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh) -> DTensor:
    """This rank's piece of a tensor that every rank has whole, as a DTensor. The piece owns its memory."""
    piece = layout.local_slice(mesh, whole.detach(), dist.get_rank()).clone(memory_format=torch.contiguous_format)
    return as_dtensor(piece.to(device_mesh.device_type), layout, mesh, device_mesh, whole.shape)


def as_dtensor(piece: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """A rank's piece as the DTensor of global ``shape``."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(piece, device_mesh, placements(layout, mesh), run_check=False, shape=shape, stride=stride)


def parallel_tree(model: nn.Module, storage: Mapping[str, Layout], mesh: Mesh, device_mesh: DeviceMesh) -> nn.Module:
    """A copy of ``model`` whose parameters are DTensors and whose buffers are on the device; the model stays as it is.

    ``storage`` gives layouts by parameter name; tied parameters stay one.
    """
    memo: dict[int, object] = {}
    for name, p in model.named_parameters():
        layout = storage.get(name, Layout.replicated(p.dim()))
        memo[id(p)] = nn.Parameter(distribute(p, layout, mesh, device_mesh), requires_grad=p.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to(device_mesh.device_type, copy=True)
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
