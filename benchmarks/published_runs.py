"""Predicts published training runs and says how near the predictions are.

    python benchmarks/published_runs.py --runs benchmarks/data/published_runs.csv
    python benchmarks/published_runs.py --runs FILE.csv --leave-one-out --only 16bit --json

Every row becomes a model of its shape on meta, a cluster and hints that pin its configuration; autopar's planner prices
that. ``data/families.toml`` says what publishers leave unsaid, ``published/`` how it is done. Printed are errors of
step time and of peak memory, rows that ran out of memory, how many pairs within a rank group are ordered rightly, the
regret of picking by prediction, the peer's errors on the same rows (one utilisation a chip), and what is not covered
and why. With ``--leave-one-out`` the level of every chip is fitted to the other families' rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from published.predict import Prediction, Predictor, completed, predictions
from published.report import figures, text
from published.rows import Row, read_rows

from autopar.errors import AutoparError

#: With 16 bits, what the project's targets speak of.
TARGET_HARDWARE = ("A100-40GB-SXM", "A100-80GB-SXM", "H100-80GB-SXM", "H200-SXM")


def keep(row: Row, arguments: argparse.Namespace) -> bool:
    """Whether the arguments ask for a row."""
    if arguments.only == "16bit" and not (row.is_16bit and row.hardware in TARGET_HARDWARE):
        return False
    return not arguments.family or row.source_family in arguments.family


def predict_all(rows: Sequence[Row], each: Path | None) -> list[Prediction]:
    """All rows' predictions; progress goes to standard error. Those that ``each`` has are taken from there, and new
    ones are added to it."""
    known = _read(each, rows) if each and each.exists() else []
    found, started = list(known), time.monotonic()
    left = {row.run_id: row for row in rows}
    for p in known:
        left.pop(p.row.run_id, None)
    for p in predictions(left.values(), Predictor()):
        found.append(p)
        print(f"\r{len(found)} of {len(rows)} rows, {time.monotonic() - started:.0f} s", end="", file=sys.stderr)
        if each:
            with each.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_plain(p)) + "\n")
    print(file=sys.stderr)
    return found


def _plain(p: Prediction) -> dict[str, object]:
    values = {f.name: getattr(p, f.name) for f in fields(p)}
    return {"run_id": p.row.run_id, **{name: value for name, value in values.items() if name != "row"}}


def _read(path: Path, rows: Sequence[Row]) -> list[Prediction]:
    by_id = {row.run_id: completed(row) for row in rows}
    tables = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Prediction(by_id[t.pop("run_id")], **t) for t in tables if t["run_id"] in by_id]


def main() -> None:
    """Predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="a CSV file with the columns of published_runs.csv")
    parser.add_argument("--only", choices=("all", "16bit"), default="all", help="16-bit rows on A100, H100 and H200")
    parser.add_argument("--family", nargs="*", help="only these source families")
    parser.add_argument("--leave-one-out", action="store_true", help="fit chips without the family that is judged")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--each", type=Path, help="a file that keeps every row's prediction, a JSON object a line")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        rows = [row for row in read_rows(arguments.runs) if keep(row, arguments)]
    except AutoparError as error:
        sys.exit(str(error))
    found = figures(predict_all(rows, arguments.each), arguments.leave_one_out)
    print(json.dumps(found, indent=1) if arguments.json else text(found))


if __name__ == "__main__":
    main()
