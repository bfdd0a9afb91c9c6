"""One installed name: `passes/` and `cost_model/` are `autopar.passes` and `autopar.cost_model`, with their data."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"autopar": "autopar", "passes": "autopar.passes", "cost_model": "autopar.cost_model"}
DATA = {".toml", ".csv", ".css", ".js"}


def source_files(*suffixes: str) -> list[Path]:
    """Files of the three source folders with these suffixes."""
    found = (path for folder in SOURCES for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in found if path.suffix in suffixes and "__pycache__" not in path.parts)


def installed_path(path: Path) -> str:
    """Where a source file lies in an installed package, e.g. passes/shard.py -> autopar/passes/shard.py."""
    folder, *rest = path.relative_to(ROOT).parts
    return "/".join([*SOURCES[folder].split("."), *rest])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built without network and without writing into the tree."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(copy)],
        check=True)
    return next(out.glob("*.whl"))


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in source_files(".py") if path.name == "__init__.py"}
    there = {installed_path(folder).replace("/", ".") for folder in folders}
    assert set(listed) == there, "tool.setuptools.packages in pyproject.toml must name every folder with an __init__.py"


def test_every_source_folder_is_a_package() -> None:
    folders = {path.parent for path in source_files(".py")}
    bare = sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists())
    assert not bare, "folders with modules and without an __init__.py"


@pytest.mark.parametrize("name", ["autopar.passes", "autopar.cost_model"])
def test_mapped_names_import(name: str) -> None:
    assert importlib.import_module(name).__name__ == name


def test_version_is_that_of_the_installation() -> None:
    assert importlib.import_module("autopar").__version__ == importlib.metadata.version("autopar")


def test_wheel_holds_every_module_and_data_file_under_one_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"autopar"}
    missing = {installed_path(path) for path in source_files(".py", ".typed", *DATA)} - names
    assert not missing
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_imports_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import importlib.util, autopar, autopar.passes, autopar.cost_model; "
        "print(autopar.__file__, autopar.passes.__file__, autopar.cost_model.__file__, sep='\\n'); "
        "from plan_samples import sample_plan; assert '</html>' in sample_plan().report('html'); "
        "assert not importlib.util.find_spec('passes') and not importlib.util.find_spec('cost_model')")
    # PYTHONPATH comes before the finder of an editable install, so this is the wheel's code and none of the tree's.
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path.parent, capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'tests'}"})
    assert ran.returncode == 0, ran.stderr
    assert all(line.startswith(str(tmp_path)) for line in ran.stdout.split())


def test_installation_claims_no_second_name() -> None:
    claimed = [top for top, owners in importlib.metadata.packages_distributions().items() if "autopar" in owners]
    assert not {"passes", "cost_model"} & set(claimed)
