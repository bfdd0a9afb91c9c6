"""What holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from autopar.solver.ahead import VARIABLE

if "PYTEST_XDIST_WORKER" in os.environ:  # there are as many of these as there are cores
    os.environ.setdefault(VARIABLE, "1")


@pytest.fixture(autouse=True, scope="module")
def _no_group_is_left() -> Iterator[None]:
    """`parallelize` makes a process group where there is none; the next file of the same worker starts without one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
