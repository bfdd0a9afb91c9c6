"""Workloads: their defaults, their table form, and bad values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.errors import WorkloadError
from autopar.solver.costs import state_bytes
from autopar.workload import Workload


def test_the_default_leaves_the_sizes_to_the_model() -> None:
    workload = Workload()
    assert (workload.global_batch, workload.seq_len, workload.optimizer) == (None, None, "adamw")


def test_a_workload_comes_back_equal_from_its_table() -> None:
    workload = Workload(global_batch=64, seq_len=2048, optimizer="sgd_momentum")
    table = {"global_batch": 64, "seq_len": 2048, "optimizer": "sgd_momentum", "pad_to": None}
    assert workload.to_dict() == {**table, "param_dtype": None, "reduce_dtype": None}
    assert Workload.from_dict(workload.to_dict()) == workload
    assert Workload.from_dict({}) == Workload()
    uneven = Workload(expert_imbalance=1.3)
    assert uneven.to_dict()["expert_imbalance"] == 1.3 and Workload.from_dict(uneven.to_dict()) == uneven
    padded = Workload(pad_to=[256, 128, 256])
    assert padded.pad_to == (128, 256) and padded.to_dict()["pad_to"] == [128, 256]
    assert Workload.from_dict(padded.to_dict()) == padded


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
@pytest.mark.parametrize("name", ["global_batch", "seq_len"])
def test_a_size_that_is_no_positive_number(name: str, value: Any) -> None:
    with pytest.raises(WorkloadError, match=name) as error:
        Workload(**{name: value})
    assert error.value.expected == "a whole number from 1, or None"
    assert error.value.found == repr(value)
    assert name in error.value.change


@pytest.mark.parametrize("value", [0.9, -1, float("inf"), float("nan"), "1.3", True, None])
def test_an_imbalance_that_is_none(value: Any) -> None:
    with pytest.raises(WorkloadError, match="expert_imbalance") as error:
        Workload(expert_imbalance=value)
    assert error.value.found == repr(value)


@pytest.mark.parametrize("value", [[], [0], [128, -1], [1.5], [True], "128", 128])
def test_buckets_that_are_no_lengths(value: Any) -> None:
    with pytest.raises(WorkloadError, match="pad_to") as error:
        Workload(pad_to=value)
    assert error.value.expected == "a list of lengths from 1, or None"
    assert error.value.found == repr(value)


@pytest.mark.parametrize(("optimizer", "advice"), [
    ("adam", "did you mean"), ("zzz", "use one of"), (None, "did you mean none or muon?"), ([], "use one of"),
])
def test_an_unknown_optimizer(optimizer: Any, advice: str) -> None:
    with pytest.raises(WorkloadError, match="no optimizer") as error:
        Workload(optimizer=optimizer)
    assert "adamw" in error.value.expected and advice in error.value.change


def test_an_optimizer_of_which_only_the_bytes_are_known() -> None:
    assert Workload.from_dict(Workload(optimizer="6.5 bytes").to_dict()).optimizer == "6.5 bytes"
    for text in ("bytes", "-6 bytes", "6 Bytes", "6 bytes a parameter"):
        with pytest.raises(WorkloadError, match="no optimizer"):
            Workload(optimizer=text)


@pytest.mark.parametrize(("optimizer", "nbytes"), [
    ("muon", 256 * 2),  # a momentum in the parameter's dtype
    ("adamw_8bit", 2 * (256 + 4)),  # twice a byte an element and one float32 a block
    ("6.5 bytes", 256 * 6.5),
])
def test_bytes_of_optimizer_state(optimizer: str, nbytes: float) -> None:
    """Of 256 numbers in bfloat16."""
    found = state_bytes(256, torch.bfloat16, optimizer)
    assert found == {"parameters": 512, "gradients": 512, "optimizer": nbytes}


def test_an_unknown_key() -> None:
    with pytest.raises(WorkloadError, match="no key 'global_batch_size'") as error:
        Workload.from_dict({"global_batch_size": 8})
    assert error.value.change == "did you mean global_batch?"
