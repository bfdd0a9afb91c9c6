"""Shapes and dtypes of a rank's values, found without computing anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import FakeTensorMode
from autopar.passes.phases import Phase
from autopar.sharding.layout import TensorSpec


def shapes_of(phases: Iterable[Phase], given: Mapping[str, TensorSpec], wanted: Iterable[str]) -> dict[str, TensorSpec]:
    """The specs of ``wanted``, nodes by name, when ``phases`` run one after the other on inputs of the specs ``given``,
    all of them a rank's own pieces."""
    left, found = set(wanted), dict[str, TensorSpec]()
    with FakeTensorMode():
        values: dict[str, Any] = {n: torch.empty(s.shape, dtype=s.dtype, device="cpu") for n, s in given.items()}
        for phase in phases:
            if left:
                values |= _run(phase, values, left, found)
        found |= {name: TensorSpec(tuple(values[name].shape), values[name].dtype) for name in left}  # sums
    return found


def _run(phase: Phase, given: Mapping[str, Any], left: set[str], found: dict[str, TensorSpec]) -> dict[str, Any]:
    """Run one phase on fake tensors, moving what it finds of ``left`` to ``found``; returns its outputs."""
    env: dict[fx.Node, Any] = {}
    for node in phase.module.graph.nodes:
        if node.op == "placeholder":
            env[node] = given[phase.inputs[len(env)]]
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
        else:
            return {name: env[n] for name, n in zip(phase.outputs, node.args[0], strict=True)}
        if node.name in left and isinstance(env[node], Tensor):
            found[node.name] = TensorSpec(tuple(env[node].shape), env[node].dtype)
            left.discard(node.name)
    raise ValueError("the graph has no output")
