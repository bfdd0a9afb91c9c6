"""Captures, plans and verifies the architectures of ``tests/zoo.py`` and writes ``docs/models.md``.

    python benchmarks/model_table.py

Every model is small, in float64 and forced to tp=2 on two simulated ranks. An architecture "works" if all results and
gradients agree with eager to 1e-10 and one rank does at most 1.1/2 of the FLOPs, and works "partly" if it agrees and
more than that is repeated; the operators that both ranks run whole are then named with their share of the FLOPs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from zoo import ARCHITECTURES, MINILM, REFUSED, Architecture, minilm_folder  # noqa: E402

import autopar  # noqa: E402
from autopar import Hints  # noqa: E402
from autopar.errors import CaptureError  # noqa: E402
from autopar.runtime.reference import exact_float64  # noqa: E402

TARGET = ROOT / "docs" / "models.md"
RANKS = 2
CLUSTER = f"cpu:1x{RANKS}"
#: Operators with less than this share of the FLOPs are not worth naming.
SHOWN = 0.001
HEAD = f"""# Models

Written by `python benchmarks/model_table.py` with torch {torch.__version__.partition("+")[0]}; do not edit.

Every architecture of transformers below is built small (two layers; `tests/zoo.py`), captured, planned with tp=2 and
run on two simulated ranks in float64. Works: all results and gradients agree with eager PyTorch on the untouched model
to 1e-10, and one rank does at most 1.1/2 of the FLOPs. Partly: it agrees, and more is repeated. Refused: a
`CaptureError` with the reason. `tests/test_zoo.py` has the same in float32, under dp=2 and, marked slow, under others.

| architecture | kind | status | FLOPs of one rank | largest error | replicated operators (share of FLOPs) |
| --- | --- | --- | --- | --- | --- |
"""


def replicated(plan: autopar.Plan) -> str:
    """The operators of a plan whose work every rank repeats, with their share of the model's FLOPs."""
    found = sorted((r for r in plan.replicated if r.flops_share >= SHOWN), key=lambda r: -r.flops_share)
    return ", ".join(f"`{r.operator}` {r.flops_share:.1%}" for r in found) or "none"


def row(architecture: Architecture) -> str:
    """One line of the table."""
    cells = [architecture.name, architecture.family]
    with exact_float64():
        model, batch = architecture.make(torch.float64)
        try:
            plan = autopar.plan(model, CLUSTER, hints=Hints(tp=RANKS), example_inputs=batch)
        except CaptureError as error:
            return " | ".join([*cells, "refused", "", "", str(error).splitlines()[0]])
        report = autopar.verify(model, CLUSTER, hints=Hints(tp=RANKS), example_inputs=batch)
    agrees = "works" if report.flops_share <= 1.1 / RANKS else "partly"
    status = agrees if report.ok else "differs"
    return " | ".join([*cells, status, f"{report.flops_share:.1%}", f"{report.max_error:.0e}", replicated(plan)])


def main() -> None:
    """Write the table."""
    models = [*ARCHITECTURES, *([MINILM] if minilm_folder() else []), *REFUSED]
    rows = []
    for architecture in models:
        rows.append(f"| {row(architecture)} |")
        print(rows[-1], flush=True)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
