"""torchrun features.py: what a user does with a parallel module besides the plain loop."""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_models import VOCABULARY, encoded, gradients, llama, mlp, tokens
from torch.distributed.tensor import DTensor
from training import Pair, assert_close, check_is_split, join, parameters, say, whole

import autopar
from autopar import Hints

#: Both axes on four ranks, one on two.
BOTH = Hints(tp=2, zero=3) if os.environ["WORLD_SIZE"] == "4" else Hints(dp=2, zero=3)


def optimizers() -> None:
    """foreach and fused AdamW, and SGD with foreach, work on the parameters as they are."""
    batch = tokens(8, 8)
    pair = Pair(llama(num_hidden_layers=1), BOTH, batch)
    pair.train(lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True), [batch], steady=True)
    pair.train(lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True), [batch], steady=True)
    pair.train(lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=True), [batch])


def module() -> None:
    """The module has the model's attributes, evaluates without gradients, gives logits as DTensors, and its state_dict
    is read back by another module and by its own optimizer."""
    batch = tokens(8, 8)
    pair = Pair(llama(num_hidden_layers=1), BOTH, batch)
    model, reference = pair.model, pair.reference
    assert model.config.vocab_size == VOCABULARY and model.generation_config is not None
    assert not hasattr(model, "no_such_attribute")

    out = model(**batch)
    truth = reference(**batch)
    assert type(out) is type(truth) and out.loss.shape == () and not isinstance(out.loss, DTensor)
    assert out.logits.shape == truth.logits.shape
    assert_close({"logits": out.logits.full_tensor().detach()}, {"logits": truth.logits.detach()}, "logits")

    model.eval(), reference.eval()
    assert not model.training and not any(m.training for m in model.modules())
    with torch.no_grad():
        for given in (batch, {"input_ids": batch["input_ids"]}):
            out, truth = model(**given), reference(**given)
            assert not out.logits.requires_grad
            assert_close({"logits": out.logits.full_tensor()}, {"logits": truth.logits}, "logits in eval mode")
    model.train(), reference.train()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batch).loss.backward()
    optimizer.step()
    state, inner = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert set(state) == set(reference.state_dict())
    at_save = parameters(model)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(not torch.equal(at_save[n], p) for n, p in parameters(model).items())
    model.load_state_dict(state)
    optimizer.load_state_dict(inner)
    assert all(torch.equal(at_save[n], p) for n, p in parameters(model).items())
    reference.load_state_dict(whole(state))
    assert_close({"loss": model(**batch).loss.detach()}, {"loss": reference(**batch).loss.detach()}, "loaded loss")


def loss_outside() -> None:
    """A model that returns a bare tensor: losses computed on it give eager's gradients."""
    x, target = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 64).view(8, 8)
    losses = {
        "square": lambda y: y.pow(2).mean(),
        "sum": lambda y: y.sum(),
        "mse": lambda y: F.mse_loss(y, target),
    }
    for hints in (None, Hints(tp=2), Hints(dp=dist.get_world_size())):
        reference = mlp()
        model = autopar.parallelize(copy.deepcopy(reference), hints=hints, example_inputs=x)
        check_is_split(model, reference)
        for loss_of in losses.values():
            y = model(x)
            assert isinstance(y, DTensor)
            loss, truth = loss_of(y), loss_of(reference(x))
            loss.backward(), truth.backward()
            assert_close({"loss": loss.detach()}, {"loss": truth.detach()}, "loss")
            assert_close(whole(gradients(model)), gradients(reference), "gradients")
            model.zero_grad(), reference.zero_grad()


def logits_outside() -> None:
    """The user's own loss on a language model's logits, gathered first, as anyone would write it."""
    batch = tokens(8, 8, ignored=False)
    pair_batch = {"input_ids": batch["input_ids"]}
    reference = llama(num_hidden_layers=1)
    model = autopar.parallelize(copy.deepcopy(reference), hints=BOTH, example_inputs=pair_batch)
    logits = model(**pair_batch).logits.full_tensor()
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    truth = F.cross_entropy(reference(**pair_batch).logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward(), truth.backward()
    assert_close({"loss": loss.detach()}, {"loss": truth.detach()}, "loss")
    assert_close(whole(gradients(model)), gradients(reference), "gradients")


def meta() -> None:
    """Models without weights are initialised as they initialise themselves, alike on all ranks, whatever their random
    states; the meta model stays as it is."""
    makers = {"llama": (lambda: llama(num_hidden_layers=1), tokens(8, 8)), "encoded": (encoded, torch.randn(8, 4, 16))}
    for make, batch in makers.values():
        with torch.device("meta"):
            model = make()
        torch.manual_seed(100 + dist.get_rank())
        parallel = autopar.parallelize(model, hints=BOTH, example_inputs=batch)
        assert all(p.is_meta for p in model.parameters())
        found = parameters(parallel)
        every: list[dict[str, torch.Tensor] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        for other in every:
            assert other is not None and all(torch.equal(found[n], other[n]) for n in found)
        built = dict(make().named_parameters())
        for name, p in found.items():
            assert p.isfinite().all()
            assert abs(float(p.std(correction=0)) / max(float(built[name].std(correction=0)), 1e-9) - 1) < 0.3 or (
                p.numel() < 100 or torch.equal(p, built[name])
            ), name
        loss = parallel(**batch).loss if isinstance(batch, dict) else parallel(batch).pow(2).mean()
        loss.backward()
        assert all(p.grad is not None for p in parallel.parameters())


def shapes() -> None:
    """Other batch and sequence lengths use the same plan; a batch that no degree divides is computed all the same."""
    pair = Pair(llama(num_hidden_layers=1), BOTH, tokens(8, 8))
    for batch in (tokens(8, 8), tokens(4, 6), tokens(3, 5), tokens(1, 3)):
        pair.train(lambda ps: torch.optim.SGD(ps, lr=0.1), [batch])


def frozen() -> None:
    """Frozen parameters get no gradient and stay; unfreezing them is noticed."""
    batch, reference = tokens(8, 8), llama(num_hidden_layers=1)
    reference.model.embed_tokens.weight.requires_grad_(False)
    model = autopar.parallelize(copy.deepcopy(reference), hints=BOTH, example_inputs=batch)
    check_is_split(model, reference)
    for unfrozen in (False, True):
        for m in (model, reference):
            m.model.embed_tokens.weight.requires_grad_(unfrozen)
            m.zero_grad()
            m(**batch).loss.backward()
        assert (model.model.embed_tokens.weight.grad is not None) == unfrozen
        assert_close(whole(gradients(model)), gradients(reference), "gradients")


def accumulated() -> None:
    """Two backwards without an update add up, as in eager mode."""
    pair = Pair(llama(num_hidden_layers=1), BOTH, tokens(8, 8))
    for m in (pair.model, pair.reference):
        for seed in (0, 1):
            m(**tokens(8, 8, seed=seed)).loss.backward()
    assert_close(whole(gradients(pair.model)), gradients(pair.reference), "gradients")


FEATURES = (optimizers, module, loss_outside, logits_outside, meta, shapes, frozen, accumulated)


def main() -> None:
    """All of them; the first that fails ends the run."""
    join()
    for feature in FEATURES:
        feature()
        say(f"ok {feature.__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
