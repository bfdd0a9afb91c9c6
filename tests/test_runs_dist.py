"""Plans of many ranks, and compiled graphs, in real Gloo processes (``eight.py``, ``compiled.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_distributed import SCRIPTS, assert_all_ok, torchrun

pytestmark = [pytest.mark.dist, pytest.mark.slow]

EIGHT = ["dp2 tp2 pp2 zero1", "dp4 tp2 zero3", "dp2 pp4 zero3 full"]
COMPILED = ["dp", "zero 3", "tp", "1f1b", "zbv"]


@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks_equal_one_process(name: str) -> None:
    """Three steps in float64 to 1e-10: every axis with ZeRO-1, ZeRO-3 beside tp and dropout, and a backward in two
    parts on eight stages with everything made again."""
    assert_all_ok(torchrun(8, SCRIPTS / "eight.py", name, timeout=900), 8, [name])


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_graphs_equal_eager(name: str) -> None:
    """Compiled by Inductor on two ranks, in the plain loop and in whole steps, on one stage and on several; a deeper
    model needs no more compilations."""
    assert_all_ok(torchrun(2, SCRIPTS / "compiled.py", name, timeout=900), 2, [name])


def test_whole_matrices_under_other_plans(tmp_path: Path) -> None:
    """Muon with AdamW, and Adafactor: saved on four ranks with both axes and ZeRO-3, continued there under plain dp and
    on two ranks under tp, where other ranks own the matrices."""
    names = [f"save {name}" for name in ("muon", "adafactor")]
    assert_all_ok(torchrun(4, SCRIPTS / "owned.py", str(tmp_path), "save"), 4, names)
    names = [name.replace("save", "load") for name in names]
    assert_all_ok(torchrun(2, SCRIPTS / "owned.py", str(tmp_path), "load"), 2, names)
