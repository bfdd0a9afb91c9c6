"""The ends of real loops in real Gloo processes, against the same loop in one process (``tests/dist/loops.py``)."""

from __future__ import annotations

import pytest
from test_distributed import SCRIPTS, assert_all_ok, torchrun

#: What runs in one start of the processes, each within the time limit of `torchrun`.
LOOPS = {
    "ragged batches, and the programs that are kept": ["ragged", "kept"],
    "recipes and checkpoints": ["recipe", "state"],
    "gradients held back": ["accumulated", "copies", "held_too_long"],
    "local batches, and ranks that differ": ["local", "differing"],
    "buckets": ["bucketed"],
    "whole steps": ["stepped", "stepped_locally"],
}

pytestmark = pytest.mark.dist


#: What starts four processes by default; the others start two, which is dp alone, and four where slow tests run.
ON_FOUR = ("whole steps", "local batches, and ranks that differ")
STARTS = [(what, processes) for what in LOOPS for processes in (2, 4)]


@pytest.mark.parametrize(
    ("what", "processes"),
    [pytest.param(*s, marks=[pytest.mark.slow] * ((s[0] in ON_FOUR) != (s[1] == 4))) for s in STARTS],
)
def test_loops_equal_those_of_one_process(what: str, processes: int) -> None:
    """On dp=2, alone and with tp=2, under ZeRO-3."""
    assert_all_ok(torchrun(processes, SCRIPTS / "loops.py", *LOOPS[what]), processes, LOOPS[what])
