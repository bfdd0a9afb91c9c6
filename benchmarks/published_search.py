"""Sets the planner free on published models and clusters, and says by what its plans are faster than those published.

    python benchmarks/published_search.py --runs benchmarks/data/published_runs.csv --sample 16 --each found.jsonl
    python benchmarks/published_search.py --runs FILE.csv --rows korthikanti-2a dgxc-124 --json

Of every row the model, the cluster and the batch are given, and nothing else; the published plan is the same call with
its hints, in as much memory as it needs, so that both times are the planner's. Where the planner is faster by more than
15 %, every mechanism by which its plan differs must be one that some published run has; the table names the families
that do. A sample is of the fastest configurations of models, clusters and batches, families in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from published.clusters import cluster_of
from published.families import family_of
from published.models import batch, build, is_gated, shape_of
from published.plans import NotCovered, check_covered, configurations, hints_of, workload_of
from published.predict import completed, with_kernels
from published.rows import Row, read_rows
from published_runs import TARGET_HARDWARE

import autopar
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.hints import Hints

#: How much faster than the published plan a plan has to be explained.
FASTER = 1.15
#: Memory of the device on which a published plan is priced, in GiB: that it ran is known.
AMPLE = 4096

#: What a plan is told by: degrees, ZeRO's stage, what is recomputed, the schedule, and samples of a micro-batch.
Traits = dict[str, object]


@dataclass(frozen=True)
class Compared:
    """One row: seconds a step of the plan that was found and of the published one, both as the planner has them, the
    traits of both, and for every ``mechanism`` by which they differ the families that have it. ``reason`` says why
    there is nothing to compare."""

    run_id: str
    published: float | None
    pinned: float | None = None
    found: float | None = None
    published_traits: Traits | None = None
    found_traits: Traits | None = None
    mechanisms: dict[str, list[str]] | None = None
    reason: str | None = None

    @property
    def ratio(self) -> float:
        """How many times as fast as the published plan the one that was found is."""
        return (self.pinned or 0.0) / self.found if self.found else 0.0


def traits_of_row(row: Row) -> Traits:
    """The traits of a published run that its source says, or that its family stands for."""
    family = family_of(row)
    stage = family.zero if row.zero_stage is None else row.zero_stage
    schedule = None if row.pp in (None, 1) else "interleaved" if (row.vpp or 1) > 1 else row.schedule or "1F1B"
    return {
        "tp": row.tp,
        "pp": row.pp,
        "cp": row.cp or 1,
        "zero": stage,
        "hybrid zero": bool(row.zero_group_size and row.tp and row.pp
                            and row.zero_group_size < row.n_gpus // (row.tp * row.pp)),
        "recompute": row.recompute or family.recompute,
        "schedule": schedule if schedule is None else _schedule(schedule),
        "micro-batch": row.micro_batch,
    }  # fmt: skip


def _schedule(name: str) -> str:
    """Schedules that differ in what they do, by one name each."""
    known = {"interleaved": "interleaved", "ZB": "zero bubble", "zb": "zero bubble", "V-": "zero bubble"}
    return next((ours for start, ours in known.items() if name.startswith(start) or f"-{start}" in name), "1f1b")


def traits_of_plan(plan: autopar.Plan) -> Traits:
    """The traits of a plan, under the same names. Blocks that are made again in part count as made again in full."""
    degrees = plan.degrees
    return {
        "tp": degrees["tp"],
        "pp": degrees["pp"],
        "cp": degrees["cp"],
        "zero": plan.zero,
        "hybrid zero": plan.zero_group_size is not None and plan.zero_group_size < degrees["dp"],
        "recompute": "full" if plan.recompute.startswith("full") else plan.recompute,
        "schedule": None if degrees["pp"] == 1 else _schedule(plan.schedule or "1f1b"),
        "micro-batch": plan.micro_batch_size,
    }


def mechanisms(found: Traits, published: Traits, rows: Sequence[Row]) -> dict[str, list[str]]:
    """What a plan does otherwise than the published one, and which families of ``rows`` do so."""
    every = [(row.source_family, traits_of_row(row)) for row in rows if row.status == "ok"]
    return {
        f"{name} = {value}": sorted({family for family, traits in every if traits[name] == value})
        for name, value in found.items()
        if value != published[name]
    }


def compare(row: Row, rows: Sequence[Row], seconds: float | None) -> Compared:
    """Plan one row freely, in at most ``seconds`` of solving, and as published."""
    row, family = completed(row), family_of(row)
    try:
        check_covered(row)
        shape = shape_of(row, gated=is_gated(row), written_out=family.written_out, dropout=family.dropout)
        cluster = cluster_of(row)
        if cluster is None:
            raise NotCovered(f"there is no description of the hardware {row.hardware}")
        cluster, workload = with_kernels(cluster, family), workload_of(row, family)
        assert workload.global_batch is not None and workload.seq_len is not None
        inputs = batch(workload.global_batch, workload.seq_len)

        def plan(where: Cluster, hints: Hints, limit: float | None) -> autopar.Plan:
            return autopar.plan(
                build(shape), where, workload=workload, hints=hints, example_inputs=inputs, search_seconds=limit,
                compile=family.fused,
            )  # fmt: skip

        pinned = hints_of(configurations(row, family)[0], family, shape)
        published, found = plan(with_memory(cluster), pinned, None), plan(cluster, Hints(), seconds)
    except (NotCovered, AutoparError) as error:
        return Compared(row.run_id, row.published_seconds, reason=str(error).splitlines()[0])
    ours, theirs = traits_of_plan(found), traits_of_plan(published)
    return Compared(
        row.run_id, row.published_seconds, published.step_time, found.step_time, theirs, ours,
        mechanisms(ours, theirs, rows),
    )  # fmt: skip


def with_memory(cluster: Cluster) -> Cluster:
    """The cluster with `AMPLE` memory on every device."""
    table = cluster.to_dict()
    return Cluster.from_dict(table | {"device": table["device"] | {"memory_gib": AMPLE}})


def sample(rows: Sequence[Row], count: int) -> list[Row]:
    """The fastest of every model, cluster and batch of those in 16 bits that say their plan and their time; one a
    family in turn, those of which most were tried first, until there are so many."""
    able = [row for row in map(completed, rows) if row.is_16bit and row.hardware in TARGET_HARDWARE
            and row.micro_batch and row.tp and row.pp and row.status == "ok" and row.published_seconds]  # fmt: skip
    tried: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in able:
        key = (row.source_family, row.model_name, row.hardware, row.n_gpus, row.seq_len, row.global_batch)
        tried[key].append(row)
    by_family: dict[str, list[Row]] = defaultdict(list)
    for group in sorted(tried.values(), key=len, reverse=True):
        by_family[group[0].source_family].append(min(group, key=lambda row: row.published_seconds or math.inf))
    turns = itertools.zip_longest(*by_family.values())
    return [row for turn in turns for row in turn if row is not None][:count]


def compare_all(chosen: Sequence[Row], rows: Sequence[Row], seconds: float | None, each: Path | None) -> list[Compared]:
    """All of them; those that ``each`` has are taken from there, and new ones are added to it."""
    lines = each.read_text(encoding="utf-8").splitlines() if each and each.exists() else []
    known = {c.run_id: c for c in (Compared(**json.loads(line)) for line in lines)}
    found = []
    for row in chosen:
        if row.run_id not in known:
            known[row.run_id] = compare(row, rows, seconds)
            if each:
                with each.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(known[row.run_id])) + "\n")
        found.append(known[row.run_id])
    return found


def text(found: Sequence[Compared]) -> str:
    """The table for people."""
    lines = [f"{'row':16} {'published':>10} {'as planned':>11} {'found':>8} {'ratio':>6}"]
    for c in found:
        if c.reason is not None:
            lines.append(f"{c.run_id:16} not compared: {c.reason}")
            continue
        seconds = (c.published or 0, c.pinned or 0, c.found or 0)
        lines.append("{:16} {:9.2f}s {:10.2f}s {:7.2f}s {:6.2f}".format(c.run_id, *seconds, c.ratio))
        if c.ratio > FASTER:
            for name, families in (c.mechanisms or {}).items():
                lines.append(f"    {name}: {', '.join(families) or 'NO PUBLISHED RUN'}")
    return "\n".join(lines)


def main() -> None:
    """Compare and print; exits with 1 if a much faster plan has a mechanism that no published run supports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="a CSV file with the columns of published_runs.csv")
    parser.add_argument("--rows", nargs="*", help="these runs, by id")
    parser.add_argument("--sample", type=int, default=4, help="how many rows, of families in turn (default 4)")
    parser.add_argument("--seconds", type=float, help="at most so long a search of solving")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--each", type=Path, help="a file that keeps what was found, a JSON object a line")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        rows = read_rows(arguments.runs)
    except AutoparError as error:
        sys.exit(str(error))
    chosen = [r for r in rows if r.run_id in arguments.rows] if arguments.rows else sample(rows, arguments.sample)
    found = compare_all(chosen, rows, arguments.seconds, arguments.each)
    print(json.dumps([{**asdict(c), "ratio": c.ratio} for c in found], indent=1) if arguments.json else text(found))
    unsupported = [c for c in found if c.ratio > FASTER and not all((c.mechanisms or {}).values())]
    sys.exit(1 if unsupported else 0)


if __name__ == "__main__":
    main()
