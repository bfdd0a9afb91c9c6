"""Optimizers that need whole matrices: each parameter is owned by one rank, which runs the user's optimizer on it.

Most optimizers treat every element by itself and run on the pieces that a rank holds. Muon orthogonalises whole
matrices and Adafactor keeps means of rows and columns: on DTensors the first is inexact (tried, torch 2.13: a Llama's
weights are off by 1.4 % after three steps, in the 16-bit products of pieces), the second fails inside DTensor.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import OptimizerError
from autopar.runtime.failure import guarded
from autopar.runtime.versions import version

#: Classes (torch.optim's and transformers') that look at more than one element of a parameter at a time.
NEED_WHOLE = ("Adafactor", "Muon")


class WholeOptimizer(torch.optim.Optimizer):
    """An optimizer of whole parameters::

        matrices = [p for name, p in model.named_parameters() if p.ndim == 2]
        optimizer = autopar.WholeOptimizer(matrices, torch.optim.Muon, lr=1e-2)

    ``kind(params, **arguments)`` makes the user's optimizer; ``params`` are parameters of a parallel module, or groups
    of them, as optimizers take them. Every parameter is owned by one rank, so that all own about as many elements: in
    `step` its gradient is gathered, the owner updates the whole parameter as one process would, bit for bit, and every
    rank takes its piece of the result. The optimizer's state exists on the owner alone. Learning-rate schedulers and
    ``torch.amp.GradScaler`` work on it as on any other; every rank must call `step`. ``state`` and `state_dict` have
    whole tensors of what this rank owns and nothing of other parameters; `TrainingState` saves them by the names of
    parameters, and whoever owns one under another plan, on any number of ranks, loads it.

    Memory: the owner keeps whole copies of what it owns; one whole gradient at a time is there on every rank. Raises
    OptimizerError for parameters that are not those of a parallel module.
    """

    def __init__(self, params: Iterable[Any], kind: Callable[..., torch.optim.Optimizer], **arguments: Any) -> None:
        super().__init__(params, kind([nn.Parameter(torch.empty(1, 1))], **arguments).defaults)
        split = [p for group in self.param_groups for p in group["params"]]
        for p in split:
            if not isinstance(p, DTensor):
                raise OptimizerError(
                    "WholeOptimizer is for the parameters of a parallel module",
                    expected="parameters of what autopar.parallelize returned",
                    found=f"a {type(p).__name__} of shape {tuple(p.shape)}",
                    change="pass model.parameters(), or use the optimizer itself on a model in one process",
                )
        self._owners = dict(zip(split, _owners(split), strict=True))
        self._whole: dict[Tensor, nn.Parameter] = {}
        self._versions: dict[Tensor, tuple[int, ...]] = {}
        for p in split:
            self._gather(p)
        own = [{**group, "params": self._own(group["params"])} for group in self.param_groups]
        self._inner = kind(own, **arguments) if any(group["params"] for group in own) else None

    def _own(self, params: Iterable[Tensor]) -> list[nn.Parameter]:
        return [self._whole[p] for p in params if p in self._whole]

    def _gather(self, p: DTensor) -> None:
        """Take the owner's whole copy of a parameter from its pieces."""
        whole: Tensor = p.full_tensor().detach()
        if self._owners[p] == _coordinate(p.device_mesh):
            if p in self._whole:
                self._whole[p].data.copy_(whole)
            else:
                self._whole[p] = nn.Parameter(whole.clone())
        self._versions[p] = version(p)[:2]

    @guarded("WholeOptimizer.step")
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Every rank must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in trained:
            if self._versions[p] != version(p)[:2]:  # loaded, or changed by hand; its own steps do not count
                self._gather(p)
            gradient = p.grad.full_tensor()
            if p in self._whole:
                self._whole[p].grad = gradient
        if self._inner is not None:
            for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                inner.update({key: value for key, value in outer.items() if key != "params"})
            self._inner.step()
            self._inner.zero_grad()
        for p in trained:
            self._hand_out(p)
        self._show_state()
        return loss

    def _show_state(self) -> None:
        """Let the state of parameters be that of the whole ones. It is empty, but there, for those of other ranks: all
        ranks alike must see whether there has been a step."""
        for p in self._owners:
            inner = self._inner.state[self._whole[p]] if self._inner is not None and p in self._whole else {}
            self.state[p] = inner

    def _hand_out(self, p: DTensor) -> None:
        """Give every rank its piece of the owner's whole parameter."""
        whole = self._whole[p].detach() if p in self._whole else torch.empty(p.shape, dtype=p.dtype, device=p.device)
        _broadcast(whole, p.device_mesh, self._owners[p])
        replicated = DTensor.from_local(whole, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
        p.to_local().copy_(replicated.redistribute(placements=p.placements).to_local())
        self._versions[p] = version(p)[:2]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a `state_dict`, of which this rank reads the state of what it owns."""
        super().load_state_dict(dict(state_dict))
        if self._inner is not None:
            self._inner.state.update({whole: self.state[p] for p, whole in self._whole.items()})
        self._show_state()


def _owners(params: Iterable[DTensor]) -> list[tuple[int, ...]]:
    """The owner of every parameter, by its coordinates on the device mesh: the largest first, to whom has least."""
    listed = list(params)
    meshes = {p.device_mesh: None for p in listed}
    heaps = {m: [(0, where) for where in itertools.product(*map(range, m.shape))] for m in meshes}
    found: dict[int, tuple[int, ...]] = {}
    for i in sorted(range(len(listed)), key=lambda i: (-listed[i].numel(), i)):
        heap = heaps[listed[i].device_mesh]
        held, where = heapq.heappop(heap)
        found[i] = where
        heapq.heappush(heap, (held + listed[i].numel(), where))
    return [found[i] for i in range(len(listed))]


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    where = mesh.get_coordinate()
    assert where is not None
    return tuple(where)


def _broadcast(whole: Tensor, mesh: DeviceMesh, owner: tuple[int, ...]) -> None:
    """Send ``whole`` from its owner to all ranks of the mesh, in place: along the last axis, then the ones before."""
    where = _coordinate(mesh)
    for axis in reversed(range(mesh.ndim)):
        if where[:axis] == owner[:axis] and mesh.size(axis) > 1:
            dist.broadcast(whole, group=mesh.get_group(axis), group_src=owner[axis])


@functools.cache
def refuse_pieces() -> None:
    """From now on refuse, in every optimizer that needs whole matrices, parameters that are split over ranks."""
    register_optimizer_step_pre_hook(_refuse_pieces)


def _refuse_pieces(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not any(kind.__name__ in NEED_WHOLE for kind in type(optimizer).__mro__):
        return
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        name = type(optimizer).__name__
        raise OptimizerError(
            f"{name} on parameters that are split over ranks",
            expected="an optimizer that treats every element by itself, or whole parameters",
            found=f"{name}, which looks at rows, columns or whole matrices",
            change=f"make it autopar.WholeOptimizer(params, {name}, ...), where one rank owns each parameter",
        )
