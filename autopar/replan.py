"""How a plan can be made again, for another question: by the model that it was made for, as long as that is there.

A plan holds no model, and is written to files without one. So beside every plan that `autopar.plan` makes in this
process a weak reference to its model is kept here, not in the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autopar._compat import pytree
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.hints import Hints
from autopar.workload import Workload

if TYPE_CHECKING:
    from autopar.plan import Plan


@dataclass(frozen=True)
class Question:
    """What a plan answers: ``example_inputs`` are on the meta device, ``search_seconds`` and ``compile`` as
    `autopar.plan` takes them."""

    cluster: Cluster
    workload: Workload
    hints: Hints
    example_inputs: Any
    search_seconds: float | None
    compile: bool


Answer = Callable[[nn.Module, Question], "Plan"]

#: Model, what was asked, and what answers another question, by the identity of plans that are alive.
_MADE: dict[int, tuple[weakref.ref[nn.Module], Question, Answer]] = {}


def remember(plan: Plan, model: nn.Module, question: Question, answer: Answer) -> Plan:
    """``plan``, of which `with_hints` can now make others as long as ``model`` lives."""
    _MADE[id(plan)] = (weakref.ref(model), question, answer)
    weakref.finalize(plan, _MADE.pop, id(plan), None)
    return plan


def recall(plan: Plan) -> tuple[nn.Module, Question, Answer]:
    """What `remember` was told of ``plan``. PlanError if the model is not known any more."""
    reference, question, answer = _MADE.get(id(plan), (None, None, None))
    model = None if reference is None else reference()
    if model is None or question is None or answer is None:
        raise PlanError(
            f"The {plan.model} of this plan is not known in this process.",
            expected="a plan that autopar.plan returned here, and its model still alive",
            found="a plan that was loaded or changed" if reference is None else "a model that is gone",
            change="call autopar.plan(model, cluster, hints=...) with the model",
        )
    return model, question, answer


def with_hints(plan: Plan, hints: Hints) -> Plan:
    """The plan for the same model, cluster and workload under ``hints`` and those of ``plan``'s own that they do not
    replace. PlanError if the model is not known any more, and what `autopar.plan` raises."""
    model, question, answer = recall(plan)
    return answer(model, replace(question, hints=Hints.from_dict({**plan.hints, **hints.to_dict()})))


def on_meta(example_inputs: Any) -> Any:
    """Example inputs without their values, so that to keep them takes no memory."""
    plain = dict(example_inputs) if isinstance(example_inputs, Mapping) else example_inputs
    return pytree.tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, plain)
