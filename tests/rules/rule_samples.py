"""Sample calls of every operator that has a rule, keyed by operator.

A sampler takes a `Draw` and the operator and returns (args, kwargs). Shapes include dims of size 1 and 0 and some that
the meshes do not divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import autopar.ops.attention
import autopar.ops.constrain
import autopar.ops.delta
import autopar.ops.dropout
import autopar.ops.scan
import autopar.ops.uniform
import autopar.ops.vocabulary

aten, own = torch.ops.aten, torch.ops.autopar
Call = tuple[tuple[Any, ...], dict[str, Any]]
Sampler = Callable[["Draw", Any], Call]
SAMPLES: dict[Any, Sampler] = {}


def sample(*targets: Any) -> Callable[[Sampler], Sampler]:
    def decorate(function: Sampler) -> Sampler:
        assert not set(targets) & set(SAMPLES)
        SAMPLES.update(dict.fromkeys(targets, function))
        return function

    return decorate


class Draw:
    """Choices and tensors, all reproducible from what hypothesis draws."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw
        self._generator = torch.Generator().manual_seed(self.integer(0, 1000))

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def pick(self, options: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(options))

    def flag(self) -> bool:
        return self.pick([False, True])

    def size(self, empty: bool = True) -> int:
        return self.pick([4, 8, 2, 6, 1, 3, 4, 2, *([0] if empty else [])])

    def shape(self, low: int = 0, high: int = 3, empty: bool = True) -> list[int]:
        return [self.size(empty) for _ in range(self.integer(low, high))]

    def dim(self, shape: Sequence[int]) -> int:
        return self.integer(-len(shape), len(shape) - 1) if shape else 0

    def dims(self, shape: Sequence[int], low: int = 1) -> list[int]:
        order = self._draw(st.permutations(range(len(shape))))
        return list(order)[:self.integer(min(low, len(shape)), len(shape))]

    def real(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(list(shape), dtype=torch.float64, generator=self._generator)

    def coarse(self, shape: Sequence[int]) -> Tensor:
        """Floats with few values, so that comparisons meet equal ones."""
        return self.whole(shape, -2, 3).double()

    def whole(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        """int64 in [low, high)"""
        return torch.randint(low, max(high, low + 1), list(shape), generator=self._generator)

    def truth(self, shape: Sequence[int]) -> Tensor:
        return self.whole(shape, 0, 2).bool()

    def broadcast(self, shape: Sequence[int]) -> list[int]:
        """A shape that broadcasts to ``shape``."""
        kept = list(shape)[self.integer(0, len(shape)):] if self.flag() else list(shape)
        return [1 if self.pick([False, False, True]) else n for n in kept]


@sample(
    aten.abs.default, aten.acos.default, aten.alias.default, aten.asin.default, aten.atan.default,
    aten.ceil.default, aten.clone.default, aten.cos.default, aten.cosh.default, aten.detach.default, aten.elu.default,
    aten.empty_like.default, aten.erf.default, aten.exp.default, aten.exp2.default, aten.expm1.default,
    aten.floor.default, aten.gelu.default, aten.hardsigmoid.default, aten.hardswish.default, aten.hardtanh.default,
    aten.isfinite.default, aten.isinf.default, aten.isnan.default, aten.leaky_relu.default,
    aten.lift_fresh_copy.default, aten.log.default, aten.log10.default, aten.log1p.default, aten.log2.default,
    aten.mish.default, aten.neg.default, aten.ones_like.default, aten.reciprocal.default, aten.relu.default,
    aten.round.default, aten.rsqrt.default, aten.sgn.default, aten.sigmoid.default, aten.sign.default,
    aten.silu.default, aten.sin.default, aten.sinh.default, aten.softplus.default, aten.sqrt.default,
    aten.square.default, aten.tan.default, aten.tanh.default, aten.trunc.default, aten.zeros_like.default,
)
def unary(d: Draw, target: Any) -> Call:
    x = d.real(d.shape())
    return (x.abs() if d.flag() else x,), {}


@sample(own.constrain.default)
def constrain(d: Draw, target: Any) -> Call:
    return (d.real(d.shape()), "tp:0"), {}


@sample(aten._to_copy.default, aten.to.dtype)
def convert(d: Draw, target: Any) -> Call:
    shape = d.shape()
    x = d.pick([d.real(shape), d.real(shape).float(), d.whole(shape, -3, 3)])
    dtype = d.pick([torch.float64, torch.float32, torch.int64])
    return ((x, dtype), {}) if target is aten.to.dtype else ((x,), {"dtype": dtype})


@sample(
    aten.add.Scalar, aten.clamp_max.default, aten.clamp_min.default, aten.div.Scalar, aten.eq.Scalar, aten.fill.Scalar,
    aten.floor_divide.default, aten.fmod.Scalar, aten.full_like.default, aten.ge.Scalar, aten.gt.Scalar,
    aten.le.Scalar, aten.lt.Scalar, aten.mul.Scalar, aten.ne.Scalar, aten.pow.Tensor_Scalar, aten.remainder.Scalar,
    aten.rsub.Scalar, aten.sub.Scalar,
)
def with_scalar(d: Draw, target: Any) -> Call:
    other = d.pick([2, -1.0, 1])
    x = d.coarse(d.shape())
    return (x, torch.tensor(2.0, dtype=torch.float64) if target is aten.floor_divide.default else other), {}


@sample(aten.clamp.default)
def clamp(d: Draw, target: Any) -> Call:
    return (d.real(d.shape()), *d.pick([(-0.5, 0.5), (None, 0.5), (-0.5,)])), {}


@sample(aten.div.Scalar_mode)
def divide_rounded(d: Draw, target: Any) -> Call:
    return (d.real(d.shape()), 0.5), {"rounding_mode": "floor"}


@sample(aten.pow.Scalar)
def scalar_power(d: Draw, target: Any) -> Call:
    return (2.0, d.real(d.shape())), {}


@sample(
    aten.add.Tensor, aten.atan2.default, aten.div.Tensor, aten.eq.Tensor, aten.fmod.Tensor, aten.ge.Tensor,
    aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.maximum.default, aten.minimum.default, aten.mul.Tensor,
    aten.ne.Tensor, aten.pow.Tensor_Tensor, aten.remainder.Tensor, aten.rsub.Tensor, aten.sub.Tensor,
)
def binary(d: Draw, target: Any) -> Call:
    shape = d.shape()
    a, b = (d.coarse(shape), d.coarse(d.broadcast(shape))) if d.flag() else (d.real(shape), d.real(d.broadcast(shape)))
    if target in (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor) and d.pick([False, False, False, True]):
        return (a, d.pick([1, d.whole(d.broadcast(shape), -3, 3)])), {}  # 1: as tracing writes x + 1
    if target in (aten.fmod.Tensor, aten.remainder.Tensor, aten.div.Tensor):
        a, b = a.abs() + 0.5, b.abs() + 0.5  # nothing over zero: no linear operator adds up to an infinity
    swap = d.flag() and target is not aten.pow.Tensor_Tensor
    return (b, a) if swap else (a, b), {"alpha": 2} if target in (aten.add.Tensor, aten.rsub.Tensor) else {}


@sample(aten.div.Tensor_mode)
def binary_rounded(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.real(d.broadcast(shape)).abs() + 0.5), {"rounding_mode": "trunc"}


@sample(aten.lerp.Scalar)
def lerp(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.real(d.broadcast(shape)), 0.25), {}


@sample(aten.addcdiv.default, aten.addcmul.default, aten.clamp.Tensor)
def ternary(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.real(d.broadcast(shape)), d.real(d.broadcast(shape)).abs() + 0.5), {}


@sample(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default)
def binary_logic(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.truth(shape), d.truth(d.broadcast(shape))), {}


@sample(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor)
def binary_bits(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.whole(shape, 0, 9), d.whole(d.broadcast(shape), 0, 9)), {}


@sample(aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar)
def bits_with_scalar(d: Draw, target: Any) -> Call:
    return (d.whole(d.shape(), 0, 9), 5), {}


@sample(aten.bitwise_not.default, aten.logical_not.default)
def unary_logic(d: Draw, target: Any) -> Call:
    return (d.truth(d.shape()),), {}


@sample(aten.where.self)
def where(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.truth(d.broadcast(shape)), d.real(shape), d.real(d.broadcast(shape))), {}


@sample(aten.where.ScalarOther)
def where_scalar_other(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.truth(d.broadcast(shape)), d.real(shape), d.pick([0, 2.0])), {}


@sample(aten.where.ScalarSelf)
def where_scalar_self(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.truth(d.broadcast(shape)), d.pick([0.0, 2.0]), d.real(shape)), {}


@sample(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(d: Draw, target: Any) -> Call:
    shape = d.shape()
    value = d.pick([0, 3.0]) if target is aten.masked_fill.Scalar else d.real([])
    return (d.real(shape), d.truth(d.broadcast(shape)), value), {}


@sample(aten.copy.default)
def copy(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.real(d.broadcast(shape))), {}


@sample(aten.fill.Tensor)
def fill_tensor(d: Draw, target: Any) -> Call:
    return (d.real(d.shape()), d.real([])), {}


@sample(
    aten.elu_backward.default, aten.gelu_backward.default, aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default, aten.hardtanh_backward.default, aten.leaky_relu_backward.default,
    aten.sigmoid_backward.default, aten.silu_backward.default, aten.softplus_backward.default,
    aten.tanh_backward.default, aten.threshold_backward.default,
)
def pointwise_backward(d: Draw, target: Any) -> Call:
    shape = d.shape()
    grad, x = d.real(shape), d.real(shape)
    if target is aten.elu_backward.default:
        return (grad, 1.0, 1.0, 1.0, False, x), {}
    rest: dict[Any, tuple[Any, ...]] = {
        aten.hardtanh_backward.default: (-1.0, 1.0), aten.leaky_relu_backward.default: (0.1, False),
        aten.softplus_backward.default: (1.0, 20.0), aten.threshold_backward.default: (0.0,)}
    return (grad, x, *rest.get(target, ())), {}


@sample(
    aten.all.default, aten.any.default, aten.max.default, aten.mean.default, aten.min.default, aten.prod.default,
    aten.sum.default,
)
def reduce_all(d: Draw, target: Any) -> Call:
    shape = d.shape(empty=False)
    if target is aten.sum.default:
        return (d.pick([d.real(shape), d.whole(shape, -3, 3), d.truth(shape)]),), d.pick([{}, {"dtype": torch.float64}])
    return (d.truth(shape) if target in (aten.all.default, aten.any.default) else d.real(shape),), {}


@sample(aten.all.dims, aten.amax.default, aten.amin.default, aten.any.dims, aten.logsumexp.default, aten.mean.dim,
        aten.std.correction, aten.sum.dim_IntList, aten.var.correction, aten.var_mean.correction)
def reduce_dims(d: Draw, target: Any) -> Call:
    shape = d.shape(empty=target is aten.sum.dim_IntList)
    x = d.truth(shape) if target in (aten.all.dims, aten.any.dims) else d.real(shape)
    dims = d.dims(shape, low=0 if target in (aten.amax.default, aten.sum.dim_IntList, aten.mean.dim) else 1)
    if target in (aten.std.correction, aten.var.correction, aten.var_mean.correction):
        return (x, dims), {"correction": 0, "keepdim": d.flag()}
    return (x, None if target is aten.sum.dim_IntList and not dims else dims, d.flag()), {}


@sample(aten.linalg_vector_norm.default)
def vector_norm(d: Draw, target: Any) -> Call:
    shape = d.shape(empty=False)
    return (d.real(shape), 2, d.pick([None, d.dims(shape)]), d.flag()), {}


@sample(aten.all.dim, aten.any.dim, aten.max.dim, aten.min.dim, aten.prod.dim_int)
def reduce_dim(d: Draw, target: Any) -> Call:
    shape = d.shape(empty=False)
    x = d.truth(shape) if target in (aten.all.dim, aten.any.dim) else d.real(shape)
    return (x, d.dim(shape), d.flag()), {}


@sample(aten.argmax.default, aten.argmin.default)
def argument_of(d: Draw, target: Any) -> Call:
    shape = d.shape(empty=False)
    return (d.real(shape), *d.pick([(), (d.dim(shape), True), (d.dim(shape),)])), {}


@sample(aten.cumprod.default, aten.cumsum.default, aten.logcumsumexp.default, aten.sort.default)
def scan(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.dim(shape)), {}


@sample(aten.sort.stable)
def sort_stable(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.coarse(shape),), {"stable": True, "dim": d.dim(shape)}


@sample(aten.topk.default)
def topk(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape)
    return (d.real(shape), d.integer(1, shape[dim]), dim), {}


@sample(aten._log_softmax.default, aten._safe_softmax.default, aten._softmax.default)
def softmax(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.dim(shape), *(() if target is aten._safe_softmax.default else (False,))), {}


@sample(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default)
def softmax_backward(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.real(shape), d.dim(shape), torch.float64), {}


def _normalized(d: Draw) -> tuple[list[int], list[int]]:
    shape = d.shape(low=1, empty=False)
    inner = shape[d.integer(0, len(shape) - 1):]
    return [*d.pick([[], [], [4], [0]]), *shape], inner


@sample(aten.native_layer_norm.default)
def layer_norm(d: Draw, target: Any) -> Call:
    shape, inner = _normalized(d)
    weight, bias = d.pick([(None, None), (d.real(inner), None), (d.real(inner), d.real(inner))])
    return (d.real(shape), inner, weight, bias, 1e-5), {}


@sample(aten._fused_rms_norm.default)
def rms_norm(d: Draw, target: Any) -> Call:
    shape, inner = _normalized(d)
    return (d.real(shape), inner, d.pick([None, d.real(inner)]), 1e-5), {}


@sample(aten.native_layer_norm_backward.default)
def layer_norm_backward(d: Draw, target: Any) -> Call:
    shape, inner = _normalized(d)
    x, weight, bias = d.real(shape), d.pick([None, d.real(inner)]), d.pick([None, d.real(inner)])
    _, mean, rstd = aten.native_layer_norm.default(x, inner, weight, bias, 1e-5)
    mask = [d.flag(), weight is not None and d.flag(), bias is not None and d.flag()]
    return (d.real(shape), x, inner, mean, rstd, weight, bias, mask if any(mask) else [True, False, False]), {}


@sample(aten.mm.default)
def mm(d: Draw, target: Any) -> Call:
    m, k, n = d.size(), d.size(), d.size()
    return (d.real([m, k]), d.real([k, n])), {}


@sample(aten.addmm.default)
def addmm(d: Draw, target: Any) -> Call:
    m, k, n = d.size(empty=False), d.size(), d.size(empty=False)
    bias = d.pick([[n], [m, n], [1, n], [m, 1], []])
    return (d.real(bias), d.real([m, k]), d.real([k, n])), d.pick([{}, {"beta": 2.0, "alpha": 3.0}])


@sample(aten.bmm.default)
def bmm(d: Draw, target: Any) -> Call:
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    return (d.real([b, m, k]), d.real([b, k, n])), {}


@sample(aten.mv.default)
def mv(d: Draw, target: Any) -> Call:
    m, k = d.size(), d.size()
    return (d.real([m, k]), d.real([k])), {}


@sample(aten.dot.default)
def dot(d: Draw, target: Any) -> Call:
    k = d.size()
    return (d.real([k]), d.real([k])), {}


@sample(aten.linear.default)
def linear(d: Draw, target: Any) -> Call:
    outer, k, n = d.shape(low=0, high=2), d.size(empty=False), d.size(empty=False)
    return (d.real([*outer, k]), d.real([n, k]), *d.pick([(), (d.real([n]),)])), {}


@sample(aten.einsum.default)
def einsum(d: Draw, target: Any) -> Call:
    equation = d.pick(["bsk,nk->bsn", "bsn,bsk->nk", "bhsd, bhtd -> bhst", "ij->ji", "ij,j->", "a,b->ab", "iij,j->i",
                       "bsk,hkd,t->bhsd"])
    sizes = {letter: d.size(empty=False) for letter in "abdhijknst"}
    terms = equation.partition("->")[0].replace(" ", "").split(",")
    broadcast = len(terms) > 1 and d.pick([False, False, True])  # a dim of size 1
    shapes = [[sizes[f] for f in term] for term in terms]
    if broadcast:
        shapes[1][0] = 1
    return (equation, [d.real(shape) for shape in shapes]), {}


@sample(aten._unsafe_view.default, aten.reshape.default, aten.view.default)
def view(d: Draw, target: Any) -> Call:
    if d.pick([False, False, False, True]):
        odd = [([4, 0], [0, 2]), ([6, 4], [4, 6]), ([4, 3, 5], [6, 10]), ([], [1, 1]), ([2, 6, 4], [3, 16])]
        source, shape = d.pick(odd)
        return (d.real(source), shape), {}
    parts = [d.size(empty=False) for _ in range(d.integer(1, 4))]

    def merged() -> list[int]:
        shape: list[int] = []
        for size in parts:
            if shape and d.flag():
                shape[-1] *= size
            else:
                shape.append(size)
        return shape

    source, shape = merged(), merged()
    if d.flag():
        shape[d.integer(0, len(shape) - 1)] = -1
    return (d.real(source), shape), {}


@sample(aten.flatten.using_ints)
def flatten(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1)
    first = d.integer(0, len(shape) - 1)
    return (d.real(shape), first, d.integer(first, len(shape) - 1)), {}


@sample(aten.unflatten.int)
def unflatten(d: Draw, target: Any) -> Call:
    a, b, n = d.size(), d.size(empty=False), d.size()
    return (d.real([n, a * b]), 1, [a, b]), {}


@sample(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(d: Draw, target: Any) -> Call:
    shape = [d.pick([1, 2, 4, 8, 3]) for _ in range(d.integer(1, 4))]
    extra = {aten.squeeze.default: (), aten.squeeze.dim: (d.dim(shape),), aten.squeeze.dims: (d.dims(shape),)}
    return (d.real(shape), *extra[target]), {}


@sample(aten.unsqueeze.default)
def unsqueeze(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.integer(-len(shape) - 1, len(shape))), {}


@sample(aten.permute.default)
def permute(d: Draw, target: Any) -> Call:
    shape = d.shape()
    order = d.dims(shape, low=len(shape))
    return (d.real(shape), [p - len(shape) if d.flag() else p for p in order]), {}


@sample(aten.t.default)
def t(d: Draw, target: Any) -> Call:
    return (d.real(d.shape(high=2)),), {}


@sample(aten.transpose.int)
def transpose(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.dim(shape), d.dim(shape)), {}


@sample(aten.expand.default)
def expand(d: Draw, target: Any) -> Call:
    shape = d.shape()
    source = d.broadcast(shape)
    skip = len(shape) - len(source)
    kept = [i >= skip and n == source[i - skip] for i, n in enumerate(shape)]
    return (d.real(source), [-1 if kept[i] and d.flag() else n for i, n in enumerate(shape)]), {}


@sample(aten.repeat.default)
def repeat(d: Draw, target: Any) -> Call:
    shape = d.shape(empty=False)
    return (d.real(shape), [d.pick([1, 2, 4]) for _ in range(len(shape) + d.integer(0, 1))]), {}


@sample(aten.view.dtype)
def view_dtype(d: Draw, target: Any) -> Call:
    return (d.real([*d.shape(), 4]), d.pick([torch.int64, torch.int32])), {}


@sample(aten.as_strided.default)
def as_strided(d: Draw, target: Any) -> Call:
    """Windows over the last dim, of which some run into the next row, and a transposition."""
    rows, length = d.shape(low=1, high=2, empty=False), d.integer(2, 6)
    x, (*strides, _) = d.real([*rows, length]), torch.empty(*rows, length).stride()
    width = d.integer(1, length)
    windows, start = length - width + 1, d.integer(0, 1)
    if d.flag():
        return (x, [*x.shape][::-1], [*x.stride()][::-1], 0), {}
    if start and rows[0] > 1:  # the last row's last window would end behind the tensor
        return (x, [rows[0] - 1, *rows[1:], windows, width], [*strides, 1, 1], start), {}
    return (x, [*rows, windows, width], [*strides, 1, 1], 0), {}


@sample(aten.as_strided_scatter.default)
def as_strided_scatter(d: Draw, target: Any) -> Call:
    return (d.real([3, 4]), d.real([2, 3]), [2, 3], [4, 1], d.integer(0, 4)), {}


@sample(aten.select.int)
def select(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape)
    return (d.real(shape), dim, d.integer(-shape[dim], shape[dim] - 1)), {}


@sample(aten.select_backward.default)
def select_backward(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape)
    grad = d.real(torch.empty(shape).select(dim, 0).shape)
    return (grad, shape, dim, d.integer(0, shape[dim] - 1)), {}


@sample(aten.select_scatter.default)
def select_scatter(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape)
    return (d.real(shape), d.real(torch.empty(shape).select(dim, 0).shape), dim, d.integer(0, shape[dim] - 1)), {}


def _bounds(d: Draw, size: int) -> tuple[int | None, int | None, int]:
    everything = [(None, None, 1), (0, 2**63 - 1, 1), (0, size, 1), (-size, None, 1)]
    return d.pick([*everything, (1, None, 1), (0, -1, 1), (0, size, 2), (1, None, 2)])


@sample(aten.slice.Tensor)
def slice_(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1)
    dim = d.dim(shape)
    return (d.real(shape), dim, *_bounds(d, shape[dim])), {}


def _sliced(d: Draw) -> tuple[list[int], int, tuple[int, int, int], Tensor]:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape)
    bounds = d.pick([(0, shape[dim], 1), (0, 2**63 - 1, 1), (0, shape[dim] // 2, 1), (1, shape[dim], 2)])
    return shape, dim, bounds, d.real(aten.slice.Tensor(torch.empty(shape), dim, *bounds).shape)


@sample(aten.slice_backward.default)
def slice_backward(d: Draw, target: Any) -> Call:
    shape, dim, bounds, piece = _sliced(d)
    return (piece, shape, dim, *bounds), {}


@sample(aten.slice_scatter.default)
def slice_scatter(d: Draw, target: Any) -> Call:
    shape, dim, bounds, piece = _sliced(d)
    return (d.real(shape), piece, dim, *bounds), {}


@sample(aten.cat.default)
def cat(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1)
    dim = d.dim(shape)

    def part() -> Tensor:
        return d.real([d.size() if i == dim % len(shape) else n for i, n in enumerate(shape)])

    empty = [d.real([0])] if d.pick([False, False, False, True]) else []
    return ([*empty, *(part() for _ in range(d.integer(1, 3)))], dim), {}


@sample(aten.stack.default)
def stack(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return ([d.real(shape) for _ in range(d.integer(1, 3))], d.integer(-len(shape) - 1, len(shape))), {}


@sample(aten.chunk.default, aten.split.Tensor)
def split(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    return (d.real(shape), d.integer(1, 3), d.dim(shape)), {}


@sample(aten.split_with_sizes.default)
def split_with_sizes(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1)
    dim = d.dim(shape)
    first = d.integer(0, shape[dim])
    return (d.real(shape), [first, shape[dim] - first], dim), {}


@sample(aten.unbind.int)
def unbind(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    return (d.real(shape), d.dim(shape)), {}


@sample(aten.constant_pad_nd.default)
def pad(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    padding = [d.pick([0, 0, 1, 2]) for _ in range(2 * d.integer(1, len(shape)))]
    return (d.real(shape), padding, *d.pick([(), (0,), (1.5,)])), {}


@sample(aten.flip.default)
def flip(d: Draw, target: Any) -> Call:
    shape = d.shape()
    return (d.real(shape), d.dims(shape, low=0)), {}


@sample(aten.roll.default)
def roll(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1)
    return (d.real(shape), *d.pick([([1],), ([1], [d.dim(shape)])])), {}


@sample(aten.tril.default, aten.triu.default)
def triangle(d: Draw, target: Any) -> Call:
    return (d.real(d.shape(low=2, high=4)), d.integer(-1, 1)), {}


@sample(aten.embedding.default)
def embedding(d: Draw, target: Any) -> Call:
    rows = d.size(empty=False)
    return (d.real([rows, d.size()]), d.whole(d.shape(), 0, rows), *d.pick([(), (rows - 1,)])), {}


@sample(aten.embedding_dense_backward.default)
def embedding_backward(d: Draw, target: Any) -> Call:
    rows, hidden, shape = d.size(empty=False), d.size(), d.shape(empty=False)
    padding, by_frequency = d.integer(-1, rows - 1), d.pick([False, False, True])
    return (d.real([*shape, hidden]), d.whole(shape, 0, rows), rows, padding, by_frequency), {}


def _beside(d: Draw, shape: Sequence[int], dim: int) -> list[int]:
    """Shape of an index into ``shape``: any length in ``dim``, elsewhere mostly the same."""
    return [d.size(empty=False) if i == dim % len(shape) else d.pick([n, n, n, 1]) for i, n in enumerate(shape)]


@sample(aten.gather.default)
def gather(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape)
    return (d.real(shape), dim, d.whole(_beside(d, shape, dim), 0, shape[dim])), {}


def _longer(d: Draw, shape: Sequence[int]) -> list[int]:
    """Shape of a source that an index of ``shape`` may leave part of unused."""
    return [n + d.pick([0, 0, 0, 1, n]) for n in shape]


@sample(aten.scatter_add.default)
def scatter_add(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape)
    index = d.whole(_beside(d, shape, dim), 0, shape[dim])
    return (d.real(shape), dim, index, d.real(_longer(d, index.shape))), {}


@sample(aten.scatter.src, aten.scatter.value)
def scatter(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape)
    wanted = _beside(d, shape, dim)
    wanted[dim] = min(wanted[dim], shape[dim])
    order = torch.argsort(d.real([*wanted[:dim % len(shape)], shape[dim], *wanted[dim % len(shape) + 1:]]), dim)
    index = order.narrow(dim, 0, wanted[dim])  # without repetitions, for which the result is not determined
    written = d.pick([0, 1.5]) if target is aten.scatter.value else d.real(_longer(d, wanted))
    return (d.real(shape), dim, index, written), {}


@sample(aten.index_select.default)
def index_select(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim = d.dim(shape)
    return (d.real(shape), dim, d.whole([d.size()], 0, shape[dim])), {}


@sample(aten.index_add.default)
def index_add(d: Draw, target: Any) -> Call:
    shape = d.shape(low=1, empty=False)
    dim, count = d.dim(shape), d.size()
    source = [count if i == dim % len(shape) else n for i, n in enumerate(shape)]
    return (d.real(shape), dim, d.whole([count], 0, shape[dim]), d.real(source)), d.pick([{}, {"alpha": 2}])


def _indices(d: Draw) -> tuple[list[int], list[Tensor | None]]:
    shape = d.shape(low=1, empty=False)
    at = d.dims(shape)
    picked = d.shape(high=2, empty=False)
    indices = [d.whole(d.broadcast(picked), -shape[i], shape[i]) if i in at else None for i in range(len(shape))]
    return shape, indices[:max(at) + 1] if d.flag() else indices


@sample(aten.index.Tensor)
def index(d: Draw, target: Any) -> Call:
    shape, indices = _indices(d)
    if d.pick([False, False, False, False, True]):
        indices = [d.truth(shape)]
    return (d.real(shape), indices), {}


@sample(aten._unsafe_index.Tensor)
def unsafe_index(d: Draw, target: Any) -> Call:
    shape, indices = _indices(d)
    return (d.real(shape), indices), {}


@sample(aten._unsafe_index_put.default, aten.index_put.default)
def index_put(d: Draw, target: Any) -> Call:
    shape, indices = _indices(d)
    selected = d.real(shape)[tuple(slice(None) if i is None else i for i in indices)].shape
    if not (accumulate := d.pick([True, True, False])):  # without repetitions: one element
        at = next(i for i, index in enumerate(indices) if index is not None)
        indices = [None] * at + [d.whole([], 0, shape[at])]
        selected = d.real(shape).select(at, 0).shape
    return (d.real(shape), indices, d.real(d.broadcast(selected)), accumulate), {}


@sample(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(d: Draw, target: Any) -> Call:
    n = d.size()
    args = {aten.arange.default: (n,), aten.arange.start: (3, 3 + n), aten.arange.start_step: (1, 1 + 2 * n, 2)}[target]
    if d.pick([False, False, True]):
        args, dtype = tuple(a * 0.1 for a in args[:2]) + args[2:], torch.float64
        return args, {"dtype": dtype, "device": torch.device("cpu")}
    return args, d.pick([{}, {"dtype": torch.float64}, {"dtype": torch.int32}])


@sample(aten.empty.memory_format, aten.ones.default, aten.zeros.default)
def constant(d: Draw, target: Any) -> Call:
    return (d.shape(),), {"dtype": torch.float64}


@sample(aten.full.default)
def full(d: Draw, target: Any) -> Call:
    return (d.shape(), 2.5), {"dtype": torch.float64}


@sample(aten.scalar_tensor.default)
def scalar_tensor(d: Draw, target: Any) -> Call:
    return (2.5,), {}


@sample(aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default)
def new_constant(d: Draw, target: Any) -> Call:
    shape = d.shape()
    outer, inner = d.integer(0, len(shape)), d.integer(0, len(shape))  # what operand and result have in common
    source = d.real(d.pick([shape, d.shape(), [*shape[:outer], *d.shape(0, 2), *shape[inner:]]]))
    return (source, shape, *([2.5] if target is aten.new_full.default else [])), {}


@sample(own.dropout.default)
def dropout(d: Draw, target: Any) -> Call:
    shape = d.shape()
    starts = torch.zeros(len(shape), dtype=torch.int64)
    return (d.real(shape), d.whole([2], 0, 99), starts, 0.4, d.integer(0, 3), shape), {}


@sample(own.uniform.default)
def uniform(d: Draw, target: Any) -> Call:
    shape = d.shape()
    starts = torch.zeros(len(shape), dtype=torch.int64)
    return (d.real(shape), d.whole([2], 0, 99), starts, d.integer(0, 3), shape), {}


def _attention(d: Draw) -> tuple[Any, ...]:
    batch, kv_heads, group = d.size(), d.pick([2, 1, 4, 3]), d.pick([1, 2, 4, 3])
    queries = d.pick([4, 8, 2, 3, 1])
    causal, window = d.flag(), d.pick([0, 0, 2])
    keys = queries if causal or window else d.pick([4, 3])
    heads, size = kv_heads * group, 2
    q, k = d.real([batch, heads, queries, size]), d.real([batch, kv_heads, keys, size])
    v = d.real([batch, kv_heads, keys, d.pick([2, 3])])
    bias_shape = [d.pick([n, 1]) for n in (batch, heads, queries)] + [keys]
    bias = d.pick([None, d.real(bias_shape), d.truth(bias_shape)])
    key_mask = d.pick([None, d.truth([batch, keys])])
    drop = d.pick([0.0, 0.3])
    seed, starts = (d.whole([2], 0, 99), torch.zeros(4, dtype=torch.int64)) if drop else (None, None)
    softcap, extent = d.pick([0.0, 5.0]), [batch, heads, queries, keys] if drop else []
    return (q, k, v, key_mask, bias, seed, starts, 1 / math.sqrt(size), causal, window, d.flag(), softcap, drop, 1,
            extent)


@sample(own.attention.default)
def attention(d: Draw, target: Any) -> Call:
    return _attention(d), {}


@sample(own.attention_backward.default)
def attention_backward(d: Draw, target: Any) -> Call:
    q, k, v, key_mask, bias, seed, starts, *scalars = args = _attention(d)
    out, lse = autopar.ops.attention.attention(*args)
    return (d.real(out.shape), q, k, v, key_mask, bias, out, lse, seed, starts, *scalars), {}


@sample(own.attention_bias_backward.default)
def attention_bias_backward(d: Draw, target: Any) -> Call:
    (grad, q, k, v, key_mask, _, out, lse, *rest), _ = attention_backward(d, target)
    bias = d.real([d.pick([n, 1]) for n in q.shape[:3]] + [k.shape[2]])
    out, lse = autopar.ops.attention.attention(q, k, v, key_mask, bias, *rest)
    return (grad, q, k, v, key_mask, bias, out, lse, *rest), {}


@sample(own.token_scores.default)
def token_scores(d: Draw, target: Any) -> Call:
    batch, length, words = d.size(), d.size(), d.pick([8, 4, 3])
    return (d.real([batch, length, 3]), d.real([words, 3]), d.whole([batch, length], -2, words), None), {}


@sample(own.token_scores_backward.default)
def token_scores_backward(d: Draw, target: Any) -> Call:
    args = token_scores(d, target)[0]
    lse, _ = own.token_scores(*args)
    return (*args, lse, d.real(lse.shape), d.real(lse.shape)), {}


def _scan(d: Draw) -> tuple[Any, ...]:
    batch, length, groups, group = d.size(), d.pick([5, 4, 1]), d.pick([2, 1, 4, 3]), d.pick([1, 2, 4])
    channels, state = d.pick([4, 2, 3]), d.pick([2, 3])
    heads = groups * group
    x, b, c = (d.real([batch, length, *shape]) for shape in ((heads, channels), (groups, state), (groups, state)))
    return x, d.real([batch, length, heads]).abs(), -d.real([heads]).abs(), b, c, d.pick([2, 3, 8])


@sample(own.scan.default)
def state_space_scan(d: Draw, target: Any) -> Call:
    return _scan(d), {}


@sample(own.scan_backward.default)
def state_space_scan_backward(d: Draw, target: Any) -> Call:
    args = _scan(d)
    return (d.real(args[0].shape), *args), {}


def _delta(d: Draw) -> tuple[Any, ...]:
    batch, length, groups, group = d.size(), d.pick([5, 4, 1]), d.pick([2, 1, 4, 3]), d.pick([1, 2, 4])
    channels, state = d.pick([4, 2, 3]), d.pick([2, 3])
    heads = groups * group
    q, k, v = (d.real([batch, length, *shape]) for shape in ((groups, state), (groups, state), (heads, channels)))
    return q, k, v, -d.real([batch, length, heads]).abs(), d.real([batch, length, heads]).sigmoid(), d.pick([2, 3, 8])


@sample(own.delta_rule.default)
def delta_rule(d: Draw, target: Any) -> Call:
    return _delta(d), {}


@sample(own.delta_rule_backward.default)
def delta_rule_backward(d: Draw, target: Any) -> Call:
    q, k, v, *rest = _delta(d)
    return (d.real(v.shape), q, k, v, *rest), {}


@sample(own.cache_write.default)
def cache_write(d: Draw, target: Any) -> Call:
    batch, heads, kept, dim = d.size(empty=False), d.size(empty=False), d.pick([4, 5]), d.size(empty=False)
    count = d.integer(1, kept)
    start = d.whole([], 0, kept - count + 1)
    return (d.real([batch, heads, kept, dim]), d.real([batch, heads, count, dim]), start), {}


@sample(own.expert_counts.default)
def expert_counts(d: Draw, target: Any) -> Call:
    experts = d.integer(1, 6)
    index = torch.arange(8 * 2).view(8, 2) * d.integer(1, 5) % (experts + 1)  # what is out of range goes to nobody
    return (index, experts), {}


@sample(own.put_into_zeros.default)
def put_into_zeros(d: Draw, target: Any) -> Call:
    size, start, step = d.pick([4, 5]), d.pick([0, 1]), d.pick([1, 2])
    kept = len(range(start, size, step))
    return (d.real([*d.shape(1, 2), kept]), size, start, size, step), {}
