"""Sample calls of the operators of vision models, recurrences and complex numbers, added to `rule_samples.SAMPLES`."""

from __future__ import annotations

from typing import Any

import torch
from rule_samples import Call, Draw, sample
from torch import Tensor

aten, own = torch.ops.aten, torch.ops.autopar


def _convolution(d: Draw) -> dict[str, Any]:
    """Operands and arguments of a small convolution, one to three dims, plain or transposed, in groups or depthwise."""
    dims, transposed = d.integer(1, 3), d.flag()
    groups, per_in, per_out = d.pick([(1, 4, 2), (1, 3, 8), (4, 1, 1), (4, 1, 2), (2, 4, 2), (2, 2, 3), (8, 1, 1)])
    kernel = [d.integer(1, 3) for _ in range(dims)]
    batch, stride, padding = d.size(), [d.integer(1, 2)] * dims, [d.integer(0, 1)] * dims
    channels = (groups * per_in, per_out) if transposed else (groups * per_out, per_in)
    return {
        "x": d.real([batch, groups * per_in, *[d.integer(4, 5)] * dims]),
        "weight": d.real([*channels, *kernel]),
        "bias": d.pick([None, d.real([groups * per_out])]),
        "rest": (stride, padding, [d.integer(1, 2)] + [1] * (dims - 1), transposed, [0] * dims, groups),
    }


@sample(aten.convolution.default)
def convolution(d: Draw, target: Any) -> Call:
    c = _convolution(d)
    return (c["x"], c["weight"], c["bias"], *c["rest"]), {}


@sample(aten.convolution_backward.default)
def convolution_backward(d: Draw, target: Any) -> Call:
    c = _convolution(d)
    out = aten.convolution.default(c["x"], c["weight"], None, *c["rest"])
    mask = d.pick([[True, True, True], [True, True, False], [False, True, True], [True, False, False],
                   [False, False, True]])
    return (d.real(out.shape), c["x"], c["weight"], [out.shape[1]], *c["rest"], mask), {}


def _groups(d: Draw) -> tuple[Tensor, list[int], Tensor | None, Tensor | None]:
    groups, per_group = d.size(empty=False), d.pick([1, 2, 3])
    x = d.real([d.size(), groups * per_group, *d.pick([[], [3], [2, 2]])])
    counts = [*x.shape[:2], torch.Size(x.shape[2:]).numel(), groups]
    weight, bias = d.pick([(None, None), (d.real([x.shape[1]]), d.real([x.shape[1]]))])
    return x, counts, weight, bias


@sample(aten.native_group_norm.default)
def group_norm(d: Draw, target: Any) -> Call:
    x, counts, weight, bias = _groups(d)
    return (x, weight, bias, *counts, 1e-5), {}


@sample(aten.native_group_norm_backward.default)
def group_norm_backward(d: Draw, target: Any) -> Call:
    x, counts, weight, bias = _groups(d)
    _, mean, rstd = aten.native_group_norm.default(x, weight, bias, *counts, 1e-5)
    affine = weight is not None
    mask = d.pick([[True, affine, affine], [True, False, False], [not affine, affine, False]])
    return (d.real(x.shape), x, mean, rstd, weight, *counts, mask), {}


def _image(d: Draw, dims: int, size: int = 4) -> Tensor:
    outer = [d.size(), d.size(empty=False)] if d.flag() else [d.size(empty=False), d.size(empty=False)]
    return d.real([*outer, *[size] * dims])


@sample(aten.avg_pool2d.default, aten.avg_pool3d.default, aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default)
def pool(d: Draw, target: Any) -> Call:
    dims = 3 if "3d" in str(target) else 2
    return (_image(d, dims), [2] * dims, [d.integer(1, 2)] * dims, [d.integer(0, 1)] * dims), {}


@sample(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def average_pool_backward(d: Draw, target: Any) -> Call:
    dims = 3 if "3d" in str(target) else 2
    x, window = _image(d, dims), ([2] * dims, [2] * dims, [d.integer(0, 1)] * dims, False, d.flag())
    forward = aten.avg_pool2d.default if dims == 2 else aten.avg_pool3d.default
    return (d.real(forward(x, *window).shape), x, *window, None), {}


@sample(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def maximum_pool_backward(d: Draw, target: Any) -> Call:
    dims = 3 if "3d" in str(target) else 2
    x, window = _image(d, dims), ([2] * dims, [2] * dims, [d.integer(0, 1)] * dims, [1] * dims, False)
    forward = aten.max_pool2d_with_indices.default if dims == 2 else aten.max_pool3d_with_indices.default
    out, indices = forward(x, *window)
    return (d.real(out.shape), x, *window, indices), {}


@sample(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, aten.adaptive_max_pool2d.default,
        aten.adaptive_max_pool3d.default)
def adaptive_pool(d: Draw, target: Any) -> Call:
    dims = 3 if "3d" in str(target) else 2
    return (_image(d, dims), [d.integer(1, 3)] * dims), {}


@sample(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_average_backward(d: Draw, target: Any) -> Call:
    dims = 3 if "3d" in str(target) else 2
    x = _image(d, dims)
    return (d.real([*x.shape[:2], *[3] * dims]), x), {}


@sample(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
def adaptive_maximum_backward(d: Draw, target: Any) -> Call:
    dims = 3 if "3d" in str(target) else 2
    x = _image(d, dims)
    forward = aten.adaptive_max_pool2d.default if dims == 2 else aten.adaptive_max_pool3d.default
    out, indices = forward(x, [3] * dims)
    return (d.real(out.shape), x, indices), {}


@sample(aten._upsample_bicubic2d_aa.default, aten._upsample_bilinear2d_aa.default)
def upsample(d: Draw, target: Any) -> Call:
    return (d.real([d.size(empty=False), d.size(empty=False), 4, 4]), [d.integer(2, 6), 5], d.flag()), {}


@sample(aten._upsample_bicubic2d_aa_backward.default, aten._upsample_bilinear2d_aa_backward.default)
def upsample_backward(d: Draw, target: Any) -> Call:
    outer = [d.size(empty=False), d.size(empty=False)]
    return (d.real([*outer, 3, 5]), [3, 5], [*outer, 4, 4], d.flag()), {}


_PADS = {
    f"{kind}_pad{dims}d{suffix}": (dims, suffix)
    for kind in ("reflection", "replication") for dims in (1, 2, 3) for suffix in ("", "_backward")
}


@sample(*(getattr(aten, name).default for name in _PADS))
def pad(d: Draw, target: Any) -> Call:
    dims, suffix = _PADS[target.overloadpacket.__name__]
    x, padding = d.real([d.size(), d.size(empty=False), *[4] * dims]), [d.integer(0, 2) for _ in range(2 * dims)]
    if not suffix:
        return (x, padding), {}
    grown = [4 + padding[2 * i] + padding[2 * i + 1] for i in reversed(range(dims))]
    return (d.real([*x.shape[:2], *grown]), x, padding), {}


@sample(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(d: Draw, target: Any) -> Call:
    outer, channels = d.shape(high=2), d.size(empty=False)
    if target is aten.pixel_shuffle.default:
        return (d.real([*outer, channels * 4, d.size(empty=False), d.size(empty=False)]), 2), {}
    return (d.real([*outer, channels, 2 * d.size(empty=False), 2 * d.size(empty=False)]), 2), {}


@sample(aten.im2col.default)
def im2col(d: Draw, target: Any) -> Call:
    outer = d.pick([[], [d.size(empty=False)]])
    return (d.real([*outer, d.size(empty=False), 5, 4]), [2, 3], [1, 1], [d.integer(0, 1), 0], [1, 1]), {}


@sample(aten.col2im.default)
def col2im(d: Draw, target: Any) -> Call:
    outer = d.pick([[], [d.size(empty=False)]])
    return (d.real([*outer, d.size(empty=False) * 6, 8]), [5, 4], [2, 3], [1, 1], [0, 0], [1, 1]), {}


@sample(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(d: Draw, target: Any) -> Call:
    dims = 3 if "3d" in str(target) else 2
    batch = d.size(empty=False)
    grid = d.real([batch, *[d.size(empty=False) for _ in range(dims)], dims])
    return (d.real([batch, d.size(empty=False), *[3] * dims]), grid, 0, 0, d.flag()), {}


@sample(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(d: Draw, target: Any) -> Call:
    dims = 3 if "3d" in str(target) else 2
    batch, channels, out = d.size(empty=False), d.size(empty=False), [d.size(empty=False) for _ in range(dims)]
    image, grid = d.real([batch, channels, *[3] * dims]), d.real([batch, *out, dims])
    return (d.real([batch, channels, *out]), image, grid, 0, 0, d.flag(), [True, True]), {}


@sample(aten.unfold.default)
def unfold(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape)
    return (d.real(shape), dim, d.integer(1, shape[dim]), d.integer(1, 3)), {}


@sample(aten.unfold_backward.default)
def unfold_backward(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape) % len(shape)
    size, step = d.integer(1, shape[dim]), d.integer(1, 3)
    return (d.real(torch.empty(shape).unfold(dim, size, step).shape), shape, dim, size, step), {}


@sample(aten.diagonal.default, aten.diagonal_backward.default)
def diagonal(d: Draw, target: Any) -> Call:
    shape = d.shape(low=2)
    first, second = d.dims(shape, low=2)[:2]
    offset = d.integer(-1, 1)
    if target is aten.diagonal.default:
        return (d.real(shape), offset, first, second), {}
    return (d.real(torch.empty(shape).diagonal(offset, first, second).shape), shape, offset, first, second), {}


def _complex(d: Draw, shape: list[int]) -> Tensor:
    return torch.complex(d.real(shape), d.real(shape))


@sample(aten._conj.default, aten.view_as_real.default)
def complex_unary(d: Draw, target: Any) -> Call:
    return (_complex(d, d.shape()),), {}


@sample(aten.view_as_complex.default)
def view_as_complex(d: Draw, target: Any) -> Call:
    return (d.real([*d.shape(), 2]),), {}


@sample(aten.polar.default)
def polar(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape).abs(), d.real(shape)), {}


@sample(aten._fft_c2c.default, aten._fft_c2r.default, aten._fft_r2c.default)
def fourier(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dims = d.dims(shape)
    if target is aten._fft_c2c.default:
        return (_complex(d, shape), dims, 0, d.flag()), {}
    if target is aten._fft_r2c.default:
        return (d.real(shape), dims, 0, d.flag()), {}
    size = 2 * (shape[dims[-1]] - 1) or 1
    return (torch.fft.rfftn(d.real([size if i == dims[-1] else n for i, n in enumerate(shape)]), dim=dims),
            dims, 0, size), {}


@sample(aten.baddbmm.default)
def baddbmm(d: Draw, target: Any) -> Call:
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    first = d.pick([[b, m, n], [m, n], [1, m, 1], [n], []])
    return (d.real(first), d.real([b, m, k]), d.real([b, k, n])), d.pick([{}, {"beta": 2.0, "alpha": 3.0}])


@sample(aten.cummax.default, aten.cummin.default)
def running_extreme(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1)
    return (d.real(shape), d.dim(shape)), {}


@sample(aten.clamp_max.Tensor, aten.clamp_min.Tensor)
def clamp_by_tensor(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.real(d.broadcast(shape))), {}


@sample(aten.new_empty_strided.default)
def new_empty_strided(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(d.shape()), shape, torch.empty(shape).stride()), {}


def _recurrence(d: Draw, gates: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gates [steps, batch, gates x hidden], a state and a weight."""
    steps, batch, hidden = d.integer(1, 3), d.size(), d.size(empty=False)
    return d.real([steps, batch, gates * hidden]), d.real([batch, hidden]), d.real([gates * hidden, hidden])


@sample(own.lstm.default)
def lstm(d: Draw, target: Any) -> Call:
    gates, state, weight = _recurrence(d, 4)
    return (gates, state, d.real(state.shape), weight, d.flag()), {}


@sample(own.lstm_backward.default)
def lstm_backward(d: Draw, target: Any) -> Call:
    (gates, h0, c0, weight, reverse), _ = lstm(d, target)
    out, cells, active = own.lstm.default(gates, h0, c0, weight, reverse)
    return (d.real(out.shape), d.real(out.shape), active, cells, c0, weight, reverse), {}


@sample(own.gru.default)
def gru(d: Draw, target: Any) -> Call:
    gates, state, weight = _recurrence(d, 3)
    return (gates, state, weight, d.real([len(weight)]), d.flag()), {}


@sample(own.gru_backward.default)
def gru_backward(d: Draw, target: Any) -> Call:
    (gates, h0, weight, bias, reverse), _ = gru(d, target)
    out, active = own.gru.default(gates, h0, weight, bias, reverse)
    return (d.real(out.shape), active, out, h0, weight, reverse), {}


@sample(aten.bucketize.Tensor)
def bucketize(d: Draw, target: Any) -> Call:
    return (d.real(d.shape()), d.real([d.size()]).sort()[0]), d.pick([{}, {"right": True}])


@sample(own.rnn.default)
def rnn(d: Draw, target: Any) -> Call:
    gates, state, weight = _recurrence(d, 1)
    return (gates, state, weight, d.flag(), d.flag()), {}


@sample(own.rnn_backward.default)
def rnn_backward(d: Draw, target: Any) -> Call:
    (gates, h0, weight, relu, reverse), _ = rnn(d, target)
    out = own.rnn.default(gates, h0, weight, relu, reverse)
    return (d.real(out.shape), out, weight, relu, reverse), {}


@sample(aten._cdist_forward.default)
def cdist(d: Draw, target: Any) -> Call:
    outer, features = d.shape(high=2, empty=False), d.size(empty=False)
    first, second = [*outer, d.size(empty=False), features], [*outer, d.size(empty=False), features]
    return (d.real(first), d.real(second), d.pick([1.0, 2.0, 3.0]), None), {}


@sample(aten._cdist_backward.default)
def cdist_backward(d: Draw, target: Any) -> Call:
    (first, second, p, _), _ = cdist(d, target)
    distances = aten._cdist_forward.default(first, second, p, None)
    return (d.real(distances.shape), first, second, p, distances), {}


@sample(aten.vdot.default)
def vdot(d: Draw, target: Any) -> Call:
    size = d.size()
    return (d.real([size]), d.real([size])), {}


@sample(aten.norm.ScalarOpt_dim)
def norm(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1)
    return (d.real(shape), 2, d.dims(shape), d.flag()), {}


@sample(aten.unsafe_split.Tensor)
def unsafe_split(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    return (d.real(shape), d.integer(1, 4), d.dim(shape)), {}
