"""The ends of real loops in real Gloo processes, against the same loop in one process (``tests/dist/loops.py``)."""

from __future__ import annotations

import itertools

import pytest
from test_distributed import SCRIPTS, assert_all_ok, torchrun

#: What runs in one start of the processes.
LOOPS = {
    "ragged batches, and the programs that are kept": ["ragged", "kept"],
    "recipes and checkpoints": ["recipe", "state"],
    "gradients held back": ["accumulated", "copies", "held_too_long"],
    "local batches, and ranks that differ": ["local", "differing"],
    "buckets": ["bucketed"],
    "whole steps": ["stepped", "stepped_locally"],
}
#: What runs by default on two processes, where there is dp alone: in one start, which is what takes long.
ON_TWO = ["ragged batches, and the programs that are kept", "recipes and checkpoints", "gradients held back",
          "whole steps"]  # fmt: skip
#: What runs by default on four: several ranks there have the same samples.
ON_FOUR = ["local batches, and ranks that differ"]

pytestmark = pytest.mark.dist


def test_loops_on_two_ranks() -> None:
    """On dp=2 under ZeRO-3."""
    names = list(itertools.chain.from_iterable(LOOPS[what] for what in ON_TWO))
    assert_all_ok(torchrun(2, SCRIPTS / "loops.py", *names, timeout=600), 2, names)


@pytest.mark.slow
@pytest.mark.parametrize("what", [what for what in LOOPS if what not in ON_TWO])
def test_more_loops_on_two_ranks(what: str) -> None:
    """The same."""
    assert_all_ok(torchrun(2, SCRIPTS / "loops.py", *LOOPS[what]), 2, LOOPS[what])


@pytest.mark.parametrize("what", [pytest.param(w, marks=[pytest.mark.slow] * (w not in ON_FOUR)) for w in LOOPS])
def test_loops_on_four_ranks(what: str) -> None:
    """On dp=2 with tp=2, under ZeRO-3."""
    assert_all_ok(torchrun(4, SCRIPTS / "loops.py", *LOOPS[what]), 4, LOOPS[what])
