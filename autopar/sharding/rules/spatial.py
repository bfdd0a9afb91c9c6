"""Pooling, resampling and padding of images: the positions, which are the last dims, stay whole."""

from __future__ import annotations

from typing import Any

from autopar.sharding.rule import OpCall, Rule, make_rule
from autopar.sharding.rules.common import aten, contiguous_args, dim_by_dim, linear_args
from autopar.sharding.rules.registry import register

# Operators and how many dims of positions they have. All of their tensors have the same dims.
_POSITIONS: dict[Any, int] = {
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
}

# Those that are linear in their first argument.
_LINEAR_POSITIONS: dict[Any, int] = {
    aten._adaptive_avg_pool2d.default: 2,
    aten._adaptive_avg_pool2d_backward.default: 2,
    aten._adaptive_avg_pool3d.default: 3,
    aten._adaptive_avg_pool3d_backward.default: 3,
    aten._upsample_bicubic2d_aa.default: 2,
    aten._upsample_bilinear2d_aa.default: 2,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.avg_pool2d.default: 2,
    aten.avg_pool2d_backward.default: 2,
    aten.avg_pool3d.default: 3,
    aten.avg_pool3d_backward.default: 3,
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.reflection_pad1d.default: 1,
    aten.reflection_pad1d_backward.default: 1,
    aten.reflection_pad2d.default: 2,
    aten.reflection_pad2d_backward.default: 2,
    aten.reflection_pad3d.default: 3,
    aten.reflection_pad3d_backward.default: 3,
    aten.replication_pad1d.default: 1,
    aten.replication_pad1d_backward.default: 1,
    aten.replication_pad2d.default: 2,
    aten.replication_pad2d_backward.default: 2,
    aten.replication_pad3d.default: 3,
    aten.replication_pad3d_backward.default: 3,
}


def _last(call: OpCall, count: int) -> list[int]:
    ndim = len(call.results[0].shape)
    return list(range(ndim - count, ndim))


@register(*_POSITIONS)
def spatial(call: OpCall) -> Rule:
    return dim_by_dim(call, _last(call, _POSITIONS[call.target]))


@register(*_LINEAR_POSITIONS)
def linear_spatial(call: OpCall) -> Rule:
    """Maximum pooling is linear in its backward: the indices say where a gradient goes."""
    return dim_by_dim(call, _last(call, _LINEAR_POSITIONS[call.target]), linear=linear_args(call, (0,)))


@register(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(call: OpCall) -> Rule:
    """(grad, self, indices)"""
    return dim_by_dim(
        call, _last(call, 3), linear=linear_args(call, (0,)),
        localize=lambda local: local.default(**contiguous_args(local, 2)),
    )  # fmt: skip


@register(aten._upsample_bicubic2d_aa_backward.default, aten._upsample_bilinear2d_aa_backward.default)
def upsample_backward(call: OpCall) -> Rule:
    """(grad, output_size, input_size, align_corners, scales): the input's size has batch and channels in it."""
    return dim_by_dim(
        call, (2, 3), linear=linear_args(call, (0,)), localize=lambda local: local.default(arg2=local.result_shape())
    )


@register(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(call: OpCall) -> Rule | None:
    """[..., C x r x r, H, W] to [..., C, H x r, W x r] and back."""
    if 0 in call.operands[0].shape:
        return None
    outer = tuple((f"b{i}",) for i in range(len(call.results[0].shape) - 3))
    packed = (*outer, ("c", "r", "s"), ("h",), ("w",))
    opened = (*outer, ("c",), ("h", "r"), ("w", "s"))
    tensors = (packed, opened) if call.target is aten.pixel_shuffle.default else (opened, packed)
    factor = call.args[1]
    return make_rule(
        call,
        [tensors[0]],
        [tensors[1]],
        fixed=("r", "s"),
        sizes={"r": factor, "s": factor},
        linear=linear_args(call, (0,)),
    )


@register(aten.im2col.default, aten.col2im.default)
def patches(call: OpCall) -> Rule | None:
    """im2col(image, kernel, ...): [N, C, H, W] to [N, C x kernel, patches]; col2im(columns, size, kernel, ...) back.
    Both also without N."""
    if 0 in call.operands[0].shape:
        return None
    unfolds = call.target is aten.im2col.default
    kernel = call.args[1] if unfolds else call.args[2]
    outer = (("n",),) if len(call.operands[0].shape if unfolds else call.results[0].shape) == 4 else ()
    image, columns = (*outer, ("c",), (), ()), (*outer, ("c", "k"), ())
    return make_rule(
        call,
        [image if unfolds else columns],
        [columns if unfolds else image],
        fixed=("k",),
        sizes={"k": kernel[0] * kernel[1]},
        linear=linear_args(call, (0,)),
    )


@register(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(call: OpCall) -> Rule:
    """(image [N, C, *in], grid [N, *out, dims], ...) -> [N, C, *out]"""
    out = tuple((f"s{i}",) for i in range(len(call.results[0].shape) - 2))
    image = (("n",), ("c",), *((),) * len(out))
    return make_rule(call, [image, (("n",), *out, ())], [(("n",), ("c",), *out)], linear=linear_args(call, (0,)))


@register(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(call: OpCall) -> Rule:
    """(grad, image, grid, interpolation, padding, align_corners, output_mask) -> gradients of image and grid."""
    out = tuple((f"s{i}",) for i in range(len(call.operands[0].shape) - 2))
    image, grid = (("n",), ("c",), *((),) * len(out)), (("n",), *out, ())
    wanted = call.args[6]
    return make_rule(
        call,
        [(("n",), ("c",), *out), image, grid],
        [image, grid] if wanted[0] else [grid],
        reduced={"c": "sum", **{factor: "sum" for (factor,) in out}},
        linear=linear_args(call, (0,)),
    )
