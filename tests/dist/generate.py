"""torchrun generate.py PART...: generation over real processes, token for token what one process generates.

All but what is pretrained is in float64, so that no two logits come so near that their order is a matter of rounding.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import VOCABULARY, gpt2, llama
from torch import Tensor
from training import join, say

import autopar
from autopar import Hints, Workload
from autopar.errors import InputError, RuntimeFailure
from autopar.runtime.reference import exact_float64

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

BATCH, PROMPT, CONTEXT = 4, 7, 40
#: Of the same length for every prompt: no token ends an answer.
OPTIONS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": None}


def prompts(batch: int = BATCH, length: int = PROMPT) -> Tensor:
    """Token ids, none of them that of padding."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(7))


def left_padded() -> dict[str, Tensor]:
    """Prompts of other lengths."""
    ids, lengths = prompts(), torch.tensor([PROMPT, 2, 5, 4])
    mask = (torch.arange(PROMPT) >= PROMPT - lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def degrees() -> Hints:
    """dp and tp of two ranks each, or of two processes tp alone."""
    return Hints(tp=2, dp=dist.get_world_size() // 2)


def split(model: Any, mode: str = "infer", hints: Hints | None = None) -> Any:
    """The model over all ranks; the original stays as it is."""
    workload = Workload(global_batch=BATCH, seq_len=CONTEXT, mode=mode)
    return autopar.parallelize(copy.deepcopy(model), workload=workload, hints=hints or degrees())


def check(what: str, mine: Any, truth: Any, **options: Any) -> None:
    """Both generate the same tokens, from the same random numbers."""
    found = []
    for model in (truth, mine):
        torch.manual_seed(11)
        found.append(model.generate(**{**OPTIONS, "max_new_tokens": 9, **options}))
    assert torch.equal(*found), f"{what}: {found[1].tolist()} where one process generates {found[0].tolist()}"


def llamas() -> None:
    """All ways to generate, by a plan that is made for it."""
    truth = llama(num_hidden_layers=2).double().eval()
    mine = split(truth)
    check("greedy", mine, truth, input_ids=prompts(), max_new_tokens=30)
    check("sampling", mine, truth, input_ids=prompts(), do_sample=True, top_k=20, temperature=1.5)
    check("left padding", mine, truth, **left_padded())
    check("chunks", mine, truth, input_ids=prompts(), prefill_chunk_size=3)
    check("beams", mine, truth, input_ids=prompts(2), num_beams=3, num_return_sequences=2)
    check("beams that rank 0 and rank 1 share", mine, truth, input_ids=prompts(1), num_beams=4)
    check("an end", mine, truth, input_ids=prompts(), eos_token_id=[5, 9, 17, 30, 41, 50])
    say("ok llamas")


def trained() -> None:
    """A plan for training generates too, in the middle of it: with the parameters as they are then."""
    truth = llama(num_hidden_layers=2).double().eval()
    mine = split(truth, "train", Hints(dp=dist.get_world_size(), zero=3))
    check("before", mine, truth, input_ids=prompts())
    for model in (truth, mine):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(input_ids=prompts(8), labels=prompts(8)).loss.backward()
        optimizer.step()
    check("after", mine, truth, input_ids=prompts())
    check("a batch that dp does not divide", mine, truth, input_ids=prompts(3))
    say("ok trained")


def kinds() -> None:
    """Learned positions; one key and value head for all; norms of queries and keys; windows; experts; in training mode
    without dropout."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    torch.manual_seed(0)
    models = {
        "gpt2": gpt2(layers=2),
        "one head": llama(num_hidden_layers=2, num_key_value_heads=1),
        "qwen3": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)),
        "gemma3": transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **windows)),
        "mixtral": transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4)),
    }
    for name, model in models.items():
        truth = model.double().train(name == "qwen3")
        check(name, split(truth), truth, **left_padded(), max_new_tokens=12)
    say("ok kinds")


def pieces() -> None:
    """A rank keeps its part of the keys and values, and a step does the work of one token, split."""
    truth = llama(num_hidden_layers=2).double().eval()
    mine = split(truth)
    result = mine.generate(input_ids=prompts(), return_dict_in_generate=True, **OPTIONS, max_new_tokens=9)
    cache, config, ranks = result.cache, truth.config, dist.get_world_size()
    kept = 2 * config.num_hidden_layers * BATCH * cache.length * config.num_key_value_heads * config.head_dim
    assert sum(piece.nbytes for piece in cache.pieces) == kept * 8 // ranks
    assert cache.length == 16 and cache.filled == PROMPT + 8
    first, step = mine.specializations
    assert step.uses == 8 and step.shapes[0] == (BATCH, 1) and first.shapes[0] == (BATCH, 16)
    dot = sum(op.flops for op in _step(mine).operators)
    weights = sum(p.numel() for name, p in truth.named_parameters() if p.dim() == 2)
    attended = 4 * config.num_hidden_layers * cache.length * config.num_attention_heads * config.head_dim
    assert dot == BATCH * (2 * weights + attended)  # of one token a sample: none before it is computed again
    say("ok pieces")


def _step(model: Any) -> Any:
    """What the module runs for one token."""
    return next(s for _, s in model._programs.cache.kept.values() if s.captured.caches)


def refused() -> None:
    """What cannot be done is said on every rank, and the next generation is as it should be."""
    truth = llama(num_hidden_layers=2).double().eval()
    mine, rank = split(truth), dist.get_rank()
    with pytest.raises(InputError, match="no memory for so many tokens") as error:
        mine.generate(input_ids=prompts(), max_new_tokens=CONTEXT, **OPTIONS)
    assert f"at most {CONTEXT} tokens" in str(error.value) and f"{CONTEXT + PROMPT - 1} tokens" in str(error.value)
    with pytest.raises(RuntimeFailure, match="from another prompt, or by other numbers"):
        mine.generate(input_ids=prompts() + rank, **OPTIONS)
    torch.manual_seed(rank)
    with pytest.raises(RuntimeFailure, match="from another prompt, or by other numbers"):
        mine.generate(input_ids=prompts(), do_sample=True, **OPTIONS)
    for options in ({"cache_implementation": "quantized"}, {"use_cache": False}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(InputError, match="cannot do that over several ranks"):
            mine.generate(input_ids=prompts(), **OPTIONS, **options)
    local = autopar.parallelize(truth, plan=mine.plan, inputs="local")
    with pytest.raises(InputError, match="cannot generate over ranks"):
        local.generate(input_ids=prompts())
    check("afterwards", mine, truth, input_ids=prompts())
    say("ok refused")


def smollm2() -> None:
    """Nine heads and three of keys and values, which two ranks do not divide: they have other samples."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=72, intermediate_size=96, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    truth = transformers.LlamaForCausalLM(config).double().eval()
    mine = split(truth)
    check("greedy", mine, truth, **left_padded())
    check("beams", mine, truth, input_ids=prompts(2), num_beams=2)
    result = mine.generate(input_ids=prompts(), return_dict_in_generate=True, **OPTIONS, max_new_tokens=2)
    assert {tuple(piece.shape[:2]) for piece in result.cache.pieces} == {(BATCH // dist.get_world_size(), 3)}
    say("ok smollm2")


def pretrained() -> None:
    """SmolLM2-135M-Instruct itself, in float32, on prompts of other lengths."""
    import smollm2 as example

    truth, tokenizer = example.load_model().eval(), example.load_tokenizer()
    tokenizer.padding_side = "left"
    questions = ["The capital of France is", "Water boils at", "Once upon a time, in a small village", "2 + 2 ="]
    batch = dict(tokenizer(questions, return_tensors="pt", padding=True))
    mine = split(truth)
    assert mine.plan.memory["cache"] == 2 * 30 * BATCH * CONTEXT * 3 * 64 * 4 // dist.get_world_size()
    check("greedy", mine, truth, **batch, max_new_tokens=20)
    check("sampling", mine, truth, **batch, do_sample=True, max_new_tokens=12)
    say("ok pretrained")


def main() -> None:
    """Run the parts that are asked for."""
    join()
    parts = {part.__name__: part for part in (llamas, trained, kinds, pieces, refused, smollm2, pretrained)}
    for name in itertools.islice(sys.argv, 1, None):
        with contextlib.nullcontext() if name == "pretrained" else exact_float64():
            parts[name]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
