"""What capture hands on: one joint forward and backward graph, and what its inputs and outputs mean.

Every node of the graph carries in ``meta``: ``val`` (a fake tensor, or a tuple of them), ``module`` (the path of the
module it came from, "" if none), ``block`` (the path of the repeated block it belongs to, or None) and ``backward``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._compat import pytree
from autopar.errors import InputError
from autopar.sharding.layout import TensorSpec


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model; tied ones are one, under the first name. ``gradient`` is None if it gets none.

    ``master`` is the dtype in which it rests where that is another than ``spec``'s, in which it is used; its gradient
    is then cast for the reduction, the last thing in the graph that happens to it.
    """

    name: str
    aliases: tuple[str, ...]
    spec: TensorSpec
    placeholder: fx.Node
    gradient: fx.Node | None
    master: torch.dtype | None = None

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype in which the parameter, its gradient and its optimizer state rest."""
        return self.master or self.spec.dtype


@dataclass(frozen=True)
class Buffer:
    """A buffer (or a tensor kept as a plain attribute) that the graph reads; ``value`` is that of a constant which the
    forward makes itself, None where the model holds the tensor under ``name``."""

    name: str
    placeholder: fx.Node
    value: torch.Tensor | None = None

    def tensor(self, model: torch.nn.Module) -> torch.Tensor:
        """The tensor as it is now. Raises InputError if the model has something else in its place."""
        if self.value is not None:
            return self.value
        path, _, attribute = self.name.rpartition(".")
        found = getattr(model.get_submodule(path), attribute)
        if not isinstance(found, torch.Tensor):
            raise InputError(
                f"{self.name} was a tensor when the model was captured",
                expected="a tensor",
                found=type(found).__name__,
                change="do not replace buffers after parallelize",
            )
        return found


@dataclass(frozen=True)
class Output:
    """A tensor that the model returns, or with ``buffer`` the new value of a buffer that its forward changes.
    ``tangent`` is its gradient's placeholder, None where no gradient is taken; ``cached`` are the keys or values of a
    cache (`hf_cache`)."""

    node: fx.Node
    tangent: fx.Node | None = None
    buffer: str | None = None
    cached: bool = False


@dataclass(frozen=True)
class BlockClass:
    """Isomorphic blocks: ``paths`` of the modules, and for each of them its nodes, in corresponding order."""

    name: str
    paths: tuple[str, ...]
    nodes: tuple[tuple[fx.Node, ...], ...]


@dataclass(frozen=True)
class Captured:
    """A model traced for one set of input shapes.

    ``inputs`` are the placeholders of the tensor leaves of ``(args, kwargs)``, in pytree order, ``input_spec`` its
    structure with those leaves; ``outputs`` are the tensor leaves of what the model returns, followed by the new values
    of buffers; ``output_spec`` is the structure of what it returns, ``output_constants`` its other leaves by position.
    ``seed`` is the placeholder of the dropout seed (int64 [2]: seed and step), None if no random numbers are drawn.
    ``caches`` are those of the inputs that are keys and values of a cache.
    """

    module: fx.GraphModule
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[fx.Node, ...]
    input_spec: pytree.TreeSpec
    outputs: tuple[Output, ...]
    output_spec: pytree.TreeSpec
    output_constants: tuple[tuple[int, Any], ...]
    seed: fx.Node | None
    blocks: tuple[BlockClass, ...]
    caches: tuple[fx.Node, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """The joint graph."""
        return self.module.graph

    def parameter(self, name: str) -> Parameter:
        """The parameter called ``name``, under any of its names. Raises KeyError."""
        for parameter in self.parameters:
            if name == parameter.name or name in parameter.aliases:
                return parameter
        raise KeyError(name)


def spec_of(value: Any) -> TensorSpec | None:
    """The spec of a tensor, or of a node that yields one tensor; None for anything else."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(int(s) for s in value.shape), value.dtype)
    return None


def specs_of(value: Any) -> tuple[TensorSpec, ...]:
    """The specs of all tensors that a node yields, in order."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    return tuple(spec for leaf in pytree.tree_leaves(value) if (spec := spec_of(leaf)) is not None)
