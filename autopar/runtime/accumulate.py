"""Gradients of several micro-batches: held on every rank as they come out of the backward, and reduced once."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import RuntimeFailure
from autopar.passes.accumulate import Accumulation, accumulation
from autopar.passes.partition import Program
from autopar.runtime.release import run_and_release
from autopar.runtime.step import keeping
from autopar.runtime.versions import version


@dataclass
class _Sums:
    """What one program's backwards have left so far: ``values`` as ``finish`` takes them, ``reached`` the parameters
    with a gradient among ``names``, those that ``finish`` returns."""

    finish: fx.GraphModule
    names: Sequence[str]
    values: list[Tensor]
    reached: set[str]
    backwards: int = 1


class Accumulator:
    """Runs a module's backward programs, and while ``active`` keeps back the reductions of gradients over ``groups``.

    The sums are this class' own: ``p.grad`` has nothing of them before the first backward that is not held. Until then
    an optimizer that steps these ``parameters`` would leave them out, and is refused (RuntimeFailure), and so is a
    backward after the parameters have changed. ``coordinates`` are this rank's, int64 [axes].
    """

    def __init__(self, groups: Collection[str], coordinates: Tensor, parameters: Sequence[Tensor]) -> None:
        self.active = False
        self._groups, self._coordinates, self._parameters = groups, coordinates, parameters
        self._cuts: weakref.WeakKeyDictionary[Program, Accumulation] = weakref.WeakKeyDictionary()
        self._sums: dict[Program, _Sums] = {}
        self._versions: list[tuple[int, ...]] = []
        self._hook: Any = None
        self._is_broken = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Accumulator:
        """What is held stays with the original: a copied module has gradients of its own."""
        return Accumulator(self._groups, self._coordinates, copy.deepcopy(self._parameters, memo))

    @torch.no_grad()
    def backward(
        self, program: Program, inputs: list[Tensor], names: Sequence[str], reached: Collection[str]
    ) -> dict[str, Tensor]:
        """Run a backward on ``inputs``, which it empties. Returns the gradients to hand on now by parameter name, this
        rank's pieces: none while active, else those of this backward and of all that were held before. ``names`` are
        those of the program's gradients, ``reached`` those of them that count."""
        assert program.backward is not None
        if not self.active and not self._sums:
            gradients = zip(names, run_and_release(program.backward, inputs), strict=True)
            return {name: gradient for name, gradient in gradients if name in reached}
        self._hold(program, inputs, names, reached)
        return {} if self.active else self._release(names)

    def check(self) -> None:
        """RuntimeFailure if parameters have changed since the first gradient that is held, or a backward has failed
        halfway."""
        if self._is_broken:
            raise RuntimeFailure(
                "the gradients that accumulate() holds back are not complete",
                expected="backwards that run to their end: each adds to the sums as it goes",
                found=f"one that failed, after {self._count()} others",
                change="drop what is held, model.zero_grad(), and run the backwards of this step again",
            )
        if self._sums and self._versions != [version(p) for p in self._parameters]:
            raise RuntimeFailure(
                "the parameters have changed while gradients are held back by accumulate()",
                expected="the gradients of one step all taken at the same parameters",
                found=f"{self._count()} backwards held from before the change",
                change="run the last backward of a step outside of accumulate(), or drop what is held: "
                "model.zero_grad()",
            )

    def drop(self) -> None:
        """Forget all that is held."""
        self._sums.clear()
        self._is_broken = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _count(self) -> int:
        return sum(sums.backwards for sums in self._sums.values())

    def _hold(self, program: Program, inputs: list[Tensor], names: Sequence[str], reached: Collection[str]) -> None:
        self.check()
        if program not in self._cuts:
            assert program.backward is not None
            self._cuts[program] = accumulation(program.backward, self._groups)
        cut, sums = self._cuts[program], self._sums.get(program)
        places = range(len(cut.backward.graph.output_node().args[0]))  # type: ignore[arg-type]
        if sums is not None:
            inputs += sums.values
            self._is_broken = True
            run_and_release(keeping(cut.backward, (), places), inputs)
            self._is_broken = False
            sums.reached |= set(reached)
            sums.backwards += 1
            return
        values = list(run_and_release(keeping(cut.backward, places, ()), inputs))
        if not self._sums:
            self._versions = [version(p) for p in self._parameters]
            self._hook = register_optimizer_step_pre_hook(self._refuse)
        self._sums[program] = _Sums(cut.finish, names, values, set(reached))

    def _release(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The gradients of all that is held, reduced."""
        total: dict[str, Tensor] = {}
        for sums in self._sums.values():
            for name, gradient in zip(sums.names, sums.finish(self._coordinates, *sums.values), strict=True):
                if name in sums.reached:
                    total[name] = total[name] + gradient if name in total else gradient
        if lost := sorted(total.keys() - set(names)):
            raise RuntimeFailure(
                f"the gradient of {lost[0]} is held back by accumulate() and has no place to go",
                expected="parameters that are trained in every micro-batch of a step",
                found=f"{len(lost)} parameters frozen since",
                change="freeze parameters between steps, or drop what is held: model.zero_grad()",
            )
        self.drop()
        return total

    def _refuse(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Hook of every optimizer step while something is held."""
        own = {id(p) for p in self._parameters}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeFailure(
                f"{type(optimizer).__name__}.step() while gradients are held back by accumulate()",
                expected="the last backward before a step outside of accumulate(), which reduces the gradients",
                found=f"{self._count()} backwards that no parameter's grad has anything of",
                change="leave the last micro-batch's backward out of accumulate(), or drop what is held: "
                "model.zero_grad()",
            )
