"""The emitted program as a function of autograd: its forward graph, and its backward graph as the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import dtensor_like, piece_of
from autopar.passes.partition import Program
from autopar.runtime.accumulate import Accumulator
from autopar.runtime.autocast import as_captured
from autopar.runtime.copies import StepCopies
from autopar.runtime.failure import guarded
from autopar.runtime.program import Emitted, Specialization
from autopar.runtime.release import run_and_release


@dataclass(frozen=True)
class Surroundings:
    """What a program needs of its module to run: the kind of device, the copies of parameters that are kept, and what
    holds gradients back."""

    device_type: str
    copies: StepCopies
    accumulator: Accumulator


class ProgramFunction(torch.autograd.Function):
    """The forward program, and the backward program as its gradient. Parameters come in and gradients go out as
    DTensors in storage layout."""

    @staticmethod
    def forward(
        ctx: Any,
        around: Surroundings,
        special: Specialization,
        program: Program,
        given: dict[str, Tensor],
        *parameters: DTensor,
    ) -> tuple[Tensor, ...]:
        values = {**given, **local_pieces(special, parameters)}
        values.update(around.copies.take(program, parameters, values, run_and_release))
        with as_captured(around.device_type):
            outputs = run_and_release(program.forward, [values[name] for name in program.forward_inputs])
        results, saved = outputs[: program.num_results], outputs[program.num_results :]
        values.update(zip(program.saved, saved, strict=True))
        kept = [name for name in program.backward_inputs if name in values]
        ctx.save_for_backward(*(values[name] for name in kept))
        ctx.kept, ctx.around, ctx.special, ctx.program, ctx.parameters = kept, around, special, program, parameters
        places = zip(results, program.results, strict=True)
        ctx.mark_non_differentiable(*(r for r, i in places if special.captured.outputs[i].tangent is None))
        ctx.set_materialize_grads(False)  # which results were not used says which parameters get no gradient
        ctx.empty = [torch.empty_like(r, device="meta") for r in results]
        return tuple(results)

    @staticmethod
    @guarded("backward")
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        around: Surroundings = ctx.around
        special: Specialization = ctx.special
        program: Program = ctx.program
        assert program.backward is not None
        values = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        ctx.maybe_clear_saved_tensors()  # from here on the values alone are held, and the graph lets go of them
        used = {place for place, tangent in zip(program.results, tangents, strict=True) if tangent is not None}
        for place, tangent, empty in zip(program.results, tangents, ctx.empty, strict=True):
            output = special.captured.outputs[place]
            if output.tangent is not None:
                if tangent is None:
                    tangent = torch.zeros_like(empty, device=around.device_type)
                values[special.input_name(output.tangent)] = tangent
        trained = [p.name for p in special.captured.parameters if p.gradient is not None]
        reached = {name for name in trained if used & special.reached[name]}
        inputs = [values[name] for name in program.backward_inputs]
        values.clear()
        gradients = around.accumulator.backward(program, inputs, trained, reached)
        found: list[DTensor | None] = []
        for p, parameter in zip(special.captured.parameters, ctx.parameters, strict=True):
            if p.name not in gradients:
                found.append(None)
                continue
            found.append(dtensor_like(gradients[p.name].to(p.storage_dtype).contiguous(), parameter))
        return (None, None, None, None, *found)


def local_pieces(special: Emitted, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """This rank's pieces of the parameters that it holds, by the name under which they enter the program."""
    names = [special.input_name(p.placeholder) for p in special.captured.parameters]
    held = zip(names, parameters, strict=True)
    return {n: piece_of(p) for n, p in held if isinstance(p, DTensor)}
