"""What is run on the cluster: the sizes of the global batch, and the optimizer whose state has to fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch

from autopar.cost_model.hardware import nearest
from autopar.cost_model.memory import check_optimizer
from autopar.errors import WorkloadError

#: What parameters may be used in, and what gradients may be reduced in; the keys are the texts of a workload.
PARAM_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: What is run.
MODES = ("train", "infer")
REDUCE_DTYPES = {**PARAM_DTYPES, "float64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """Mixed precision: parameters and inputs of floating point are used in ``param_dtype`` (None: as they are),
    gradients summed over micro-batches and ranks in ``reduce_dtype``. Parameters rest in the model's own dtypes."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step, or with ``mode`` "infer" a step of a generation (of what is no decoder: a forward).
    ``global_batch`` is in sequences over all ranks, ``seq_len`` in tokens, of a generation those of prompt and answer;
    None takes what the example inputs or the model's config say.

    ``optimizer`` is one of adamw, sgd, sgd_momentum, adafactor, muon, adamw_8bit and none (no training state at all),
    or the bytes of state that any other keeps for every element of a parameter, such as "6 bytes"; to infer takes none.
    ``pad_to`` are the lengths, in tokens, to which batches of a transformers text model are padded before they run,
    each to the next: one program a bucket instead of one a length; kept as a sorted tuple.

    ``param_dtype`` (bfloat16, float16 or float32) is the dtype in which parameters are gathered and used, while they,
    their gradients and the optimizer's state rest in the model's own; ``reduce_dtype`` that in which gradients are
    added up over micro-batches and ranks, float32 with a ``param_dtype``. With neither everything stays in the model's
    own dtype. float16 wants a ``torch.amp.GradScaler``.

    ``expert_imbalance`` says how many tokens the busiest rank has for its experts, of a mixture whose experts are
    spread over ranks, over those that it would have if all experts were asked alike: time and memory are planned so.
    Raises WorkloadError for a value out of range."""

    global_batch: int | None = None
    seq_len: int | None = None
    optimizer: str = "adamw"
    pad_to: Sequence[int] | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    expert_imbalance: float = 1.0
    mode: str = "train"

    def __post_init__(self) -> None:
        self._check_buckets()
        for name, known in (("param_dtype", PARAM_DTYPES), ("reduce_dtype", REDUCE_DTYPES)):
            if (dtype := getattr(self, name)) is not None and (not isinstance(dtype, str) or dtype not in known):
                raise WorkloadError(
                    f"A workload cannot have {name}={dtype!r}.",
                    expected=f"one of {', '.join(known)}, or None",
                    found=repr(dtype),
                    change=nearest(str(dtype), known),
                )
        for name in ("global_batch", "seq_len"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise WorkloadError(
                    f"A workload cannot have {name}={value!r}.",
                    found=repr(value),
                    expected="a whole number from 1, or None",
                    change=f"give {name} as a positive int, or leave it out",
                )
        imbalance = self.expert_imbalance
        number = isinstance(imbalance, int | float) and not isinstance(imbalance, bool)
        if not number or not 1.0 <= imbalance < math.inf:
            raise WorkloadError(
                f"A workload cannot have expert_imbalance={imbalance!r}.",
                found=repr(imbalance),
                expected="a number from 1: the tokens of the busiest rank over the mean",
                change="give for instance expert_imbalance=1.3, or leave it out",
            )
        check_optimizer(self.optimizer)
        self._check_mode()

    def _check_mode(self) -> None:
        """WorkloadError for a mode that is not known; without training no optimizer keeps anything."""
        if self.mode not in MODES:
            raise WorkloadError(
                f"A workload cannot have mode={self.mode!r}.",
                found=repr(self.mode),
                expected=f"one of {', '.join(MODES)}",
                change=nearest(str(self.mode), MODES),
            )
        if self.mode == "infer":
            object.__setattr__(self, "optimizer", "none")

    def _check_buckets(self) -> None:
        """Sort ``pad_to``; WorkloadError unless it is None or some lengths."""
        buckets = self.pad_to
        if buckets is None:
            return
        whole = isinstance(buckets, Sequence) and not isinstance(buckets, str)
        if not whole or not buckets or not all(type(b) is int and b > 0 for b in buckets):
            raise WorkloadError(
                f"A workload cannot have pad_to={buckets!r}.",
                found=repr(buckets),
                expected="a list of lengths from 1, or None",
                change="give the lengths to pad to, for instance pad_to=[512, 1024, 2048]",
            )
        object.__setattr__(self, "pad_to", tuple(sorted(set(buckets))))

    @property
    def precision(self) -> Precision | None:
        """How numbers are cast; None if everything stays in the model's own dtype."""
        if self.param_dtype is None and self.reduce_dtype is None:
            return None
        param = None if self.param_dtype is None else PARAM_DTYPES[self.param_dtype]
        return Precision(param, REDUCE_DTYPES[self.reduce_dtype or "float32"])

    def to_dict(self) -> dict[str, Any]:
        """A table of plain values that `from_dict` turns into an equal workload."""
        table = asdict(self)
        if self.expert_imbalance == 1.0:
            del table["expert_imbalance"]
        if self.mode == "train":
            del table["mode"]
        return table if self.pad_to is None else {**table, "pad_to": list(self.pad_to)}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; keys left out take their defaults. WorkloadError names an unknown key."""
        known = [field.name for field in fields(cls)]
        for key in table:
            if key not in known:
                raise WorkloadError(
                    f"A workload has no key {key!r}.", expected=", ".join(known), found=key, change=nearest(key, known)
                )
        return cls(**table)
