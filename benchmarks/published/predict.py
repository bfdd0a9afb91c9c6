"""What autopar's planner says of a published configuration, with all of it pinned: seconds a step, bytes a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.solver.search import search
from autopar.specialize import capture_batch
from autopar.workload import Workload
from published.clusters import cluster_of
from published.families import Family, family_of
from published.models import Shape, batch, build, is_gated, shape_of
from published.plans import Configuration, NotCovered, check_covered, configurations, hints_of, workload_of
from published.rows import Row

#: Memory of a device while a row is predicted, in GiB: whether it fits is judged afterwards, by its peak.
UNBOUNDED_GIB = 1e6


@dataclass(frozen=True)
class Prediction:
    """What is said of a row: ``seconds`` of a step, ``breakdown`` in seconds by part, ``peak_gib`` of the fullest
    device and ``memory`` in GiB by kind, and the ``limit_gib`` of a device. ``reason`` says why there is none."""

    row: Row
    seconds: float | None = None
    breakdown: dict[str, float] | None = None
    peak_gib: float | None = None
    memory: dict[str, float] | None = None
    limit_gib: float | None = None
    reason: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the device is large enough."""
        if self.peak_gib is None or self.limit_gib is None:
            return None
        return self.peak_gib <= self.limit_gib


class Predictor:
    """Predicts rows one after the other. What the last row's model and batch gave is kept for the next."""

    def __init__(self, devices: dict[str, dict[str, Any]] | None = None) -> None:
        """``devices`` overrides keys of devices, by the name of the row's hardware."""
        self.devices = devices or {}
        self._known: tuple[object, nn.Module, Captured] | None = None

    def predict(self, row: Row) -> Prediction:
        """The prediction of one row; what cannot be predicted has its reason."""
        try:
            return self._predict(row)
        except NotCovered as error:
            return Prediction(row, reason=str(error))
        except AutoparError as error:
            return Prediction(row, reason=f"{type(error).__name__}: {error.what} (found: {error.found})")

    def _predict(self, row: Row) -> Prediction:
        check_covered(row)
        family = family_of(row)
        shape = shape_of(row, gated=is_gated(row), written_out=family.written_out, dropout=family.dropout)
        cluster = cluster_of(row, **self.devices.get(row.hardware, {}))
        if cluster is None:
            raise NotCovered(f"there is no description of the hardware {row.hardware}")
        limit = cluster.device.memory_bytes / 2**30
        found = [self._plan(row, family, shape, c, cluster) for c in configurations(row, family)]
        fitting = [plan for plan in found if plan.peak_memory / 2**30 <= limit] or found[:1]
        plan = min(fitting, key=lambda plan: plan.step_time)
        memory = {kind: nbytes / 2**30 for kind, nbytes in plan.peak.items()}
        return Prediction(row, plan.step_time, dict(plan.breakdown), sum(memory.values()), memory, limit)

    def _plan(self, row: Row, family: Family, shape: Shape, configuration: Configuration, cluster: Cluster) -> Plan:
        hints, workload = hints_of(configuration, family, shape), workload_of(row, family)
        table = cluster.to_dict()
        roomy = Cluster.from_dict({**table, "device": {**table["device"], "memory_gib": UNBOUNDED_GIB}})
        model, captured = self._captured(shape, workload)
        return search(model, captured, roomy, workload, hints, compiled=family.fused)

    def _captured(self, shape: Shape, workload: Workload) -> tuple[nn.Module, Captured]:
        key = (shape, workload)
        if self._known is None or self._known[0] != key:
            model = build(shape)
            assert workload.global_batch is not None and workload.seq_len is not None
            inputs = batch(workload.global_batch, workload.seq_len)
            self._known = (key, model, capture_batch(model, (), inputs, precision=workload.precision))
        return self._known[1:]


def predictions(rows: Iterable[Row], predictor: Predictor) -> Iterator[Prediction]:
    """A prediction of every row, those of one model and batch one after the other."""

    def order(row: Row) -> tuple[str, ...]:
        return tuple(str(value) for value in (row.source_family, row.model_name, row.n_layers, row.hidden, row.seq_len,
                                              row.global_batch, row.precision))  # fmt: skip

    for row in sorted(rows, key=order):
        yield predictor.predict(row)
