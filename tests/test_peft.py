"""LoRA adapters of PEFT: what is frozen is split and left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.small_models import llama, tokens
from test_distributed import ROOT, SCRIPTS, TIMEOUT, assert_all_ok, torchrun

import autopar
from autopar import Hints
from autopar.runtime.reference import exact_float64

pytest.importorskip("peft")
NAMES = ["dp 2, zero 3", "tp 2", "saved", "a trainer", "taken up again"]
BATCH, LENGTH, RANK = 4, 8, 4
#: Elements of the adapters of one layer: A [rank, in] and B [out, rank] of q_proj [32, 32] and down_proj [32, 48].
ADAPTERS = RANK * (32 + 32) + RANK * (48 + 32)


def adapted() -> Any:
    """A Llama of two layers with adapters that are not zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(llama(num_hidden_layers=2), config)


def test_what_is_frozen_takes_neither_gradients_nor_optimizer_state() -> None:
    """In the memory account, and nothing of it is reduced; the batch is made up as for the model inside."""
    workload = autopar.Workload(global_batch=BATCH, seq_len=LENGTH)
    plan = autopar.plan(adapted(), "cpu:1x2", hints=Hints(dp=2, zero=0), workload=workload)
    assert plan.memory["gradients"] == 2 * ADAPTERS * 4 and plan.memory["optimizer"] == 2 * plan.memory["gradients"]
    reduced = [c for c in plan.collectives if c.purpose == "gradients"]
    assert sum(c.bytes for c in reduced) == 2 * ADAPTERS * 4
    frozen = [name for name in plan.parameters if "lora" not in name]
    assert len(plan.parameters) - len(frozen) == 8 and "base_model.model.model.embed_tokens.weight" in frozen


@pytest.mark.slow
@pytest.mark.parametrize("hints", [Hints(tp=2), Hints(dp=2, zero=3), Hints(pp=2, micro_batch_size=2)], ids=str)
def test_simulated_ranks_agree(hints: Hints) -> None:
    with exact_float64():
        model = adapted().double()
        batch = tokens(BATCH, LENGTH)
        report = autopar.verify(model, "cpu:1x2", hints=hints, example_inputs=batch)
    assert report.ok and report.max_error < 1e-10, str(report)
    assert set(report.gradients) == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
@pytest.mark.dist
def test_adapters_train_as_in_one_process(tmp_path: Path) -> None:
    """Losses and adapters of loops and of a Trainer; what is frozen is what it was, to the last bit."""
    script = SCRIPTS / "adapters.py"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    subprocess.run([sys.executable, str(script), str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=TIMEOUT)
    assert_all_ok(torchrun(2, script, str(tmp_path)), 2, NAMES)


def test_a_module_answers_as_the_model_inside() -> None:
    """Its class and arguments, of which a Trainer reads the names of labels."""
    from autopar.capture.hf_adapters import adapter_names, core

    model = adapted()
    assert type(core(model)).__name__ == "LlamaForCausalLM" and core(core(model)) is core(model)
    stored = adapter_names(model)["default"]
    assert len(stored) == 8 and all(key.replace(".weight", ".default.weight") == name for key, name in stored.items())
    assert all(isinstance(model.get_parameter(name), torch.nn.Parameter) for name in stored.values())
