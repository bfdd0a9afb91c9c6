"""Optimizers, clipping and mixed precision on four real processes, and who owns whole parameters."""

from __future__ import annotations

import pytest
from test_distributed import SCRIPTS, assert_all_ok, torchrun

PARTS = ["by_element", "whole_matrices", "clipping", "mixed", "loss_scale", "overflow_of_one_stage", "kept_copies"]


@pytest.mark.slow
@pytest.mark.dist
def test_optimizers_and_mixed_precision() -> None:
    """SGD on pieces; Muon and Adafactor on whole parameters, to the last bit given the same gradients; one global norm;
    bf16 with masters in the plain loop and in `train_step`; float16 with a scaler that overflows; copies that ZeRO 1
    and 2 keep in the plain loop (``optimizers.py``)."""
    assert_all_ok(torchrun(4, SCRIPTS / "optimizers.py", timeout=900), 4, PARTS)
