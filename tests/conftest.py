"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def _no_group_is_left() -> Iterator[None]:
    """`parallelize` makes a process group where there is none; the next file of the same worker starts without one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
