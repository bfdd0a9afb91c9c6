"""The only place that imports private PyTorch names. Tried on torch 2.11.0, 2.13.0 and 2.14.1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import _grouped_mm as grouped_mm
from torch._C import DisableTorchFunctionSubclass as disable_torch_function
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch._decomp import get_decompositions
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "BoxedCodeGen",
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "HashStore",
    "InputMutationAOTOutput",
    "LazyGraphModule",
    "OpOverload",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "PrefixStore",
    "Store",
    "TangentAOTInput",
    "TorchDispatchMode",
    "aot_export_joint_with_descriptors",
    "below_autograd",
    "compile_graph",
    "compiling",
    "default_store",
    "disable_torch_function",
    "dtensor_like",
    "fake_like",
    "flatten",
    "get_decompositions",
    "grouped_mm",
    "piece_of",
    "pipeline_action",
    "pipeline_order",
    "pipeline_runtime",
    "pipeline_stage",
    "pytree",
    "run_actions",
    "start_p2p",
    "storage_key",
    "strided_shard",
    "without_modes",
]


def fake_like(tensor: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor, or parameter, of the strides of ``tensor``. Made without dispatch, and a parameter marked as
    one as ``nn.Parameter`` marks a tensor subclass, but without its detach: a tenth of the time, for hundreds of them.
    """
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    fake: torch.Tensor = FakeTensor(mode, meta, torch.device("cpu"))
    if isinstance(tensor, torch.nn.Parameter):
        fake.requires_grad_(tensor.requires_grad)
        fake._is_param = True
    return fake


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true: model code then does not look at values (transformers' masks do)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def unvalidated() -> Iterator[None]:
    """Let distributions of ``torch.distributions`` not look at the values of their parameters."""
    from torch.distributions import Distribution

    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators go past autograd, as in its own kernels: a Python operator of ours takes half the time."""
    guard: contextlib.AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


def dtensor_like(piece: torch.Tensor, like: Any) -> Any:
    """A DTensor of the shape and layout of the DTensor ``like``, of this rank's ``piece``: what ``DTensor.from_local``
    gives, in a tenth of its time."""
    from torch.distributed.tensor import DTensor

    return DTensor(piece, like._spec, requires_grad=False)


def piece_of(tensor: Any) -> torch.Tensor:
    """This rank's piece of a DTensor itself; ``to_local`` gives a view of it, in ten times the time."""
    piece: torch.Tensor = tensor._local_tensor
    return piece


def strided_shard(dim: int, split_factor: int) -> Any:
    """DTensor's placement of an axis that splits ``dim`` inside ``split_factor`` pieces made by axes further right."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def compile_graph(module: Any, inputs: list[torch.Tensor], name: str) -> Any:
    """What Inductor makes of a graph of ATen operators for inputs like these; takes them and returns its outputs.

    Of the processes of a host one at a time compiles what is called ``name``; the others find it in Inductor's cache,
    which takes in only what is compiled under an environment of shapes, also where all are static.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._filelock import FileLock

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    with mode:  # real ones would be given symbols for sizes, whatever the mode says, and two of one tensor would be one
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
    with FileLock(f"{get_lock_dir()}/autopar-{name}.lock"), tracing(TracingContext(mode)):
        return compile_fx(module, fakes)


def default_store() -> Any:
    """The key-value store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def storage_key(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from all others that are alive, on any device."""
    return int(tensor.untyped_storage()._cdata)


def flatten(device_mesh: Any, name: str | None = None) -> Any:
    """Give a device mesh a process group over all its axes, which DTensor then uses for joint reductions; returns the
    mesh of that one axis, called ``name``."""
    return device_mesh._flatten(name)


def pipeline_stage() -> type[Any]:
    """The base class of stages of ``torch.distributed.pipelining``, which takes a sixth of a second to import."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    return _PipelineStageBase


def pipeline_runtime(stages: list[Any], micro_batches: int, orders: dict[int, list[Any]], act: Any) -> Any:
    """torch's runtime of schedules for ``stages`` of this rank and the ``orders`` of actions of all ranks;
    ``act(action, context)`` is called for every action that computes."""
    from torch.distributed.pipelining.schedules import _ComputationType, _PipelineScheduleRuntime

    runtime = _PipelineScheduleRuntime(stages, micro_batches, scale_grads=False, backward_requires_autograd=False)
    runtime._prepare_schedule_with_comms(orders)
    for kind in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"):
        runtime.register_custom_function(_ComputationType[kind], act)
    return runtime


def run_actions(runtime: Any, micro_batches: int) -> None:
    """Run a step of `pipeline_runtime`; its stages have their inputs already."""
    runtime._step_microbatches([()] * micro_batches, [{}] * micro_batches, return_outputs=False)


def start_p2p(operations: list[Any]) -> list[Any]:
    """Start sends or receives; returns what to wait for."""
    from torch.distributed.pipelining.schedules import _batch_p2p

    return _batch_p2p(operations)


def pipeline_action(stage: int, kind: str, micro_batch: int) -> Any:
    """An action of ``torch.distributed.pipelining``; ``kind`` as it is written there: F, B, I or W."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    return _Action(stage, _ComputationType(kind), micro_batch)


def pipeline_order(schedule: str, pp: int, stages: int, micro_batches: int) -> dict[int, list[Any]]:
    """The actions of every rank of one of torch's own schedules. Their constructors ask a stage only for its place,
    so no process group is needed; sends and receives, which take longer to write than all the rest, are left out."""
    from torch.distributed.pipelining import schedules

    kinds = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "interleaved-zb": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }
    places: list[Any] = [
        SimpleNamespace(group_size=pp, group_rank=0, num_stages=stages, submod=None) for _ in range(stages // pp)
    ]
    kind = type(schedule, (kinds[schedule],), {"_prepare_schedule_with_comms": lambda self, actions: None})
    return kind(places, micro_batches).pipeline_order
