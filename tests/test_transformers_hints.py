"""transformers' own tensor parallel plans as hints."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from dist.small_models import llama, mlp, tokens

import autopar
from autopar import Hints
from autopar.errors import HintError
from autopar.runtime.reference import exact_float64

BLOCK = "model.layers.*."
LLAMA = {
    f"{BLOCK}self_attn.q_proj.weight": {"tp": 0}, f"{BLOCK}self_attn.k_proj.weight": {"tp": 0},
    f"{BLOCK}self_attn.v_proj.weight": {"tp": 0}, f"{BLOCK}self_attn.o_proj.weight": {"tp": 1},
    f"{BLOCK}mlp.gate_proj.weight": {"tp": 0}, f"{BLOCK}mlp.up_proj.weight": {"tp": 0},
    f"{BLOCK}mlp.down_proj.weight": {"tp": 1},
}  # fmt: skip


def untied(**changes: Any) -> Any:
    return llama(num_hidden_layers=2, tie_word_embeddings=False, **changes)


def test_styles_are_dims() -> None:
    found = Hints.from_transformers(untied(), tp=2)
    assert found == Hints(tp=2, shard={**LLAMA, "lm_head.weight": {"tp": 0}})


def test_hints_of_ones_own_take_their_place() -> None:
    own = {f"{BLOCK}mlp.down_proj.weight": {"tp": 0}}
    found = Hints.from_transformers(untied(), shard=own, zero=3)
    assert found.shard == {**LLAMA, "lm_head.weight": {"tp": 0}, **own} and found.zero == 3


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)  # fmt: skip
    return MixtralForCausalLM(config)


DENSE = {*(name for name in LLAMA if "self_attn" in name), "lm_head.weight"}


def test_experts_are_left_out() -> None:
    with torch.device("meta"):
        shard = Hints.from_transformers(mixtral()).shard
    assert shard is not None and shard.keys() == DENSE


def test_experts_are_spread_as_the_expert_parallel_plan_says() -> None:
    """Its own, and one of an earlier version, whose ranks see all tokens; what it says of other modules is named."""
    with torch.device("meta"):
        model = mixtral()
    found = Hints.from_transformers(model, ep=2)
    assert (found.ep, found.dispatch) == (2, None) and found.shard is not None and found.shard.keys() == DENSE
    model.config.base_model_tp_plan = {"layers.*.mlp.experts.down_proj": "colwise"}
    assert Hints.from_transformers(model, ep=2).shard == {"lm_head.weight": {"tp": 0}}  # experts are spread, not split
    model.config.base_model_ep_plan = {"layers.*.mlp.gate": "ep_router", "layers.*.mlp.experts": "moe_tp_experts"}
    assert Hints.from_transformers(model, ep=2).dispatch == "gather"
    assert Hints.from_transformers(model, ep=2, dispatch="exchange").dispatch == "exchange"
    assert Hints.from_transformers(model).dispatch is None
    model.config.base_model_ep_plan = {"layers.*.mlp.experts": "grouped_gemm", "layers.*.self_attn.q_proj": "colwise"}
    with pytest.warns(UserWarning, match="expert parallel plan that hints have no word for are left out: colwise"):
        Hints.from_transformers(model, ep=2)
    with pytest.raises(HintError, match="LlamaForCausalLM has no expert parallel plan of transformers") as error:
        Hints.from_transformers(untied(), ep=2)
    assert "base_model_ep_plan" in error.value.expected


def test_unknown_styles_are_named_and_left_out() -> None:
    model = untied()
    model.config.base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "spiral"}
    with pytest.warns(UserWarning, match="left out: spiral"):
        found = Hints.from_transformers(model)
    assert found.shard == {f"{BLOCK}mlp.up_proj.weight": {"tp": 0}, "lm_head.weight": {"tp": 0}}


def test_what_contradicts_itself_or_is_not_there() -> None:
    model = untied()
    model.config.base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.up_proj.weight": "rowwise"}
    with pytest.raises(HintError, match=r"splits model\.layers\.0\.mlp\.up_proj\.weight in two ways"):
        Hints.from_transformers(model)
    with pytest.raises(HintError, match="has no tensor parallel plan"):
        Hints.from_transformers(mlp())
    with pytest.raises(HintError, match="tp=1 and shard"):
        Hints.from_transformers(untied(), tp=1)
    with warnings.catch_warnings(), pytest.raises(HintError, match="3 pieces"):
        warnings.simplefilter("error")
        autopar.plan(untied(), "cpu:1x3", hints=Hints.from_transformers(untied(), tp=3), example_inputs=tokens(6, 6))


@pytest.mark.slow
def test_a_plan_keeps_them() -> None:
    """Weights rest where transformers has them, and the ranks compute what one does."""
    with exact_float64():
        model = untied().double()
        batch = tokens(4, 8)
        plan = autopar.plan(model, "cpu:1x2", hints=Hints.from_transformers(model, tp=2), example_inputs=batch)
        report = autopar.verify(model, plan, example_inputs=batch)
    assert report.ok and report.max_error < 1e-10, str(report)
    assert str(plan.layout("model.layers.1.mlp.down_proj.weight")) == "[1:tp]"
    assert str(plan.layout("model.layers.1.self_attn.v_proj.weight")) == "[0:tp]"
    assert str(plan.layout("lm_head.weight")) == "[0:tp]"


@pytest.mark.slow
def test_a_plan_keeps_experts_spread() -> None:
    """Each of two ranks has half of the experts whole, and the ranks compute what one does."""
    torch.manual_seed(0)
    with exact_float64():
        model, batch = mixtral().double(), tokens(4, 8)
        plan = autopar.plan(model, "cpu:1x2", hints=Hints.from_transformers(model, ep=2), example_inputs=batch)
        report = autopar.verify(model, plan, example_inputs=batch)
    assert report.ok and report.max_error < 1e-10, str(report)
    layout = plan.layout("model.layers.0.mlp.experts.down_proj")
    assert plan.degrees["ep"] == 2 and len(layout.dims[0]) == 1 and layout.dims[1:] == ((), ())
