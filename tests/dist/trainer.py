"""torchrun trainer.py FOLDER: transformers' Trainer on a parallel Llama, against the same Trainer in one process.

Started without torchrun it is that one process, which trains the original model by `transformers.Trainer` and leaves in
FOLDER what came out.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from small_models import llama, tokens
from torch import Tensor
from torch.distributed.tensor import DTensor
from training import assert_close, say
from transformers import LlamaForCausalLM, TrainerCallback, TrainingArguments

import autopar
from autopar import Hints
from autopar.errors import HintError, InputError, RuntimeFailure
from autopar.integrations.trainer import AutoparTrainer

SAMPLES, LENGTH, BATCH = 22, 8, 4

#: What the Trainer is asked to do, and on which layout.
RUNS: dict[str, tuple[dict[str, Any], Hints]] = {
    "the model's loss": ({}, Hints(dp=2)),
    "a loss function": ({"loss": True}, Hints(tp=2)),
    "a loss function, accumulated": ({"loss": True, "gradient_accumulation_steps": 3}, Hints(dp=2, zero=3)),
    "the model's loss, accumulated": (
        {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False}, Hints(dp=2)),
    "label smoothing": ({"label_smoothing_factor": 0.1}, Hints(dp=2)),
    "micro-batches": ({}, Hints(dp=2, micro_batch_size=1)),
    "micro-batches, accumulated": (
        {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
        Hints(tp=2, zero=0, micro_batch_size=2)),
    "a pipeline, accumulated": ({"gradient_accumulation_steps": 2}, Hints(pp=2, micro_batch_size=1)),
}  # fmt: skip

#: What a run that is taken up again is asked to do, and the step after which it is: in the middle of an epoch.
KEPT, STEP = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1}, 4


def samples() -> list[dict[str, Tensor]]:
    """Token ids and labels that count unevenly, and a column that the model does not take."""
    data = tokens(SAMPLES, LENGTH, seed=5)
    rows = zip(*data.values(), strict=True)
    return [{"input_ids": ids, "labels": labels, "number": torch.tensor(n)} for n, (ids, labels) in enumerate(rows)]


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """A loss function as the documentation of the Trainer has it: a sum over tokens, divided by those of the step."""
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    assert num_items_in_batch is not None
    return total / num_items_in_batch


def right(prediction: Any) -> dict[str, float]:
    """How many tokens are predicted right, and how many there are."""
    guess, truth = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    counts = truth != -100
    return {"right": float((guess == truth)[counts].sum()), "tokens": float(counts.sum())}


class Logged(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """One number for each of what two runs have in common."""
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "eval_tokens"):
            if name in logs:
                self.seen.setdefault(name, []).append(float(logs[name]))


def make(kind: Any, model: Any, folder: Path, *, loss: bool = False, data: Any = None, hints: Hints | None = None,
         model_init: Any = None, **asked: Any) -> Any:  # fmt: skip
    """A Trainer with weight decay, a schedule, clipping and an evaluation at the end of each of two epochs, whose last
    batches are short."""
    arguments = TrainingArguments(**{
        "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH, "num_train_epochs": 2, "learning_rate": 1e-2, "adam_epsilon": 1e-3,
        "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.5, "logging_steps": 1, "eval_strategy": "epoch",
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 11, **asked,
    })  # fmt: skip
    data = data or samples()
    more: dict[str, Any] = {"hints": hints} if hints is not None else {}
    more |= {"model_init": model_init} if model_init is not None else {}
    return kind(model=model, args=arguments, train_dataset=data, eval_dataset=data[:6], callbacks=[Logged()],
                compute_loss_func=loss_of if loss else None, compute_metrics=right, **more)  # fmt: skip


def train(trainer: Any, **how: Any) -> dict[str, Tensor]:
    """Everything that was logged, and the weights at the end, whole (of a pipeline those of this rank's stage)."""
    trainer.train(**how)
    logged = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Logged))
    found = {name: torch.tensor(values) for name, values in logged.seen.items()}
    for name, p in trainer.model.named_parameters():
        found[name] = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone()
    return found


def parallel(hints: Hints, **arguments: Any) -> Any:
    """A Llama of one layer, split."""
    batch = tokens(BATCH, LENGTH)
    return autopar.parallelize(llama(num_hidden_layers=1), hints=hints, example_inputs=batch, **arguments)


def saved(trainer: Any, found: dict[str, Tensor], folder: Path) -> None:
    """What `save_model` writes, transformers loads back: the weights at the end."""
    trainer.save_model(str(folder))
    dist.barrier()
    loaded = dict(LlamaForCausalLM.from_pretrained(folder).named_parameters())
    assert all(torch.equal(p, found[name]) for name, p in loaded.items()) and (folder / "training_args.bin").exists()


def resumed(folder: Path) -> None:
    """A run that is kept and taken up by other plans ends where one process does that is never interrupted."""
    truth = torch.load(folder / "kept.pt")
    trainer = make(AutoparTrainer, parallel(Hints(dp=2, zero=3)), folder / "kept", **KEPT)
    assert_close(train(trainer), truth, "a run that is kept")
    for hints in (Hints(tp=2), Hints(pp=2, micro_batch_size=2)):
        trainer = make(AutoparTrainer, parallel(hints), folder / "kept", **KEPT)
        found = train(trainer, resume_from_checkpoint=str(folder / "kept" / f"checkpoint-{STEP}"))
        assert len(found["loss"]) == len(truth["loss"]) - STEP > 0
        rest = {name: value[STEP:] for name, value in truth.items() if name in ("loss", "grad_norm", "learning_rate")}
        assert_close({name: found[name] for name in rest}, rest, f"what is logged under {hints}")
        assert_close({n: t for n, t in found.items() if "." in n}, {n: truth[n] for n in found if "." in n}, str(hints))
    dist.barrier()


def the_best(folder: Path) -> None:
    """At the end the weights of the best of the evaluations, which here is not the last; those that went into a
    checkpoint without optimizers come out of it as well."""
    asked = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "eval_tokens",
             "greater_is_better": True, "save_only_model": True}  # fmt: skip
    trainer = make(AutoparTrainer, parallel(Hints(dp=2, zero=3)), folder / "best", **asked)
    found = train(trainer)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    assert not (folder / "best" / "checkpoint-6" / "training_state").exists()
    best = dict(LlamaForCausalLM.from_pretrained(folder / "best" / "checkpoint-6").named_parameters())
    last = dict(LlamaForCausalLM.from_pretrained(folder / "best" / "checkpoint-12").named_parameters())
    assert all(torch.equal(p, found[name]) and not torch.equal(p, last[name]) for name, p in best.items())


def whole_models(folder: Path) -> None:
    """A model that comes whole is split as arguments and hints say, for batches like those of the dataset."""
    asked: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True, "max_steps": 2}
    trainer = make(AutoparTrainer, llama(num_hidden_layers=1), folder, hints=Hints(tp=2), **asked)
    plan = trainer.model.plan
    assert plan.degrees["tp"] == 2 and plan.recompute == "full" and plan.workload["param_dtype"] == "bfloat16"
    assert (plan.workload["global_batch"], plan.workload["seq_len"]) == (BATCH, LENGTH)
    found = train(trainer)
    assert len(found["loss"]) == 2 and all(t.dtype == torch.float32 for n, t in found.items() if "." in n)
    trainer = make(AutoparTrainer, None, folder, model_init=lambda: llama(num_hidden_layers=1), max_steps=1)
    assert len(train(trainer)["loss"]) == 1 and trainer.model.plan.degrees["pp"] == 1


class ItsOwn(AutoparTrainer):
    """A Trainer with a loss of its own."""

    def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Twice that of the model."""
        loss, outputs = super().compute_loss(*args, return_outputs=True, **kwargs)
        return (2 * loss, outputs) if return_outputs else 2 * loss


def outside(folder: Path) -> None:
    """A loss that is not the model's own is computed by the Trainer's own code, under micro-batches with a warning."""
    own, other = (
        train(make(kind, parallel(hints), folder, max_steps=2))
        for kind, hints in ((AutoparTrainer, Hints(dp=2)), (ItsOwn, Hints(dp=2, micro_batch_size=1)))
    )
    assert torch.allclose(other["loss"][:1], 2 * own["loss"][:1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make(AutoparTrainer, parallel(Hints(dp=2, micro_batch_size=1)), folder, loss=True)
    said = "a batch of 4 runs at once and not in the 2 micro-batches of the plan"
    advice = "per_device_train_batch_size=2 with gradient_accumulation_steps=2"
    assert any(said in str(w.message) and advice in str(w.message) for w in told)


def refused(kind: type[Exception], text: str, act: Callable[[], object]) -> None:
    """``act`` raises an error of ``kind`` that says ``text``, on every rank."""
    try:
        act()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"expected {text}")


def refusals(folder: Path) -> None:
    """What would train something else is refused before it does, each by its own words."""
    model = parallel(Hints(dp=2))
    make(AutoparTrainer, model, folder)
    refused(InputError, "autopar.integrations.trainer", lambda: make(transformers.Trainer, model, folder))
    refused(InputError, "per_device_train_batch_size is then the global batch",
            lambda: make(AutoparTrainer, parallel(Hints(dp=2), inputs="local"), folder))  # fmt: skip
    refused(InputError, 'Workload(param_dtype="bfloat16")', lambda: make(AutoparTrainer, model, folder, bf16=True))
    refused(InputError, 'Hints(recompute="full")',
            lambda: make(AutoparTrainer, model, folder, gradient_checkpointing=True))  # fmt: skip
    refused(InputError, "Hints(memory_limit=...)",
            lambda: make(AutoparTrainer, model, folder, auto_find_batch_size=True))  # fmt: skip
    refused(InputError, "computes the loss of the model itself",
            lambda: make(AutoparTrainer, parallel(Hints(pp=2)), folder, loss=True))  # fmt: skip
    refused(InputError, "found: ItsOwn.compute_loss, and a plan with a pipeline",
            lambda: make(ItsOwn, parallel(Hints(pp=2)), folder))  # fmt: skip
    refused(InputError, "hints come too late", lambda: make(AutoparTrainer, model, folder, hints=Hints(tp=2)))
    refused(HintError, "contradict each other", lambda: make(AutoparTrainer, llama(num_hidden_layers=1), folder,
            hints=Hints(recompute="none"), gradient_checkpointing=True))  # fmt: skip
    other = samples()
    other[-1 - dist.get_rank()]["input_ids"] = torch.zeros(LENGTH, dtype=torch.int64)
    trainer = make(AutoparTrainer, model, folder, data=other)
    refused(RuntimeFailure, "ranks [1] passed another batch than rank 0", trainer.train)


def main() -> None:
    """All runs, in one process or in several; then what is refused. The first that fails ends it."""
    folder = Path(sys.argv[1])
    for number, (name, (asked, hints)) in enumerate(RUNS.items()):
        file = folder / f"run{number}.pt"
        if "RANK" not in os.environ:
            torch.save(train(make(transformers.Trainer, llama(num_hidden_layers=1), folder, **asked)), file)
            continue
        trainer = make(AutoparTrainer, parallel(hints), folder, **asked)
        found, truth = train(trainer), torch.load(file)
        own = {n: t for n, t in truth.items() if "." not in n or hints.pp is None or n in found}
        assert len(found["eval_loss"]) == 2 and set(found) == set(own)
        assert_close(found, own, name)
        steps = {key[0] for key in trainer.model._programs.cache.kept if key[3]}  # programs to train with
        assert steps == {"step" if "micro" in name or "pipeline" in name else "forward"}, steps
        if number == 0:
            saved(trainer, found, folder / "saved")
        say(f"ok {name}")
    if "RANK" not in os.environ:
        torch.save(train(make(transformers.Trainer, llama(num_hidden_layers=1), folder / "one", **KEPT)),
                   folder / "kept.pt")  # fmt: skip
        return
    for check in (resumed, the_best, whole_models, outside, refusals):
        check(folder)
        say(f"ok {check.__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
