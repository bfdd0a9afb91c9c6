"""Complex numbers, as pairs of real ones and through Fourier transforms. Complex tensors are never `Partial`."""

from __future__ import annotations

from autopar.sharding.rule import OpCall, Rule, make_rule
from autopar.sharding.rules.common import aten, contiguous_args, dim_by_dim, names, normalized
from autopar.sharding.rules.registry import register


@register(aten._conj.default, aten.polar.default)
def pointwise(call: OpCall) -> Rule | None:
    shapes = {spec.shape for spec in call.operands}
    return dim_by_dim(call) if len(shapes) == 1 else None


@register(aten.view_as_complex.default)
def view_as_complex(call: OpCall) -> Rule:
    """[..., 2] to [...]"""
    dims = names("d", len(call.results[0].shape))
    # pairs have to lie side by side: of what a product leaves (or a copy that was taken out), they need not
    return make_rule(
        call, [(*dims, ())], [dims], localize=lambda local: local.default(**contiguous_args(local, 0))
    )


@register(aten.view_as_real.default)
def view_as_real(call: OpCall) -> Rule:
    """[...] to [..., 2]"""
    dims = names("d", len(call.operands[0].shape))
    return make_rule(call, [dims], [(*dims, ())])


@register(aten._fft_c2c.default, aten._fft_c2r.default, aten._fft_r2c.default)
def fourier(call: OpCall) -> Rule:
    """(self, dims, ...): the transformed dims stay whole."""
    return dim_by_dim(call, normalized(call.args[1], len(call.operands[0].shape)))
