"""What assignments are made and priced for."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.capture.graph import Captured, Parameter
from autopar.cluster import Cluster
from autopar.sharding.assignment import Assignment, zero_axes
from autopar.sharding.operators import Operators
from autopar.sharding.zero import Keeping, Zero


@dataclass(frozen=True)
class Setting:
    """What assignments are made and priced for: a captured graph on a cluster, the optimizer whose state is kept, what
    is made again in the backward (`sharding.recompute`), how long copies of sharded parameters live, whether Inductor
    compiles the emitted graphs, and whether the first backward needs the forwards of all micro-batches."""

    captured: Captured
    operators: Operators
    cluster: Cluster
    optimizer: str
    recompute: str = "none"
    zero: Zero = Zero()  # noqa: RUF009  frozen
    compiled: bool = False
    forwards_first: bool = False


def is_sharded(p: Parameter, operators: Operators, assignment: Assignment) -> bool:
    """Whether a parameter rests sharded by ZeRO."""
    return bool(zero_axes(operators, assignment, p.placeholder))


def keepings(setting: Setting, assignment: Assignment) -> dict[str, Keeping]:
    """How long copies of every parameter live and how often its gradient is reduced, by name."""
    return {
        p.name: setting.zero.keeping(is_sharded(p, setting.operators, assignment), p.master is not None)
        for p in setting.captured.parameters
    }
