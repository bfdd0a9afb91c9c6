"""The command line: every command with its text and its JSON, and every error that a user can cause.

``ERRORS`` and docs/errors.md list the same errors; each is produced here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from test_distributed import ROOT
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from autopar import Cluster, Hints, Plan, Workload
from autopar import plan as make_plan
from autopar.cli import app
from autopar.cli.models import make_model
from autopar.cost_model.hardware import device_names
from autopar.runtime import verify as comparing

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
#: Most plans here are asked for so.
ASKED = ("plan", "llama", "--cluster", "cpu:4", "--batch", "8", "--seq", "16")
MODELS = """\
import torch

def mlp():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)), torch.zeros(8, 16)

def alone():
    return mlp()[0]

def number():
    return 3

def broken():
    raise RuntimeError("no luck")
"""


@dataclass(frozen=True)
class Ran:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """What it printed as JSON."""
        return json.loads(self.out)


def run(*args: str | Path) -> Ran:
    """Run a command in this process; an exception other than that of an exit code is a bug."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def good(*args: str | Path) -> Ran:
    """Run a command that ends well."""
    ran = run(*args)
    assert ran.code == 0, ran.err + ran.out
    return ran


def llama_config() -> LlamaConfig:
    """The config of the tiny Llama, as one writes it in Python."""
    return LlamaConfig(**{key: value for key, value in LLAMA.items() if key not in ("architectures", "model_type")})


def write_files(folder: Path) -> None:
    """A tiny Llama, models as functions, and what is wrong in all kinds of ways."""
    (folder / "llama").mkdir()
    (folder / "empty").mkdir()
    configs = {
        "llama/config.json": LLAMA,
        "plain.json": {key: value for key, value in LLAMA.items() if key != "architectures"},
        "other_class.json": {**LLAMA, "architectures": ["LlamaForEverything"]},
        "other_type.json": {"model_type": "llamma"},
        "odd.json": {**LLAMA, "hidden_size": 33},
        "huge.json": {**LLAMA, "hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 8},
        "vision.json": {"model_type": "vit"},
        "speech.json": {"architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32,
                        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        "list.json": [],
    }  # fmt: skip
    texts = {name: json.dumps(config) for name, config in configs.items()}
    texts |= {"models_here.py": MODELS, "broken_here.py": "import nonesuch_at_all", "broken.json": "{", "train.py": ""}
    texts |= {f"{name}.yaml": text for name, text in HINTS.items()}
    texts |= {"broken.toml": "hosts = ", "short.toml": "hosts = 1\ndevices_per_host = 2\n",
              "wrong.toml": 'preset = "cpu"\nhosts = 1\ndevices_per_host = 2\nracks = 3\n'}  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


HINTS = {
    "dp2_tp2": "# both are degrees\ndp: 2\ntp: 2\n",
    "tp4": "tp: 4\n",
    "pp2": "pp: 2\nschedule: 1f1b\nmicro_batch_size: 2\n",
    "dp4": "tp: 1\ndp: 4\n",
    "unknown": "tp: 2\nzeor: 3\n",
    "type": "tp: 2\nzero: three\n",
    "axis": "tp: 2\nshard:\n  lm_head.weight: {tp: 0}\n  model.norm.weight:\n    tq: 0\n",
    "pattern": "tp: 2\nshard:\n  model.layers.*.mlp.down_prj.weight: {tp: 1}\n",
    "contradiction": "tp: 1\nzero: 1\nshard:\n  lm_head.weight: {tp: 0}\n",
    "divides": "zero: 1\ntp: 3\n",
    "no_yaml": "tp: [1\n",
    "list": "- tp\n",
    "twice": "tp: 2\ndp: 2\ntp: 2\n",
    "number": "1: 2\n",
    "tag": "zero: 1\nrecompute: !!python/name:os.system\n",
    "memory": "memory_limit: 1kB\n",
    "cp": "cp: 3\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, hints, three plans made by the command line, and plans that are broken."""
    made = tmp_path_factory.mktemp("cli")
    write_files(made)
    before = Path.cwd()
    os.chdir(made)
    try:
        good(*ASKED, "--hints", "tp4.yaml", "-o", "plan.json", "--timeline", "step.json")
        good(*ASKED, "--hints", "dp2_tp2.yaml", "-o", "other.json")
        good("plan", "plain.json", "--cluster", "cpu:2", "--batch", "8", "--seq", "16", "--hints", "pp2.yaml",
             "-o", "pipeline.json")  # fmt: skip
        good("plan", "models_here:mlp", "--cluster", "cpu:2", "-o", "mlp.json")
    finally:
        os.chdir(before)
    table = json.loads((made / "other.json").read_text())
    wrong = {
        "old": {**table, "version": 1},
        "degrees": {**table, "degrees": {**table["degrees"], "dp": 1, "tp": 2}},
        "by_hand": {**table, "timing": None},
        "less": {key: value for key, value in table.items() if key != "gap"},
    }
    for name, content in wrong.items():
        (made / f"{name}.json").write_text(json.dumps(content))
    hosts = Cluster(Cluster.parse("cpu:2").device, 2, 2).to_dict()
    (made / "hosts.json").write_text(json.dumps({**table, "cluster": hosts}))
    return made


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as the current one; what its modules are called is forgotten afterwards."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


def test_plan_is_what_the_api_plans(here: Path) -> None:
    """The file, the report and the trace are those of `autopar.plan` for the same question."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config())
    asked = Workload(global_batch=8, seq_len=16)
    expected = make_plan(model, "cpu:4", workload=asked, hints=Hints(dp=2, tp=2))
    found = Plan.load("other.json")
    assert found == Plan.from_dict(json.loads(expected.report("json")))
    assert found.hints == {"dp": 2, "tp": 2} and found.degrees["dp"] == found.degrees["tp"] == 2
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}


def test_plan_prints_the_report_or_itself(here: Path) -> None:
    ran = good("plan", "models_here:mlp", "--cluster", "cpu:2", "--optimizer", "sgd", "--dtype", "bfloat16", "--json")
    workload = Plan.from_dict(ran.data).workload
    assert (workload["optimizer"], workload["param_dtype"], ran.err) == ("sgd", "bfloat16", "")
    ran = good("plan", "models_here:mlp", "--cluster", "cpu:2", "--compile", "--search-seconds", "5", "-o", "new.json")
    assert ran.out.rstrip() == Plan.load("new.json").report() and "new.json" in ran.err


@pytest.mark.parametrize(("masters", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_parameters_are_masters_in_mixed_precision(here: Path, masters: bool, dtype: torch.dtype) -> None:
    """A model of a config has the config's dtype, with --dtype float32; it takes no memory."""
    Path("half.json").write_text(json.dumps({**LLAMA, "dtype": "bfloat16"}))
    model, inputs = make_model("half.json", masters)
    assert type(model) is LlamaForCausalLM and inputs is None
    assert {(p.dtype, p.is_meta) for p in model.parameters()} == {(dtype, True)}


def test_verify_takes_weights_that_are_there(here: Path) -> None:
    torch.manual_seed(5)
    original = LlamaForCausalLM(llama_config())
    original.save_pretrained("saved")
    model, _ = make_model("saved", masters=True, weights=True)
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.state_dict().items())


def test_report(here: Path) -> None:
    plan = Plan.load("plan.json")
    assert good("report", "plan.json").out == plan.report() + "\n"
    assert Plan.from_dict(good("report", "plan.json", "--json").data) == plan


def test_explain(here: Path) -> None:
    expected = Plan.load("other.json").explain("model.layers.*.mlp")
    assert good("explain", "other.json", "model.layers.*.mlp").out == f"{expected}\n"
    data = good("explain", "other.json", "model.layers.*.mlp", "--json").data
    assert data["summary"] == expected.summary
    assert [[v["choice"] for v in options] for options in data["verdicts"]] == [
        [v.choice for v in options] for options in expected.verdicts
    ]


def test_diff(here: Path) -> None:
    ran = good("diff", "plan.json", "other.json")
    assert ran.out == f"{Plan.load('plan.json').diff(Plan.load('other.json'))}\n"
    data = good("diff", "plan.json", "other.json", "--json").data
    assert {"hints dp", "hints tp"} <= {d["what"] for d in data["differences"] if d["group"] == "given"}
    assert good("diff", "plan.json", "plan.json", "--json").data["differences"] == []


def test_simulate(here: Path) -> None:
    """Every rank of the pipeline takes the whole step; the one that waits least has the plan's breakdown."""
    plan = Plan.load("pipeline.json")
    data = good("simulate", "pipeline.json", "--timeline", "pipeline_step.json", "--json").data
    assert plan.schedule == "1f1b" and data["micro_batches"] == plan.num_micro_batches == 4
    assert data["step_time"] == pytest.approx(plan.step_time, rel=1e-4)
    assert [rank["stages"] for rank in data["ranks"]] == [[0], [1]]
    for rank in data["ranks"]:
        assert sum(rank["seconds"].values()) == pytest.approx(data["step_time"], rel=1e-9)
    assert data["ranks"][data["slowest"]]["seconds"] == pytest.approx(plan.breakdown, rel=1e-4)
    assert data["ranks"][data["slowest"]]["seconds"]["bubble"] == min(r["seconds"]["bubble"] for r in data["ranks"])
    busiest = max(data["stages"], key=lambda stage: stage["forward"] + stage["backward"])
    assert busiest["rank"] == data["slowest"] and 0 < busiest["forward"] < busiest["backward"]
    assert "waits least" in good("simulate", "pipeline.json").out
    assert Path("pipeline_step.json").read_text()


def test_estimate_has_the_plan_and_those_that_lost_a_line_each(here: Path) -> None:
    plan = Plan.load("mlp.json")
    data = good("estimate", "models_here:mlp", "--cluster", "cpu:2", "--json").data
    chosen, *lost = data["plans"]
    assert (chosen["degrees"], chosen["zero"], chosen["recompute"]) == (plan.degrees, plan.zero, plan.recompute)
    assert (chosen["step_time"], chosen["peak_memory"]) == (plan.step_time, plan.peak_memory)
    assert chosen["reason"] == "chosen"
    assert lost and [p["reason"] for p in lost] == [a.reason for a in plan.alternatives]
    assert [p["step_time"] for p in lost] == [a.step_time for a in plan.alternatives]
    title, header, *lines = good("estimate", "models_here:mlp", "--cluster", "cpu:2").out.splitlines()
    assert "Sequential on cpu:1x2" in title and header.split()[:2] == ["degrees", "storage"]
    assert len(lines) == len(data["plans"]) and lines[0].endswith("chosen")
    assert all(line.endswith(p["reason"]) for line, p in zip(lines[1:], lost, strict=True))


def test_verify(here: Path) -> None:
    """All four ranks of dp 2 x tp 2, each with a part of the work, and the loss of the weights that the seed gives."""
    data = good("verify", "llama", "other.json", "--seed", "3", "--json").data
    assert data["ok"] and data["world_size"] == 4 and data["max_error"] <= data["bound"] == 1e-5
    assert data["flops_share"] <= 1.1 / 4 and {c["axis"] for c in data["collectives"]} >= {"dp", "tp"}
    torch.manual_seed(3)
    model = LlamaForCausalLM(llama_config())
    generator = torch.Generator().manual_seed(0)  # as real_batch draws both
    ids, labels = (torch.randint(0, 64, (8, 16), generator=generator) for _ in range(2))
    assert data["loss"] == pytest.approx(model(input_ids=ids, labels=labels).loss.item(), rel=1e-5)


def test_verify_ends_with_1_if_numbers_differ(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = comparing.run_sharded

    def doubled(*args: Any) -> Any:
        """A sharded run whose gradients are twice too large."""
        found, traffic = original(*args)
        return replace(found, gradients=[{n: 2 * g for n, g in step.items()} for step in found.gradients]), traffic

    monkeypatch.setattr(comparing, "run_sharded", doubled)
    ran = run("verify", "models_here:mlp", "mlp.json")
    assert ran.code == 1 and ran.out.startswith("DIFFERENT")


def test_clusters(here: Path) -> None:
    """All presets with their numbers, and the source of each."""
    text = good("clusters").out
    data = good("clusters", "--json").data
    assert list(data) == device_names() and all(entry["source"] and entry["sources"] for entry in data.values())
    for name, entry in data.items():
        (row,) = [line for line in text.splitlines() if line.split()[:1] == [name] and "GiB" in line]
        assert f"{entry['memory_bandwidth_gbs']:.0f}" in row.split()
        assert entry["source"].split()[0] in text
    assert data["h100-sxm"]["memory_gib"] == 79.1


def test_calibrate(here: Path) -> None:
    """What was measured is a cluster to plan for."""
    ran = good("calibrate", "--seconds", "0.2", "-o", "here.toml", "--json")
    found = Cluster.load("here.toml")
    assert found == Cluster.from_dict(ran.data) and found.size == 1
    assert found.device.spec["sources"]["peak_tflops"].startswith("measured")
    plan = Plan.from_dict(good("plan", "models_here:mlp", "--cluster", "here.toml", "--json").data)
    assert plan.cluster == found.to_dict()


LAUNCH = f"{sys.executable} -m torch.distributed.run"


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (["plan.json", "--", "train.py"], "--nnodes 1 --nproc-per-node 4 --standalone train.py"),
        (["plan.json", "--nproc-per-node", "2", "--nnodes", "2", "--rdzv-endpoint", "a:1", "--", "train.py", "--json"],
         "--nnodes 2 --nproc-per-node 2 --rdzv-endpoint a:1 train.py --json"),
        (["hosts.json", "--master-addr", "a", "--", "train.py", "a b", "--", "c"],
         "--nnodes 2 --nproc-per-node 2 --master-addr a train.py 'a b' -- c"),
        (["plan.json", "-m", "--", "package.train"], "--nnodes 1 --nproc-per-node 4 --standalone -m package.train"),
    ],
)  # fmt: skip
def test_launch_command(here: Path, args: list[str], command: str) -> None:
    """Sizes of the plan's cluster, the options of torchrun, and after ``--`` all that is the script's own."""
    assert good("launch", "--dry-run", *args).out == f"{LAUNCH} {command}\n"


def test_launch_runs_what_it_prints(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: ran.append([path, *command]))
    result = good("launch", "plan.json", "--", "train.py")
    expected = good("launch", "plan.json", "--dry-run", "--json", "--", "train.py").data["command"]
    assert ran == [[sys.executable, *expected]] and " ".join(expected) in result.err and result.out == ""


@dataclass(frozen=True)
class Case:
    """A command and the error that it ends with: its class and what it says, … standing for what differs."""

    kind: str
    what: str
    command: str
    found: str = ""


PLAN = "plan llama --cluster cpu:4 --batch 8 --seq 16"
ERRORS = [
    Case("ClusterError", "There is no device preset …", "plan llama --cluster h100sxm:8", "h100sxm"),
    Case("ClusterError", "Cannot read … as a cluster.", "plan llama --cluster h100-sxm"),
    Case("ClusterError", "Cannot read the cluster file …", "plan llama --cluster nowhere.toml", "nowhere.toml"),
    Case("ClusterError", "… is not valid TOML.", "plan llama --cluster broken.toml"),
    Case("ClusterError", "…: neither preset nor device is given.", "plan llama --cluster short.toml"),
    Case("ClusterError", "…: there is no key …", "plan llama --cluster wrong.toml", "racks"),
    Case("ClusterError", "Cannot write the cluster to …", "calibrate --seconds 0.1 -o nowhere/here.toml"),
    Case("CommandError", "There is no model …", "plan nowhere --cluster cpu:4"),
    Case("CommandError", "There is no config.json in …", "plan empty --cluster cpu:4", "an empty directory"),
    Case("CommandError", "… is not a config of a model that transformers has.", "plan broken.json --cluster cpu:4"),
    Case("CommandError", "… is not a config of a model that transformers has.", "plan other_type.json --cluster cpu:4",
         "llamma"),
    Case("CommandError", "… is not a config of a model that transformers has.", "plan odd.json --cluster cpu:4", "33"),
    Case("CommandError", "… is not a config of a model that transformers has.", "plan list.json --cluster cpu:4"),
    Case("CommandError", "transformers … has no model …", "plan other_class.json --cluster cpu:4", "ForEverything"),
    Case("CommandError", "The config in … names no model.", "plan vision.json --cluster cpu:4", "ViTConfig"),
    Case("CommandError", "The module … cannot be imported.", "plan nonesuch:model --cluster cpu:4", "nonesuch"),
    Case("CommandError", "The module … cannot be imported.", "plan broken_here:model --cluster cpu:4",
         r"nonesuch_at_all.*broken_here.py, line 1"),
    Case("CommandError", "… has no function …", "plan models_here:mpl --cluster cpu:4"),
    Case("CommandError", "…() of … failed.", "plan models_here:broken --cluster cpu:4",
         r"RuntimeError: no luck .*models_here.py, line 13"),
    Case("CommandError", "… returns no model.", "plan models_here:number --cluster cpu:4", "int: 3"),
    Case("CommandError", "… returns no example inputs.", "plan models_here:alone --cluster cpu:4", "Sequential"),
    Case("CommandError", "… is too large to be simulated here.", "verify huge.json other.json", "TiB"),
    Case("CommandError", "There is no script …", "launch plan.json --dry-run -- nowhere.py"),
    Case("CommandError", "It is not said where the … hosts meet.", "launch hosts.json --dry-run -- train.py"),
    Case("WorkloadError", "A workload cannot have …", "plan llama --cluster cpu:4 --batch 0", "0"),
    Case("WorkloadError", "A workload cannot have …", "plan llama --cluster cpu:4 --dtype int8", "int8"),
    Case("WorkloadError", "There is no optimizer … in the memory model.", f"{PLAN} --optimizer adan"),
    Case("WorkloadError", "… does not take input_ids and labels, so no batch can be made up",
         "plan speech.json --cluster cpu:4"),
    Case("HintError", "Cannot read the hints …", f"{PLAN} --hints nowhere.yaml", "nowhere.yaml"),
    Case("HintError", "…: This is not YAML.", f"{PLAN} --hints no_yaml.yaml"),
    Case("HintError", "…: Hints are a mapping.", f"{PLAN} --hints list.yaml"),
    Case("HintError", "…: … is given twice.", f"{PLAN} --hints twice.yaml", "line 1"),
    Case("HintError", "…: A key is no text.", f"{PLAN} --hints number.yaml"),
    Case("HintError", "…: A value cannot be read.", f"{PLAN} --hints tag.yaml"),
    Case("HintError", "…: There is no hint …", f"{PLAN} --hints unknown.yaml", "zeor"),
    Case("HintError", "…: zero=… is not available.", f"{PLAN} --hints type.yaml", "three"),
    Case("HintError", "…: The hint shard[…] names an unknown axis …", f"{PLAN} --hints axis.yaml", "tq"),
    Case("HintError", "…: The hint shard[…] matches no parameter.", f"{PLAN} --hints pattern.yaml"),
    Case("HintError", "…: The hints … and … contradict each other.", f"{PLAN} --hints contradiction.yaml"),
    Case("HintError", "…: The hint … does not divide a cluster of … ranks.", f"{PLAN} --hints divides.yaml"),
    Case("HintError", "…: The hint dp=… leaves ranks without a sample.",
         "plan llama --cluster cpu:4 --batch 2 --seq 16 --hints dp4.yaml", "global_batch=2"),
    Case("HintError", "…: The hint cp=… does not divide the sequence.",
         "plan llama --cluster cpu:3 --batch 3 --seq 16 --hints cp.yaml", "seq_len=16"),
    Case("InfeasibleError", "no plan fits into the memory of a device",
         "plan models_here:mlp --cluster cpu:2 --hints memory.yaml", "too many"),
    Case("PlanError", "Cannot read the plan …", "report nowhere.json"),
    Case("PlanError", "… is not valid JSON.", "report broken.json"),
    Case("PlanError", "…: plan: … is missing.", "report less.json"),
    Case("PlanError", "…: plan is malformed.", "report list.json"),
    Case("PlanError", "…: plan.degrees is malformed.", "report degrees.json"),
    Case("PlanError", "…: The plan has version …", "report old.json"),
    Case("PlanError", "The plan does not say what its step consists of.", "simulate by_hand.json"),
    Case("PlanError", "The plan has nothing to explain of …", "explain other.json model.layers.*.mpl"),
    Case("PlanError", "The plans are of different models.", "diff plan.json mlp.json"),
    Case("PlanError", "The plan is for … ranks.", "launch plan.json --dry-run --nproc-per-node 2 -- train.py", "1 x 2"),
    Case("PlanError", "Cannot write the plan to …", "plan models_here:mlp --cluster cpu:2 -o nowhere/plan.json"),
    Case("PlanError", "Cannot write the report to …", "report other.json --html nowhere/report.html"),
    Case("PlanError", "Cannot write the timeline to …", "simulate other.json --timeline nowhere/step.json"),
]  # fmt: skip


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.command)
def test_every_error(here: Path, case: Case) -> None:
    """Exit code 1, the error with all its parts as JSON, and no traceback."""
    ran = run(*case.command.split(" -- ")[0].split(), "--json", *_script(case.command))
    error = ran.data["error"]
    assert ran.code == 1 and error["kind"] == case.kind, error
    assert re.fullmatch(".+".join(map(re.escape, case.what.rstrip("…").split("…"))) + ".*", error["what"]), error
    assert re.search(case.found, error["found"], re.DOTALL), error
    assert all(error[part] for part in ("what", "expected", "found", "change")), error


def _script(command: str) -> list[str]:
    _, dashes, script = command.partition(" -- ")
    return ["--", *script.split()] if dashes else []


@pytest.mark.parametrize(
    ("name", "lines", "change"),
    [
        ("unknown", "line 2", "zero"),
        ("type", "line 2", "zero"),
        ("axis", "line 5", "tp"),
        ("pattern", "line 3", r"model\.layers\.\*\.mlp\.down_proj\.weight"),
        ("contradiction", "lines 1 and 4", "tp"),
        ("divides", "line 2", "degree"),
        ("twice", "line 3", "remove"),
        ("list", "line 1", "hint"),
        ("tag", "line 2", "quotes"),
        ("no_yaml", "line 2", "line"),
    ],
)
def test_errors_of_hints_name_the_line(here: Path, name: str, lines: str, change: str) -> None:
    """The line that is wrong, not others, and what may have been meant."""
    error = run(*ASKED, "--hints", f"{name}.yaml", "--json").data["error"]
    assert error["what"].startswith(f"{name}.yaml, {lines}: "), error
    assert re.search(change, error["change"]), error


def test_hints_of_a_file_from_python(here: Path) -> None:
    Path("whole.yaml").write_text(
        "dp: 2\nzero: 3\nreshard_after_forward: no\nmemory_limit: 70GiB\nrecompute: none\nschedule: null\n"
        "shard:\n  'model.layers.*.mlp.down_proj.weight': {tp: 1}\n"
    )
    assert Hints.load("whole.yaml") == Hints(
        dp=2, zero=3, reshard_after_forward=False, memory_limit="70GiB", recompute="none",
        shard={"model.layers.*.mlp.down_proj.weight": {"tp": 1}},
    )  # fmt: skip
    Path("none.yaml").write_text("# nothing is asked for\n")
    assert Hints.load("none.yaml") == Hints()


def test_an_error_for_people(here: Path) -> None:
    ran = run("plan", "llama", "--cluster", "h100sxm:8")
    first, *rest = ran.err.splitlines()
    assert ran.code == 1 and ran.out == "" and first == "ClusterError: There is no device preset 'h100sxm'."
    assert [line.split(":")[0].strip() for line in rest] == ["expected", "found", "change"]


@pytest.mark.parametrize(
    "command",
    ["plan llama", "plan llama --cluster cpu:4 --batch many", "plan llama --cluster cpu:4 --bacth 8", "nonesuch",
     "explain plan.json", "launch plan.json", "launch plan.json --", "verify llama plan.json --steps 0",
     "plan llama --cluster cpu:4 --search-seconds -1"],
)  # fmt: skip
def test_commands_that_cannot_be_read(here: Path, command: str) -> None:
    ran = run(*command.split())
    assert ran.code == 2 and ran.out == "" and "Usage: " in ran.err


def commands() -> dict[str, Any]:
    """The commands by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_help_has_an_example_of_every_command() -> None:
    listed = good("--help").out
    assert list(commands()) == ["plan", "estimate", "verify", "report", "explain", "diff", "simulate", "clusters",
                                "calibrate", "launch"]  # fmt: skip
    for name in commands():
        assert name in listed
        assert re.search(rf"^\s+autopar {name}\b", good(name, "--help").out, re.MULTILINE)
        assert "--json" in good(name, "--help").out
    assert good("--version").out.startswith("autopar 0.")


def shown_commands(text: str) -> Iterator[list[str]]:
    """The words of every command that a text shows after a prompt."""
    for line in re.findall(r"^\$ autopar (.*(?:\\\n.*)*)$", text, re.MULTILINE):
        yield line.replace("\\\n", " ").split(" -- ")[0].split()


def test_docs_show_every_command_with_options_that_there_are() -> None:
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    shown = list(shown_commands(text))
    titles = set(re.findall(r"^## `autopar (\w+)", text, re.MULTILINE))
    assert titles == set(commands()) == {words[0] for words in shown}
    for name, *words in shown:
        known = {opt for parameter in commands()[name].params for opt in parameter.opts}
        known |= {"--rdzv-backend", "--rdzv-endpoint"} if name == "launch" else set()
        assert {word for word in words if word.startswith("-")} <= known, words


def test_docs_list_the_errors_that_are_tested() -> None:
    text = (ROOT / "docs" / "errors.md").read_text("utf-8")
    listed = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        kind = section.split()[0]
        listed += [(kind, what) for what, _ in re.findall(r"^\| `(.*?)` \| (\S.*) \|$", section, re.MULTILINE)]
    assert len(listed) == len(set(listed)) and set(listed) == {(case.kind, case.what) for case in ERRORS}


TRAIN = """\
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import autopar

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("llama"))
model = autopar.parallelize(model, plan=autopar.Plan.load("pair.json"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(0, 64, (8, 16))
for step in range(3):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item(), model.plan.world_size, flush=True)
sys.exit(int(sys.argv[1]))
"""


def entry(*args: str, cwd: Path, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the installed command ``autopar`` as a user does."""
    command = [str(script or Path(sys.executable).with_name("autopar")), *args]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.dist
@pytest.mark.slow
def test_from_a_config_to_two_processes(tmp_path: Path) -> None:
    """The installed command plans, verifies, and trains in two processes; a script that fails fails the command."""
    write_files(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    made = entry("plan", "llama", "--cluster", "cpu:2", "--batch", "8", "--seq", "16", "--hints", "pair.yaml",
                 "-o", "pair.json", cwd=_with_hints(tmp_path))  # fmt: skip
    assert made.returncode == 0, made.stderr
    proved = entry("verify", "llama", "pair.json", cwd=tmp_path)
    assert proved.returncode == 0 and proved.stdout.startswith("ok: 2 simulated ranks"), proved.stderr
    ran = entry("launch", "pair.json", "--", "train.py", "0", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"^loss (\S+) 2$", ran.stdout, re.MULTILINE)]
    assert ran.returncode == 0 and len(losses) == 6 and max(losses[-2:]) < min(losses[:2]), ran.stderr
    failed = entry("launch", "pair.json", "--", "train.py", "3", cwd=tmp_path)
    assert failed.returncode == 1 and "exitcode  : 3" in failed.stderr, failed.stderr
    wrong = entry("report", "nowhere.json", cwd=tmp_path)
    assert wrong.returncode == 1 and "PlanError" in wrong.stderr and "Traceback" not in wrong.stderr


def _with_hints(folder: Path) -> Path:
    (folder / "pair.yaml").write_text("dp: 2\n")
    return folder


@pytest.mark.dist
@pytest.mark.slow
def test_calibrate_under_torchrun(tmp_path: Path) -> None:
    """Two processes measure their collectives; one writes."""
    torchrun, autopar = (Path(sys.executable).with_name(name) for name in ("torchrun", "autopar"))
    ran = entry("--standalone", "--nproc-per-node", "2", "--no-python", str(autopar), "calibrate", "--seconds", "0.5",
                "-o", "here.toml", cwd=tmp_path, script=torchrun)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = Cluster.load(tmp_path / "here.toml")
    constants = found.device.links[found.device.scale_up.name]
    assert found.size == 2 and "measured: Cluster.calibrate" in found.device.spec["sources"]["peak_tflops"]
    assert ran.stdout.count("all_reduce") == 1 and constants["all_reduce"].base + constants["all_reduce"].step > 0
