"""What is run on the cluster: the sizes of the global batch, and the optimizer whose state has to fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from autopar.cost_model.hardware import nearest
from autopar.cost_model.memory import OPTIMIZER_ELEMENTS
from autopar.errors import WorkloadError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step. ``global_batch`` is in sequences over all ranks, ``seq_len`` in tokens; None takes what the
    example inputs or the model's config say. ``optimizer`` is one of adamw, sgd, sgd_momentum, adafactor and none (no
    training state at all). Raises WorkloadError for a value out of range."""

    global_batch: int | None = None
    seq_len: int | None = None
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq_len"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise WorkloadError(
                    f"A workload cannot have {name}={value!r}.",
                    found=repr(value),
                    expected="a whole number from 1, or None",
                    change=f"give {name} as a positive int, or leave it out",
                )
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZER_ELEMENTS:
            raise WorkloadError(
                f"There is no optimizer {self.optimizer!r} in the memory model.",
                expected=f"one of {', '.join(OPTIMIZER_ELEMENTS)}",
                found=repr(self.optimizer),
                change=nearest(str(self.optimizer), OPTIMIZER_ELEMENTS),
            )

    def to_dict(self) -> dict[str, Any]:
        """A table of plain values that `from_dict` turns into an equal workload."""
        return asdict(self)

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
