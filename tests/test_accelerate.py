"""accelerate on real Gloo processes, against a plain loop in one process (``tests/dist/accelerated.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_distributed import SCRIPTS, assert_all_ok, torchrun


@pytest.mark.slow
@pytest.mark.dist
def test_a_loop_of_accelerate_trains_as_in_one_process(tmp_path: Path) -> None:
    """With accumulation, clipping, a schedule and a short last batch; taken up again under another plan; refusals."""
    assert_all_ok(torchrun(2, SCRIPTS / "accelerated.py", str(tmp_path)), 2, ["trained", "resumed", "refusals"])
