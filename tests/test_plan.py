"""Plans: what they answer, their way to a file and back, and what is said of a file that is none."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_samples import GIB, MIB, sample_plan

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.hints import Hints
from autopar.plan import PLAN_VERSION, Plan
from autopar.sharding.layout import Layout, Mesh
from autopar.workload import Workload


def test_what_a_plan_answers() -> None:
    plan = sample_plan()
    assert plan.peak_memory == 20 * GIB + 512 * MIB
    assert plan.world_size == 8
    assert plan.mesh == Mesh((("dp", 4), ("tp", 2)))
    assert plan.layout("model.layers.0.mlp.down_proj.weight") == Layout((("dp",), ("tp",)))
    assert str(plan) == (
        "Plan of LlamaForCausalLM on 8 ranks: pp=1, dp=4, cp=1, tp=2, zero=3, 412 ms a step, 20.5 GiB a device"
    )


def test_tp_is_the_innermost_axis_whatever_the_order_of_the_degrees() -> None:
    assert sample_plan(degrees={"tp": 2, "cp": 1, "dp": 4, "pp": 1}).mesh.names == ("dp", "tp")
    assert sample_plan(degrees={"tp": 2, "cp": 2, "dp": 4, "pp": 1}).mesh.names == ("dp", "cp", "tp")


def test_layout_of_an_unknown_parameter_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"did you mean model\.layers\.0\.mlp\.down_proj\.weight") as error:
        sample_plan().layout("model.layers.0.mlp.down.weight")
    assert error.value.found == "model.layers.0.mlp.down.weight"
    assert error.value.expected == "one of the 3 parameters of LlamaForCausalLM"


def test_a_plan_comes_back_equal_from_a_file(tmp_path: Path) -> None:
    plan = sample_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    data = json.loads(path.read_text())
    assert data["version"] == PLAN_VERSION
    assert data["degrees"] == {"pp": 1, "dp": 4, "cp": 1, "tp": 2}
    assert data["schedule"] is None
    assert data["stages"] == [["model.embed_tokens", "model.layers.0", "model.norm"]]
    assert data["parameters"]["model.embed_tokens.weight"] == {
        "shape": [128, 32], "storage": {"dims": [["tp", "dp"], []], "partial": []}, "copy": "use", "gradient": "step",
            "used": []}
    assert data["layers"][1] == {"name": "model.layers.*.mlp", "count": 30, "splits": [["batch", "dp"], ["ffn", "tp"]]}
    assert json.loads(sample_plan().report("json")) == data


def test_what_a_plan_was_made_for_can_be_read_from_it() -> None:
    plan = sample_plan(hints=Hints(tp=2, memory_limit="70GiB", shard={"*.weight": {"tp": 0}}).to_dict())
    assert Plan.from_dict(json.loads(plan.report("json"))) == plan
    assert Cluster.from_dict(plan.cluster) == Cluster.parse("h100-sxm:8")
    assert Workload.from_dict(plan.workload) == Workload(global_batch=64, seq_len=2048)
    assert Hints.from_dict(plan.hints).memory_bytes == 70 * GIB


def test_saving_replaces_the_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    sample_plan(step_time=1.0).save(str(path))
    assert Plan.load(str(path)).step_time == 1.0


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    sample_plan().save(path)

    def refuse(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(PlanError, match="no space left"):
        sample_plan(step_time=1.0).save(path)
    assert Plan.load(path) == sample_plan()
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]


def test_a_saved_plan_can_be_read_by_others(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    sample_plan().save(tmp_path / "plan.json")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1, "a plan has the mode of any new file"


def test_save_into_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="Cannot write the plan"):
        sample_plan().save(tmp_path / "missing" / "plan.json")


def test_load_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="Cannot read the plan"):
        Plan.load(tmp_path / "missing.json")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"not json"])
def test_load_what_is_not_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match="not valid JSON"):
        Plan.load(tmp_path / "plan.json")


def test_load_json_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[1, 2]")
    with pytest.raises(PlanError, match=r"plan is malformed") as error:
        Plan.load(tmp_path / "plan.json")
    assert error.value.expected == "an object"


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a plan's JSON at one place."""
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value
    return change


def drop(*path: str | int) -> Callable[[dict[str, Any]], None]:
    """A change of a plan's JSON that removes one entry."""
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]
    return change


EMBEDDING = ("parameters", "model.embed_tokens.weight")
STORAGE = r"model\.embed_tokens\.weight\.storage is malformed"
BAD = {
    "another version": (put("version", value=PLAN_VERSION + 1), f"version {PLAN_VERSION + 1}"),
    "a missing entry": (drop("degrees"), "plan: degrees is missing"),
    "no version": (drop("version"), "plan: version is missing"),
    "an unknown entry": (put("recomputes", value="x"), r"no key 'recomputes'[\s\S]*did you mean recompute"),
    "a missing entry inside": (drop("collectives", 0, "wire_bytes"), r"plan\.collectives\[0\]: wire_bytes is missing"),
    "an unknown entry inside": (put("layers", 0, "split", value=[]),
                                r"plan\.layers\[0\]: there is no key 'split'[\s\S]*did you mean splits"),
    "a number that is text": (put("step_time", value="fast"), r"plan\.step_time is malformed[\s\S]*a finite number"),
    "a number that is a boolean": (put("zero", value=True), r"plan\.zero is malformed[\s\S]*a whole number"),
    "a fraction of a byte": (put("memory", "gradients", value=0.5), r"plan\.memory\.gradients is malformed"),
    "a time that is not finite": (put("breakdown", "compute", value=float("nan")), r"plan\.breakdown\.compute"),
    "a text that is a number": (put("model", value=3), r"plan\.model is malformed[\s\S]*text"),
    "a list that is none": (put("layers", value={}), r"plan\.layers is malformed[\s\S]*a list"),
    "peaks of another number of ranks": (put("peaks", value=[]), r"plan\.peaks is malformed[\s\S]*the 1 ranks of pp"),
    "an object that is none": (put("memory", value=[]), r"plan\.memory is malformed[\s\S]*an object"),
    "a record that is none": (put("alternatives", 0, value=7), r"plan\.alternatives\[0\] is malformed[\s\S]*an object"),
    "a pair of three": (put("layers", 0, "splits", 0, value=list("abc")), r"splits\[0\] is malformed[\s\S]*list of 2"),
    "a schedule without a pipeline": (put("schedule", value="1f1b"), r"plan\.schedule is malformed[\s\S]*null"),
    "a pipeline without a schedule": (put("degrees", "pp", value=2), r"plan\.schedule is malformed[\s\S]*1f1b"),
    "a schedule that is a number": (put("schedule", value=1), r"plan\.schedule is malformed[\s\S]*text"),
    "stages that are text": (put("stages", value=["model"]), r"plan\.stages\[0\] is malformed[\s\S]*a list"),
    "an unknown axis": (put("degrees", "xp", value=2), r"plan\.degrees is malformed"),
    "experts over what does not divide dp": (
        put("expert_group_size", value=3), r"expert_group_size is malformed[\s\S]*divisor of 4"),
    "experts over what is no part of cp": (
        put("expert_context_size", value=2), r"expert_context_size is malformed[\s\S]*divisor of cp=1"),
    "groups that do not divide dp": (put("zero_group_size", value=3), r"zero_group_size is malformed[\s\S]*dp=4"),
    "a group of ZeRO that is all of dp": (put("zero_group_size", value=4), r"zero_group_size is malformed"),
    "a degree of zero": (put("degrees", "tp", value=0), r"plan\.degrees is malformed"),
    "an unknown kind of ZeRO": (put("zero", value=4), r"plan\.zero is malformed[\s\S]*2 or 3"),
    "a layout over an unknown axis": (put(*EMBEDDING, "storage", "dims", 0, value=["pp"]), STORAGE),
    "a layout that uses an axis twice": (put(*EMBEDDING, "storage", "dims", 1, value=["tp"]), STORAGE),
    "a layout with too many dims": (put(*EMBEDDING, "shape", value=[128]), STORAGE),
    "a layout that does not divide": (put(*EMBEDDING, "shape", value=[100, 32]), STORAGE),
    "a parameter that is owed a sum": (put(*EMBEDDING, "storage", "partial", value=[["tp", "sum"]]), STORAGE),
    "a bad cluster": (drop("cluster", "hosts"), "hosts is missing"),
    "a bad workload": (put("workload", "batch", value=1), "no key 'batch'"),
    "a bad hint": (put("hints", "zero", value=4), "zero=4 is not available"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_malformed_plan_is_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    """The error names the place."""
    data = sample_plan().to_dict()
    change(data)
    with pytest.raises(PlanError, match=message) as error:
        Plan.from_dict(data)
    assert error.value.expected and error.value.found and error.value.change


def test_a_whole_number_is_a_fine_time() -> None:
    data = sample_plan().to_dict() | {"step_time": 2}
    assert Plan.from_dict(data).step_time == 2.0


def test_an_unknown_report_format() -> None:
    with pytest.raises(PlanError, match="no report format 'pdf'"):
        sample_plan().report("pdf")
    with pytest.raises(PlanError, match="did you mean text"):
        sample_plan().report("txt")
