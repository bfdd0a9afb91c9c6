"""What the first forward of a generation, that of the prompts, takes under a plan for the tokens after it."""

from __future__ import annotations

from torch import nn

from autopar.capture.hf_generate import prompt_batch
from autopar.cluster import Cluster
from autopar.plan import Plan, Prefill
from autopar.sharding.zero import Zero
from autopar.solver.carry import plan_pins
from autopar.solver.peaks import peaks_of
from autopar.solver.program import solve
from autopar.solver.setting import Setting, keepings
from autopar.solver.spmd import account, make_program, read
from autopar.solver.staged import Stages
from autopar.specialize import capture_batch
from autopar.workload import Workload


def prefill(model: nn.Module, plan: Plan) -> Prefill:
    """A forward of prompts as long as the context of ``plan``, for the logits of their last tokens, with the plan's
    decisions."""
    workload, cluster = Workload.from_dict(plan.workload), Cluster.from_dict(plan.cluster)
    assert workload.global_batch is not None and workload.seq_len is not None  # a plan has both
    batch = prompt_batch(model, workload.global_batch, workload.seq_len)
    activations = plan.hints.get("activations")
    captured = capture_batch(model, (), batch, False, workload.precision, gradients=False, activations=activations)
    operators = read(captured, imbalance=workload.expert_imbalance)
    zero = Zero(plan.zero, plan.reshard_after_forward)
    setting = Setting(captured, operators, cluster, workload.optimizer, zero=zero)
    space, program = make_program(setting, plan.mesh, plan_pins(captured, operators, plan))
    solution = solve(program)
    assert solution is not None  # without a budget every space has an answer
    solved = account(Stages(setting, space.assignment(solution.options), 1, None))
    (peak,) = peaks_of(setting, solved.assignment, solved.held, keepings(setting, solved.assignment))
    return Prefill(solved.step_time, sum(peak.values()) + plan.memory["cache"])
