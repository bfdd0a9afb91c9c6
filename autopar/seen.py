"""What is known of the model that was planned last: its graph, and what searches under different hints share.

`Plan.with_hints` and questions of what would change a plan ask about the same model again. Each call of `autopar.plan`
looks anew: the code of a forward may have changed in between, which nothing here would tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar._compat import pytree
from autopar.capture.activations import Activations
from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.solver.frame import Known
from autopar.specialize import capture_batch
from autopar.workload import Workload


@dataclass(frozen=True)
class _Seen:
    """The graph of a model by all that it depends on, and by the rest of a question what searches share."""

    model: weakref.ref[nn.Module]
    key: tuple[object, ...]
    captured: Captured
    rest: tuple[object, ...]
    known: Known


#: At most one: a graph of a large model takes hundreds of MB.
_last: list[_Seen] = []


def look(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    workload: Workload,
    cluster: Cluster,
    compiled: bool,
    activations: Activations | None,
    again: bool,
) -> tuple[Captured, Known]:
    """The graph of one batch, and what searches of it share; with ``again`` what was found last time, if that was for
    this. Raises what `capture_batch` does."""
    trains = workload.mode == "train"
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    shapes = [(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else repr(t) for t in leaves]
    weights = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    modes = [module.training for module in model.modules()]
    key = (str(spec), tuple(shapes), tuple(weights), tuple(modes), workload.precision, trains, repr(activations))
    rest = (workload, cluster, compiled)
    last = _last[0] if _last and again and _last[0].model() is model and _last[0].key == key else None
    if last is not None and last.rest == rest:
        return last.captured, last.known
    captured = last.captured if last is not None else None
    if captured is None:
        training = None if trains else False
        captured = capture_batch(
            model, args, kwargs, training, workload.precision, gradients=trains, activations=activations
        )
    found = _Seen(weakref.ref(model), key, captured, rest, Known())
    if not again:
        _last[:] = [found]
    return found.captured, found.known
