"""Refusing random operators: they would draw other numbers on every rank."""

from __future__ import annotations

import torch
from torch import fx

from autopar.errors import CaptureError


def refuse_random(graph: fx.Graph) -> None:
    """CaptureError, naming module and operator, if a labelled graph draws random numbers other than by ``autopar``'s
    own dropout, which knows the place of each element in the whole."""
    for node in graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CaptureError(
                f"the forward draws random numbers in module {node.meta['module'] or 'at the top'}",
                expected="dropout (F.dropout, nn.Dropout, attention's, the dropout of channels and of RNNs) or none",
                found=str(node.target),
                change="draw them outside and pass them in as an input, or call model.eval()",
            )
