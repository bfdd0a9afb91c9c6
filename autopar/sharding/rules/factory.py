"""Tensors made from nothing: every rank makes its own piece."""

from __future__ import annotations

from typing import Any

import torch

from autopar.sharding.rule import Local, OpCall, Rule, make_rule
from autopar.sharding.rules.common import aten, dim_by_dim, linear_args, names, start_of, with_local_shape
from autopar.sharding.rules.registry import register

_ZEROS = (aten.new_zeros.default, aten.zeros_like.default)


@register(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(call: OpCall) -> Rule:
    first = 0 if call.target is aten.arange.default else call.args[0]
    step = call.argument(2, "step", 1) if call.target is aten.arange.start_step else 1
    dtype = call.results[0].dtype

    def localize(local: Local) -> Any:
        if not local.result_layouts[0].split_axes:
            return local.default()
        emit = local.emit
        options = {k: v for k, v in call.kwargs.items() if k == "device"}
        # in the widest dtype, because the steps of a whole arange are not accumulated in a narrow one either
        wide = torch.float64 if dtype.is_floating_point else torch.int64
        index = emit(aten.arange.default, local.result_shape()[0], dtype=wide, **options)
        index = emit(aten.add.Tensor, index, start_of(local, local.result_layouts[0], call.results[0].shape, 0))
        value = emit(aten.add.Scalar, emit(aten.mul.Scalar, index, step), first)
        return value if dtype == wide else emit(aten._to_copy.default, value, dtype=dtype)

    return make_rule(call, [], [(("n",),)], localize=localize)


@register(
    aten.empty.memory_format, aten.full.default, aten.ones.default, aten.scalar_tensor.default, aten.zeros.default
)
def constant(call: OpCall) -> Rule:
    scalar = call.target is aten.scalar_tensor.default
    dims = names("d", len(call.results[0].shape))
    return make_rule(call, [], [dims], localize=None if scalar else with_local_shape(0))


@register(aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default)
def new_constant(call: OpCall) -> Rule:
    """The operand gives dtype and device only. It is split as the result is along the outer and the inner dims that
    both have (``[b, k, l, h]`` and ``[b, s, h]`` share b and h), and whole along the others."""
    given, shape = call.operands[0].shape, call.results[0].shape
    dims, most = names("d", len(shape)), min(len(given), len(shape))
    outer = next((d for d in range(most) if given[d] != shape[d]), most)
    inner = next((d for d in range(most - outer) if given[-1 - d] != shape[-1 - d]), most - outer)
    operand = (*dims[:outer], *[()] * (len(given) - outer - inner), *dims[len(shape) - inner :])
    return make_rule(
        call,
        [operand],
        [dims],
        linear=linear_args(call, (0,)) if call.target in _ZEROS else (),
        localize=with_local_shape(1),
    )


@register(aten.new_empty_strided.default)
def new_empty_strided(call: OpCall) -> Rule:
    """As `new_constant`. Strides of the whole mean nothing to a piece; nothing relies on them."""
    dims = names("d", len(call.results[0].shape))
    operand = ((),) * len(call.operands[0].shape)

    def localize(local: Local) -> Any:
        return local.emit(aten.new_empty.default, local.operands[0], local.result_shape(), **call.kwargs)

    return make_rule(call, [operand], [dims], localize=localize)


@register(aten.empty_like.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default)
def constant_like(call: OpCall) -> Rule:
    return dim_by_dim(call, linear=linear_args(call, (0,)) if call.target in _ZEROS else ())
