"""Captures, plans and verifies the models of ``tests/zoo*.py`` and of ``tests/plain_models.py``: ``docs/models.md``.

    python benchmarks/model_table.py

Every model is small, in float64 and forced to tp=2 on two simulated ranks. It "works" if all results and gradients
agree with eager to 1e-10 and at least 95 % of the FLOPs are split, and works "partly" if it agrees and more is
repeated; the operators that both ranks run whole are named with their share of the FLOPs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from handwritten import DISPATCH, LOOPS  # noqa: E402
from models import Case  # noqa: E402
from plain_models import GRU, LSTM, MOBILENET, RECOMMENDER, RESNET50, UNET, VIT  # noqa: E402
from zoo import ARCHITECTURES, MINILM, MIXTURES, SPLIT, minilm_folder, split_share  # noqa: E402
from zoo_wide import REFUSED, WIDER  # noqa: E402

import autopar  # noqa: E402
from autopar import Hints  # noqa: E402
from autopar.errors import CaptureError  # noqa: E402
from autopar.runtime.reference import exact_float64  # noqa: E402

TARGET = ROOT / "docs" / "models.md"
RANKS = 2
CLUSTER = f"cpu:1x{RANKS}"
#: A kind of models of which "FLOPs split" is as planned.
MIXTURE = "mixture of experts"
#: Operators with less than this share of the FLOPs are not worth naming.
SHOWN = 0.001
COLUMNS = """
| {first} | kind | status | FLOPs split | FLOPs of one rank | largest error | replicated operators (share of FLOPs) |
| --- | --- | --- | --- | --- | --- | --- |
"""
HEAD = f"""# Models

Written by `python benchmarks/model_table.py` with torch {torch.__version__.partition("+")[0]}; do not edit.

Every model below is built small, captured, planned with tp={RANKS} and run on {RANKS} simulated ranks in float64.
Works: all results and gradients agree with eager PyTorch on the untouched model to 1e-10, and at least {SPLIT:.0%} of
the FLOPs are split over the ranks. Partly: it agrees, and more is repeated. Refused: a `CaptureError` with the reason.
`tests/test_zoo.py` and `tests/test_plain_models.py` have the same in float32 and float64 on 2, 4 and 8 ranks, free
and with dp, tp or both forced, with and without ZeRO-3 (most of it marked slow; of `tests/zoo_wide.py` tp and dp on 2
ranks), and hold the {SPLIT:.0%} everywhere.

## transformers

Two layers each (`tests/zoo.py`, `tests/zoo_wide.py`). Of a mixture of experts the FLOPs of one rank are those of rank
0, which has what the router sends to its half of the experts, and those split are as planned (`tests/test_experts.py`
has other plans).
"""
PLAIN_HEAD = """
## Ordinary PyTorch modules

Own definitions, as one writes them (`tests/plain_models.py`): convolutions, batch norm over the global batch,
recurrences, embedding tables.
"""
EXPERTS_HEAD = """
## Mixtures of experts in plain PyTorch

Loops over experts that select their tokens by value, in their common spellings (`torch.where`, `nonzero`, masks as an
index; `index_add_` or `+=`; experts that are skipped without tokens), and one-hot dispatch by einsums with a capacity
(`tests/handwritten.py`). A loop is traced to the same grouped operators as transformers' mixtures. What an expert may
do to its rows: linear layers, pointwise operators, splits of the last dim. Anything else (dropout, norms of rows) is a
`CaptureError` that names the line. An expert that no token chose gets a gradient of zeros, as under
DistributedDataParallel, where one process that skips it leaves None: AdamW then decays its weights all the same.
"""
#: What kind of model each of the plain ones is.
PLAIN = {
    RESNET50: "images",
    UNET: "images",
    MOBILENET: "images",
    VIT: "images",
    LSTM: "recurrence",
    GRU: "recurrence",
    RECOMMENDER: "recommendation",
}


def replicated(plan: autopar.Plan) -> str:
    """The operators of a plan whose work every rank repeats, with their share of the model's FLOPs."""
    found = sorted((r for r in plan.replicated if r.flops_share >= SHOWN), key=lambda r: -r.flops_share)
    return ", ".join(f"`{r.operator}` {r.flops_share:.1%}" for r in found) or "none"


def row(case: Case, kind: str) -> str:
    """One line of the table."""
    cells = [case.name, kind]
    with exact_float64():
        model, batch = case.make(torch.float64)
        try:
            plan = autopar.plan(model, CLUSTER, hints=Hints(tp=RANKS), example_inputs=batch)
        except CaptureError as error:
            return " | ".join([*cells, "refused", "", "", "", str(error).splitlines()[0]])
        report = autopar.verify(model, CLUSTER, hints=Hints(tp=RANKS), example_inputs=batch)
    as_planned = 1.0 - sum(r.flops_share for r in plan.replicated)  # of a mixture rank 0's work is up to the router
    split = as_planned if kind == MIXTURE else min(1.0, split_share(report))
    status = ("works" if split >= SPLIT else "partly") if report.ok else "differs"
    cells += [status, f"{split:.1%}", f"{report.flops_share:.1%}", f"{report.max_error:.0e}", replicated(plan)]
    return " | ".join(cells)


def table(first: str, cases: Mapping[Case, str]) -> str:
    """A table of models, printed as it grows; ``first`` is the name of its first column."""
    rows = []
    for case, kind in cases.items():
        rows.append(f"| {row(case, kind)} |\n")
        print(rows[-1], end="", flush=True)
    return COLUMNS.format(first=first) + "".join(rows)


def main() -> None:
    """Write both tables."""
    models = [*ARCHITECTURES, *MIXTURES, *WIDER, *([MINILM] if minilm_folder() else []), *REFUSED]
    text = HEAD + table("architecture", {m: m.family for m in models}) + PLAIN_HEAD + table("model", PLAIN)
    text += EXPERTS_HEAD + table("form", dict.fromkeys([*LOOPS, DISPATCH], MIXTURE))
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
