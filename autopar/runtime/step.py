"""The order in which the phases of a training step run, whoever runs them: a rank, or a simulation of all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.phases import Phase, Phases
from autopar.passes.sums import keep_sums
from autopar.runtime.program import StepProgram

#: Runs a graph on values in the order of its inputs, and may empty the list; returns its outputs.
Run = Callable[[fx.GraphModule, list[Any]], Sequence[Any]]
#: Takes two values together by a reduction: "sum", "max" or "min".
Combine = Callable[[str, Any, Any], Any]

_COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def combine(op: str, a: Tensor, b: Tensor) -> Tensor:
    """Two tensors taken together. Not in place: what a graph returns may be a view of something else."""
    return _COMBINED[op](a, b)


def run_phase(run: Run, phase: Phase, values: Mapping[str, Any]) -> dict[str, Any]:
    """Run one phase on ``values``; returns its outputs by name."""
    outputs = run(phase.module, [values[name] for name in phase.inputs])
    return dict(zip(phase.outputs, outputs, strict=True))


#: Graphs that keep sums, by the graphs that they were made of and the places of what they return and add.
_keeping: weakref.WeakKeyDictionary[fx.GraphModule, dict[tuple[tuple[int, ...], tuple[int, ...]], fx.GraphModule]] = (
    weakref.WeakKeyDictionary()
)


def keeping(module: fx.GraphModule, owned: Sequence[int], added: Sequence[int]) -> fx.GraphModule:
    """`passes.sums.keep_sums`, made once. ``module`` must not change any more."""
    made = _keeping.setdefault(module, {})
    key = (tuple(owned), tuple(added))
    if key not in made:
        made[key] = keep_sums(module, owned, added)
    return made[key]


class Sums(dict[str, Any]):
    """What micro-batches leave for the end of a step, by name, taken together by ``reductions``."""

    def __init__(self, reductions: Mapping[str, str], combine: Combine) -> None:
        super().__init__()
        self._reductions, self._combine = reductions, combine

    def add(self, found: Mapping[str, Any]) -> None:
        """Take in what one micro-batch leaves; without a reduction (there is one micro-batch) as it is."""
        for name, value in found.items():
            known = name in self._reductions and name in self
            self[name] = self._combine(self._reductions[name], self[name], value) if known else value

    def run(self, run: Run, phase: Phase, inputs: list[Any], left: Collection[str]) -> dict[str, Any]:
        """Run a backward on ``inputs``, which may be emptied, and take in what it leaves under the names ``left``: from
        the second micro-batch on in place, as soon as it is there. Returns its other outputs by name."""
        summed = [i for i, name in enumerate(phase.outputs) if name in left and self._reductions.get(name) == "sum"]
        added = [i for i in summed if phase.outputs[i] in self]
        owned = [i for i in summed if phase.outputs[i] not in self]
        module = keeping(phase.module, owned, added) if summed else phase.module
        inputs += [self[phase.outputs[i]] for i in added]
        names = [name for i, name in enumerate(phase.outputs) if i not in added]
        found = dict(zip(names, run(module, inputs), strict=True))
        self.add({name: found[name] for name in names if name in left})
        return found


def run_step(
    phases: Phases,
    given: Mapping[str, Any],
    micro_batches: Sequence[Mapping[str, Any]],
    run: Run,
    combine: Combine = combine,
) -> tuple[list[Any], list[Any]]:
    """Results and gradients of a step. ``given`` are the inputs that all micro-batches share, by name, and
    ``micro_batches`` those of each."""
    values = dict(given)
    if phases.prologue is not None:
        before = Sums(phases.sums, combine)
        for own in micro_batches:
            before.add(run_phase(run, phases.prologue, {**values, **own}))
        values.update(before)
    if phases.once is not None:
        values.update(run_phase(run, phases.once, values))
    sums = Sums(phases.sums, combine)
    if phases.awaited:
        saved = [_forward(phases, values, own, run, sums) for own in micro_batches]
        values.update({name: sums[name] for name in phases.awaited})
        if phases.between is not None:
            values.update(run_phase(run, phases.between, values))
        for own in micro_batches:
            _backward(phases, values, own, saved.pop(0), run, sums)
    else:
        for own in micro_batches:
            _backward(phases, values, own, _forward(phases, values, own, run, sums), run, sums)
    values.update(sums)
    if phases.finish is not None:
        values.update(run_phase(run, phases.finish, values))
    return [values[name] for name in phases.results], [values[name] for name in phases.gradients]


def _forward(
    phases: Phases, values: Mapping[str, Any], own: Mapping[str, Any], run: Run, sums: Sums
) -> dict[str, Any]:
    """Run the forward of one micro-batch; what it saves for its backward, by name."""
    made = run_phase(run, phases.forward, {**values, **own})
    sums.add({name: made[name] for name in phases.left if name in made})
    read = phases.backward.inputs if phases.backward is not None else ()
    return {name: made[name] for name in read if name in made and name not in phases.awaited}


def _backward(
    phases: Phases,
    values: Mapping[str, Any],
    own: Mapping[str, Any],
    saved: dict[str, Any],
    run: Run,
    sums: Sums,
) -> None:
    """Run the backward of one micro-batch on what its forward has ``saved``, which is emptied."""
    if phases.backward is None:
        return
    here = {**values, **own, **saved}
    inputs = [here[name] for name in phases.backward.inputs]
    here.clear()  # what the forward saved is held by the list alone, which may be emptied as it is used
    saved.clear()
    sums.run(run, phases.backward, inputs, phases.left)


def step_inputs(program: StepProgram, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """What all micro-batches of a step share and what each has for itself, of ``given``: the inputs of a rank but its
    parameters, by name, coordinates without that of the micro-batch. The loss' own gradient is added, which is 1."""
    loss = program.captured.outputs[program.loss]
    assert loss.tangent is not None
    shared = dict(given)
    coordinates = shared.pop(program.sharded.coordinates.name)
    one = torch.ones((), dtype=loss.node.meta["val"].dtype, device=coordinates.device)
    shared[program.input_name(loss.tangent)] = one
    split = {name: shared.pop(name) for name in [program.input_name(node) for node in program.split]}
    each: list[dict[str, Tensor]] = []
    for i in range(program.count):
        own = {name: tensor.chunk(program.count)[i] for name, tensor in split.items()}
        where = torch.cat([coordinates.new_tensor([i] if program.count > 1 else []), coordinates])
        each.append({**own, program.sharded.coordinates.name: where})
    # what runs once a step reads the other coordinates alone
    shared[program.sharded.coordinates.name] = each[0][program.sharded.coordinates.name]
    return shared, each
