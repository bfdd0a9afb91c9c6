"""torchrun expert_ways.py: families of mixtures on real processes, in the ways in which experts can be split and
reached; their balancing loss over micro-batches; and the bias of DeepSeek's routers. Against eager PyTorch."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training import Pair, assert_close, join, parameters, say, whole

import autopar
from autopar.capture.hf_experts import mixtures, router_biases
from autopar.runtime.reference import exact_float64

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from zoo import MIXTURES

FAMILIES = ("mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss")
#: By the number of processes: experts over dp with each expert's hidden dim over tp; and over both, tokens gathered.
PLANS: dict[int, dict[str, autopar.Hints]] = {
    4: {
        "dp=2, ep=2, tp=2": autopar.Hints(dp=2, tp=2, ep=2, zero=1),
        "ep=4, gathered": autopar.Hints(dp=2, tp=2, ep=4, zero=3, dispatch="gather"),
    },
    8: {"dp=4, ep=2, tp=2": autopar.Hints(dp=4, tp=2, ep=2, zero=3)},
}


def family(name: str) -> tuple[Any, dict[str, Any]]:
    """A model in float64, alike on all ranks, and a batch."""
    return next(f for f in MIXTURES if f.name == name).make(torch.float64)


def trained(name: str, plan: str, hints: autopar.Hints) -> None:
    """Three steps. Of all weights of experts a rank rests no more than its part."""
    model, batch = family(name)
    if hints.ep == 2:  # not over tp, which splits each of them
        shard = {"*.experts.gate_up_proj": {"tp": 2}, "*.experts.down_proj": {"tp": 1 if name == "gpt-oss" else 2}}
        hints = autopar.Hints(**{**hints.to_dict(), "shard": shard})
    pair = Pair(model, hints, batch)
    experts = [p for n, p in pair.model.named_parameters() if ".experts." in n and p.dim() == 3]
    parts = dist.get_world_size() if hints.zero == 3 or hints.ep == 4 else 4
    assert experts and all(p.to_local().numel() * parts == p.numel() for p in experts), plan
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.model, pair.reference)]
    for _ in range(3):
        pair.step(batch, optimizers, max_norm=0.01)
    assert_close(parameters(pair.model), parameters(pair.reference), "parameters")


def balanced(hints: autopar.Hints) -> None:
    """A balancing loss is that of the whole batch, whatever micro-batches it comes in."""
    reference, batch = family("mixtral")
    reference.router_aux_loss_coef = 0.5
    model = autopar.parallelize(copy.deepcopy(reference), hints=hints, example_inputs=batch)
    assert model.plan.forwards_first and model.plan.num_micro_batches > 1
    loss, truth = model.train_step(**batch), reference(**batch).loss
    truth.backward()
    assert_close({"loss": loss.detach()}, {"loss": truth.detach()}, "loss")
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    found = {name: p.grad for name, p in model.named_parameters()}
    assert hints.pp is not None or any("gate.weight" in name for name in found)
    assert_close(whole(found), {name: gradients[name] for name in found}, "gradients")


def biased(hints: autopar.Hints) -> None:
    """Three steps with updates of the bias, which decides where tokens go; counted by hand beside eager."""
    reference, batch = family("deepseek-v3")
    model = autopar.parallelize(copy.deepcopy(reference), hints=hints, example_inputs=batch)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    counts: dict[str, torch.Tensor] = {}
    for name, module in mixtures(reference).items():
        module.register_forward_pre_hook(lambda m, args, name=name: counts.update({name: args[1].reshape(-1)}))
    for _ in range(3):
        loss, truth = model.train_step(**batch), reference(**batch).loss
        truth.backward()
        assert_close({"loss": loss.detach()}, {"loss": truth.detach()}, "loss")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, bias in router_biases(reference).items():
            sent = torch.bincount(counts[name], minlength=bias.numel())
            assert torch.equal(model.expert_load()[name].tokens, sent), name
            bias += 0.05 * (sent.double().mean() - sent).sign().to(bias.dtype)
        model.router_bias_update(0.05)
    mine, theirs = router_biases(model._original), router_biases(reference)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert any(bias.any() for bias in theirs.values())


def compiled() -> None:
    """What lies between rows of experts is compiled, they are not; the next step runs what is there."""
    reference = family("mixtral")[0].float()
    batch = family("mixtral")[1]
    model = autopar.parallelize(copy.deepcopy(reference), hints=autopar.Hints(tp=2, ep=2), example_inputs=batch,
                                compile=True)  # fmt: skip
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, reference)]
    for _ in range(2):
        loss, truth = model(**batch).loss, reference(**batch).loss
        loss.backward()
        truth.backward()
        assert_close({"loss": loss.detach()}, {"loss": truth.detach()}, "loss")
        grads = {name: p.grad for name, p in reference.named_parameters()}
        assert_close(whole({name: p.grad for name, p in model.named_parameters()}), grads, "gradients")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """All of it that so many processes can run."""
    join()
    world = dist.get_world_size()
    with exact_float64():
        for plan, hints in PLANS.get(world, {}).items():
            for name in FAMILIES:
                trained(name, plan, hints)
                say(f"ok {name}, {plan}")
        if world == 4:
            balanced(autopar.Hints(pp=2, dp=2, ep=2, micro_batch_size=1))
            balanced(autopar.Hints(dp=4, ep=2, zero=3, micro_batch_size=1))
            say("ok balanced")
            biased(autopar.Hints(dp=2, tp=2, ep=4, micro_batch_size=2))
            biased(autopar.Hints(pp=2, dp=2, ep=2, micro_batch_size=2))
            say("ok biased")
    if world == 2:
        compiled()
        say("ok compiled")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
