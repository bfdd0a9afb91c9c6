"""What the README and docs/planning.md show is there, and the README's programs run as they are printed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from test_distributed import ROOT, prepare_smollm2, torchrun

import autopar
from autopar.schedule import ALL_SCHEDULES

README = (ROOT / "README.md").read_text("utf-8")
HINTS = (ROOT / "docs" / "hints.md").read_text("utf-8")
TEXTS = README + (ROOT / "docs" / "planning.md").read_text("utf-8") + (ROOT / "CONTRIBUTING.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXTS, re.DOTALL)
#: What the blocks call their objects.
OBJECTS = {"autopar": autopar, "plan": autopar.Plan, "model": autopar.ParallelModule}


def block_with(text: str) -> str:
    """The one block that contains ``text``."""
    (block,) = [block for block in BLOCKS if text in block]
    return block


def attributes(code: str) -> Iterator[tuple[str, str]]:
    """Every ``name.attribute`` of ``code``; ``...`` for further arguments is no program."""
    for node in ast.walk(ast.parse(code.replace(", ...)", ")").replace("(...)", "()"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


def test_blocks_are_programs_of_what_there_is() -> None:
    """Every block parses, and what it asks of autopar or of a plan exists."""
    found = [pair for block in BLOCKS for pair in attributes(block)]
    assert {"parallelize", "plan", "verify", "Hints", "Workload"} <= {name for of, name in found if of == "autopar"}
    for of, name in found:
        if of in ("autopar", "plan"):
            known = {*dir(OBJECTS[of]), *(f.name for f in fields(autopar.Plan) if of == "plan")}
            assert name in known, f"{of}.{name}"


def test_tables_of_hints_and_schedules() -> None:
    """The table has every hint, and the schedules that there are."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", HINTS, re.MULTILINE)
    hints = {name: row for names, row in rows for name in re.findall(r"\w+", names)}
    assert {field.name for field in fields(autopar.Hints)} <= hints.keys()
    assert set(ALL_SCHEDULES) == set(re.findall(r"`([\w-]+)`", hints["schedule"])) - {"pp"}


def test_paths_and_targets_exist() -> None:
    """Files, folders and make targets that are named."""
    tracked = re.findall(r"(?:autopar|passes|cost_model|tests|benchmarks|docs|examples)/[\w./-]*", TEXTS)
    assert len(tracked) > 15
    assert not [path for path in tracked if not (ROOT / path.rstrip(".")).exists()]
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make (?!PYTHON)([\w-]+)", README)) <= targets
    ran = re.findall(r"^make (.*)$", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
    assert ran and all(f"`make {command}`" in README for command in ran)


@pytest.mark.dist
@pytest.mark.slow
def test_training_example(tmp_path: Path) -> None:
    """The file ``train.py`` of the README, copied out and run under torchrun: the same falling losses on every rank."""
    prepare_smollm2()
    (tmp_path / "train.py").write_text(block_with("# train.py"), encoding="utf-8")
    result = torchrun(2, tmp_path / "train.py", timeout=900)
    assert result.returncode == 0, result.stdout[-4000:]
    lines = sorted(re.findall(r"^(\d) (\d+\.\d+)$", result.stdout, re.MULTILINE))
    losses = [float(loss) for _, loss in lines]
    assert [int(step) for step, _ in lines] == [0, 0, 1, 1, 2, 2], result.stdout[-2000:]
    assert losses[0] == losses[1] > losses[2] == losses[3] > losses[4] == losses[5]


@pytest.mark.slow
def test_planning_example(tmp_path: Path) -> None:
    """Planning on a laptop, then what a plan says of itself: the plan is for 8 devices, and a loaded one explains
    itself."""
    prepare_smollm2()
    code = block_with("plan.save(").replace(".demo", str(ROOT / ".demo"))
    code += 'print(plan.explain("model.layers.*.mlp"))\nprint(plan.binding)\nprint(plan.compare(plan.step_time))\n'
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    plan = autopar.Plan.load(tmp_path / "plan.json")
    assert plan.world_size == 8 and plan.report() in done.stdout
    assert str(plan.explain("model.layers.*.mlp")) in done.stdout and str(plan.binding) in done.stdout
