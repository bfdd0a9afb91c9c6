"""Hints: what they accept, what they match, and one named error for everything that cannot be kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar import Cluster
from autopar.errors import HintError
from autopar.hints import Hints, check_hints, matching, parse_bytes
from autopar.solver.candidates import Limits, all_degrees

SHAPES = {
    "model.embed_tokens.weight": (128, 32),
    "model.layers.0.mlp.up_proj.weight": (96, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 96),
    "model.layers.1.mlp.up_proj.weight": (96, 32),
    "model.layers.1.mlp.down_proj.weight": (32, 96),
    "model.norm.weight": (32,),
    "scale": (),
}
DOWN = "model.layers.*.mlp.down_proj.weight"


@pytest.mark.parametrize(("text", "size"), [
    (4096, 4096), ("4096", 4096), ("4096B", 4096), ("70GiB", 70 * 2**30), ("512MB", 512_000_000), ("1TB", 10**12),
    ("80 GiB", 80 * 2**30), ("1.5KiB", 1536), ("2kB", 2000), ("1gb", 1_000_000_000), ("1gib", 2**30), (" 1TiB ", 2**40),
])
def test_sizes_in_bytes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size
    assert Hints(memory_limit=text).memory_bytes == size


@pytest.mark.parametrize("text", ["", "GiB", "70G", "70 gigabytes", "-1GiB", "0", "1e9", "0.1B", 0, -5, True, 1.5, []])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(HintError, match="number of bytes") as error:
        parse_bytes(text)
    assert "GiB" in error.value.expected and error.value.found == repr(text)


def test_hints_come_back_equal_from_their_table() -> None:
    hints = Hints(dp=2, tp=4, zero=3, memory_limit="70GiB", shard={DOWN: {"tp": 1, "dp": 0}})
    assert hints.to_dict() == {"dp": 2, "tp": 4, "zero": 3, "memory_limit": "70GiB",
                               "shard": {DOWN: {"tp": 1, "dp": 0}}}
    assert Hints.from_dict(hints.to_dict()) == hints
    assert Hints().to_dict() == {} and Hints.from_dict({}) == Hints()


def test_hints_do_not_follow_changes_of_the_mapping_they_were_made_from() -> None:
    shard = {DOWN: {"tp": 1}}
    hints = Hints(shard=shard)
    shard[DOWN]["tp"] = 0
    assert hints.shard == {DOWN: {"tp": 1}}


def test_an_unknown_hint_in_a_table() -> None:
    with pytest.raises(HintError, match="did you mean memory_limit"):
        Hints.from_dict({"memory": "70GiB"})


@pytest.mark.parametrize(("pattern", "name", "matches"), [
    ("model.norm.weight", "model.norm.weight", True),
    ("model.norm.weight", "model.norm.weights", False),
    ("model.norm", "model.norm.weight", False),
    ("*", "lm_head.weight", True),
    ("*.weight", "model.layers.3.mlp.down_proj.weight", True),
    ("*.weight", "weight", False),
    (DOWN, "model.layers.3.mlp.down_proj.weight", True),
    (DOWN, "model.layers.3.experts.5.mlp.down_proj.weight", True),
    (DOWN, "model.layers.mlp.down_proj.weight", False),
    ("model.layers.1*.weight", "model.layers.12.weight", True),
    ("model.layers.1*.weight", "model.layers.1.weight", False),
    ("modelxnorm", "model.norm", False),
    ("model.norm", "modelxnorm", False),
    ("w[0]", "w[0]", True),
    ("w?", "wx", False),
])
def test_a_star_stands_for_one_character_or_more(pattern: str, name: str, matches: bool) -> None:
    assert matching(Hints(shard={pattern: {"tp": 0}}), name) == ({"tp": 0} if matches else {})


def test_patterns_that_match_one_parameter_are_taken_together() -> None:
    hints = Hints(shard={"*.weight": {"dp": 0}, DOWN: {"tp": 1, "dp": 0}})
    assert matching(hints, "model.layers.0.mlp.down_proj.weight") == {"dp": 0, "tp": 1}
    assert matching(hints, "model.norm.weight") == {"dp": 0}
    assert matching(Hints(), "model.norm.weight") == {}


def test_a_tied_parameter_is_matched_by_any_of_its_names() -> None:
    hints = Hints(shard={"lm_head.weight": {"tp": 0}})
    assert matching(hints, "model.embed_tokens.weight", "lm_head.weight") == {"tp": 0}


@pytest.mark.parametrize("hints", [
    Hints(), Hints(dp=4, tp=2), Hints(tp=8), Hints(dp=8, zero=3), Hints(zero=0), Hints(memory_limit=1),
    Hints(tp=4, shard={DOWN: {"tp": 1}}), Hints(shard={DOWN: {"tp": 0, "dp": 1}}),
    Hints(zero=3, dp=4, tp=2, shard={DOWN: {"dp": 1, "tp": 1}}),
])
def test_hints_that_can_be_kept(hints: Hints) -> None:
    """None is refused, and none is changed on the way to a plan."""
    check_hints(hints, 8, SHAPES)
    assert Hints.from_dict(hints.to_dict()) == hints


BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "a degree of zero": ({"dp": 0}, "dp=0 is no degree"),
    "a degree that is text": ({"tp": "2"}, "tp='2' is no degree"),
    "a degree that is a boolean": ({"tp": True}, "tp=True is no degree"),
    "ZeRO 4": ({"zero": 4}, "zero=4 is not available"),
    "resharding without ZeRO-3": ({"zero": 2, "reshard_after_forward": False}, "needs zero=3"),
    "ZeRO True": ({"zero": True}, "zero=True is not available"),
    "a bad memory limit": ({"memory_limit": "lots"}, "'lots'"),
    "an unknown axis": ({"shard": {DOWN: {"pp": 1}}}, "unknown axis 'pp'"),
    "a negative dim": ({"shard": {DOWN: {"tp": -1}}}, "splits no dim over tp"),
    "a dim that is text": ({"shard": {DOWN: {"tp": "1"}}}, "splits no dim over tp"),
    "a shard that is a list": ({"shard": [DOWN]}, "shard is malformed"),
    "a shard without axes": ({"shard": {DOWN: 1}}, "is malformed"),
    "a shard by number": ({"shard": {3: {"tp": 1}}}, "is malformed"),
}


@pytest.mark.parametrize(("values", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values_are_refused_when_hints_are_made(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HintError, match=message) as error:
        Hints(**values)
    assert error.value.expected and error.value.found and error.value.change


@pytest.mark.parametrize(("values", "first", "second"), [
    ({"tp": 1, "shard": {DOWN: {"tp": 0}}}, "tp=1", f"shard['{DOWN}']"),
    ({"dp": 1, "shard": {DOWN: {"dp": 0}}}, "dp=1", f"shard['{DOWN}']"),
    ({"zero": 0, "shard": {DOWN: {"dp": 0}}}, "zero=0", f"shard['{DOWN}']"),
])
def test_contradictions_name_both_hints(values: dict[str, Any], first: str, second: str) -> None:
    with pytest.raises(HintError, match="contradict each other") as error:
        Hints(**values)
    assert first in error.value.what and second in error.value.what


BAD_FOR_THE_MODEL: dict[str, tuple[int, Hints, str]] = {
    "degrees of too few ranks": (8, Hints(pp=1, dp=2, cp=1, tp=2),
                                   r"pp=1, dp=2, cp=1, tp=2 do not match a cluster of 8 ranks"),
    "a degree that does not divide": (8, Hints(tp=3), r"tp=3 does not divide a cluster of 8[\s\S]*one of 1, 2, 4, 8"),
    "parts of experts that do not divide": (8, Hints(etp=3), r"The hint etp=3 does not divide a cluster of 8"),
    "a degree above the ranks": (8, Hints(dp=16), "dp=16 does not divide"),
    "a pattern with a misspelt name": (
        8, Hints(shard={"model.layers.*.mlp.down.weight": {"tp": 1}}),
        r"matches no parameter[\s\S]*did you mean model\.layers\.\*\.mlp\.down_proj\.weight"),
    "a misspelt name": (8, Hints(shard={"model.layers.0.mlp.down.weight": {"tp": 1}}),
                        r"did you mean model\.layers\.0\.mlp\.down_proj\.weight"),
    "a pattern like nothing": (8, Hints(shard={"zzz": {"tp": 1}}),
                               r"there are: model\.embed_tokens\.weight[\s\S]*and 2 more"),
    "a dim that does not exist": (8, Hints(shard={"model.norm.weight": {"tp": 1}}),
                                  r"dim 1 of model\.norm\.weight over tp[\s\S]*from 0 to 0[\s\S]*\(32,\)"),
    "a dim of a scalar": (8, Hints(shard={"scale": {"tp": 0}}), "it is a scalar"),
    "a dim that does not divide": (64, Hints(tp=64, shard={DOWN: {"tp": 1}}),
                                   r"in 64 pieces \(tp\)[\s\S]*64 divides[\s\S]*96 in the shape \(32, 96\)"),
    "a dim that does not divide by what dp leaves": (64, Hints(pp=1, dp=1, cp=1, shard={DOWN: {"tp": 1}}),
                                                     r"in 64 pieces \(tp\)"),
    "a dim that two axes do not divide": (64, Hints(dp=8, tp=8, shard={DOWN: {"dp": 1, "tp": 1}}),
                                          r"in 64 pieces \(dp x tp\)"),
    "two patterns that disagree": (8, Hints(shard={DOWN: {"tp": 1}, "*.weight": {"tp": 0}}),
                                   r"disagree on how tp splits model\.layers\.0[\s\S]*dim 1 in[\s\S]*dim 0 in"),
    "an axis that dp leaves no ranks": (64, Hints(dp=64, shard={DOWN: {"tp": 1}}),
                                        r"over tp, which has degree 1[\s\S]*dp=64 on 64 ranks"),
    "an axis on one rank": (1, Hints(shard={DOWN: {"tp": 1}}), "which has degree 1"),
}


@pytest.mark.parametrize(("ranks", "hints", "message"), BAD_FOR_THE_MODEL.values(), ids=BAD_FOR_THE_MODEL)
def test_what_a_model_or_cluster_cannot_keep(ranks: int, hints: Hints, message: str) -> None:
    with pytest.raises(HintError, match=message) as error:
        check_hints(hints, ranks, SHAPES)
    assert error.value.expected and error.value.found and error.value.change


def test_axes_are_named_in_any_order() -> None:
    """Sets, tuples and lists are the same hint, which comes back from its table, as from a file."""
    hints = Hints(within_host={"tp", "cp"}, require=["cp"], forbid=("pp",))
    assert hints == Hints(within_host=["cp", "tp"], require={"cp"}, forbid={"pp"})
    assert hints.to_dict() == {"within_host": ["cp", "tp"], "require": ["cp"], "forbid": ["pp"]}
    assert Hints.from_dict(hints.to_dict()) == hints


@pytest.mark.parametrize(("values", "found"), [
    ({"require": {"ep"}}, "unknown axis 'ep'"), ({"forbid": "pp"}, "no axes"), ({"within_host": []}, "no axes"),
    ({"require": {"cp"}, "forbid": {"cp"}}, "contradict"), ({"require": {"tp"}, "tp": 1}, "contradict"),
    ({"forbid": {"pp"}, "pp": 2}, "contradict"),
])  # fmt: skip
def test_axes_that_cannot_be_kept(values: dict[str, Any], found: str) -> None:
    with pytest.raises(HintError, match=found):
        Hints(**values)


def test_forbidden_axes_leave_degrees() -> None:
    """What is forbidden has degree 1, in what the cluster leaves too."""
    with pytest.raises(HintError, match="splits a dim over tp, which has degree 1"):
        check_hints(Hints(forbid={"pp", "cp"}, dp=4, shard={DOWN: {"tp": 1}}), 4, SHAPES)


def test_meshes_that_hints_leave() -> None:
    """Of 2 hosts of 4 devices, by hand: tp innermost, then cp."""
    cluster, limits = Cluster.parse("h100-sxm:2x4"), Limits(8, 8, 8, parts=True)

    def meshes(**hints: Any) -> set[tuple[int, int, int, int]]:
        return {(d.pp, d.dp, d.cp, d.tp) for d in all_degrees(cluster, Hints(**hints), limits)}

    assert len(meshes()) == 20, "2^3 over four axes"
    assert meshes(forbid={"pp", "cp"}) == {(1, 8, 1, 1), (1, 4, 1, 2), (1, 2, 1, 4), (1, 1, 1, 8)}
    assert meshes(require={"cp", "tp"}, forbid={"pp"}) == {(1, 2, 2, 2), (1, 1, 4, 2), (1, 1, 2, 4)}
    assert meshes(require={"cp", "tp"}, forbid={"pp"}, within_host={"tp"}) == {(1, 2, 2, 2), (1, 1, 4, 2), (1, 1, 2, 4)}
    assert meshes(require={"cp", "tp"}, forbid={"pp"}, within_host={"cp"}) == {(1, 2, 2, 2)}
    assert meshes(forbid={"pp", "cp"}, within_host={"tp"}) == {(1, 8, 1, 1), (1, 4, 1, 2), (1, 2, 1, 4)}


def test_a_plan_keeps_axes() -> None:
    """A model that would not be split so is; what leaves no mesh names the hints."""
    model, batch = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)), torch.zeros(8, 16)
    plan = autopar.plan(model, "h100-sxm:2x2", example_inputs=batch, hints=Hints(require={"tp"}, within_host={"tp"}))
    assert plan.degrees["tp"] == 2 and autopar.plan(model, "h100-sxm:2x2", example_inputs=batch).degrees["tp"] == 1
    assert plan.hints == {"within_host": ["tp"], "require": ["tp"]}
    with pytest.raises(HintError, match="without any one of them"):
        autopar.plan(model, "h100-sxm:2x1", example_inputs=batch, hints=Hints(require={"tp"}, within_host={"tp"}))
