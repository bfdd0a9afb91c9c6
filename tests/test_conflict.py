"""Hints in conflict: the set that is named cannot be kept, and each of its members can be dropped."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from dist import small_models as models

import autopar
from autopar import Hints
from autopar.errors import HintError, InfeasibleError
from autopar.solver.ahead import VARIABLE
from autopar.solver.conflict import Conflict, conflict, constraints, restricted, searched
from autopar.solver.task import Task

DOWN, UP = "*.down_proj.weight", "*.up_proj.weight"
MANY = Hints(dp=2, tp=2, zero=3, micro_batch_size=2, recompute="full", memory_limit="20GiB",
             shard={DOWN: {"tp": 1}, UP: {"tp": 0}})  # fmt: skip
NAMES = {
    ("dp", ""): "dp=2", ("tp", ""): "tp=2", ("zero", ""): "zero=3", ("micro_batch_size", ""): "micro_batch_size=2",
    ("recompute", ""): "recompute='full'", ("memory_limit", ""): "memory_limit='20GiB'",
    ("shard", DOWN): f"shard['{DOWN}']={{'tp': 1}}", ("shard", UP): f"shard['{UP}']={{'tp': 0}}",
}  # fmt: skip


def forbids(*sets: set[str]) -> Callable[[Hints], bool]:
    """There is a plan unless all hints of one of ``sets`` (by field, or pattern of shard) are given."""

    def feasible(hints: Hints) -> bool:
        given = {name or field for field, name in constraints(hints)}
        return not any(some <= given for some in sets)

    return feasible


def test_constraints_are_fields_and_patterns() -> None:
    assert set(constraints(MANY)) == set(NAMES)
    assert constraints(Hints()) == ()


def test_a_part_of_hints() -> None:
    """What is kept is kept as it is; what needs a hint that is not kept goes with it."""
    assert restricted(MANY, constraints(MANY)) == MANY
    assert restricted(MANY, [("shard", UP), ("tp", "")]) == Hints(tp=2, shard={UP: {"tp": 0}})
    staged = Hints(pp=2, schedule="1f1b", stages={"model.layers.*": 0}, zero=3, reshard_after_forward=False)
    assert restricted(staged, [("schedule", ""), ("stages", ""), ("zero", "")]) == Hints(zero=3)
    assert restricted(staged, [("reshard_after_forward", ""), ("pp", "")]) == Hints(pp=2)


@pytest.mark.parametrize("members", [{"tp"}, {"tp", "zero"}, {DOWN, UP}, {"memory_limit", "dp", DOWN}, set(NAMES)],
                         ids=["tp", "tp zero", "two shards", "limit dp shard", "all"])  # fmt: skip
def test_the_one_conflict_is_found(members: set[str]) -> None:
    members = {name or field for field, name in (m if isinstance(m, tuple) else (m, "") for m in members)}
    found = conflict(MANY, forbids(members))
    assert found.proved
    assert set(found.hints) == {text for (field, name), text in NAMES.items() if (name or field) in members}
    assert ("without any one of them there is a plan" in str(found)) == (len(members) > 1)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_claimed_holds(seed: int) -> None:
    """For any answers, of which more hints need not be harder to keep: the set has no plan, without any one it has."""
    draw = random.Random(seed)
    everything = constraints(MANY)
    monotone = seed % 2 == 0
    sets = [set(draw.sample(range(len(everything)), draw.randint(1, 5))) for _ in range(3)]
    answers: dict[frozenset[tuple[str, str]], bool] = {}
    asked = []

    def feasible(hints: Hints) -> bool:
        given = frozenset(constraints(hints))
        asked.append(given)
        places = {everything.index(c) for c in given}
        answer = not any(s <= places for s in sets) if monotone else draw.random() < 0.5
        return answers.setdefault(given, answer)

    answers[frozenset()], answers[frozenset(everything)] = True, False
    found = conflict(MANY, feasible)
    assert found.proved and len(asked) == len(set(asked)), "no set is asked about twice"
    kept = frozenset(c for c, text in NAMES.items() if text in found.hints)
    assert len(kept) == len(found.hints) >= 1
    assert answers[kept] is False
    assert all(answers[kept - {c}] for c in kept)
    assert not monotone or len(asked) <= 2 + len(everything) + len(kept)


def test_a_hint_that_is_wrong_by_itself_is_found_at_once() -> None:
    """A memory limit that nothing fits into: one question with no hints, one with the limit alone."""
    asked = []

    def feasible(hints: Hints) -> bool:
        asked.append(hints)
        return hints.memory_limit is None

    assert conflict(MANY, feasible) == Conflict(("memory_limit='20GiB'",), True)
    assert asked == [Hints(), Hints(memory_limit="20GiB")]


def test_no_plan_without_hints_either() -> None:
    assert conflict(MANY, lambda hints: False) == Conflict((), True)
    assert "without hints either" in str(Conflict((), True))


@pytest.mark.parametrize("calls", range(4))
def test_time_runs_out(calls: int) -> None:
    """What has been left out by then stays away, and nothing is claimed of the rest."""
    ticks = itertools.count()
    asked = []

    def feasible(hints: Hints) -> bool:
        asked.append(hints)
        return forbids({"tp", "zero"})(hints)

    found = conflict(MANY, feasible, seconds=calls, clock=lambda: next(ticks))
    assert not found.proved and len(asked) <= calls
    assert {"tp=2", "zero=3"} <= set(found.hints) and str(found).startswith("some of ")


def test_errors_say_what_is_in_conflict() -> None:
    """Beside what they said; of one hint alone there is nothing more to say, and a plan that is found is handed on. A
    whole search is made once: others are asked only whether there is a plan."""
    searches = []

    def find(hints: Hints) -> str:
        searches.append(hints)
        if hints.tp == 2 and hints.zero == 3:
            raise InfeasibleError("too large", expected="less", found="more", change="shrink")
        return str(hints.dp)

    with pytest.raises(InfeasibleError) as caught:
        searched(find, MANY, forbids({"tp", "zero"}))
    error = caught.value
    assert searches == [MANY]
    assert (error.what, error.expected, error.change) == ("too large", "less", "shrink")
    assert error.found == "more; zero=3 and tp=2 cannot be kept together; without any one of them there is a plan"
    assert searched(find, Hints(dp=2, tp=2), forbids()) == "2"

    def never(hints: Hints) -> str:
        raise HintError("no", expected="a", found="b", change="c")

    with pytest.raises(HintError) as alone:
        searched(never, Hints(tp=2), forbids({"tp"}))
    assert alone.value.found == "b"


@pytest.mark.slow
def test_a_conflict_of_a_large_model_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3-8B on eight H100, nothing split: 18 bytes of each of 8.03 billion parameters are 145 GB, whatever the
    limit, so that this goes first, and cp, which splits no state. Without any one of the three others a rank has an
    eighth of that, or half where stages are two. Of each question no more programs are solved than it takes to find one
    that fits, or to see from estimates that none does: it was sixteen of each, 84 seconds in all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                         num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
                         tie_word_embeddings=False, use_cache=False)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    solved = []
    monkeypatch.setenv(VARIABLE, "1")  # so that all of it is counted here
    least = Task.least_memory
    monkeypatch.setattr(Task, "least_memory", lambda task: solved.append(task) or least(task))
    hints = Hints(pp=1, tp=1, cp=1, zero=0, memory_limit="70GiB")
    workload = autopar.Workload(global_batch=128, seq_len=8192, param_dtype="bfloat16")
    with pytest.raises(InfeasibleError, match=r"zero=0, tp=1 and pp=1 cannot be kept together; without any one"):
        autopar.plan(model, "h100-sxm:1x8", workload=workload, hints=hints, compile=True)
    assert len(solved) <= 20


def test_a_real_conflict() -> None:
    """Whole copies of all parameters on two ranks do not fit into less than they take: the memory limit goes, ZeRO or
    tensor parallelism would do; what has nothing to do with it is not named. Each of those named can be dropped."""
    model, x = models.mlp(), torch.linspace(-1, 1, 64).view(4, 16)

    def plan(**hints: object) -> autopar.Plan:
        return autopar.plan(model, "cpu:2", hints=Hints(**hints), example_inputs=x)  # type: ignore[arg-type]

    whole, less = plan(dp=2, zero=0).peak_memory, plan(dp=2, zero=1).peak_memory
    limit = (whole + less) // 2
    assert less < limit < whole
    with pytest.raises(InfeasibleError) as caught:
        plan(dp=2, zero=0, recompute="none", memory_limit=limit)
    found = caught.value.found
    assert found.endswith("zero=0, dp=2 and memory_limit="
                          f"{limit} cannot be kept together; without any one of them there is a plan")
    assert "recompute" not in found
    plan(dp=2, memory_limit=limit)
    plan(zero=0, memory_limit=limit)
