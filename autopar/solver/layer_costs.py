"""What every kind of layer costs in a step: its FLOPs, its kernels' seconds and the collectives that it waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from autopar.capture.blocks import pattern
from autopar.plan import LayerCosts
from autopar.report.names import layer_of
from autopar.sharding.operators import Operator
from autopar.sharding.rules.attention import ATTENTION
from autopar.solver.collectives import Issue, totals
from autopar.solver.staged import Stages

#: Of the five products that the backward of a fused attention does, one makes its scores again (Dao et al., 2022).
AGAIN = 1 / 5


def flops_by_dtype(operators: Iterable[Operator]) -> dict[str, float]:
    """The FLOPs of the model in one step of the global batch by the dtype that they are done in ("bfloat16"), forward
    and backward, without what is made again, by the kernels of attention too; 2 a multiply-add, attention counted whole
    where it is causal."""
    found: dict[str, float] = defaultdict(float)
    for op in operators:
        if op.flops:
            floating = (spec.dtype for spec in op.call.operands if spec.dtype.is_floating_point)
            dtype = next(floating, op.call.results[0].dtype)
            found[str(dtype).removeprefix("torch.")] += _flops(op)
    return dict(found)


def _flops(op: Operator) -> float:
    """The FLOPs of an operator that the model asks for."""
    return op.flops * (1 - AGAIN) if op.backward and op.call.target in ATTENTION else op.flops


def layer_costs(stages: Stages) -> tuple[LayerCosts, ...]:
    """The costs of all layers in the order of the graph. A layer is named as `describe_layers` does; parameters
    and gradients move in buckets, which count for the block as a whole that needs them."""
    modules: dict[str, dict[str, None]] = defaultdict(dict)
    flops: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for stage in stages.work:
        for op in stage.operators:
            name = _layer(op.node, modules)
            flops[name] += _flops(op)
            seconds[name] += stages.once[op.node] * _times(op, stages)
        for op in stage.again:
            seconds[_layer(op.node, modules)] += stages.once[op.node] * _times(op, stages)
    issues: dict[str, list[Issue]] = defaultdict(list)
    for issue in (issue for stage in stages.work for issue in stage.issues):
        issues[_of_issue(issue, modules)].append(issue)
    elements: dict[str, int] = defaultdict(int)
    for p in stages.setting.captured.parameters:
        elements[pattern(layer_of(p.name.rpartition(".")[0]))] += p.spec.numel
    names = dict.fromkeys((*modules, *issues, *elements))
    return tuple(
        LayerCosts(
            name,
            len(modules[name]) or 1,
            elements[name],
            flops[name],
            seconds[name],
            totals(issues[name], stages.prices),
        )
        for name in names
        if seconds[name] or issues[name] or elements[name]
    )


def _of_issue(issue: Issue, modules: dict[str, dict[str, None]]) -> str:
    """The kind of layer that a collective counts for."""
    node = issue.ready if issue.reader is None else issue.reader
    if node is None:
        return layer_of("")
    block = issue.block or node.meta.get("block")
    if issue.purpose == "activations" or block is None:
        return _layer(node, modules)
    modules[pattern(block)][block] = None
    return pattern(block)


def _layer(node: fx.Node, modules: dict[str, dict[str, None]]) -> str:
    """The kind of layer that a node belongs to; its own layer is noted among the ``modules`` of that kind."""
    layer = layer_of(node.meta.get("module") or "")
    modules[pattern(layer)][layer] = None
    return pattern(layer)


def _times(op: Operator, stages: Stages) -> int:
    """How often an operator runs in a step."""
    return stages.micro_batches if stages.operators.batch_factors[op.node] else 1
