"""What a forward may depend on besides tensors: the numbers, flags and texts that modules keep (`runtime.attributes`;
that programs follow them on real processes is in tests/dist/ends.py)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from autopar.runtime.attributes import MANY, States


def model_with(value: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    model[1].scale = value
    return model


@pytest.mark.parametrize("values", [(1, 1.0, True), (0, 0.0, -0.0, False), ([1], (1,), [1.0])], ids=str)
def test_equal_numbers_of_other_kinds_are_other_states(values: tuple[Any, ...]) -> None:
    """x * 1 and x * 1.0 are other graphs where x is of integers."""
    model = model_with(values[0])
    states = States(model)
    found = []
    for value in values:
        model[1].scale = value
        found.append(states.now())
    assert found == list(range(len(values)))
    model[1].scale = values[0]
    assert states.now() == 0


def test_what_is_no_number_is_one_state() -> None:
    model = model_with(math.nan)
    states = States(model)
    first = states.now()
    model[1].scale = float("nan")
    assert states.now() == first


def test_lists_that_change_in_place_and_modes_are_other_states() -> None:
    model = model_with([0.5, 0.5])
    states = States(model)
    first = states.now()
    model[1].scale[0] = 0.25
    second = states.now()
    model[0].eval()
    assert len({first, second, states.now()}) == 3


def test_many_states_are_told_by_name() -> None:
    model = model_with(0)
    states = States(model)
    for step in range(MANY - 1):
        model[1].scale = step
        states.now()
    model[1].scale = MANY
    with pytest.warns(UserWarning, match=r"1\.scale of the model has had 8 values"):
        states.now()
