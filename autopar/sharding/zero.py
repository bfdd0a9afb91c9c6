"""What ZeRO is besides parameters that rest sharded: how long a gathered copy of one lives, and how its gradient is
added up over micro-batches (the table of DESIGN section 6).

| zero | copy | gradient |
| --- | --- | --- |
| 0 (DDP) | nothing is sharded | ``step``: whole, all-reduced once a step |
| 1 | ``step`` | ``step``: whole, reduce-scattered once a step |
| 2 | ``step`` | ``micro-batch``: sharded, reduce-scattered each micro-batch |
| 3 without resharding after the forward (FSDP's SHARD_GRAD_OP) | ``micro-batch`` | ``micro-batch`` |
| 3 | ``use``: gathered again in the backward | ``micro-batch`` |
"""

from __future__ import annotations

from dataclasses import dataclass

#: How long a copy of a parameter lives that is not the one at rest.
COPIES = ("use", "micro-batch", "step")
#: How often gradients are reduced over ranks.
REDUCED = ("micro-batch", "step")


@dataclass(frozen=True)
class Keeping:
    """How long the ``copy`` of a parameter lives in which it is used (of `COPIES`), and how often its ``gradient`` is
    reduced over the data axis (of `REDUCED`)."""

    copy: str = "use"
    gradient: str = "step"


@dataclass(frozen=True)
class Zero:
    """The kind of ZeRO of a plan: its ``stage`` (None: 3 where a parameter rests sharded over the data axis), and
    whether stage 3 gives up after a forward what it gathered for it."""

    stage: int | None = None
    reshard_after_forward: bool = True

    def keeping(self, sharded: bool, cast: bool) -> Keeping:
        """What it does with one parameter, as the function of that name."""
        stage = (3 if sharded else 0) if self.stage is None else self.stage
        return keeping(stage, sharded, cast, self.reshard_after_forward)


def keeping(zero: int, sharded: bool, cast: bool, reshard_after_forward: bool = True) -> Keeping:
    """What ``zero`` (0 to 3) does with one parameter: ``sharded`` if it rests sharded over the data axis, ``cast`` if
    it is used in another dtype than its master's. Below 3 a cast copy is kept even of one that rests whole."""
    if not sharded:
        return Keeping("step" if cast and zero < 3 else "use", "step")
    if zero == 3:
        return Keeping("use" if reshard_after_forward else "micro-batch", "micro-batch")
    return Keeping("step", "step" if zero <= 1 else "micro-batch")
