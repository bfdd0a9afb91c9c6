"""Mixtures of experts as Megatron runs them, where the planner would choose for itself.

The planner's own program spreads the experts over as many ranks as the row says: over those of tp, cp and dp, in this
order, which is how ranks follow one another (Megatron's parallel folding). Only what is exchanged differs:

* rows go to the ranks of their experts and back in every layer, forward and backward, by one all-to-all over all of
  these ranks; nothing hides it, unless one micro-batch computes beside it; on arrival they are sorted, in one pass;
* DeepEP sends a token once to every host that has one of its experts;
* Transformer Engine's GroupedLinear multiplies every expert's rows by a product of its own (on Hopper, cuBLAS on a few
  streams), so that the tiles of one do not fill the last round of another's. Those that add up the gradients of weights
  have few rounds and as short contractions as an expert has rows: the sums are read and written when tiles end, all at
  about the same time, when no tensor core works.

Routing is even: published runs force it to be, or say that they do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.cluster import Cluster
from autopar.cost_model.communication import collective_seconds
from autopar.cost_model.compute import Work, stream_seconds
from autopar.cost_model.simulate import COMPUTE, Task
from autopar.cost_model.step import Program, Repeated, Timing
from autopar.sharding.assignment import result_layouts
from autopar.sharding.axes import EXPERT_AXES, ExpertRanks
from autopar.sharding.operators import Operators, Value
from autopar.solver.actions import StageWork
from autopar.solver.space import Space
from autopar.solver.staged import Stages, priced_once
from published.plans import Configuration

#: The stream of the exchange.
EXCHANGE = "ep"

_DISPATCH, _COMBINE = torch.ops.autopar.dispatch.default, torch.ops.autopar.combine.default
#: Products with experts, and those of them that make gradients of weights.
_SUMMED = frozenset({torch.ops.autopar.grouped_outer.default, torch.ops.autopar.gated_outer.default})
_PRODUCTS = frozenset(
    {
        torch.ops.autopar.grouped_mm.default,
        torch.ops.autopar.gated_mm.default,
        torch.ops.autopar.gated_mm_backward.default,
        *_SUMMED,
    }
)
#: What rows begin and end with, and what is in between and reads the router's choice.
_OF_ROWS = frozenset(
    {
        _DISPATCH,
        _COMBINE,
        torch.ops.autopar.combine_weights_backward.default,
        torch.ops.autopar.grouped_bias.default,
        torch.ops.autopar.grouped_sum.default,
        *_PRODUCTS,
    }
)


@dataclass(frozen=True)
class Spread:
    """Experts over ``ep`` ranks, each expert's width over ``etp``, ``top_k`` of them a token; ``once`` if a token goes
    once to every host (DeepEP); ``overlapped`` if the exchange of a micro-batch is beside the compute of another;
    ``apart`` if every expert has products of its own."""

    ep: int
    etp: int
    top_k: int
    once: bool
    overlapped: bool
    apart: bool

    def ranks(self, c: Configuration) -> ExpertRanks:
        """Over how many ranks of dp, and of which part of cp, experts are spread: tp's first, unless it has a part of
        each, then the innermost of cp, then of dp."""
        left = self.ep // (math.gcd(self.ep, c.tp) if self.etp == 1 else 1)
        of_cp = math.gcd(left, c.cp)
        return ExpertRanks(math.gcd(left // of_cp, c.dp), of_cp if of_cp < c.cp else 1)


@dataclass(frozen=True)
class Exchange:
    """Seconds of one way of one layer's rows in a micro-batch, and of sorting them on arrival."""

    travel: float
    sort: float


def keep_tokens_apart(space: Space, operators: Operators) -> None:
    """Forbid what gathers the tokens of ranks that share experts over an axis of their own: rows are exchanged."""
    places = [i for i, axis in enumerate(space.mesh.names) if axis in EXPERT_AXES]
    for node, (decision, strategies) in space.of_node.items():
        if operators.by_node[node].call.target in _OF_ROWS.difference(_PRODUCTS):
            gathers = [k for k, s in enumerate(strategies) if any(s[at].factor != "c" for at in places)]
            allowed = space.decisions[decision].allowed
            if allowed.sum() > allowed[gathers].sum():
                allowed[gathers] = False


def without_exchange(work: StageWork, operators: Operators) -> StageWork:
    """A stage's work without the collectives by which rows would be exchanged."""

    def of_rows(reader: fx.Node | None) -> bool:
        return reader is not None and operators.by_node[reader].call.target in _OF_ROWS

    return replace(work, issues=[i for i in work.issues if i.purpose != "activations" or not of_rows(i.reader)])


def product_seconds(stages: Stages, summed: int = 0) -> dict[fx.Node, float]:
    """Seconds of the products with experts, every expert's one by one; those that make gradients add them to sums of so
    many bytes an element."""
    own = [op for op in stages.operators if op.call.target in _PRODUCTS]
    work, places = priced_once(own, stages.operators, stages.assignment, stages.micro_batches)
    seconds = stages.prices.work_seconds([_of_one(w) for w in work]) / [w.times for w in work]
    found = {op.node: float(seconds[i]) for op, i in zip(own, places, strict=True)}
    device, mesh = stages.setting.cluster.device, stages.assignment.mesh
    layouts = result_layouts(stages.operators, stages.assignment)
    for op in own:
        if op.call.target in _SUMMED:
            spec = op.call.results[0]
            elements = layouts[Value(op.node)].local_bytes(mesh, spec) / spec.dtype.itemsize
            found[op.node] += stream_seconds(2 * summed * elements, device, kernels=0)
    return found


def _of_one(work: Work) -> Work:
    """The products of a batch one after the other."""
    count = max(1, round(work.batch))
    return replace(
        work, flops=work.flops / count, bytes=work.bytes / count, batch=work.batch / count, times=work.times * count
    )


def exchange_of(stages: Stages, spread: Spread, cluster: Cluster) -> Exchange:
    """The exchange of one layer. The rows of a rank are those of its tokens."""
    rows = next(op for op in stages.operators if op.call.target is _DISPATCH).call.results[0]
    nbytes = math.prod(rows.shape) * rows.dtype.itemsize / (stages.assignment.mesh.size * stages.micro_batches)
    group = cluster.group(spread.etp, spread.ep)
    sent = nbytes
    if spread.once and group.hosts > 1:  # of so many hosts, how many have one of the experts of a token, on average
        sent *= group.hosts * (1 - (1 - 1 / group.hosts) ** spread.top_k) / spread.top_k
    travel = float(collective_seconds("all_to_all", sent * group.size, group, cluster.device))
    return Exchange(travel, stream_seconds(2 * nbytes, cluster.device))


def with_exchange(timing: Timing, stages: Stages, exchange: Exchange, overlapped: bool) -> Timing:
    """The timing with the exchange at the end of every forward and backward, or ``overlapped`` beside it: two ways a
    layer, and two more in the backward for layers whose products are made again."""
    operators = stages.operators
    held = [operators.by_node[node] for node in stages.held.operators]
    again = {op.block for op in held if op.call.target in _PRODUCTS}
    layers, repeated = [0] * stages.count, [0] * stages.count
    for op in operators:
        if op.call.target is _DISPATCH and not op.backward:
            layers[stages.stage(op.node)] += 1
            repeated[stages.stage(op.node)] += op.block in again
    programs, actions = list(timing.programs), dict(timing.actions)
    for kind in (kind for kind in ("F", "B", "I") if kind in actions):
        places = []
        for stage, place in enumerate(actions[kind]):
            ways = 2 * (layers[stage] + (0 if kind == "F" else repeated[stage]))
            programs.append(_exchanged(programs[place], exchange, ways, overlapped))
            places.append(len(programs) - 1)
        actions[kind] = tuple(places)
    return replace(timing, programs=tuple(programs), actions=actions)


def _exchanged(program: Program, exchange: Exchange, ways: int, overlapped: bool) -> Program:
    if not ways:
        return program
    sort = Task(COMPUTE, exchange.sort * ways, after=(1,), name="exchange")
    travel = Task(EXCHANGE, exchange.travel * ways, after=() if overlapped else (1,))
    if overlapped:
        return (Repeated(1, (travel,)), *program, Repeated(1, (sort,)))
    return (*program, Repeated(1, (sort, travel)))
