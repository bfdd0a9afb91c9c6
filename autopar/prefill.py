"""What the first forward of a generation, that of the prompts, takes under what is decided for the tokens after it."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from autopar.capture.activations import Activations
from autopar.capture.graph import Captured
from autopar.capture.hf_generate import prompt_batch
from autopar.plan import Prefill
from autopar.sharding.operators import Operators
from autopar.solver.carry import carried_pins, operator_choices
from autopar.solver.peaks import peaks_of
from autopar.solver.program import solve
from autopar.solver.setting import Setting, keepings
from autopar.solver.spmd import Solved, account, make_program, read
from autopar.solver.staged import Stages
from autopar.specialize import capture_batch
from autopar.workload import Workload


class Prompts:
    """Prompts as long as the context of a ``workload``, all at once, for the logits of their last tokens. Traced when
    they are first asked about."""

    def __init__(self, model: nn.Module, workload: Workload, activations: Activations | None) -> None:
        self.model, self.workload, self.activations = model, workload, activations

    @cached_property
    def _graph(self) -> tuple[Captured, Operators]:
        """The forward of the prompts."""
        workload = self.workload
        assert workload.global_batch is not None and workload.seq_len is not None  # filled in before a search
        batch = prompt_batch(self.model, workload.global_batch, workload.seq_len)
        captured = capture_batch(
            self.model, (), batch, False, workload.precision, gradients=False, activations=self.activations
        )
        return captured, read(captured, imbalance=workload.expert_imbalance)

    def trace(self) -> None:
        """Trace them, unless they are."""
        assert self._graph

    def under(self, setting: Setting, solved: Solved, dispatch: str | None) -> Prefill:
        """What their forward takes under what was ``solved`` for one token of every sample, with the hint
        ``dispatch``."""
        captured, operators = self._graph
        rests, choices = solved.assignment.sources, operator_choices(setting.operators, solved.assignment)
        layouts = {p.name: rests[p.placeholder] for p in setting.captured.parameters}
        pins = carried_pins(operators, solved.mesh, layouts, choices, dispatch)
        mine = Setting(
            captured, operators, setting.cluster, setting.optimizer, zero=setting.zero, compiled=setting.compiled
        )
        space, program = make_program(mine, solved.mesh, pins)
        solution = solve(program)
        assert solution is not None  # without a budget every space has an answer
        found = account(Stages(mine, space.assignment(solution.options), 1, None))
        (peak,) = peaks_of(mine, found.assignment, found.held, keepings(mine, found.assignment))
        return Prefill(found.step_time, sum(peak.values()) + solved.memory["cache"])
