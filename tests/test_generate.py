"""Generation: plans for it, its programs simulated, and in real Gloo processes (``tests/dist/generate.py``)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dist.small_models import HIDDEN, KV_HEADS, LAYERS, VOCABULARY, bert, llama
from test_cli import good, llama_config
from test_distributed import SCRIPTS, assert_all_ok, torchrun
from torch import fx

import autopar
from autopar import Hints, Plan, Workload
from autopar.capture.hf_generate import bucket_of, prompt, refuse, why_not
from autopar.cost_model.hardware import load_device
from autopar.errors import HintError, InfeasibleError, InputError, WorkloadError
from autopar.passes.cached import WRITE, in_place
from autopar.passes.collectives import ALL_REDUCE
from autopar.runtime.reference import exact_float64
from autopar.runtime.verify_generation import _other_tokens
from autopar.sharding.cached import cached_layout
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.rules.attention import ATTENTION
from autopar.specialize import specialize_cached

GPU = "h100-sxm:1x8"
aten = torch.ops.aten


def infer(model: Any, cluster: str, hints: Hints | None = None, batch: int = 16, context: int = 64) -> Plan:
    """A plan to generate."""
    workload = Workload(global_batch=batch, seq_len=context, mode="infer")
    return autopar.plan(model, cluster, workload=workload, hints=hints)


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "ranks"), [(KV_HEADS, 8), (1, 4)], ids=["heads over tp", "one head"])
def test_the_cache_is_accounted_for(heads: int, ranks: int) -> None:
    """2 (keys, values) x layers x samples x tokens x heads x dim x bytes, over the ranks that split it: where tp
    divides neither the heads nor the samples of a rank of dp, those of dp alone."""
    with torch.device("meta"):
        model = llama(num_key_value_heads=heads)
    plan = infer(model, GPU, Hints(dp=4, tp=2), batch=12 if ranks == 4 else 16)
    whole = 2 * LAYERS * (12 if ranks == 4 else 16) * 64 * heads * (HIDDEN // 4) * 4
    assert plan.memory["cache"] == plan.peak["cache"] == whole // ranks
    assert plan.memory["gradients"] == plan.memory["optimizer"] == 0
    assert (plan.num_micro_batches, plan.schedule, plan.recompute) == (1, None, "none")
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.slow
def test_a_step_reads_all_weights_and_the_whole_cache() -> None:
    """Decoding is bound by memory, and the report says tokens a second for the context."""
    with torch.device("meta"):
        model = llama(hidden_size=1024, intermediate_size=2048, num_attention_heads=8, max_position_embeddings=8192)
    plan = infer(model, "h100-sxm:1x1", batch=32, context=8192)
    cache = 2 * LAYERS * 32 * 8192 * KV_HEADS * 128 * 4
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2) * 4
    assert plan.memory["cache"] == cache
    least = (cache + weights) / load_device("h100-sxm").memory_bandwidth
    assert least < plan.step_time < 3 * least
    report = plan.report()
    assert f"{32 / plan.step_time:,.0f} tokens/s: one of each of 32 samples a step, with 8192 of context" in " ".join(
        report.split()
    )
    assert plan.prefill is not None and plan.prefill.seconds > 10 * plan.step_time
    assert plan.prefill.memory > cache + weights


def test_prompts_have_to_fit_too() -> None:
    """A plan is one in which the forward of the prompts fits beside weights and cache; to the byte."""
    with torch.device("meta"):
        model = llama(num_hidden_layers=1, intermediate_size=512)
    free = infer(model, "cpu:1x1", batch=8)
    assert free.prefill is not None and free.prefill.memory > free.peak_memory
    assert infer(model, "cpu:1x1", Hints(memory_limit=free.prefill.memory), batch=8).prefill == free.prefill
    with pytest.raises(InfeasibleError) as error:
        infer(model, "cpu:1x1", Hints(memory_limit=free.prefill.memory - 1), batch=8)
    assert f"with {free.prefill.memory} bytes" in error.value.found and "while prompts are read" in error.value.found


@pytest.mark.slow
def test_the_plan_is_one_whose_prompts_fit() -> None:
    """Where the fastest step leaves no room for the prompts another plan is taken."""
    with torch.device("meta"):
        model = llama(intermediate_size=512, num_key_value_heads=1)
    prefills = {n: infer(model, "cpu:1x2", Hints(tp=n)).prefill for n in (1, 2)}
    most = sorted(p.memory for p in prefills.values() if p is not None)
    assert most[0] < most[1]
    limited = infer(model, "cpu:1x2", Hints(memory_limit=most[0]))
    assert limited.prefill is not None and limited.prefill.memory == most[0]


def test_what_if_of_a_generation() -> None:
    """Twice the context reads more and makes as many tokens: never faster, and not half as fast where weights are what
    a step reads. Twice the batch is twice the tokens, and no other plan for having larger parts."""
    with torch.device("meta"):
        model = llama(num_hidden_layers=1, hidden_size=512, intermediate_size=2048)
    plan = infer(model, "h100-sxm:1x1", batch=2, context=32).what_if()
    _, batch, context, _ = plan.what_ifs
    assert (batch.question, batch.work, batch.changes) == ("twice the batch", 2, ())
    assert (context.question, context.work) == ("contexts twice as long", 1)
    faster, slower = batch.speed(plan), context.speed(plan)
    assert faster is not None and slower is not None and faster > 1.5 and 0.8 < slower <= 1.0
    assert plan.prefill is not None and plan.prefill.memory == plan.needed_memory > plan.peak_memory
    report = plan.report()
    assert "total of prompts" in report and "while they are read" in report
    assert "parameters rest whole on every dp rank" in report and "2 samples a rank" in report
    page = plan.report("html")
    assert "to generate: a token of each of 2 samples a step, with 32 of context" in page and "total of prompts" in page
    first = {line.strip().partition("  ")[0] for line in report.splitlines()}
    assert {"Storage", "parameters", "cache"} <= first and "optimizer none" not in report
    assert not first & {"Micro-batches", "Recompute", "gradients", "activations"}


def test_inference_keeps_no_optimizer() -> None:
    workload = Workload(mode="infer", global_batch=8)
    assert workload.optimizer == "none" and Workload.from_dict(workload.to_dict()) == workload
    assert "mode" not in Workload().to_dict()
    with pytest.raises(WorkloadError, match="mode='serve'") as error:
        Workload(mode="serve")
    assert error.value.expected == "one of train, infer"


@pytest.mark.slow
def test_a_pipeline_is_refused() -> None:
    with torch.device("meta"), pytest.raises(HintError, match="The hint pp=2 cannot be kept"):
        infer(llama(), "cpu:1x2", Hints(pp=2))


@pytest.mark.slow
def test_an_encoder_infers_without_a_backward() -> None:
    with torch.device("meta"):
        model = bert()
    found = infer(model, "cpu:1x2", Hints(tp=2))
    assert found.memory["gradients"] == found.memory["activations"] == 0 and found.prefill is None
    assert "cache" not in found.memory and not any(c.kind == "reduce_scatter" for c in found.collectives)


@pytest.mark.slow
def test_the_command_line_plans_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    llama_config().save_pretrained(tmp_path)
    found = good("plan", ".", "--cluster", "cpu:2", "--batch", "4", "--seq", "16", "--infer", "--json").data
    assert found["workload"]["mode"] == "infer" and found["prefill"]["seconds"] > 0
    assert good("estimate", ".", "--cluster", "cpu:2", "--batch", "4", "--seq", "16", "--infer").code == 0


def test_where_keys_and_values_rest() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    assert cached_layout(mesh, (4, 2, 16, 8)) == Layout((("dp",), ("tp",), (), ()))
    assert cached_layout(mesh, (4, 3, 16, 8)) == Layout((("dp", "tp"), (), (), ()))
    assert cached_layout(mesh, (2, 3, 16, 8)) == Layout((("dp",), (), (), ()))
    assert cached_layout(mesh, (3, 2, 16, 8)) == Layout(((), ("tp",), (), ()))
    assert cached_layout(Mesh((("cp", 2), ("tp", 2))), (1, 4, 16, 8)) == Layout(((), ("cp", "tp"), (), ()))


# -- programs ----------------------------------------------------------------------------------------------------------


def test_a_write_is_where_the_cache_rests() -> None:
    cache, new, start = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 2, 4), torch.tensor(5)
    written = torch.ops.autopar.cache_write(cache, new, start)
    assert torch.equal(written, torch.cat([cache[:, :, :5], new, cache[:, :, 7:]], 2))
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("cache", "new", "start")]
    graph.output(graph.call_function(aten.neg.default, (graph.call_function(WRITE, tuple(given)),)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    in_place(module)
    own = cache.clone()
    assert torch.equal(module(own, new, start), -written) and torch.equal(own, written)
    with graph.inserting_after(given[2]):
        copied = graph.call_function(aten.clone.default, (given[0],))
        graph.call_function(WRITE, (copied, *given[1:]))
    with pytest.raises(ValueError, match="no input of its own"):
        in_place(fx.GraphModule(torch.nn.Module(), graph))
    with pytest.raises(ValueError, match="expects"):
        torch.ops.autopar.cache_write(cache, new[:1], start)


# -- verify ------------------------------------------------------------------------------------------------------------


KEPT = 16  # tokens of context


@pytest.fixture(scope="module")
def small() -> tuple[Any, Plan]:
    """A Llama of one layer in training mode, and a plan to generate with it on dp 2 x tp 2."""
    model = llama(num_hidden_layers=1)
    return model, infer(model, "cpu:1x4", Hints(dp=2, tp=2, zero=0), batch=4, context=KEPT)


def test_simulated_ranks_generate_what_one_process_does(
    small: tuple[Any, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` of a plan to generate: prompts, some padded on the left and all on the right, and tokens after them."""
    (model, plan), made = small, []

    def record(*args: Any, **kwargs: Any) -> Any:
        made.append(specialize_cached(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("autopar.verification.specialize_cached", record)
    report = autopar.verify(model, plan, workload=Workload(global_batch=4, seq_len=12))
    assert report.ok and report.max_error < 1e-5 and report.loss is None and not report.gradients
    assert list(report.errors) == [f"logits of token {i}" for i in range(5)]
    assert report.flops_share == pytest.approx(0.25, rel=0.02) and report.traffic.count["all_reduce", "tp"] > 0
    assert report.notes == ("4 prompts of 7 tokens, 5 greedy ones after each: the same tokens",)
    assert model.training
    first, step = made  # one program for all prompts, one for all tokens
    assert first.captured.inputs[0].meta["val"].shape == (4, KEPT) and not first.captured.caches
    tokens = {op.call.results[0].shape[:2] for op in step.operators if op.call.target is aten.embedding.default}
    assert tokens == {(4, 1)}  # nothing before the last token is computed again
    attended = [step.assignment.layouts(op)[0] for op in step.operators if op.call.target in ATTENTION]
    assert len(attended) == 1 and all(key.split_axes == ("dp", "tp") for _, key, *_ in attended)
    assert plan.memory["cache"] == 2 * 1 * 4 * KEPT * KV_HEADS * 8 * 4 // 4  # over all ranks


@pytest.mark.parametrize("which", ["prompt", "token"])
def test_verify_sees_a_generation_that_is_wrong(
    small: tuple[Any, Plan], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum over tp that is left out, of the prompt's forward or only of those of the tokens after it."""

    def without_a_sum(*args: Any, **kwargs: Any) -> Any:
        special = specialize_cached(*args, **kwargs)
        if bool(special.captured.caches) == (which == "token"):
            graph = special.sharded.module.graph
            lost = next(node for node in graph.nodes if node.target is ALL_REDUCE)
            lost.replace_all_uses_with(lost.args[0])
        return special

    monkeypatch.setattr("autopar.verification.specialize_cached", without_a_sum)
    model, plan = small
    report = autopar.verify(model, plan, workload=Workload(global_batch=4, seq_len=12))
    first = "logits of token 0"
    assert not report.ok and report.max_error > 1e-2
    assert (report.errors[first] > 1e-2) == (which == "prompt") and "DIFFERENT" in str(report)


def test_tokens_that_differ() -> None:
    """Where eager's two logits are as good as equal either token will do; a NaN never does."""
    truth = [torch.tensor([[1.0, 3.0, 2.0], [1.0, 2.0, 2.0 - 1e-6]])]
    assert _other_tokens(truth, truth, 0.0) == ([], 0)
    near = [torch.tensor([[1.0, 3.0, 2.0], [1.0, 2.0, 2.0 + 1e-6]])]
    assert _other_tokens(near, truth, 1e-5) == ([], 1)
    assert _other_tokens(near, truth, 1e-9) == (["token 0 of sample 1"], 0)
    other = [torch.tensor([[1.0, 2.0, 3.0], [1.0, float("nan"), 2.0]])]
    assert _other_tokens(other, truth, 1e-6) == (["token 0 of sample 0"], 0)
    assert _other_tokens([torch.full((2, 3), float("nan"))], truth, 1e-6)[0] == [
        f"token 0 of sample {i}" for i in range(2)
    ]


@pytest.mark.slow
def test_verify_in_other_precisions(small: tuple[Any, Plan]) -> None:
    """float64 to 1e-10, bfloat16 as near to float64 as one process; prompts of one's own; more tokens."""
    model, plan = llama(num_hidden_layers=2), small[1]
    with exact_float64():
        report = autopar.verify(model.double(), plan, workload=Workload(global_batch=3, seq_len=12))
    assert report.ok and report.bound == 1e-10
    ids = torch.randint(1, VOCABULARY, (2, 6))
    for inputs in (ids, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        report = autopar.verify(model.bfloat16(), plan, example_inputs=inputs, steps=6)
        assert report.ok and len(report.errors) == 6 and "2 prompts of 6 tokens" in str(report)
    with pytest.raises(InputError, match="starts from prompts"):
        autopar.verify(model, plan, example_inputs=(ids,))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_verify_plans_to_generate(dtype: str | None) -> None:
    """On a cluster, all its ranks; with parameters used in bfloat16; ZeRO, whose gathers run before every token."""
    workload = Workload(global_batch=4, seq_len=12, mode="infer", param_dtype=dtype)
    report = autopar.verify(llama(num_hidden_layers=2), "cpu:1x4", workload=workload, hints=Hints(dp=2, tp=2, zero=3))
    assert report.ok and report.world_size == 4 and report.traffic.count["all_gather", "dp"] > 0


@pytest.mark.slow
def test_verify_of_an_encoder_runs_its_forward() -> None:
    model = bert()
    workload = Workload(global_batch=4, seq_len=16, mode="infer")
    report = autopar.verify(model, "cpu:1x2", workload=workload, hints=Hints(tp=2))
    assert report.ok and report.loss is None and not report.gradients and model.training
    assert report.flops_share == pytest.approx(0.5, rel=0.02)


@pytest.mark.slow
def test_the_command_line_verifies_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    llama_config().save_pretrained(tmp_path)
    good("plan", ".", "--cluster", "cpu:2", "--batch", "4", "--seq", "16", "--infer", "-o", "plan.json")
    found = good("verify", ".", "plan.json", "--json").data
    assert found["ok"] and "4 prompts of 11 tokens, 5 greedy ones after each: the same tokens" in found["notes"]


# -- what cannot be done -----------------------------------------------------------------------------------------------


def test_prompts_are_padded_to_few_lengths() -> None:
    assert [bucket_of(n) for n in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]
    model = llama(max_position_embeddings=20)
    given = {"input_ids": torch.ones(2, 17, dtype=torch.int64), "position_ids": torch.arange(17).expand(2, 17)}
    found = prompt(model, given, 100)
    assert found["input_ids"].shape == (2, 20) and int(found["position_ids"].max()) == 19  # the last that there is
    assert prompt(model, given, 18)["input_ids"].shape == (2, 18)


def test_what_is_no_decoder_is_named() -> None:
    import transformers

    assert why_not(llama()) is None
    assert why_not(torch.nn.Linear(2, 2)) == "Linear is no model of transformers"
    assert "no generate()" in str(why_not(bert()))
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with torch.device("meta"):
        t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
        config = transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)
        mamba = transformers.MambaForCausalLM(config)
    assert "has an encoder" in str(why_not(t5)) and why_not(mamba) is not None


@pytest.mark.parametrize(("changes", "found"), [
    ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    ({"use_cache": False}, "use_cache=False"),
    ({"output_attentions": True}, "output_attentions=True"),
])  # fmt: skip
def test_ways_that_are_refused(changes: dict[str, Any], found: str) -> None:
    usual = {"cache_implementation": None, "use_cache": True, "output_attentions": None, "output_hidden_states": None}
    refuse(SimpleNamespace(**usual), {}, "greedy_search")
    with pytest.raises(InputError) as error:
        refuse(SimpleNamespace(**{**usual, **changes}), {}, "greedy_search")
    assert error.value.found == found
    with pytest.raises(InputError, match="generation by assisted_generation"):
        refuse(SimpleNamespace(**usual), {}, "assisted_generation")


# -- real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "parts"), [
    (2, ["llamas", "trained"]), (4, ["llamas", "trained"]), (2, ["pieces", "refused", "smollm2"]),
    (4, ["kinds", "pieces"]), (2, ["pretrained"]),
])  # fmt: skip
def test_processes_generate_what_one_does(processes: int, parts: list[str]) -> None:
    """tp 2, and dp 2 x tp 2."""
    assert_all_ok(torchrun(processes, SCRIPTS / "generate.py", *parts, timeout=900), processes, parts)
