"""Runs an emitted graph for every rank in one process, node by node in lockstep.

Local operators run once a rank on that rank's tensors; collectives exchange between the ranks of a group. No process
group is needed, so a library call can simulate inside any program, on any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import TorchDispatchMode
from autopar.passes.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    KINDS,
    PERMUTE,
    REDUCE_SCATTER,
    WAIT,
    axis_of,
    group_argument,
)
from autopar.sharding.flops import count_flops
from autopar.sharding.layout import Mesh

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}


@dataclass
class Traffic:
    """What rank 0 did at run time: collectives by (kind, axis), their bytes (of the whole tensors), and FLOPs."""

    count: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    flops: int = 0


class _CountFlops(TorchDispatchMode):
    """Adds the FLOPs of every operator that runs, as plans count them."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.traffic.flops += count_flops(func, args, kwargs or {}, out)
        return out


def groups(mesh: Mesh, axis: str) -> list[list[int]]:
    """The ranks of every group of an axis, or of neighbouring ones taken together, in the axis' order."""
    stride, n = mesh.stride(axis), mesh.degree(axis)
    return [[first + i * stride for i in range(n)] for first in range(mesh.size) if first // stride % n == 0]


def _exchange(target: Any, args: Sequence[tuple[Any, ...]], pieces: list[Tensor]) -> list[Tensor]:
    """One collective in one group: the tensors of its ranks and their further arguments in, their results out."""
    n, op = len(pieces), args[0][0]
    if target is ALL_REDUCE:
        total = _REDUCTIONS[op](torch.stack(pieces))
        return [total.clone() for _ in pieces]
    if target is ALL_GATHER:
        whole = torch.cat(pieces)
        return [whole.clone() for _ in pieces]
    if target is REDUCE_SCATTER:
        return list(_REDUCTIONS[op](torch.stack(pieces)).chunk(n))
    if target is PERMUTE:
        to = list(args[0][1])
        return [pieces[to.index(rank)].clone() for rank in range(n)]
    if target is ALL_TO_ALL:
        parts = [piece.split(sent) for piece, (_, sent, *_) in zip(pieces, args, strict=True)]
        arrived = [[parts[source][rank] for source in range(n)] for rank in range(n)]
        assert all([a.shape[0] for a in by] == received for by, (received, *_) in zip(arrived, args, strict=True))
        return [torch.cat(by) for by in arrived]
    raise ValueError(f"{target} is not a collective that is simulated")


def _local(node: fx.Node, env: dict[fx.Node, Any], traffic: Traffic | None) -> Any:
    """One operator on one rank."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    target: Any = node.target
    if target is WAIT:
        return args[0]
    if traffic is None:
        return target(*args, **kwargs)
    with _CountFlops(traffic):
        return target(*args, **kwargs)


def whole_bytes(target: Any, piece: Tensor, n: int) -> int:
    """Bytes of the whole tensor of a collective, as cost_model.communication counts: X."""
    return piece.nbytes * (n if target in (ALL_GATHER, ALL_TO_ALL) else 1)


def run_ranks(
    module: fx.GraphModule, inputs: Sequence[Sequence[Any]], mesh: Mesh, traffic: Traffic | None = None
) -> list[list[Tensor]]:
    """Run ``module`` with ``inputs[rank]`` on every rank of ``mesh``; returns the outputs of every rank."""
    ranks = range(mesh.size)
    env: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    last: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        for arg in node.all_input_nodes:
            last[arg] = node
    given = [iter(values) for values in inputs]
    for node in module.graph.nodes:
        if node.op == "placeholder":
            for r in ranks:
                env[r][node] = next(given[r])
        elif node.op == "output":
            return [[env[r][n] for n in node.args[0]] for r in ranks]
        elif node.target in KINDS:
            axis = axis_of(group_argument(node))
            for members in groups(mesh, axis):
                pieces = [env[r][node.args[0]] for r in members]
                if traffic is not None and 0 in members:
                    key = (KINDS[node.target], axis)
                    traffic.count[key] += 1
                    traffic.bytes[key] += whole_bytes(node.target, pieces[0], len(members))
                args = [fx.node.map_arg(node.args[1:], env[r].__getitem__) for r in members]
                for r, result in zip(members, _exchange(node.target, args, pieces), strict=True):
                    env[r][node] = result
        else:
            for r in ranks:
                env[r][node] = _local(node, env[r], traffic if r == 0 else None)
        for arg in node.all_input_nodes:
            if last[arg] is node:
                for r in ranks:
                    del env[r][arg]
    raise ValueError("the graph has no output")
