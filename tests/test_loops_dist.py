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


#: On how many processes loops run by default: on two there is dp alone. On all others, and the buckets on any, they are
#: slow tests.
DEFAULT = {
    ("whole steps", 4),
    ("local batches, and ranks that differ", 4),
    ("ragged batches, and the programs that are kept", 2),
    ("recipes and checkpoints", 2),
    ("gradients held back", 2),
}
STARTS = [(what, processes) for what in LOOPS for processes in (2, 4)]


@pytest.mark.parametrize(
    ("what", "processes"),
    [pytest.param(*start, marks=[pytest.mark.slow] * (start not in DEFAULT)) for start in STARTS],
)
def test_loops_equal_those_of_one_process(what: str, processes: int) -> None:
    """On dp=2, alone and with tp=2, under ZeRO-3."""
    assert_all_ok(torchrun(processes, SCRIPTS / "loops.py", *LOOPS[what]), processes, LOOPS[what])
