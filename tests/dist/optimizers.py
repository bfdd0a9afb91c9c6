"""torchrun optimizers.py [NAME ...]: optimizers, clipping and mixed precision, each against one process."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from small_models import errors, gradients, llama, tokens
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from training import assert_close, join, parameters, say, whole

import autopar
from autopar import Hints, WholeOptimizer, Workload
from autopar.capture.graph import Captured
from autopar.errors import AutoparError
from autopar.runtime.copies import StepCopies
from autopar.runtime.precision import agree_on_overflow, mixed_call
from autopar.specialize import capture_batch

Make = Callable[[list[Any]], torch.optim.Optimizer]
SPLIT = Hints(dp=2, tp=2, zero=3)


def batches(count: int) -> list[dict[str, Tensor]]:
    """Batches of eight samples."""
    return [tokens(8, 8, seed=i) for i in range(count)]


def pair(hints: Hints = SPLIT, **arguments: Any) -> tuple[Any, nn.Module]:
    """A parallel Llama of one layer, and the eager one that it was made from."""
    reference = llama(num_hidden_layers=1)
    return autopar.parallelize(
        copy.deepcopy(reference), hints=hints, example_inputs=tokens(8, 8), **arguments
    ), reference


def hand_over(model: nn.Module, reference: nn.Module) -> None:
    """Give the parallel model exactly the gradients of the one in one process, each rank its pieces."""
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and q.grad is not None
        same = DTensor.from_local(q.grad, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
        p.grad.to_local().copy_(same.redistribute(placements=p.placements).to_local())


def alike(make: Make, alone: Make, chosen: Callable[[Any], bool] = lambda p: True, exact: bool = False) -> None:
    """Three steps with a learning-rate schedule in parallel (by ``make``) and in one process (by ``alone``): the same
    parameters, ``exact`` ones to the last bit given the same gradients, and others than before."""
    pairs = pair()
    before = parameters(pairs[1])
    makes = zip((make, alone), pairs, strict=True)
    optimizers = [m([p for p in model.parameters() if chosen(p)]) for m, model in makes]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch) for o in optimizers]
    for batch in batches(3):
        for model in pairs:
            model.zero_grad()
            model(**batch).loss.backward()
        if exact:
            assert_close(whole(gradients(pairs[0])), gradients(pairs[1]), "gradients")
            hand_over(*pairs)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    found, truth = parameters(pairs[0]), parameters(pairs[1])
    assert_close(found, truth, "parameters")
    assert not exact or all(torch.equal(found[name], p) for name, p in truth.items())
    moved = [name for name, p in truth.items() if not torch.equal(p, before[name])]
    assert len(moved) == sum(chosen(p) for p in pairs[1].parameters())


def refused(text: str, act: Callable[[], object]) -> None:
    """``act`` raises an error of autopar that says ``text``."""
    try:
        act()
    except AutoparError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"expected {text}")


def by_element() -> None:
    """SGD with momentum on the pieces themselves; AdamW, foreach and fused, is in features.py."""
    def make(params: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)

    alike(make, make)


def whole_matrices() -> None:
    """Muon, and both Adafactors, on whole parameters that ranks own: as in one process. On the pieces they are refused.
    All ranks own something, and each only what is its own."""
    from transformers.optimization import Adafactor

    def matrix(p: Any) -> bool:
        return bool(p.ndim == 2)

    cases: list[tuple[Any, dict[str, Any], Callable[[Any], bool]]] = [
        (torch.optim.Muon, {"lr": 1e-2, "weight_decay": 0.1}, matrix),
        (torch.optim.Adafactor, {"lr": 1e-2}, lambda p: True),
        (Adafactor, {"lr": 1e-3, "relative_step": False, "scale_parameter": False}, lambda p: True),
    ]
    for kind, arguments, chosen in cases:
        alike(lambda ps, k=kind, a=arguments: WholeOptimizer(ps, k, **a),
              lambda ps, k=kind, a=arguments: k(ps, **a), chosen, exact=True)  # fmt: skip
    model, _ = pair()
    model(**tokens(8, 8)).loss.backward()
    for kind, arguments, chosen in cases:
        optimizer = kind([p for p in model.parameters() if chosen(p)], **arguments)
        refused("on parameters that are split over ranks", optimizer.step)
    optimizer = WholeOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer.step()
    owned = [int(s["momentum_buffer"].numel()) for s in optimizer.state_dict()["state"].values() if s]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, sum(owned))
    total = sum(p.numel() for p in model.parameters())
    assert sum(every) == total and max(every) <= 2 * total / dist.get_world_size(), every
    refused("parameters of a parallel module", lambda: WholeOptimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD))


def clipping() -> None:
    """One norm of all gradients, each element once, of orders 1, 2, 3 and infinity, under ZeRO-3 with TP and under
    plain dp: as torch has it of whole gradients. A norm that is not finite is an error on every rank if asked for."""
    for hints in (SPLIT, Hints(dp=4, zero=0), Hints(dp=2, tp=2, zero=1)):
        model, reference = pair(hints)
        for order in (1.0, 2.0, 3.0, math.inf):
            for m in (model, reference):
                m.zero_grad()
                m(**tokens(8, 8)).loss.backward()
            norm = model.clip_grad_norm_(0.05, order)
            truth = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, order)
            assert not isinstance(norm, DTensor) and norm.dtype == truth.dtype and truth > 0.05
            assert_close({"norm": norm}, {"norm": truth}, "norm")
            assert_close(whole(gradients(model)), gradients(reference), "clipped gradients")
    untouched = whole(gradients(model))
    assert float(model.clip_grad_norm_(1e9)) <= 1e9
    assert all(torch.equal(a, b) for a, b in zip(whole(gradients(model)).values(), untouched.values(), strict=True))
    refused("norm_type=0", lambda: model.clip_grad_norm_(1.0, 0))
    model.lm_head.weight.grad.to_local().fill_(math.inf if dist.get_rank() == 0 else 0.0)
    refused("the norm of the gradients is inf", lambda: model.clip_grad_norm_(1.0, error_if_nonfinite=True))


def by_hand(reference: nn.Module, captured: Captured, batch: dict[str, Tensor], scale: float = 1.0) -> Tensor:
    """Loss and gradients of one process that casts its masters itself."""
    loss: Tensor = mixed_call(reference, captured, (), batch).loss
    (loss * scale).backward()
    return loss


def near(found: dict[str, Tensor], truth: dict[str, Tensor], bound: float) -> None:
    """RMS over all tensors of the error, in numbers of 16 bits."""
    off = errors(found, truth)
    assert math.sqrt(sum(e * e for e in off.values()) / len(off)) <= bound, off


def mixed() -> None:
    """float32 masters, bf16 use: the plain loop and `train_step` in two micro-batches against one process by hand, to a
    few roundings of bf16; what the optimizer sees is float32."""
    workload = Workload(param_dtype="bfloat16", global_batch=8)
    for hints in (SPLIT, Hints(dp=2, tp=2, zero=2, micro_batch_size=2)):
        model, reference = pair(hints, workload=workload)
        captured = capture_batch(reference, (), tokens(8, 8), precision=workload.precision)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
        for batch in batches(2):
            truth = by_hand(reference, captured, batch)
            if hints.micro_batch_size is None:
                loss = model(**batch).loss
                loss.backward()
            else:
                loss = model.train_step(**batch)
            assert abs(float(loss.detach()) - float(truth.detach())) <= 2e-2 * float(truth.detach())
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            near(whole(gradients(model)), gradients(reference), 2e-2)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def loss_scale() -> None:
    """float16 with a GradScaler, in the plain loop and in `train_step`: an overflow on any rank skips the step on all
    of them and halves the scale; otherwise gradients come out unscaled."""
    workload = Workload(param_dtype="float16", global_batch=8)
    model, reference = pair(Hints(dp=2, tp=2, zero=3, micro_batch_size=2), workload=workload)
    captured = capture_batch(reference, (), tokens(8, 8), precision=workload.precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    model.grad_scaler = scaler
    before = parameters(model)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model.train_step(**tokens(8, 8))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(scales, scaler.get_scale())
        assert len(set(scales)) == 1, scales
        after = parameters(model)
        if any(not torch.equal(after[n], before[n]) for n in after):
            break
    assert scaler.get_scale() < 2.0**40, "nothing overflowed"
    truth = by_hand(reference, captured, tokens(8, 8), 1024.0)
    assert abs(float(loss) - float(truth.detach())) <= 2e-3 * float(truth.detach())
    near(whole(gradients(model)), {n: g / 1024.0 for n, g in gradients(reference).items()}, 5e-3)

    optimizer.zero_grad()
    reference.load_state_dict({n: p for n, p in parameters(model).items()}, strict=False)
    reference.zero_grad()
    scaler.scale(model(**tokens(8, 8)).loss).backward()
    scaler.unscale_(optimizer)
    by_hand(reference, captured, tokens(8, 8), 1024.0)
    near(whole(gradients(model)), {n: g / 1024.0 for n, g in gradients(reference).items()}, 5e-3)


def kept_copies() -> None:
    """ZeRO 1 and 2 in the plain loop: parameters are gathered once for all forwards and backwards between two changes
    of them, by an optimizer (foreach ones leave version counters as they are) or by hand, and each gives the numbers of
    one process."""
    for zero in (1, 2):
        models = pair(Hints(dp=2, tp=2, zero=zero))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=True) for m in models]
        with counted() as count:
            both(models, count, 1, forwards=2)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            both(models, count, 2)
            for m in models:
                m.zero_grad()
                with torch.no_grad():
                    m.get_parameter("model.norm.weight").mul_(2.0)
            both(models, count, 3)
            with torch.no_grad():
                models[1].get_parameter("model.norm.weight").mul_(0.5)
            models[0].load_state_dict(models[1].state_dict())
            both(models, count, 4)


def both(models: tuple[Any, nn.Module], count: Counter[str], gathers: int, forwards: int = 1) -> None:
    """Forward and backward in parallel and in one process: equal, with so many ``gathers`` since the start."""
    for _ in range(forwards):
        losses = [model(**tokens(8, 8)).loss for model in models]
        for loss in losses:
            loss.backward()
        assert_close({"loss": losses[0].detach()}, {"loss": losses[1].detach()}, "loss")
    assert_close(whole(gradients(models[0])), gradients(models[1]), "gradients")
    assert count["gathers"] == gathers, (count, gathers)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often copies of parameters are made in the block."""
    count: Counter[str] = Counter()
    take = StepCopies.take

    def counting(self: StepCopies, program: Any, parameters: Any, values: Any, run: Any) -> dict[str, Tensor]:
        def counted_run(module: Any, inputs: Any) -> Any:
            count["gathers"] += 1
            return run(module, inputs)

        return take(self, program, parameters, values, counted_run)

    StepCopies.take = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        StepCopies.take = take  # type: ignore[method-assign]


def overflow_of_one_stage() -> None:
    """A pipeline with float16 and a scaler: a gradient of one rank that is not finite makes all ranks skip the step;
    one that is finite on all changes no gradient."""
    workload = Workload(param_dtype="float16", global_batch=8)
    model, _ = pair(Hints(pp=2, dp=2, zero=3, micro_batch_size=1), workload=workload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.grad_scaler = scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for broken in (False, True):
        optimizer.zero_grad()
        before = [p.detach().to_local().clone() for p in model.parameters()]
        model.train_step(**tokens(8, 8))
        pieces = [p.grad.to_local() for p in model.parameters()]
        if broken and dist.get_rank() == dist.get_world_size() - 1:
            pieces[-1].fill_(math.nan)
        kept = [piece.clone() for piece in pieces]
        agree_on_overflow([p.grad for p in model.parameters()], torch.device("cpu"))
        assert broken or all(torch.equal(a, b) for a, b in zip(pieces, kept, strict=True))
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(p.detach().to_local(), q) for p, q in zip(model.parameters(), before, strict=True)]
        assert all(same) if broken else not any(same), (broken, same)
    assert scaler.get_scale() == 128.0


PARTS = (by_element, whole_matrices, clipping, mixed, loss_scale, overflow_of_one_stage, kept_copies)


def main() -> None:
    """Those that are named, else all; the first that fails ends the run."""
    join()
    for part in PARTS:
        if len(sys.argv) == 1 or part.__name__ in sys.argv[1:]:
            part()
            say(f"ok {part.__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
