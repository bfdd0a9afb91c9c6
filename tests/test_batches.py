"""Batches of other shapes than the plan's: what they lose, in which words it is told, and which programs are kept."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from dist.small_models import bert, llama, mlp, tokens

import autopar
from autopar import Hints, Plan
from autopar.capture.hf_padding import padded
from autopar.errors import InputError, WorkloadError
from autopar.runtime import cache
from autopar.runtime.batches import Fallback, input_names, warn_of, widened
from autopar.runtime.cache import Cache, CacheEntry
from autopar.runtime.program import Specialization
from autopar.solver.carry import operator_choices
from autopar.specialize import specialize


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(num_hidden_layers=1)


@pytest.fixture(scope="module")
def plan(model: Any) -> Plan:
    return autopar.plan(model, "cpu:4", hints=Hints(dp=2, tp=2), example_inputs=tokens(4, 8))


def made(model: Any, plan: Plan, batch: int, length: int) -> Specialization:
    return specialize(model, plan, (), tokens(batch, length))


def test_the_plans_own_shapes_lose_nothing(model: Any, plan: Plan) -> None:
    assert made(model, plan, 4, 8).fallbacks == ()
    assert made(model, plan, 2, 8).fallbacks == ()


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_that_does_not_divide_loses_dp_and_keeps_tp(model: Any, plan: Plan, batch: int) -> None:
    found = made(model, plan, batch, 8)
    assert found.fallbacks == (Fallback("dp", 0, (("input_ids", batch), ("labels", batch)), 2, 1.0),)
    choices = operator_choices(found.operators, found.assignment)
    assert {c["dp"] for c in choices.values()} == {"-"}
    wanted = {key: choice["tp"] for key, choice in plan.operators.items()}
    assert {key: choice["tp"] for key, choice in choices.items()} == wanted


def test_the_words_name_the_input_and_what_to_do() -> None:
    assert str(Fallback("dp", 0, (("input_ids", 6), ("labels", 6)), 4, 0.9)) == (
        "dim 0 of input_ids (6), labels (6) is not a multiple of 4 and cannot be split over dp as planned: 90% of the "
        "FLOPs run replicated over dp for this batch; results are the same. To split that work, drop the last batch "
        "(drop_last=True in the DataLoader), or pad to a multiple of 4."
    )
    assert str(Fallback("tp", 1, (("x", 7),), 2, 0.1)).endswith("To split that work, pad to a multiple of 2.")
    assert "a size of the model is not a multiple of 2" in str(Fallback("tp", None, (), 2, 0.1))


def test_a_dim_that_two_axes_split_has_to_divide_by_both() -> None:
    """Attention with 3 heads on dp=2, tp=2 splits the batch on both axes."""
    odd = llama(num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    plan = autopar.plan(odd, "cpu:4", hints=Hints(dp=2, tp=2), example_inputs=tokens(4, 8))
    assert {"dp": "b", "tp": "b"} in plan.operators.values()
    (found,) = made(odd, plan, 6, 8).fallbacks
    assert (found.axis, found.dim, found.multiple, found.inputs[0]) == ("tp", 0, 4, ("input_ids", 6))
    assert 0 < found.replicated < 0.1  # attention alone: the matrix products have weights to split


def test_each_kind_of_fallback_is_told_once() -> None:
    told: set[tuple[str, int | None]] = set()
    what = [("dp", 0, 3), ("dp", 0, 1), ("tp", 1, 5)]
    kinds = [Fallback(axis, dim, (("x", size),), 2, 1.0) for axis, dim, size in what]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of([*kinds, Fallback("tp", 2, (("x", 7),), 2, 0.0)], told)  # the last repeats no work
        warn_of(kinds, told)
    assert [str(w.message) for w in caught] == [str(kinds[0]), str(kinds[2])]


def test_inputs_are_named_by_keyword_or_place() -> None:
    batch = tokens(2, 4)
    ids, labels = batch.values()
    assert input_names((), batch) == ["input_ids", "labels"]
    names = input_names((ids, {"a": labels}, 3), {"x": [ids, labels]})
    assert names == ["argument 0", "argument 1['a']", "x[0]", "x[1]"]


def test_the_global_batch_of_a_local_one() -> None:
    args, kwargs = widened((torch.ones(2, 3),), {"x": [torch.ones(2, dtype=torch.int64), torch.tensor(1.0), "name"]}, 4)
    assert [(t.shape, t.dtype, t.device.type) for t in (args[0], *kwargs["x"][:2])] == [
        ((8, 3), torch.float32, "meta"), ((8,), torch.int64, "meta"), ((), torch.float32, "meta"),
    ]  # fmt: skip
    assert kwargs["x"][2] == "name"
    with pytest.raises(InputError, match="different numbers of samples") as error:
        widened((torch.ones(2, 3),), {"positions": torch.ones(1, 3)}, 4)
    assert error.value.found == "argument 0 with 2, positions with 1"


def test_local_inputs_come_split_over_dp(model: Any, plan: Plan) -> None:
    """The program of the global batch, without a slice of its inputs."""
    found = specialize(model, plan, (), tokens(2, 8), inputs="local")
    assert [str(found.assignment.sources[node]) for node in found.captured.inputs] == ["[0:dp]", "[0:dp]"]
    assert [node.meta["val"].shape for node in found.captured.inputs] == [(4, 8), (4, 8)]
    moved = {t.value.node for t in found.sharded.transfers if t.source == found.assignment.sources.get(t.value.node)}
    assert not moved & set(found.captured.inputs)


def test_inputs_are_global_or_local(model: Any) -> None:
    with pytest.raises(InputError, match="inputs is not understood") as error:
        autopar.parallelize(model, inputs="mine")  # type: ignore[arg-type]
    assert error.value.found == "'mine'"


def test_every_known_input_is_padded_on_the_right(model: Any) -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, -100, 7]]), "attention_mask":
        torch.tensor([[0, 1, 1]]), "position_ids": torch.tensor([[0, 0, 1]]), "use_cache": False,
    }  # fmt: skip
    found, length = padded(model, (), batch, (2, 5, 8))
    assert length == 3 and found["use_cache"] is False
    assert {n: t.tolist() for n, t in found.items() if isinstance(t, torch.Tensor)} == {
        "input_ids": [[5, 6, 7, 0, 0]], "labels": [[5, -100, 7, -100, -100]], "attention_mask": [[0, 1, 1, 0, 0]],
        "position_ids": [[0, 0, 1, 2, 3]],
    }  # fmt: skip


def test_a_mask_is_made_unless_it_would_hide_packed_sequences(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])
    found, _ = padded(model, (ids,), {}, [4])
    assert found["attention_mask"].tolist() == [[1, 1, 1, 0]] and found["input_ids"].shape == (1, 4)
    assert padded(model, (), {"input_ids": ids}, [3])[0]["attention_mask"].tolist() == [[1, 1, 1]]
    packed, _ = padded(model, (), {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 0]])}, [4])
    assert "attention_mask" not in packed and packed["position_ids"].tolist() == [[0, 1, 0, 1]]
    with pytest.raises(InputError, match="padding cannot be hidden"):
        padded(bert(), (), {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 0]])}, [4])


def test_labels_of_whole_sequences_stay(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])
    for labels in (torch.tensor([1]), torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[1, 0]])):
        assert padded(model, (), {"input_ids": ids, "labels": labels}, [4])[0]["labels"] is labels


@pytest.mark.parametrize(("changed", "message"), [
    ({"input_ids": torch.ones(2, 9, dtype=torch.int64)}, "a sequence of 9 tokens is longer than the largest bucket"),
    ({"input_ids": None}, "cannot tell how long"),
    ({"pixel_values": torch.ones(2, 3, 4, 4)}, "does not know how to pad pixel_values"),
    ({"attention_mask": torch.ones(2, 1, 8, 8)}, "does not know how to pad attention_mask"),
])  # fmt: skip
def test_what_cannot_be_padded_is_refused(model: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        padded(model, (), {"input_ids": torch.ones(2, 8, dtype=torch.int64), **changed}, [4, 8])


def test_buckets_belong_to_transformers_models_and_size_the_plan(model: Any) -> None:
    found = autopar.plan(model, "cpu:2", workload=autopar.Workload(pad_to=[4, 6]))
    assert found.workload["seq_len"] == 6 and Plan.from_dict(found.to_dict()) == found
    with pytest.raises(WorkloadError, match="pad_to cannot pad the inputs of Sequential"):
        autopar.plan(mlp(), "cpu:2", workload=autopar.Workload(pad_to=[4]), example_inputs=torch.ones(2, 16))


def test_the_cache_is_bounded_counts_and_makes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CACHE_SIZE", 2)
    kept: Cache[int] = Cache()
    made_for: list[str] = []

    def take(key: str) -> int:
        return kept.take(key, CacheEntry(((len(key),),), True), lambda: made_for.append(key) or len(made_for))

    assert [take(key) for key in ("a", "bb", "a", "ccc", "bb")] == [1, 2, 1, 3, 4]
    assert made_for == ["a", "bb", "ccc", "bb"]
    assert kept.entries() == (CacheEntry(((3,),), True, 1), CacheEntry(((2,),), True, 1))
