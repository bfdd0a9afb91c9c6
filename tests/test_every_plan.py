"""Every plan that hints can ask for computes what eager computes: all pairs of choices, every rank simulated.

Fewer cases than there are combinations: each pair of choices that can go together is in one of them at least.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dist.small_models import HIDDEN, VOCABULARY, gpt2, llama, tokens
from models import planned_and_compared
from torch import nn

from autopar import Hints
from autopar.runtime.reference import exact_float64
from autopar.schedule import SCHEDULES, runs

SAMPLES, LENGTH = 16, 8

#: All that a plan can choose.
CHOICES: dict[str, tuple[Any, ...]] = {
    "model": ("llama, tied", "llama, untied", "gpt2, dropout"),
    "pp": (1, 2, 4),
    "schedule": (None, *SCHEDULES),
    "tp": (1, 2),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3, "3, not resharded"),
    "recompute": ("none", "selective", "full", "full:1"),
    "micro_batches": (1, 4, 8),
}

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "llama, tied": lambda layers: llama(num_hidden_layers=layers, tie_word_embeddings=True),
    "llama, untied": lambda layers: llama(num_hidden_layers=layers, tie_word_embeddings=False),
    "gpt2, dropout": lambda layers: gpt2(0.1, layers=layers),
}

Combination = dict[str, Any]


def stages(c: Combination) -> int:
    """How many pipeline stages there are: two a rank, but where a schedule has exactly one."""
    return c["pp"] * (SCHEDULES[c["schedule"]] or 2) if c["schedule"] is not None else 1


def layers(c: Combination) -> int:
    """As many blocks as there are stages, four at least."""
    return max(4, stages(c))


def is_possible(c: Combination) -> bool:
    """Whether choices go together: a schedule needs a pipeline and enough micro-batches; ZeRO needs dp."""
    if (c["schedule"] is None) != (c["pp"] == 1) or (c["zero"] != 0 and c["dp"] == 1):
        return False
    return c["schedule"] is None or runs(c["schedule"], c["pp"], stages(c), c["micro_batches"])


def pairs(c: Combination) -> set[tuple[Any, ...]]:
    """The pairs of choices in a combination."""
    return set(itertools.combinations(c.items(), 2))


def covering() -> Iterator[Combination]:
    """Few possible combinations that together have all pairs that any of them has."""
    possible = [c for values in itertools.product(*CHOICES.values())
                if is_possible(c := dict(zip(CHOICES, values, strict=True)))]  # fmt: skip
    having = {i: pairs(c) for i, c in enumerate(possible)}
    left = set().union(*having.values())
    while left:
        best = max(having, key=lambda i: len(having[i] & left))
        left -= having.pop(best)
        yield possible[best]


CASES = list(covering())
#: What runs by default: a pipeline. Steps without one are in test_micro_batches.py.
DEFAULT = (next(i for i, c in enumerate(CASES) if c["pp"] > 1),)


def hints(c: Combination) -> Hints:
    """The hints that ask for a combination."""
    return Hints(
        pp=c["pp"],
        tp=c["tp"],
        dp=c["dp"],
        schedule=c["schedule"],
        zero=3 if c["zero"] == "3, not resharded" else c["zero"],
        reshard_after_forward=False if c["zero"] == "3, not resharded" else None,
        recompute=c["recompute"],
        micro_batch_size=SAMPLES // c["dp"] // c["micro_batches"],
    )


def largest_share(model: nn.Module, c: Combination) -> float:
    """Of the FLOPs of matrix products: the last of equal stages has the head too, tp and dp split everything, and what
    is made again is at most a forward of the blocks, a third of what they do."""
    blocks = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and re.search(r"\.\d+\.", n))
    head = VOCABULARY * HIDDEN
    again = 1.0 if c["recompute"] == "none" else 4 / 3
    return again * (blocks / c["pp"] + head) / (blocks + head) / (c["dp"] * c["tp"])


def test_pairs_are_covered() -> None:
    """The cases are few, and any two choices are in one of them, but for a schedule without a pipeline, ZeRO on one
    rank of dp, and schedules that one micro-batch cannot fill."""
    assert len(CASES) < 60
    every = {
        (one, two)
        for (name, values), (other, others) in itertools.combinations(CHOICES.items(), 2)
        for one in zip(itertools.repeat(name), values)
        for two in zip(itertools.repeat(other), others)
    }
    impossible = {
        *((("pp", 1), ("schedule", schedule)) for schedule in SCHEDULES),
        *((("pp", pp), ("schedule", None)) for pp in (2, 4)),
        *((("dp", 1), ("zero", zero)) for zero in (1, 2, 3, "3, not resharded")),
        *((("schedule", schedule), ("micro_batches", 1)) for schedule in ("1f1b", "dualpipev")),
    }
    assert every - set().union(*map(pairs, CASES)) == impossible


@pytest.mark.parametrize("number", [
    pytest.param(i, id=", ".join(f"{k}={v}" for k, v in c.items()), marks=[pytest.mark.slow] * (i not in DEFAULT))
    for i, c in enumerate(CASES)
])  # fmt: skip
def test_a_plan_computes_what_eager_computes(number: int) -> None:
    """Loss, gradients and the parameters after two steps, in float64; one micro-batch of the many has no label."""
    c, batch = CASES[number], tokens(SAMPLES, LENGTH)
    batch["labels"][: SAMPLES // c["micro_batches"] if c["micro_batches"] > 1 else 1] = -100
    ranks = c["pp"] * c["dp"] * c["tp"]
    with exact_float64():
        model = MODELS[c["model"]](layers(c)).double()
        plan, report = planned_and_compared(model, batch, f"cpu:{ranks}", hints(c), steps=2)
    found = {"pp": plan.degrees["pp"], "tp": plan.degrees["tp"], "dp": plan.degrees["dp"],
             "schedule": plan.schedule, "recompute": plan.recompute,
             "micro_batches": plan.num_micro_batches}  # fmt: skip
    assert found == {name: c[name] for name in found}
    assert report.ok and report.bound <= 1e-10, str(report)
    assert report.flops_share <= 1.1 * largest_share(model, c), str(report)
    assert {n: g.shape for n, g in report.gradients.items()} == {n: p.shape for n, p in model.named_parameters()}
