"""What would change a decision: the same question about slower links, more work and more memory, searched anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autopar._compat import pytree
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.replan import Question, recall, remember
from autopar.report.diff import decided
from autopar.report.progress import announce
from autopar.workload import Workload

if TYPE_CHECKING:
    from autopar.plan import Plan

#: What is asked, and what it is multiplied by.
SLOWER, MORE, LARGER = 0.5, 2, 1.2
#: What follows from the size of the batch, and is no other decision where all else stays: of training the number of
#: micro-batches, of inference, which has one, its size.
_FOLLOWS = ({"num_micro_batches"}, {"micro_batch_size"})


@dataclass(frozen=True)
class WhatIf:
    """The answer to one ``question``: a step of ``work`` times the plan's takes ``step_time`` seconds and a run
    ``peak_memory`` bytes a device, with the ``decision`` in words. ``changes`` are what is decided otherwise, each as
    (what, before, then), none if the decision stays. Where no plan was found, ``error`` says why, and both numbers are
    None."""

    question: str
    work: float
    decision: str
    changes: tuple[tuple[str, str, str], ...]
    step_time: float | None
    peak_memory: int | None
    error: str

    def speed(self, plan: Plan) -> float | None:
        """Work a second over that of ``plan``; None where there is no plan."""
        return None if not self.step_time else self.work * plan.step_time / self.step_time


def what_if(plan: Plan, search_seconds: float | None = None) -> Plan:
    """``plan`` with all answers. PlanError if its model is not known any more; a question without a plan is answered by
    the error."""
    model, question, answer = recall(plan)
    asked = list(questions(question, by_token=plan.prefill is not None))
    found = []
    for i, (text, work, other) in enumerate(asked):
        announce(f"What if: {text} ({i + 1} of {len(asked)})")
        other = replace(other, search_seconds=search_seconds or question.search_seconds)
        try:
            found.append(_answered(plan, text, work, answer(model, other)))
        except AutoparError as error:
            found.append(WhatIf(text, work, "", (), None, None, error.what))
    return remember(replace(plan, what_ifs=tuple(found)), model, question, answer)


def _answered(plan: Plan, text: str, work: float, found: Plan) -> WhatIf:
    changes = [(d.what, str(d.mine), str(d.other)) for d in decided(plan, found)]
    if work > 1 and any({what for what, _, _ in changes} <= follows for follows in _FOLLOWS):
        changes = []
    return WhatIf(text, work, decision_text(found), tuple(changes), found.step_time, found.needed_memory, "")


def decision_text(plan: Plan) -> str:
    """What was decided in a few words: "dp 64, ZeRO 2, 16 micro-batches of 1"."""
    degrees = [f"{axis} {n}" for axis, n in plan.degrees.items() if n > 1] or ["one rank"]
    groups = f" in groups of {plan.zero_group_size}" if plan.zero_group_size else ""
    first = [" x ".join(degrees), f"ZeRO {plan.zero}{groups}"]
    if plan.infers:
        return ", ".join([*first, f"{plan.micro_batch_size} sample{'s' if plan.micro_batch_size > 1 else ''} a rank"])
    parts = [
        *first,
        f"{plan.num_micro_batches} micro-batch{'es' if plan.num_micro_batches > 1 else ''} of {plan.micro_batch_size}",
        *([f"schedule {plan.schedule}"] if plan.schedule else []),
        "nothing recomputed" if plan.recompute == "none" else f"recompute {plan.recompute}",
    ]
    return ", ".join(parts)


def questions(question: Question, by_token: bool = False) -> Iterator[tuple[str, float, Question]]:
    """The questions in words, how many times the work they ask for, and as they are answered. The sequence is only
    asked for where it is known. Steps ``by_token``, of a generation, make one token of every sample however many there
    are before it."""
    yield "links half as fast", 1, replace(question, cluster=_slower(question.cluster))
    yield "twice the batch", MORE, _longer(question, "global_batch", 0)
    if question.workload.seq_len is not None:
        what = "contexts twice as long" if by_token else "sequences twice as long"
        yield what, 1 if by_token else MORE, _longer(question, "seq_len", 1)
    yield "20% more memory", 1, _larger(question)


def _changed(cluster: Cluster, factors: dict[str, float]) -> Cluster:
    """A cluster whose device has some of its numbers times a factor."""
    table = cluster.to_dict()
    device = table["device"]
    return Cluster.from_dict({**table, "device": {**device, **{key: device[key] * n for key, n in factors.items()}}})


def _slower(cluster: Cluster) -> Cluster:
    return _changed(cluster, dict.fromkeys(("scale_up_gbs", "network_gbs"), SLOWER))


def _larger(question: Question) -> Question:
    hints, cluster = question.hints, _changed(question.cluster, {"memory_gib": LARGER})
    if hints.memory_bytes is not None:
        hints = replace(hints, memory_limit=int(hints.memory_bytes * LARGER))
    return replace(question, cluster=cluster, hints=hints)


def _longer(question: Question, what: str, dim: int) -> Question:
    """A question with twice the size ``what`` of the workload, which is that of ``dim`` of the example inputs."""
    before = getattr(question.workload, what)
    table = {**question.workload.to_dict(), what: MORE * before}
    workload = Workload.from_dict({**table, "pad_to": None} if what == "seq_len" else table)

    def longer(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.dim() <= dim or tensor.shape[dim] != before:
            return tensor
        return tensor.new_empty([n * MORE if d == dim else n for d, n in enumerate(tensor.shape)])

    return replace(question, workload=workload, example_inputs=pytree.tree_map(longer, question.example_inputs))
