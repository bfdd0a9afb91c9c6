"""Runs the segments of emitted graphs as Inductor compiles them, each kind of segment once."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import compile_graph
from autopar.errors import CompilerError

#: What Inductor made, by the text of a segment and its tensors: shapes, strides, dtypes and devices.
_made: dict[tuple[Any, ...], Callable[..., Sequence[Any]]] = {}


class Segment:
    """A segment of a graph, compiled when it first runs on tensors of some strides: shapes and dtypes are always the
    same. Those of isomorphic blocks share."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.text = module, module.code
        self.__name__ = "segment"  # as which it appears in the outer graph's code
        self._strides: list[tuple[int, ...]] | None = None
        self._run: Callable[..., Sequence[Any]]

    def __call__(self, *inputs: Tensor) -> Sequence[Any]:
        strides = [t.stride() for t in inputs]
        if strides != self._strides:
            self._strides, self._run = strides, self._compiled(inputs)
        return self._run(*inputs)

    def _compiled(self, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Any]]:
        key = (self.text, *((t.shape, t.stride(), t.dtype, t.device) for t in inputs))
        if key not in _made:
            with torch.no_grad():
                name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
                _made[key] = compile_graph(self.module, list(inputs), name)
        return _made[key]


def compilations() -> int:
    """How many segments have been compiled in this process."""
    return len(_made)


@functools.cache
def check_compiler(device_type: str) -> None:
    """CompilerError unless Inductor can compile for this kind of device: a trial of one addition."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, 1)),))
    example = torch.zeros(8, device=device_type)
    try:
        with torch.no_grad():
            compile_graph(fx.GraphModule(torch.nn.Module(), graph), [example], "trial")(example)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CompilerError(
            "compile=True, and nothing can be compiled here",
            expected="a C++ compiler (g++ or clang++) for CPUs" if device_type == "cpu" else "Triton for GPUs",
            found=f"{type(error).__name__}: {lines[0][:300]}",
            change="install it, or leave compile out: the program is the same and runs eagerly",
        ) from error
