"""Copies of parameters that live from step to step, as ZeRO 1 and 2 keep them: made again when a parameter changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.partition import Program
from autopar.runtime.versions import version


class StepCopies:
    """The copies that a module's programs read; those of the program that ran last are kept.

    Their bytes stay with the module from a forward until the first one after the parameters have changed, or one of
    another program.
    """

    def __init__(self) -> None:
        self._program: Program | None = None
        self._versions: list[tuple[int, ...]] = []
        self._values: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCopies:
        """A copied module makes its own."""
        return StepCopies()

    @torch.no_grad()
    def take(
        self,
        program: Program,
        parameters: Sequence[Tensor],
        values: Mapping[str, Tensor],
        run: Callable[[fx.GraphModule, list[Tensor]], Sequence[Tensor]],
    ) -> dict[str, Tensor]:
        """The copies that ``program`` takes, by name; ``values`` has what they are made of, this rank's pieces of
        ``parameters``. Every rank makes them again at the same time."""
        if program.copies is None:
            return {}
        versions = [version(p) for p in parameters]
        if program is not self._program or versions != self._versions:
            self._values.clear()  # before there are new ones
            made = run(program.copies.module, [values[name] for name in program.copies.inputs])
            self._values = dict(zip(program.copies.outputs, made, strict=True))
            self._program, self._versions = program, versions
        return dict(self._values)
