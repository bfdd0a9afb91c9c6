"""torchrun adapters.py FOLDER: a Llama with LoRA adapters, trained in parallel and in one process.

Started without torchrun it is the one process, which trains by `transformers.Trainer` and leaves in FOLDER what came
out.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from small_models import llama, tokens
from torch import Tensor
from trainer import BATCH, LENGTH, make, train
from training import assert_close, join, say, whole

import autopar
from autopar import Hints
from autopar.integrations.trainer import AutoparTrainer

STEPS = 3
KEPT = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "eval_strategy": "no"}


def adapted() -> Any:
    """A Llama of one layer with adapters that are not zero."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(llama(num_hidden_layers=1), config)


def parameters(model: Any) -> dict[str, Tensor]:
    """Whole parameters by name."""
    return whole({name: p.detach().clone() for name, p in model.named_parameters()})


def loop(model: Any) -> dict[str, Tensor]:
    """Losses of some steps with clipping; what is frozen has no gradient and no state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = {}
    for step in range(STEPS):
        loss = model(**tokens(BATCH, LENGTH, seed=step)).loss
        loss.backward()
        assert all((p.grad is not None) == ("lora" in name) for name, p in model.named_parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss {step}"] = loss.detach()
    assert {id(p) for p in optimizer.state} == {id(p) for name, p in model.named_parameters() if "lora" in name}
    return losses


def trained(hints: Hints) -> Any:
    """The parallel module after a loop, which agrees with the loop of one process."""
    original = adapted()
    before = parameters(original)
    model = autopar.parallelize(copy.deepcopy(original), hints=hints, example_inputs=tokens(BATCH, LENGTH))
    found, truth = loop(model), loop(original)
    assert_close(found, truth, "losses")
    after = parameters(model)
    assert_close(after, parameters(original), "parameters")
    frozen = [name for name in before if "lora" not in name]
    assert all(torch.equal(after[name], before[name]) for name in frozen)
    assert not any(torch.equal(after[name], before[name]) for name in before if name not in frozen)
    return model


def saved(model: Any, folder: Path) -> None:
    """Adapters alone are written, as PEFT reads them."""
    model.save_pretrained(folder)
    found = parameters(model)
    files = sorted(file.name for file in folder.iterdir())
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files, files
    loaded = parameters(PeftModel.from_pretrained(llama(num_hidden_layers=1), folder))
    assert set(loaded) == set(found) and all(torch.equal(p, found[name]) for name, p in loaded.items())


def main() -> None:
    """All of it, in one process or in several; the first that fails ends it."""
    folder = Path(sys.argv[1])
    if "RANK" not in os.environ:
        torch.save(train(make(transformers.Trainer, adapted(), folder / "one", **KEPT)), folder / "adapters.pt")
        return
    join()
    model = trained(Hints(dp=2, zero=3))
    say("ok dp 2, zero 3")
    trained(Hints(tp=2))
    say("ok tp 2")
    saved(model, folder / "saved")
    say("ok saved")
    truth = torch.load(folder / "adapters.pt")
    trainer = make(AutoparTrainer, adapted(), folder / "kept", hints=Hints(dp=2, zero=3), **KEPT)
    assert_close(train(trainer), truth, "a trainer")
    state = dcp.FileSystemReader(folder / "kept" / "checkpoint-2" / "training_state").read_metadata()
    assert any("exp_avg" in name for name in state.state_dict_metadata)
    assert all("lora" in name for name in state.state_dict_metadata if name.endswith("weight"))
    say("ok a trainer")
    trainer = make(AutoparTrainer, adapted(), folder / "kept", hints=Hints(tp=2), **KEPT)
    found = train(trainer, resume_from_checkpoint=str(folder / "kept" / "checkpoint-2"))
    assert len(found["loss"]) == 2
    assert_close({n: p for n, p in found.items() if "." in n}, {n: p for n, p in truth.items() if "." in n}, "resumed")
    say("ok taken up again")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
