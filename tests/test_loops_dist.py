"""The ends of real loops in real Gloo processes, against the same loop in one process (``tests/dist/loops.py``)."""

from __future__ import annotations

import pytest
from test_distributed import SCRIPTS, assert_all_ok, torchrun

LOOPS = ["ragged", "kept", "recipe", "state", "accumulated", "held_too_long", "local", "differing", "bucketed"]

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("processes", [2, 4])
def test_loops_equal_those_of_one_process(processes: int) -> None:
    """On dp=2, alone and with tp=2, under ZeRO-3: ragged batches and lengths, and a small cache of programs."""
    assert_all_ok(torchrun(processes, SCRIPTS / "loops.py"), processes, LOOPS)
