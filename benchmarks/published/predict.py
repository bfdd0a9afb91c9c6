"""What autopar's planner says of a published configuration, with all of it pinned: seconds a step, bytes a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.cost_model.hardware import attention_tables
from autopar.errors import AutoparError
from autopar.sharding.operators import Operators
from autopar.solver.spmd import read
from autopar.specialize import capture_batch
from autopar.workload import Workload
from published.clusters import cluster_of
from published.experts import Spread
from published.families import Family, family_of
from published.models import Shape, batch, build, is_gated, shape_of
from published.plans import Configuration, NotCovered, check_covered, configurations, hints_of, workload_of
from published.price import Priced, Running, price_configuration
from published.rows import Row

#: Where the source does not say what is recomputed and what is assumed needs so many times the memory of a device, it
#: cannot have run: then everything is recomputed.
IMPOSSIBLE = 1.5


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
        self._known: tuple[object, Captured, Operators] | None = None

    def predict(self, row: Row) -> Prediction:
        """The prediction of one row; what cannot be predicted has its reason."""
        try:
            return self._predict(row)
        except NotCovered as error:
            return Prediction(row, reason=str(error))
        except AutoparError as error:
            return Prediction(row, reason=f"{type(error).__name__}: {error.what} (found: {error.found})")
        except Exception as error:  # one row's failure must not hide the others: it is counted as what it is
            return Prediction(row, reason=f"internal failure, {type(error).__name__}: {error}")

    def _predict(self, row: Row) -> Prediction:
        family, row = family_of(row), completed(row)
        check_covered(row)
        shape = shape_of(row, gated=is_gated(row), written_out=family.written_out, dropout=family.dropout)
        cluster = cluster_of(row, **self.devices.get(row.hardware, {}))
        if cluster is None:
            raise NotCovered(f"there is no description of the hardware {row.hardware}")
        limit = cluster.device.memory_bytes / 2**30
        device, choices = with_kernels(cluster, family), configurations(row, family)
        found = [self._price(row, family, shape, c, device) for c in choices]
        if row.recompute is None and min(map(_gib, found)) > IMPOSSIBLE * limit:
            found = [self._price(row, family, shape, replace(c, recompute="full"), device) for c in choices]
        fitting = [p for p in found if _gib(p) <= limit] or found[:1]
        best = min(fitting, key=lambda p: p.seconds)
        memory = {kind: nbytes / 2**30 for kind, nbytes in best.memory.items()}
        counted = sum(n for kind, n in memory.items() if kind not in family.not_counted)
        return Prediction(row, best.seconds, best.breakdown, counted, memory, limit)

    def _price(self, row: Row, family: Family, shape: Shape, c: Configuration, cluster: Cluster) -> Priced:
        hints, workload = hints_of(c, family, shape), workload_of(row, family)
        captured, operators = self._captured(shape, workload)
        running, spread = running_of(row, family), spread_of(row, family, shape)
        return price_configuration(captured, operators, cluster, c, hints, running, spread)

    def _captured(self, shape: Shape, workload: Workload) -> tuple[Captured, Operators]:
        key = (shape, workload)
        if self._known is None or self._known[0] != key:
            assert workload.global_batch is not None and workload.seq_len is not None
            inputs = batch(workload.global_batch, workload.seq_len)
            captured = capture_batch(build(shape), (), inputs, precision=workload.precision)
            self._known = (key, captured, read(captured))
        return self._known[1:]


def completed(row: Row) -> Row:
    """The row with its family's batch and length of sequences, where the source says none."""
    family = family_of(row)
    return replace(row, global_batch=row.global_batch or family.global_batch, seq_len=row.seq_len or family.seq_len)


def _gib(p: Priced) -> float:
    return sum(p.memory.values()) / 2**30


def running_of(row: Row, family: Family) -> Running:
    """What the row's framework does; the row itself wins where it says so."""
    says, words = row.async_tp_overlap or "", ("tp_comm_overlap on", "tp-comm-overlap", "async TP", "TP/PP/DP overlap")
    overlapped, everything = any(word in says for word in words), "TP/PP/DP overlap" in says
    tp_overlap = overlapped if "tp_comm_overlap" in says or overlapped else family.tp_overlap
    whole = family.sequence_parallel if row.sequence_parallel is None else row.sequence_parallel == "y"
    return Running(
        compiled=family.fused,
        sequence_parallel=whole,
        gathered_again=family.gathered_again,
        tp_overlap=tp_overlap,
        cp_overlap=family.cp_overlap,
        dp_overlap=family.dp_overlap or everything,
        prefetch=family.prefetch,
        p2p="overlapped" if everything else family.p2p,
        whole_gradients=family.whole_gradients,
        owners=family.owners,
        fused_accumulation=family.fused_accumulation,
        fused_optimizer=family.fused_optimizer,
        fused_loss=family.fused_loss,
    )


def spread_of(row: Row, family: Family, shape: Shape) -> Spread | None:
    """How the row's experts are spread and exchanged; None without experts."""
    if shape.mixture is None:
        return None
    words = f"{row.async_tp_overlap} {row.notes}"
    return Spread(
        ep=row.ep or 1,
        etp=row.etp or 1,
        top_k=shape.mixture.top_k,
        once="DeepEP" in words,
        overlapped="a2a overlap" in words,
        apart=family.experts_apart,
    )


def with_kernels(cluster: Cluster, family: Family) -> Cluster:
    """The cluster with the attention kernels of the family's framework, and its own constants of the device."""
    table = cluster.to_dict()
    device = {**table["device"], **family.device}
    name = family.attention_kernels.get(device["attention_kernel"], device["attention_kernel"])
    levels = attention_tables()[name]
    scaled = {
        direction: {dim: level * family.attention_level for dim, level in levels[direction].items()}
        for direction in ("forward", "backward")
    }
    device |= {"attention_kernel": name, "attention": {**levels, **scaled}}
    return Cluster.from_dict({**table, "device": device})


def predictions(rows: Iterable[Row], predictor: Predictor) -> Iterator[Prediction]:
    """A prediction of every row, those of one model and batch one after the other."""

    def order(row: Row) -> tuple[str, ...]:
        return tuple(str(value) for value in (row.source_family, row.model_name, row.n_layers, row.hidden, row.seq_len,
                                              row.global_batch, row.precision))  # fmt: skip

    for row in sorted(rows, key=order):
        yield predictor.predict(row)
