"""Tokens that experts are sent, counted as part of a step, and the bias that keeps DeepSeek's routers balanced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import MIXTURES

import autopar
from autopar.capture.hf_experts import BIAS, COUNTS, count_tokens, mixtures, router_biases
from autopar.errors import InputError
from autopar.runtime.reference import Batch, exact_float64, run_sharded
from autopar.runtime.router import ExpertLoad, loads, update_biases
from autopar.specialize import specialize, specialize_step

#: Where tokens and experts are split, in one piece and in micro-batches, with what is made again, and by a pipeline.
PLANS: dict[str, tuple[int, autopar.Hints]] = {
    "dp2-tp2": (4, autopar.Hints(dp=2, tp=2, ep=4, pp=1)),
    "cp2": (2, autopar.Hints(cp=2, ep=2, pp=1)),
    "dp2-micro-batches-full": (2, autopar.Hints(dp=2, ep=2, pp=1, micro_batch_size=1, recompute="full")),
    "pp2-dp2": (4, autopar.Hints(pp=2, dp=2, ep=2, micro_batch_size=2)),
}


def deepseek(seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A model whose routers have biases that matter, and a batch."""
    model, batch = next(f for f in MIXTURES if f.name == "deepseek-v3").make(torch.float64)
    torch.manual_seed(seed)
    with torch.no_grad():
        for bias in router_biases(model).values():
            bias.copy_(torch.rand(bias.shape) * 0.2)
    return model, batch


def truly_sent(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The tokens that every expert is sent by the untouched model, as its routers say."""
    model, found = copy.deepcopy(model), dict[str, Tensor]()
    model.set_experts_implementation("eager")
    for name, module in mixtures(model).items():
        experts = int(module.num_experts)

        def see(_: nn.Module, args: tuple[Any, ...], name: str = name, experts: int = experts) -> None:
            found[name] = torch.bincount(args[1].reshape(-1), minlength=experts)

        module.register_forward_pre_hook(see)
    with torch.no_grad():
        model(**batch)
    return found


def test_loads_and_biases() -> None:
    """By hand: the mean is 3, two have less, one more, one as many."""
    model, _ = deepseek()
    count_tokens(model, torch.device("cpu"))
    name, module = next(iter(mixtures(model).items()))
    counts = getattr(module, COUNTS)
    before = router_biases(model)[name].clone()
    counts[:4] = torch.tensor([1, 2, 6, 3])
    counts[4:] = 3
    load = loads(model)[name]
    assert load.imbalance == pytest.approx(6 / 3) and load.tokens.tolist()[:4] == [1, 2, 6, 3]
    assert ExpertLoad(torch.zeros(4, dtype=torch.int64)).imbalance == 1.0
    update_biases(model, 0.25)
    change = router_biases(model)[name] - before
    torch.testing.assert_close(change[:4], torch.tensor([0.25, 0.25, -0.25, 0.0]).to(change.dtype))
    assert not counts.any() and not change[4:].any()
    assert not any(COUNTS in key for key in model.state_dict())


def test_models_without_them() -> None:
    with pytest.raises(InputError, match="no experts whose tokens are counted"):
        loads(nn.Linear(2, 2))
    with pytest.raises(InputError, match=f"no routers that a bias keeps balanced(.|\n)*{BIAS}"):
        update_biases(MIXTURES[0].make()[0], 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_token_counts_once(plan: str) -> None:
    """As many as the untouched model sends, of all ranks and micro-batches, in every one of three steps."""
    ranks, hints = PLANS[plan]
    model, batch = deepseek()
    expected = truly_sent(model, batch)
    assert len(expected) >= 1 and all(t.max() > t.min() for t in expected.values())
    count_tokens(model, torch.device("cpu"))
    with exact_float64():
        found = autopar.plan(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
        make = specialize_step if found.num_micro_batches > 1 else specialize
        run, _ = run_sharded(model, make(model, found, (), batch), Batch((), batch, 1, "sgd"))
    for name, tokens in expected.items():
        assert torch.equal(run.buffers[f"{name}.{COUNTS}"], tokens), plan
