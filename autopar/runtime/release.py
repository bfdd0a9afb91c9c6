"""Runs an emitted graph without holding on to what it is given.

A call of a Python function keeps its arguments alive until it returns. What the forward saved would then stay until the
whole backward is done, on top of all gradients. Here the inputs come in a list that the graph empties, and each of them
is gone after its last use, as in eager PyTorch.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from autopar._compat import BoxedCodeGen, below_autograd
from autopar.passes.lower import lower
from autopar.passes.segments import segmented
from autopar.runtime.compiled import Segment
from autopar.sharding.buckets import is_overwritten

#: Key of a graph module's ``meta``: whether its segments are compiled.
COMPILE = "compile"

_boxed: weakref.WeakKeyDictionary[fx.GraphModule, Callable[[list[Any]], Any]] = weakref.WeakKeyDictionary()


def run_and_release(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """``module(*inputs)``, without autograd; ``inputs`` is empty afterwards. ``module`` must not change after its first
    run, and shapes and dtypes of the inputs neither."""
    if module not in _boxed:
        if module.meta.get(COMPILE):
            graph = segmented(module.graph, Segment)
        else:
            graph = copy.deepcopy(module.graph)
            lower(graph, inputs)
        for node in graph.nodes:
            if is_overwritten(node):
                node.target = torch.ops._c10d_functional.all_reduce_.default
        graph.set_codegen(BoxedCodeGen())
        boxed = fx.GraphModule(nn.Module(), graph, class_name=type(module).__name__)
        _boxed[module] = boxed.forward  # no hooks of a module: it is none of the user's
    if module.meta.get(COMPILE):  # Inductor traces with autograd's own dispatch
        return _boxed[module](inputs)
    with below_autograd():
        return _boxed[module](inputs)
