"""A pipeline stage as ``torch.distributed.pipelining`` sees one: it sends and receives, and its graphs run as the
actions of torch's schedule runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar._compat import pipeline_runtime, pipeline_stage, run_actions
from autopar.passes.pipeline import Stage
from autopar.runtime.stages import StageRun
from autopar.sharding.layout import TensorSpec


class Channel(pipeline_stage()):  # type: ignore[misc]
    """The ends of one stage's connections to the stages before and after it, and during a step its ``run``.

    ``specs`` are those of everything that it receives, ``ranks`` the place on the pp axis of every stage.
    """

    def __init__(
        self,
        index: int,
        stage: Stage,
        specs: Mapping[str, TensorSpec],
        ranks: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(nn.Module(), index, len(ranks), device, group)
        self.stage, self.specs, self.ranks = stage, specs, ranks
        self.args_recv_info: dict[int, tuple[()]] = {0: ()}
        self.act_send_info: dict[int, Any] = {}
        self.run: StageRun
        self.received: dict[tuple[str, int], dict[str, Tensor]] = {}

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: shapes are known."""

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: shapes are known."""

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[()]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the step's end reduces gradients."""

    def get_fwd_recv_ops(self, micro_batch: int) -> list[dist.P2POp]:
        """Receives of what the stage before sends."""
        return self.receive("F", micro_batch, self.stage.receives, self.stage_index - 1)

    def get_bwd_recv_ops(self, micro_batch: int) -> list[dist.P2POp]:
        """Receives of what the stage after sends back, with the last gradients also results."""
        results = self.stage.receives_last if micro_batch == self.run.last else ()
        return self.receive("B", micro_batch, (*self.stage.receives_back, *results), self.stage_index + 1)

    def get_fwd_send_ops(self, micro_batch: int) -> list[dist.P2POp]:
        """Sends to the stage after."""
        return self.send("F", micro_batch, self.stage_index + 1)

    def get_bwd_send_ops(self, micro_batch: int) -> list[dist.P2POp]:
        """Sends to the stage before."""
        return self.send("B", micro_batch, self.stage_index - 1)

    def receive(self, way: str, micro_batch: int, names: Sequence[str], source: int) -> list[dist.P2POp]:
        """Receives of ``names`` from stage ``source``; ``way`` is F (up) or B (down)."""
        buffers = {n: torch.empty(self.specs[n].shape, dtype=self.specs[n].dtype, device=self.device) for n in names}
        self.received[way, micro_batch] = buffers
        peer = dist.get_global_rank(self.group, self.ranks[source])
        return [dist.P2POp(dist.irecv, buffer, peer, self.group) for buffer in buffers.values()]

    def send(self, way: str, micro_batch: int, target: int) -> list[dist.P2POp]:
        """Sends of what the stage has for ``target``."""
        peer = dist.get_global_rank(self.group, self.ranks[target])
        handed_on = self.run.hand_on(way, micro_batch)
        return [dist.P2POp(dist.isend, value.contiguous(), peer, self.group) for value in handed_on.values()]


def scheduled(channels: Sequence[Channel], orders: dict[int, list[Any]], micro_batches: int) -> Callable[[], None]:
    """What runs a step's actions of this rank's stages, each `Channel.run` set before; ``orders`` are those of every
    rank of the pp axis."""
    here = {channel.stage_index: channel for channel in channels}

    def act(action: Any, context: Any) -> None:
        for part in action.sub_actions or (action,):
            kind, micro_batch = part.computation_type.value, part.microbatch_index
            _act(context.schedule_ref, here, part.stage_index, kind, micro_batch)

    return functools.partial(run_actions, pipeline_runtime(list(channels), micro_batches, orders, act), micro_batches)


def _act(runtime: Any, here: Mapping[int, Channel], index: int, kind: str, micro_batch: int) -> None:
    """One action: take over what has arrived, run, hand on to a neighbour on the same rank."""
    channel, run = here[index], here[index].run
    way = "F" if kind == "F" else "B"
    waiting = runtime.fwd_recv_ops if kind == "F" else runtime.bwd_recv_ops
    for work in waiting.pop((index, micro_batch), []) if kind != "W" else []:
        work.wait()
    run.values[micro_batch].update(channel.received.pop((way, micro_batch), {}))
    run.act(kind, micro_batch)
    neighbour = here.get(index + (1 if kind == "F" else -1))
    if neighbour is not None and kind != "W":
        neighbour.run.values[micro_batch].update(run.hand_on(way, micro_batch))
