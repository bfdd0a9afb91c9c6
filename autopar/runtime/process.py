"""The process group and device mesh of a run: found, or made from torchrun's environment."""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from autopar._compat import HashStore, flatten, strided_shard
from autopar.errors import PlanError
from autopar.sharding.axes import joint_axes
from autopar.sharding.layout import JOINT, Layout, Mesh


def device_type() -> str:
    """The kind of device that this process computes on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def ensure_process_group() -> None:
    """Join the process group that torchrun describes; without torchrun, a group of this process alone."""
    if dist.is_initialized():
        return
    if device_type() == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device_type() == "cuda" else "gloo"
    timeout = datetime.timedelta(minutes=30)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=HashStore(), timeout=timeout)


def make_device_mesh(mesh: Mesh) -> DeviceMesh:
    """The device mesh of all ranks, or with an axis pp first that of all stages. PlanError if the number of ranks is
    not the mesh's."""
    world = dist.get_world_size()
    if world != mesh.size:
        degrees = " x ".join(f"{axis}={n}" for axis, n in mesh.axes)
        raise PlanError(
            f"the plan is for {mesh.size} ranks and {world} are running",
            expected=f"{degrees} = {mesh.size} ranks",
            found=f"a world of {world}",
            change=f"run torchrun with {mesh.size} processes in all, or plan again",
        )
    found = init_device_mesh(device_type(), mesh.sizes, mesh_dim_names=mesh.names)
    return found if "pp" in mesh.names else _flattened(found)


def stage_mesh(whole: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """The part of a device mesh with an axis pp that is this rank's stage, of the axes of ``mesh``."""
    return _flattened(whole[mesh.names])


def _flattened(mesh: DeviceMesh) -> DeviceMesh:
    if all(n > 1 for n in mesh.shape):
        flatten(mesh)  # lets DTensor reduce over both axes at once, as clip_grad_norm_ does
    return mesh


def group_names(device_mesh: DeviceMesh, mesh: Mesh) -> dict[str, str]:
    """The name of the process group of every axis of ``mesh``, and of axes that a collective takes together. Makes
    groups: every rank must call it."""
    found = {axis: str(device_mesh.get_group(axis).group_name) for axis in mesh.names}
    for axes in joint_axes(mesh):
        name = JOINT.join(axes)
        found[name] = str(flatten(device_mesh[axes], name).get_group().group_name)
    return found


def group_places(device_mesh: DeviceMesh, mesh: Mesh) -> dict[str, int]:
    """This rank's place in each of the groups that `group_names` names; of axes taken together the first is outermost.
    """
    found = {axis: device_mesh.get_local_rank(axis) for axis in mesh.names}
    for axes in joint_axes(mesh):
        place = 0
        for axis in axes:
            place = place * mesh.degree(axis) + found[axis]
        found[JOINT.join(axes)] = place
    return found


def host_group() -> dist.ProcessGroup | None:
    """A group of all ranks that takes CPU tensors, and that no program communicates in: a rank that asks for something
    there while others run a program waits, and takes no part of theirs for an answer. None for a rank alone. Every rank
    must make the first call."""
    return None if dist.get_world_size() == 1 else _gloo_group(dist.group.WORLD)


@functools.cache
def _gloo_group(world: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A Gloo group of the ranks of ``world``. Modules ask for it each time: they can be copied, a group cannot."""
    return dist.new_group(backend="gloo")


def placements(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """A layout as DTensor's placements, one an axis. Axes that split a dim in another order than the mesh's become
    strided: that is how FSDP2 writes a dim that tp splits outermost and dp inside it."""
    found: list[Placement] = []
    for axis in mesh.names:
        d = layout.dim_of(axis)
        if d is None:
            found.append(Replicate())
            continue
        order = layout.dims[d]
        outside = 1  # pieces made by axes that are further right in the mesh but further out in the layout
        for other in order[: order.index(axis)]:
            if mesh.names.index(other) > mesh.names.index(axis):
                outside *= mesh.degree(other)
        found.append(Shard(d) if outside == 1 else strided_shard(d, outside))
    return tuple(found)


def agree(value: Any) -> Any:
    """Rank 0's ``value``, on every rank; alone, the value itself."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]
