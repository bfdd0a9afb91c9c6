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
from torch import Tensor, fx

import autopar
from autopar import Hints, Plan, Workload
from autopar.capture.hf_cache import TracedCache
from autopar.capture.hf_generate import bucket_of, following, prompt, refuse, why_not
from autopar.cost_model.hardware import load_device
from autopar.errors import HintError, InputError, WorkloadError
from autopar.passes.cached import WRITE, in_place
from autopar.runtime.simulate import run_ranks
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


class _Simulated:
    """The forwards of a generation on all ranks of a plan."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self.model, self.plan, self.mesh = model, plan, plan.mesh
        #: Keys and values by rank.
        self.caches: list[list[Tensor]] = []

    def make(self, shapes: dict[str, Any]) -> Any:
        """The program for inputs of ``shapes``."""
        return specialize_cached(self.model, self.plan, (), shapes, training=False)

    def run(self, special: Any, given: dict[str, Any]) -> Tensor:
        """The logits, whole; of a prompt the keys and values go to the ranks' caches, with room for none more."""
        program, captured, caches = special.generation(), special.captured, self.caches
        batch = [t for t in given.values() if isinstance(t, Tensor)]
        plain = [node for node in captured.inputs if node not in captured.caches]
        every = []
        for rank in range(self.mesh.size):
            values = {special.sharded.coordinates.name: torch.tensor(self.mesh.coordinates(rank))}
            values |= {special.input_name(b.placeholder): b.tensor(self.model) for b in captured.buffers}
            values |= {special.input_name(n): t for n, t in zip(plain, batch, strict=True)}
            rests = caches[rank] if captured.caches else []
            values |= dict(zip(map(special.input_name, captured.caches), rests, strict=True))
            for p in captured.parameters:
                layout = special.assignment.sources[p.placeholder]
                whole = self.model.get_parameter(p.name).detach()
                values[special.input_name(p.placeholder)] = layout.local_slice(self.mesh, whole, rank)
            every.append([values[name] for name in program.forward_inputs])
        outputs = run_ranks(program.forward, every, self.mesh)
        if not captured.caches:
            self.caches = [list(out[1:]) for out in outputs]
        return self._whole(special, 0, [out[0] for out in outputs])

    def _whole(self, special: Any, place: int, pieces: list[Tensor]) -> Tensor:
        shape, layout = special.captured.outputs[place].node.meta["val"].shape, special.assignment.sinks[place]
        whole = torch.full(shape, float("nan"), dtype=pieces[0].dtype)
        for rank, piece in enumerate(pieces):
            layout.local_slice(self.mesh, whole, rank).copy_(piece)
        return whole


def test_simulated_ranks_generate_what_one_process_does() -> None:
    """A prompt that is padded on both sides, then three tokens, on dp 2 x tp 2: logits to 1e-5 (of float32)."""
    truth, kept = llama(num_hidden_layers=1).eval(), 16
    with torch.no_grad():
        plan = infer(truth, "cpu:1x4", Hints(dp=2, tp=2, zero=0), batch=4, context=kept)
        assert plan.memory["cache"] == 2 * 1 * 4 * kept * KV_HEADS * 8 * 4 // 4  # over all ranks
        ids = torch.randint(1, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        names = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        ranks = _Simulated(truth, plan)
        first = prompt(truth, {**names, "use_cache": True, "logits_to_keep": 1}, kept)
        assert first["input_ids"].shape == (4, 16) and first["logits_to_keep"].tolist() == [6]
        logits = ranks.run(ranks.make({**first, "cache": TracedCache()}), first)
        assert [tuple(piece.shape) for piece in ranks.caches[0]] == [(2, 1, 16, 8)] * 2
        step = None
        for length in range(7, 11):
            torch.testing.assert_close(logits[:, -1], truth(**names).logits[:, -1], rtol=0, atol=1e-5)
            token = logits[:, -1].argmax(-1, keepdim=True)
            new = (token, torch.ones_like(token), names["position_ids"][:, -1:] + 1)
            names = {n: torch.cat([t, more], 1) for (n, t), more in zip(names.items(), new, strict=True)}
            last = {"input_ids": token, "attention_mask": names["attention_mask"], "position_ids": new[2]}
            given = {**following(last, kept), "use_cache": True}
            whole = [torch.empty(4, KV_HEADS, kept, 8, device="meta") for _ in range(2)]
            filled = torch.tensor(length)
            step = step or ranks.make({**given, "cache": TracedCache(whole[:1], whole[1:], filled)})
            logits = ranks.run(step, {**given, "filled": filled})
    assert step is not None
    tokens = {op.call.results[0].shape[:2] for op in step.operators if op.call.target is aten.embedding.default}
    assert tokens == {(4, 1)}  # nothing before the last token is computed again
    attended = [step.assignment.layouts(op)[0] for op in step.operators if op.call.target in ATTENTION]
    assert len(attended) == 1 and all(key.split_axes == ("dp", "tp") for _, key, *_ in attended)


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
