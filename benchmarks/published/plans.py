"""Row -> workload and hints: the published configuration in this project's words, or why it has none."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass, replace

from autopar.hints import Hints
from autopar.schedule import SCHEDULES, SIMULATED_SCHEDULES
from autopar.workload import Workload
from published.families import Family
from published.models import Shape, after_layers, layers_of
from published.rows import Row

#: What all published runs train with.
OPTIMIZER = "adamw"

#: What sources call a schedule, beginning so -> ours. Without a pipeline a row's schedule does not matter.
_SCHEDULES = {
    "interleaved 1F1B": "interleaved",
    "1F1B": "1f1b",
    "ZB-1p": "interleaved-zb",
    "ZB-2p": "zb-2p",
    "ZBV": "zbv",
    "V-half": "v-half",
    "V-min": "v-min",
}
#: Micro-batches, in samples, that are tried where a source does not say.
TRIED = (1, 2, 4, 8)
#: Degrees that are tried where a source says neither tp nor pp.
TRIED_DEGREES = (1, 2, 4, 8)


class NotCovered(Exception):
    """A row that cannot be predicted; its text is the reason."""


@dataclass(frozen=True)
class Configuration:
    """Degrees and sizes of a row, with nothing left open. ``chunks`` are stages a rank of the pipeline, ``zero_group``
    ranks of dp x cp that state is split over, ``ep`` those that experts are spread over."""

    dp: int
    cp: int
    tp: int
    pp: int
    chunks: int
    micro_batch: int
    micro_batches: int
    zero: int
    zero_group: int
    recompute: str
    schedule: str | None
    ep: int = 1


def check_covered(row: Row) -> None:
    """NotCovered for what no prediction is made of."""
    if not row.is_16bit:
        raise NotCovered(f"products in {row.precision.partition('-')[0]}: autopar runs none in 8 bits")
    for name, value in (("seq_len", row.seq_len), ("global_batch", row.global_batch)):
        if value is None:
            raise NotCovered(f"the source does not say {name}")


def configurations(row: Row, family: Family) -> list[Configuration]:
    """The row's configuration; several if the source does not say the degrees, the micro-batch, or which blocks are
    made again. NotCovered if it fits no mesh."""
    if row.tp is None or row.pp is None:
        found: list[Configuration] = []
        for tp, pp in itertools.product(*((n,) if n else TRIED_DEGREES for n in (row.tp, row.pp))):
            with contextlib.suppress(NotCovered):
                found += configurations(replace(row, tp=tp, pp=pp), family)
        if not found:
            raise NotCovered("no tp and pp divide devices and batch")
        return found
    tp, pp, cp = row.tp or 1, row.pp or 1, row.cp or 1
    dp, rest = divmod(row.n_gpus, tp * pp * cp)
    if rest or not dp:
        raise NotCovered(f"tp {tp} x pp {pp} x cp {cp} does not divide {row.n_gpus} devices")
    sizes = TRIED if row.micro_batch is None else (row.micro_batch,)
    batch = row.global_batch or 1
    sizes = tuple(n for n in sizes if batch % (dp * n) == 0)
    if not sizes:
        raise NotCovered("micro-batches do not divide the batch")
    zero = family.zero if row.zero_stage is None else row.zero_stage
    group = row.zero_group_size or dp * cp
    return [
        Configuration(
            dp=dp,
            cp=cp,
            tp=tp,
            pp=pp,
            chunks=_chunks(row, pp),
            micro_batch=n,
            micro_batches=batch // (dp * n),
            zero=zero if dp * cp > 1 else 0,
            zero_group=min(group, dp * cp),
            recompute=recompute,
            schedule=_schedule(row, pp, batch // (dp * n)),
            ep=row.ep or 1,
        )
        for n in sizes
        for recompute in _recompute(row, family)
    ]


def _recompute(row: Row, family: Family) -> tuple[str, ...]:
    """The row's way to recompute. For a share of the blocks that is not said, what the source's two utilisations say:
    with all of the forward made again the hardware does 4/3 of the model's FLOPs; without them a half and all."""
    mode = row.recompute or family.recompute
    if mode == "selective":
        mode = family.selective
    half = f"full:{math.ceil(row.n_layers / 2)}"
    if mode == "some" and row.mfu and row.hfu:
        count = round(row.n_layers * 3 * (row.hfu / row.mfu - 1))
        return ("full" if count >= row.n_layers else f"full:{count}" if count > 0 else "none",)
    return {"half": (half,), "some": (half, "full")}.get(mode, (mode,))


def _chunks(row: Row, pp: int) -> int:
    """Stages a rank: those printed; of an interleaved or V-shaped schedule without them as many as there are layers."""
    schedule = row.schedule or ""
    if pp == 1:
        return 1
    if schedule.startswith(("ZBV", "V-")):
        return 2
    if not schedule.startswith("interleaved"):
        return row.vpp or 1
    return row.vpp or max(1, (row.n_layers + 2) // pp)


def _schedule(row: Row, pp: int, micro_batches: int) -> str | None:
    """Our name for the row's schedule. One forward and one backward in turn with fewer micro-batches than ranks is what
    GPipe does, whose bubble is the same."""
    if pp == 1:
        return None
    for start, name in _SCHEDULES.items():
        if (row.schedule or "1F1B").startswith(start):
            if name == "1f1b" and row.vpp not in (None, 1):
                return "interleaved"
            return "gpipe" if name == "1f1b" and micro_batches < pp else name
    raise NotCovered(f"the schedule {row.schedule} is not known")


def workload_of(row: Row, family: Family) -> Workload:
    """Mixed precision with an optimizer in float32."""
    return Workload(
        global_batch=row.global_batch,
        seq_len=row.seq_len,
        optimizer=OPTIMIZER,
        param_dtype="float16" if row.precision == "fp16" else "bfloat16",
        reduce_dtype=family.reduce,
    )


def hints_of(configuration: Configuration, family: Family, shape: Shape) -> Hints:
    """Everything the row decides. NotCovered for a schedule that there is not."""
    c = configuration
    if c.schedule is not None and c.schedule not in {**SCHEDULES, **SIMULATED_SCHEDULES}:
        raise NotCovered(f"the schedule {c.schedule} is not available")
    given: dict[str, object] = {"dp": c.dp, "tp": c.tp, "pp": c.pp, "micro_batch_size": c.micro_batch}
    given |= {"recompute": c.recompute, "zero": c.zero}
    if c.zero == 2 and family.zero_2 == "shard_grad_op":
        given |= {"zero": 3, "reshard_after_forward": False}
    if c.zero == 2 and family.zero_2 == "1":
        given["zero"] = 1
    if c.cp > 1:
        given["cp"] = c.cp
    if c.ep > 1:
        given["ep"] = c.ep
    group = divides(c.zero_group // c.cp, shape.hidden)
    if c.zero and 1 < group < c.dp:
        given["zero_group_size"] = group
    if c.schedule is not None:
        given |= {"schedule": c.schedule, "stages": stages(shape, c.pp * c.chunks)}
    return Hints(**given)  # type: ignore[arg-type]


def divides(group: int, size: int) -> int:
    """The largest divisor of ``group`` that divides ``size``. Frameworks cut flat buffers of parameters into any number
    of pieces, autopar cuts a dim: where a dim does not divide, state is split over fewer ranks."""
    return next(n for n in range(max(1, group), 0, -1) if group % n == 0 and size % n == 0)


def stages(shape: Shape, count: int) -> dict[str, int]:
    """Layers to stages as Megatron does: equally many each; if only that divides, embedding and head count as a layer
    each; else the first stages have one more."""
    layers, prefix = shape.layers, layers_of(shape)
    extra = 1 if layers % count and (layers + 2) % count == 0 else 0
    units = layers + 2 * extra
    size, more = divmod(units, count)
    if not size:
        raise NotCovered(f"{layers} layers cannot be cut into {count} stages")
    edges = [0]
    for stage in range(count):
        edges.append(edges[-1] + size + (1 if stage < more else 0))
    stage_of = [stage for stage in range(count) for _ in range(edges[stage], edges[stage + 1])]
    found = {f"{prefix}.{i}": stage_of[i + extra] for i in range(layers)}
    return found | dict.fromkeys(after_layers(shape), count - 1)
