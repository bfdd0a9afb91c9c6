"""Floating point operations of an operator: one count for plans and for what runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry

aten = torch.ops.aten


def _convolution_backward(args: tuple[Any, ...]) -> int:
    """Both gradients cost what the forward costs. torch's formula counts the weight's as if there were one group, a
    depthwise convolution's by the number of channels too high."""
    grad_out, x, weight = args[:3]
    forward = conv_flop_count(x.shape, weight.shape, grad_out.shape, transposed=args[7])
    return forward * sum(args[10][:2])


def has_flops(target: Any) -> bool:
    """Whether `count_flops` knows the operator."""
    return getattr(target, "overloadpacket", None) in flop_registry


def count_flops(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of one call on tensors (their shapes count, so meta tensors will do), 2 a multiply-add: by
    ``torch.utils.flop_counter``'s registry, and 0 for operators that it does not know."""
    if target is aten.convolution_backward.default:
        return _convolution_backward(args)
    return int(flop_registry[target.overloadpacket](*args, **kwargs, out_val=result)) if has_flops(target) else 0
