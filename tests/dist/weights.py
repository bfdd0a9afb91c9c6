"""torchrun weights.py FOLDER PART...: meta models filled on all ranks, parallel models saved, runs continued.

FOLDER is empty and shared by all ranks.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import gpt2, llama, tokens
from torch import nn
from training import assert_close, check_is_split, join, parameters, say
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import autopar
from autopar import Hints, TrainingState, Workload
from autopar.errors import WeightsError

FOLDER = Path(sys.argv[1])
#: 255 MiB of float32 weights, the largest of them 31 MiB.
LARGE = LlamaConfig(vocab_size=16000, hidden_size=512, intermediate_size=2048, num_hidden_layers=12,
                    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=128)  # fmt: skip


def mixtral() -> Any:
    """Experts that are one by one in the files, and stacked and fused in the model."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )).train()  # fmt: skip


def split() -> Hints:
    """Every parameter is split, on both axes if there are ranks for two."""
    return Hints(tp=2, zero=3) if dist.get_world_size() == 4 else Hints(dp=2, zero=3)


def on_meta(build: Callable[[], Any]) -> Any:
    """The model without weights."""
    with torch.device("meta"):
        return build()


def on_rank_0(action: Callable[[], object]) -> None:
    """Do something on one rank while the others wait."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def assert_holds_pieces(model: Any, truth: nn.Module) -> None:
    """The parameters are those of the whole model, to the last bit, and a rank holds its pieces of them alone."""
    check_is_split(model, truth)
    for name, p in parameters(model).items():
        assert torch.equal(p, truth.get_parameter(name)), name
    own = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
    assert own < 0.6 * sum(p.nbytes for p in truth.parameters()), own


def initialised() -> None:
    """A meta model made from its config gets the weights that one process draws with the same seed."""
    config = copy.deepcopy(llama(num_hidden_layers=2).config)
    model = on_meta(lambda: AutoModelForCausalLM.from_config(config))
    torch.manual_seed(7)
    parallel = autopar.parallelize(model, hints=split(), example_inputs=tokens(8, 8))
    torch.manual_seed(7)
    assert_holds_pieces(parallel, AutoModelForCausalLM.from_config(config))
    assert all(p.is_meta for p in model.parameters())


def read() -> None:
    """From a directory: the weights, the loss that they and the buffers give, and a step trains all of them."""
    _read(lambda: llama(num_hidden_layers=2))


def read_experts() -> None:
    """The same where experts are one by one in the files, and stacked and fused in the model."""
    _read(mixtral)


def _read(build: Callable[[], Any]) -> None:
    reference = build()
    folder = FOLDER / f"read-{reference.config.model_type}"
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.01)  # not what a seed gives
    on_rank_0(lambda: reference.save_pretrained(folder, max_shard_size="30KB"))
    batch = tokens(8, 8)
    model = autopar.parallelize(on_meta(build), hints=split(), example_inputs=batch, weights=folder)
    assert_holds_pieces(model, reference)
    out, truth = model(**batch), reference(**batch)
    assert_close({"loss": out.loss.detach()}, {"loss": truth.loss.detach()}, "loss")
    out.loss.backward(), truth.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def saved() -> None:
    """Every parameter, trained and split on both axes (a bias on one dim over both), is in the directory, and nothing
    but rank 0 wrote; transformers loads it back."""
    batch = tokens(8, 8)
    model = autopar.parallelize(gpt2(layers=2), hints=split(), example_inputs=batch)
    layouts = {str(p.storage) for p in model.plan.parameters.values()}
    assert dist.get_world_size() == 2 or "[0:tp+dp]" in layouts, layouts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**batch).loss.backward()
    optimizer.step()
    truth, folder = parameters(model), FOLDER / "saved"
    assert not torch.equal(truth["transformer.wte.weight"], gpt2(layers=2).transformer.wte.weight)
    for limit in ("30kB", "5GB"):  # the second takes the place of the first
        model.save_pretrained(folder, max_shard_size=limit)
        files = sorted(f.name for f in folder.glob("*.safetensors"))
        assert (len(files) > 1) == (limit == "30kB"), files
        back = AutoModelForCausalLM.from_pretrained(folder)
        assert type(back).__name__ == "GPT2LMHeadModel" and back.config.to_diff_dict() is not None
        assert all(torch.equal(p, truth[name]) for name, p in back.named_parameters())
        assert back.lm_head.weight is back.transformer.wte.weight
        dist.barrier()  # before rank 0 replaces what others still read


def staged() -> None:
    """In a pipeline a rank reads, holds and sends the parameters of its stages alone; the tied embedding is on both
    ends. Saved, and continued without a pipeline."""
    batch, folder = tokens(8, 8), FOLDER / "staged"
    reference = llama(num_hidden_layers=2)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.01)  # not what a seed gives
    on_rank_0(lambda: reference.save_pretrained(folder))
    dp = dist.get_world_size() // 2
    hints = Hints(pp=2, tp=1, dp=dp, zero=3 if dp > 1 else 0, micro_batch_size=2)
    build = functools.partial(llama, num_hidden_layers=2)
    model = autopar.parallelize(on_meta(build), hints=hints, example_inputs=batch, weights=folder)
    held = dict(model.named_parameters())
    assert "model.embed_tokens.weight" in held and 0 < len(held) < len(list(reference.parameters()))
    for name, p in held.items():
        assert torch.equal(p.full_tensor(), reference.get_parameter(name)), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"training": TrainingState(model, optimizer)}
    for step in range(2):
        model.train_step(**tokens(8, 8, seed=step)), optimizer.step(), optimizer.zero_grad()
    trained = {n: p.full_tensor().detach().clone() for n, p in held.items()}
    model.save_pretrained(FOLDER / "staged-saved", max_shard_size="30kB")
    dcp.save(state, checkpoint_id=FOLDER / "staged-1")
    losses = [float(model.train_step(**tokens(8, 8, seed=2)))]

    back = LlamaForCausalLM.from_pretrained(FOLDER / "staged-saved")
    assert all(torch.equal(back.get_parameter(n), p) for n, p in trained.items())
    assert not any(torch.equal(p, reference.get_parameter(n)) for n, p in back.named_parameters())
    after = autopar.parallelize(on_meta(build), hints=split(), example_inputs=batch, weights=folder)
    again = torch.optim.AdamW(after.parameters(), lr=1e-2)
    dcp.load({"training": TrainingState(after, again)}, checkpoint_id=FOLDER / "staged-1")
    assert all(torch.equal(p, back.get_parameter(n)) for n, p in parameters(after).items())
    assert all(len(again.state[p]) == 3 and again.state[p]["step"] == 2 for p in after.parameters())
    losses.append(float(after.train_step(**tokens(8, 8, seed=2))))
    assert abs(losses[0] - losses[1]) < 1e-5, losses


def failed() -> None:
    """One rank that cannot read its directory, and a directory that cannot be written: the error is on every rank."""
    good, bad = FOLDER / "good", FOLDER / "bad"
    on_rank_0(lambda: llama(num_hidden_layers=1).save_pretrained(good))
    last = dist.get_rank() == dist.get_world_size() - 1
    model = on_meta(lambda: llama(num_hidden_layers=1))
    try:
        autopar.parallelize(model, hints=split(), example_inputs=tokens(8, 8), weights=bad if last else good)
        raise AssertionError("no error")
    except WeightsError as error:
        assert f"there is no directory {bad}" in str(error)
    model = autopar.parallelize(model, hints=split(), example_inputs=tokens(8, 8), weights=good)
    on_rank_0(lambda: bad.write_text("a file"))
    try:
        model.save_pretrained(bad)
        raise AssertionError("no error")
    except WeightsError as error:
        assert "Not a directory" in str(error) and bad.read_text() == "a file"


def continued() -> None:
    """A checkpoint saved under one plan and loaded under another (``checkpoint.py``)."""
    on_rank_0(lambda: (FOLDER / "checkpoints").mkdir())
    checkpoint.plans(FOLDER / "checkpoints")


def memory() -> None:
    """A quarter of 255 MiB a rank: the peak of resident host memory while a rank initialises, reads and saves."""
    folder, mib = FOLDER / "large", 2**20
    on_rank_0(lambda: LlamaForCausalLM(LARGE).save_pretrained(folder))
    model = on_meta(lambda: LlamaForCausalLM(LARGE))
    total, largest = (f(p.numel() * 4 / mib for p in model.parameters()) for f in (sum, max))
    workload = Workload(global_batch=8, seq_len=16)
    plan = autopar.plan(model, "cpu:4", workload=workload, hints=split())
    for weights in (folder, None):
        reset_peak()
        before = resident("VmRSS")
        parallel = autopar.parallelize(model, plan=plan, weights=weights)
        peak = resident("VmHWM") - before
        own = sum(p.to_local().nbytes for p in parallel.parameters()) / mib
        assert own < 0.26 * total and peak > 0.9 * own
        # one parameter, and the 16 MiB that are mapped or kept at a time; initialisation writes whole parameters
        assert peak < own + 16 + (8 if weights else largest + 8), (peak, own)
        reset_peak()
        before = resident("VmRSS")
        parallel.save_pretrained(FOLDER / "large-saved", max_shard_size="64MiB")
        saving = resident("VmHWM") - before
        # one file, and a piece of the next tensor on its way; nothing on ranks that only send
        assert saving < (64 + largest if dist.get_rank() == 0 else 16), saving
        what = "read" if weights else "initialised"
        say(f"{what}: {own:.0f} of {total:.0f} MiB, peak {peak:.0f} MiB, then {saving:.0f} MiB to save")
        del parallel


def resident(kind: str) -> float:
    """MiB of this process's memory: VmRSS now, VmHWM at its peak."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def reset_peak() -> None:
    """Let the peak begin here, with no memory that was freed and kept: it would hide what is taken from now on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


PARTS = (initialised, read, read_experts, saved, staged, failed, continued, memory)


def main() -> None:
    """The parts that are named."""
    join()
    for part in PARTS:
        if part.__name__ in sys.argv[2:]:
            part()
            say(f"ok {part.__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
