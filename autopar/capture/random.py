"""Refusing random numbers that would be others on every rank, or the same in every step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar.errors import CaptureError


def _states() -> dict[str, Any]:
    """The generators of numbers that are no tensors, by the module that has them."""
    _, key, *place = np.random.get_state()
    return {"random": random.getstate(), "numpy.random": (np.asarray(key).tobytes(), place)}


@contextlib.contextmanager
def refuse_constants() -> Iterator[None]:
    """CaptureError if what runs inside draws from the generators of Python or NumPy: a graph would have the numbers of
    this one call as constants, in every step."""
    before = _states()
    yield
    drawn = [name for name, state in _states().items() if state != before[name]]
    if drawn:
        raise CaptureError(
            "the forward draws random numbers that are no tensors",
            expected="random numbers from torch (torch.rand, ...), or none",
            found=f"numbers drawn from the generator of {drawn[0]}",
            change="draw them with torch, or outside and pass them in as an input, or turn them off (model.eval(), the "
            "probability in the model's config)",
        )


def refuse_random(graph: fx.Graph) -> None:
    """CaptureError, naming module and operator, if a labelled graph draws random numbers other than by ``autopar``'s
    own operators, which know the place of each element in the whole (`autopar.ops.draws`)."""
    for node in graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CaptureError(
                f"the forward draws random numbers in module {node.meta['module'] or 'at the top'}",
                expected="dropout, torch.rand, randn, randint and their likes, torch.normal, bernoulli, uniform_, "
                "normal_, exponential_, bernoulli_ and F.gumbel_softmax, without a generator of their own; or none",
                found=str(node.target),
                change="draw them outside and pass them in as an input, or call model.eval()",
            )
