"""Mixtures of experts over what they can be combined with: every two values of two columns meet somewhere below.

Families, where experts are, ZeRO, how tokens come to them, how many experts a token has, and whether routers tell their
experts apart: one that does not sends all tokens to the first ones, and the others none.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from zoo import MIXTURES

import autopar
from autopar.runtime.reference import exact_float64
from autopar.runtime.verify import compare
from autopar.specialize import specialize, specialize_step

#: Where experts are: over a part of dp, all of it, beside each expert's hidden dim over tp, over the tp of attention
#: (folded), and in the stages of a pipeline.
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (4, {"dp": 4, "ep": 2, "pp": 1}),
    "ep4": (4, {"dp": 4, "ep": 4, "pp": 1}),
    "ep2-tp2": (4, {"dp": 2, "tp": 2, "ep": 2, "pp": 1}),
    "folded": (4, {"dp": 2, "tp": 2, "ep": 4, "pp": 1}),
    "pp2-ep2": (4, {"dp": 2, "ep": 2, "pp": 2, "micro_batch_size": 2}),
}
FOUR = ("mixtral", "qwen2-moe", "olmoe", "granite-moe", "deepseek-v2", "glm4-moe")
EIGHT = ("qwen3-moe", "deepseek-v3", "gpt-oss")
#: family, place, ZeRO, dispatch, top-k, skewed
CASES = [
    ("mixtral", "ep2", 1, "exchange", 1, True),
    ("mixtral", "folded", 3, "gather", 4, False),
    ("qwen2-moe", "ep4", 3, "exchange", 2, False),
    ("qwen2-moe", "pp2-ep2", 1, "gather", 1, True),
    ("qwen3-moe", "ep2-tp2", 1, "gather", 8, True),
    ("qwen3-moe", "ep4", 3, "exchange", 8, False),
    ("olmoe", "folded", 1, "exchange", 2, True),
    ("olmoe", "pp2-ep2", 3, "gather", 4, False),
    ("granite-moe", "ep2", 3, "gather", 2, False),
    ("granite-moe", "ep2-tp2", 1, "exchange", 4, False),
    ("deepseek-v2", "ep4", 1, "gather", 4, True),
    ("deepseek-v2", "folded", 3, "exchange", 1, True),
    ("deepseek-v3", "ep2", 1, "exchange", 4, True),
    ("deepseek-v3", "pp2-ep2", 3, "exchange", 2, False),
    ("deepseek-v3", "ep2-tp2", 3, "gather", 1, False),
    ("glm4-moe", "ep4", 1, "gather", 1, True),
    ("glm4-moe", "ep2-tp2", 3, "exchange", 2, False),
    ("gpt-oss", "ep2", 3, "exchange", 8, False),
    ("gpt-oss", "folded", 1, "gather", 8, True),
    ("gpt-oss", "pp2-ep2", 1, "exchange", 8, True),
]


def routed(name: str, top_k: int, skewed: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A model in float64 whose tokens have ``top_k`` experts each, and a batch."""
    model, batch = next(f for f in MIXTURES if f.name == name).make(torch.float64)
    changed = [module for module in model.modules() if hasattr(module, "top_k")]
    for module in changed:
        module.top_k = top_k
    routers = [module for path, module in model.named_modules() if path.endswith((".gate", ".router"))]
    assert changed and routers
    for router in routers if skewed else ():
        with torch.no_grad():
            for parameter in router.parameters():
                parameter.zero_()
    model.config.output_router_logits = False
    return model, batch


def test_what_meets() -> None:
    """Every family is there in two places at least, and of all other columns every two values meet."""
    assert {case[0] for case in CASES} == {f.name for f in MIXTURES} == {*FOUR, *EIGHT}
    assert {case[1] for case in CASES} == {*PLACES}
    for name in (*FOUR, *EIGHT):
        assert len({case[1] for case in CASES if case[0] == name}) >= 2, name
    for a, b in itertools.combinations((1, 2, 3, 5), 2):
        met = {(case[a], case[b]) for case in CASES}
        assert met == {*itertools.product({c[a] for c in CASES}, {c[b] for c in CASES})}, (a, b)
    assert {(c[2], c[4]) for c in CASES} == {*itertools.product((1, 3), (1, 2, 4, 8))}
    assert {(c[3], c[4]) for c in CASES} == {*itertools.product(("exchange", "gather"), (1, 2, 4, 8))}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place", "zero", "dispatch", "top_k", "skewed"), CASES)
def test_three_steps(name: str, place: str, zero: int, dispatch: str, top_k: int, skewed: bool) -> None:
    ranks, given = PLACES[place]
    hints = autopar.Hints(**given, zero=zero, dispatch=dispatch)
    model, batch = routed(name, top_k, skewed)
    with exact_float64():
        plan = autopar.plan(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
        make = specialize_step if plan.num_micro_batches > 1 else specialize
        report = compare(model, make(model, plan, (), batch), (), batch, steps=3)
    assert report.ok and report.max_error < 1e-10, report
    assert plan.degrees["ep"] == given["ep"]
