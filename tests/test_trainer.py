"""transformers' Trainer on real Gloo processes, against the same Trainer in one process (``tests/dist/trainer.py``)."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import LLAMA
from test_distributed import ROOT, SCRIPTS, TIMEOUT, assert_all_ok, torchrun

import autopar
from autopar import Hints

NAMES = ["the model's loss", "a loss function", "a loss function, accumulated", "the model's loss, accumulated",
         "label smoothing", "micro-batches", "micro-batches, accumulated", "a pipeline, accumulated", "resumed",
         "the_best", "whole_models", "outside", "refusals"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.dist
def test_a_trainer_trains_as_in_one_process(tmp_path: Path) -> None:
    """Losses, norms, rates, evaluations and final weights of eight trainings of two epochs; what is saved; runs that
    are taken up again under other plans; models that come whole; what is refused."""
    script = SCRIPTS / "trainer.py"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    subprocess.run([sys.executable, str(script), str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=TIMEOUT)
    assert_all_ok(torchrun(2, script, str(tmp_path)), 2, NAMES)


def test_a_parallel_module_answers_as_its_model() -> None:
    """The name of its class, and the names of the arguments of ``forward``, which libraries read."""
    model = LLAMA.build()
    found = autopar.parallelize(model, hints=Hints(), example_inputs=LLAMA.batch(), cluster="cpu:1x1")
    assert type(found).__name__ == "LlamaForCausalLM" and isinstance(found, autopar.runtime.module.ParallelModule)
    assert inspect.signature(found.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(found).forward) == inspect.signature(type(model).forward)


@pytest.mark.parametrize(("asked", "mode"), [
    (None, "full"), pytest.param("none", "none", marks=pytest.mark.slow)])  # fmt: skip
def test_a_model_that_recomputes_by_itself_asks_for_a_plan_that_does(asked: str | None, mode: str) -> None:
    """Unless hints say otherwise; what the model itself would recompute is no part of the graph."""
    model = LLAMA.build()
    model.gradient_checkpointing_enable()
    found = autopar.plan(model, "cpu:1x1", hints=Hints(recompute=asked), example_inputs=LLAMA.batch())
    assert found.recompute == mode
