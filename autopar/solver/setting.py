"""What assignments are made and priced for."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.capture.graph import Captured, Parameter
from autopar.cluster import Cluster
from autopar.sharding.assignment import Assignment
from autopar.sharding.operators import Operators
from autopar.sharding.zero import Keeping, Zero
from autopar.solver.space import DATA_AXIS


@dataclass(frozen=True)
class Setting:
    """What assignments are made and priced for: a captured graph on a cluster, the optimizer whose state is kept, what
    is made again in the backward (`sharding.recompute`), and how long copies of sharded parameters live."""

    captured: Captured
    operators: Operators
    cluster: Cluster
    optimizer: str
    recompute: str = "none"
    zero: Zero = Zero()  # noqa: RUF009  frozen


def is_sharded(p: Parameter, assignment: Assignment) -> bool:
    """Whether a parameter rests sharded over the data axis."""
    return DATA_AXIS in assignment.sources[p.placeholder].split_axes


def keepings(captured: Captured, assignment: Assignment, zero: Zero) -> dict[str, Keeping]:
    """How long copies of every parameter live and how often its gradient is reduced, by name."""
    return {p.name: zero.keeping(is_sharded(p, assignment), p.master is not None) for p in captured.parameters}
