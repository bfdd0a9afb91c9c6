"""What one pipeline stage does with its graphs in a step, whoever runs them: a rank, or a simulation of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.passes.pipeline import Stage
from autopar.runtime.program import StepProgram
from autopar.runtime.step import Combine, Run, Sums, combine, run_phase
from autopar.schedule import global_order, last_backward, order


class StageRun:
    """One step of one stage: its values, of the step and of every micro-batch.

    ``given`` are the inputs that all micro-batches share, by name, ``micro_batches`` those of each, ``sums`` the
    reductions of `Phases.sums`. What the stages before and after compute is put into ``values`` of the micro-batch
    before it is read. With the gradients of the micro-batch ``last`` (`schedule.last_backward`) results go back.
    """

    def __init__(
        self,
        stage: Stage,
        sums: Mapping[str, str],
        given: Mapping[str, Any],
        micro_batches: Sequence[Mapping[str, Any]],
        run: Run,
        combine: Combine = combine,
        last: int | None = None,
    ) -> None:
        self.stage, self.last, self._run = stage, last, run
        self._given, self._batches = dict(given), micro_batches
        self._before, self._sums = Sums(sums, combine), Sums(sums, combine)
        self.values: list[dict[str, Any]] = [{} for _ in micro_batches]
        self._handed_on: dict[tuple[str, int], dict[str, Any]] = {}
        self._arrived: dict[str, Any] = {}

    def begin(self) -> None:
        """What is made once a step before the first forward."""
        stage = self.stage
        if stage.prologue is not None:
            for batch in self._batches:
                self._before.add(run_phase(self._run, stage.prologue, {**self._given, **batch}))
            self._given.update(self._before)
        if stage.once is not None:
            self._given.update(run_phase(self._run, stage.once, self._given))

    def act(self, kind: str, micro_batch: int) -> None:
        """Run the graph of one action and drop what is not needed any more."""
        stage = self.stage
        if kind != "F" and stage.awaited and stage.awaited[0] not in self._given:
            self._between()
        phase, kept, sends = {
            "F": (stage.forward, stage.saved, stage.sends),
            "B": (stage.backward, (), stage.sends_back),
            "I": (stage.input, stage.weight.inputs, stage.sends_back),
            "W": (stage.weight, (), ()),
        }[kind]
        values, results = self.values[micro_batch], kind in ("B", "I") and micro_batch == self.last
        if results:
            self._arrived = {name: values.pop(name) for name in stage.receives_last}
        here = {**self._given, **self._batches[micro_batch], **values}
        inputs = [here[name] for name in phase.inputs]
        passed = {name: values[name] for name in (*kept, *sends) if name in values}
        here.clear()  # what the forward saved is held by the list alone, which may be emptied as it is used
        values.clear()
        values.update({name: passed[name] for name in kept if name in passed})
        if kind == "F":
            found = dict(zip(phase.outputs, self._run(phase.module, inputs), strict=True))
            self._sums.add({name: value for name, value in found.items() if name in stage.left})
        else:
            found = self._sums.run(self._run, phase, inputs, stage.left)
        found |= passed
        values.update({name: found[name] for name in kept if name in found})
        if kind != "W":
            self._handed_on["F" if kind == "F" else "B", micro_batch] = {name: found[name] for name in sends}
        if results and stage.sends_last:
            known = self.results()
            self._handed_on["B", micro_batch].update({name: known[name] for name in stage.sends_last})

    def _between(self) -> None:
        """What is made once a step after all forwards, for the backwards."""
        self._given.update({name: self._sums[name] for name in self.stage.awaited})
        if self.stage.known is not None:
            self._given.update(run_phase(self._run, self.stage.known, self._given))

    def hand_on(self, way: str, micro_batch: int) -> dict[str, Any]:
        """What a forward (``way`` F) has for the next stage, or a backward (B) for the one before, by name; given out
        once."""
        return self._handed_on.pop((way, micro_batch))

    def results(self) -> dict[str, Any]:
        """The results of the step that are known here, by name: made once all forwards have run, or come back."""
        own = self.stage.results
        if own and own[0] not in self._arrived:
            values = {**self._given, **self._sums}
            if self.stage.result is not None:
                values.update(run_phase(self._run, self.stage.result, values))
            self._arrived.update({name: values[name] for name in own})
        return self._arrived

    def end(self) -> dict[str, Any]:
        """Gradients of the step, as far as they come to be here, by name."""
        values = {**self._given, **self._sums}
        if self.stage.finish is not None:
            values.update(run_phase(self._run, self.stage.finish, values))
        return {name: values[name] for name in self.stage.gradients}


def run_pipeline(
    program: StepProgram,
    given: Mapping[str, Any],
    micro_batches: Sequence[Mapping[str, Any]],
    runs: Sequence[Run],
    combine: Combine = combine,
) -> tuple[list[Any], list[Any]]:
    """Results and gradients of a step of all stages, run in one process in an order that the schedule allows. Takes
    what `run_step` takes, with one of ``runs`` a stage."""
    stages, sums = program.stages, program.phases.sums
    rows = order(program.schedule, program.pp, len(stages), program.count)
    last = last_backward(rows, len(stages) - 1)
    every = [StageRun(s, sums, given, micro_batches, run, combine, last) for s, run in zip(stages, runs, strict=True)]
    for one in every:
        one.begin()
    for step in global_order(rows, len(stages)):
        for action in step:
            every[action.stage].act(action.kind, action.micro_batch)
        for s, kind, m in [(a.stage, a.kind, a.micro_batch) for a in step if a.kind != "W"]:
            handed_on = every[s].hand_on("F" if kind == "F" else "B", m)
            if handed_on:
                every[s + (1 if kind == "F" else -1)].values[m].update(handed_on)
    found: dict[str, Any] = {}
    results: dict[str, Any] = {}
    for one in reversed(every):  # what has come back to the first stage is what it has there
        results |= one.results()
        for name, value in one.end().items():
            found[name] = combine("sum", found[name], value) if name in found else value
    phases = program.phases
    return [results[name] for name in phases.results], [found[name] for name in phases.gradients]
