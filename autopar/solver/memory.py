"""Bytes a device that an assignment keeps between the operators that make and read them, by kind."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.sharding.assignment import Assignment, zero_ranks
from autopar.sharding.operators import Value
from autopar.sharding.recompute import Kept
from autopar.sharding.zero import Keeping
from autopar.solver.costs import state_bytes
from autopar.solver.setting import Setting


def cached_bytes(setting: Setting, assignment: Assignment) -> int:
    """Bytes a device of the keys and values that a generation of the whole batch keeps."""
    specs = ((node, setting.operators.specs[Value(node)]) for node in setting.captured.caches)
    return sum(assignment.sources[node].local_bytes(assignment.mesh, spec) for node, spec in specs)


def memory_of(
    setting: Setting, assignment: Assignment, held: Kept, keep: Mapping[str, Keeping], micro_batches: int
) -> dict[str, int]:
    """Bytes a device by kind; ``copies`` are those of parameters that live longer than one use, ``cache`` the keys and
    values that a generation keeps."""
    optimizer = setting.optimizer
    totals: dict[str, float] = {"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0}
    copies = 0
    for p in setting.captured.parameters:
        local = assignment.sources[p.placeholder].local_numel(assignment.mesh, p.spec.shape)
        for kind, nbytes in state_bytes(local, p.storage_dtype, optimizer, p.gradient is not None).items():
            totals[kind] += nbytes
        ranks = zero_ranks(setting.operators, assignment, p.placeholder)
        if keep[p.name].copy != "use":
            copies += local * ranks * p.spec.dtype.itemsize
        if keep[p.name].gradient == "step" and micro_batches > 1 and p.gradient is not None and optimizer != "none":
            totals["gradients"] += local * (ranks - 1) * p.gradient.meta["val"].dtype.itemsize
    if setting.captured.caches:
        totals["cache"] = cached_bytes(setting, assignment)
    if copies:
        totals["copies"] = copies
    operators = setting.operators
    for value, layout in held.saved:
        parts = micro_batches if operators.batch_dims[value] else 1
        totals["activations"] += layout.local_bytes(assignment.mesh, operators.specs[value]) / parts
    return {kind: int(nbytes) for kind, nbytes in totals.items()}
