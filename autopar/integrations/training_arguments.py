"""What transformers' training arguments mean for a plan: which are hints, which would do again what a plan does."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers
from torch import nn

from autopar.api import parallelize
from autopar.arguments import ExampleInputs
from autopar.capture.hf_adapters import core
from autopar.cluster import Cluster
from autopar.errors import HintError, InputError
from autopar.hints import Hints
from autopar.plan import Plan
from autopar.runtime.module import ParallelModule
from autopar.workload import Workload

#: Training arguments that would do again what a plan does, or something that only works on one process, and what does
#: it instead.
_INSTEAD = {
    "fp16": 'bf16, or Workload(param_dtype="float16") and a loop with model.grad_scaler',
    "bf16_full_eval": "model.to(torch.bfloat16) before it is split",
    "fp16_full_eval": "model.to(torch.float16) before it is split",
    "fsdp": "Hints(zero=3)",
    "deepspeed": "Hints(zero=3)",
    "parallelism_config": "Hints(tp=...)",
    "torch_compile": "parallelize(model, compile=True)",
    "auto_find_batch_size": "Hints(memory_limit=...), and a plan that fits",
    "use_liger_kernel": "graphs as they are emitted",
    "neftune_noise_alpha": "noise inside of the model's forward",
}


@dataclass(frozen=True)
class Wanted:
    """How a model is to be split that comes to a Trainer whole: the training arguments, the data (dataset, collator,
    tokenizer) that batches come from, and the arguments of `autopar.parallelize`."""

    args: Any
    data: tuple[Any, Any, Any]
    plan: Plan | None
    hints: Hints | None
    workload: Workload | None
    cluster: Cluster | str | None
    example_inputs: ExampleInputs | None


def split(model: nn.Module, wanted: Wanted) -> ParallelModule:
    """``model`` split as ``wanted``; a parallel module as it is. InputError if that comes with hints and the like,
    HintError where hints contradict the training arguments, and what `autopar.parallelize` raises."""
    if isinstance(model, ParallelModule):
        given = [name for name in ("plan", "hints", "workload", "cluster", "example_inputs")
                 if getattr(wanted, name) is not None]  # fmt: skip
        if given:
            raise InputError(
                f"{', '.join(given)} come too late for a model that is split",
                expected="a model as it is, or a parallel module alone",
                found=f"a parallel module, and {', '.join(given)}",
                change="give them to parallelize, or give the Trainer the model as it was",
            )
        return model
    example = wanted.example_inputs
    if example is None:
        example = first_batch(model, wanted)
    workload = wanted.workload or Workload()
    if example is None and workload.global_batch is None:
        workload = replace(workload, global_batch=wanted.args.per_device_train_batch_size)
    if wanted.args.bf16 and workload.param_dtype is None:
        workload = replace(workload, param_dtype="bfloat16")
    return parallelize(
        model, plan=wanted.plan, cluster=wanted.cluster, workload=workload,
        hints=_with_recompute(wanted.hints or Hints(), wanted.args), example_inputs=example,
    )  # fmt: skip


def _with_recompute(hints: Hints, args: Any) -> Hints:
    """Hints that keep what ``gradient_checkpointing`` asks for."""
    if not args.activation_checkpointing:
        return hints
    if hints.recompute == "none":
        raise HintError(
            "The hint recompute='none' and the training argument gradient_checkpointing contradict each other.",
            expected="one of the two",
            found="recompute='none' and gradient_checkpointing=True",
            change="leave one of the two out",
        )
    return hints if hints.recompute is not None else replace(hints, recompute="full")


def first_batch(model: nn.Module, wanted: Wanted) -> dict[str, Any] | None:
    """A batch like those that the Trainer makes: of the first samples of its dataset; None without a dataset."""
    dataset, collate, tokenizer = wanted.data
    if dataset is None:
        return None
    count = wanted.args.per_device_train_batch_size
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        samples = [dataset[i] for i in range(min(count, len(dataset)))]
    else:
        samples = list(itertools.islice(iter(dataset), count))
    taken = {*inspect.signature(type(core(model)).forward).parameters, "label", "label_ids"}
    if wanted.args.remove_unused_columns and all(isinstance(sample, Mapping) for sample in samples):
        samples = [{key: value for key, value in sample.items() if key in taken} for sample in samples]
    if collate is None:
        pads = isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
        collate = transformers.DataCollatorWithPadding(tokenizer) if pads else transformers.default_data_collator
    return dict(collate(samples))


def as_planned(args: Any) -> Any:
    """A copy of the training arguments without what the plan has taken over."""
    found = copy.copy(args)
    found.bf16, found.mixed_precision = False, "no"
    found.activation_checkpointing = found.gradient_checkpointing = False
    return found


def warn_of_own_loss(plan: Plan, loss: str) -> None:
    """Say that a ``loss`` outside of the model, which needs all of its outputs, runs a batch at once where ``plan``
    counts on micro-batches. The Trainer's accumulation is in micro-batches for any loss."""
    count, batch = plan.num_micro_batches, plan.workload["global_batch"]
    warnings.warn(
        f"{loss} computes the loss outside of the model, so a batch of {batch} runs at once and not in the {count} "
        f"micro-batches of the plan, and needs more memory than planned. per_device_train_batch_size={batch // count} "
        f"with gradient_accumulation_steps={count} trains the same in less memory.",
        UserWarning,
        stacklevel=3,
    )


def check(model: ParallelModule, args: Any) -> None:
    """InputError for a model or training arguments with which training would not be that of one process."""

    def refuse(what: str, expected: str, found: str, change: str) -> None:
        raise InputError(what, expected=expected, found=found, change=change)

    if getattr(model, "inputs", "global") == "local":
        refuse("this Trainer gives all processes the same batch", 'a module made with inputs="global"',
               'inputs="local"', "leave inputs out; per_device_train_batch_size is then the global batch")  # fmt: skip
    for name, instead in _INSTEAD.items():
        if getattr(args, name, None):
            refuse(f"the training argument {name} is for a model that is not split yet", instead,
                   f"{name}={getattr(args, name)!r}", f"leave {name} out")  # fmt: skip
    if args.bf16 and Workload.from_dict(model.plan.workload).param_dtype != "bfloat16":
        refuse("the training argument bf16 comes too late for a model that is split", "a plan for bfloat16",
               f"bf16=True, and a plan for {model.plan.workload['param_dtype']}",
               'parallelize(model, workload=Workload(param_dtype="bfloat16")), or give the Trainer the model as it '
               "was")  # fmt: skip
    if args.activation_checkpointing and model.plan.recompute == "none":
        refuse("the training argument gradient_checkpointing comes too late for a model that is split",
               "a plan that recomputes", "gradient_checkpointing=True, and a plan that keeps all activations",
               'parallelize(model, hints=Hints(recompute="full")), or give the Trainer the model as it '
               "was")  # fmt: skip
